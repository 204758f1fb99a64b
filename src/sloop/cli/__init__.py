"""The command line: `sloop COMMAND`. One file per command, no logic: read options, call a room, show the answer.

Until a command is chosen only click is imported, so that `sloop --help` answers at once; hence the table of names below
rather than imports.
"""

import importlib
from typing import Final

import click

from sloop import __version__

COMMANDS: Final = {
    "serve": ("sloop.cli.serve", "Serve an application inside its deadlines."),
    "profile": ("sloop.cli.profile", "Measure a model on this machine and fit its latency."),
    "plan": ("sloop.cli.plan", "Say what an application needs at a given rate, and what it costs."),
    "simulate": ("sloop.cli.simulate", "Run a scenario in the simulator, under one system or several."),
    "load": ("sloop.cli.load", "Send a trace to a server, never waiting for its answers."),
    "explain": ("sloop.cli.explain", "Say why a request ended as it did, or why a decision was taken."),
    "replay": ("sloop.cli.replay", "Feed a recorded run through a fresh core and compare its actions."),
    "check": ("sloop.cli.check", "Validate an application and print its plan, touching nothing."),
    "reproduce": ("sloop.cli.reproduce", "Repeat a published experiment beside its published figures."),
    "systems": ("sloop.cli.systems", "List the systems: who published them and what they are made of."),
    "trace": ("sloop.cli.trace", "Describe, convert or plot a trace of arrivals."),
    "forecast": ("sloop.cli.forecast", "Score forecasters on a trace; train a network on one."),
    "demo": ("sloop.cli.demo", "Three minutes: a real model under a bursty trace, live and simulated."),
}
"""Each command's module, in which the command has its own name, and its line in `sloop --help`."""


class Commands(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command), command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", prog_name="sloop")
def main() -> None:
    """Serve deep-learning models inside their deadlines at the least cost, and try every policy in a simulator first.

    \b
    Example:
      sloop check app.yaml && sloop serve app.yaml
    """
