"""The command line: `sloop COMMAND`. One file per command, without logic: read the options, call, print the result.

Commands are imported only when they are chosen, so that `sloop --help` is fast; `COMMANDS` therefore lists module
names. Of a command that an installed distribution adds (`sloop.plugins`), `sloop --help` shows the first line of its
module's docstring, which is read from the source.
"""

import ast
import gc
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from itertools import accumulate
from keyword import iskeyword
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

import click

from sloop import __version__, plugins
from sloop.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS: Final = {
    "serve": ("sloop.cli.serve", "Serve applications over HTTP and gRPC, within their deadlines."),
    "deploy": ("sloop.cli.deploy", "Add, replace or remove applications of a running server."),
    "pull": ("sloop.cli.pull", "Fetch the models that applications name by URL."),
    "import": ("sloop.cli.import_", "Write the application file for a Triton model repository."),
    "profile": ("sloop.cli.profile", "Measure the latency of a model on this machine, by batch size and cores."),
    "plan": ("sloop.cli.plan", "Show what an application needs at a request rate, and what that costs."),
    "advise": ("sloop.cli.advise", "Advise which machines to rent, how many, and which models share a device."),
    "simulate": ("sloop.cli.simulate", "Simulate a scenario, under one system or several."),
    "load": ("sloop.cli.load", "Send the requests of a trace to a server and count how they end."),
    "explain": ("sloop.cli.explain", "Explain why a request ended as it did, or why a decision was taken."),
    "replay": ("sloop.cli.replay", "Repeat the decisions of a recorded run and compare them with the log."),
    "check": ("sloop.cli.check", "Validate an application file and show its plan, without starting anything."),
    "systems": ("sloop.cli.systems", "List the systems: who published them, and which policies they use."),
    "trace": ("sloop.cli.trace", "Describe, convert or plot a trace of arrivals."),
    "demo": ("sloop.cli.demo", "Run a real model under bursts, live and simulated, and write a report."),
}
"""Per command: its module, which defines a function of the same name, and its line in `sloop --help`."""
REMOVED: Final = {
    "agent": "`sloop agent` is gone, because Ray starts agents: run `ray start --address=HEAD:6379` on this machine, "
    "and `sloop serve APP --backend ray --address auto` on the head",
}
"""Per command of earlier versions, what to use instead."""


class Commands(click.Group):
    """A click group that imports a command on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *(name for name in _added() if name not in COMMANDS)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in REMOVED:
            raise click.UsageError(REMOVED[cmd_name])
        if cmd_name not in COMMANDS:
            return _added_command(cmd_name)
        if os.getpid() == 1:  # of a container: it gets no signal for which it has no handler, and imports take seconds
            signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
        function = f"{cmd_name}_" if iskeyword(cmd_name) else cmd_name
        command = getattr(_imported(COMMANDS[cmd_name][0]), function)
        assert isinstance(command, click.Command), command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = {name: line for name, (_, line) in COMMANDS.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, lines.get(name) or _line_of(name)) for name in self.list_commands(ctx)])


def _imported(name: str) -> ModuleType:
    """Import a module without looking for garbage, of which imports leave hardly any: that is a seventh of a start."""
    if name not in sys.modules:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            importlib.import_module(name)
        finally:
            if was_enabled:
                gc.enable()
        gc.freeze()
    return sys.modules[name]


def _added() -> "Mapping[str, tuple[EntryPoint, ...]]":
    """The entry points of the commands that installed distributions add, by name."""
    try:
        return plugins.points("sloop.commands")
    except InputError as error:
        raise click.ClickException(str(error)) from error


def _added_command(name: str) -> click.Command | None:
    try:
        return plugins.load(_added()[name], click.Command) if name in _added() else None
    except InputError as error:
        raise click.ClickException(str(error)) from error


def _line_of(name: str) -> str:
    """The first line of the docstring of the module with a command. No module is imported, nor the packages around it;
    empty if it is not found in the folders of the import path."""
    module, path, source = _added()[name][0].module, None, None
    for end in accumulate(module.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(end, path)
        path = spec.submodule_search_locations if spec else []
        source = spec and spec.origin
    try:
        return (ast.get_docstring(ast.parse(Path(source or "").read_bytes())) or "").partition("\n")[0]
    except (OSError, ValueError, SyntaxError):
        return ""


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", prog_name="sloop")
def main() -> None:
    """Serve deep-learning models within their deadlines at the least cost, and try every policy in a simulator first.

    \b
    Example:
      sloop check app.yaml && sloop serve app.yaml
    """
