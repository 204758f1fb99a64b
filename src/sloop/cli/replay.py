"""`sloop replay`: checks that the core still takes the decisions of a recorded run."""

from pathlib import Path

import click

from sloop.cli.command import CommandOutput, command
from sloop.runlog import read_log
from sloop.systems.replay import rebuild, replay_log
from sloop.units import to_s


@command("replay", example="sloop replay run.jsonl")
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
def replay(log: Path) -> CommandOutput:
    """Feed the events recorded in LOG to a fresh core and compare its actions with the recorded ones.

    Exit code 1 if an action differs; the first difference is shown.
    """
    recorded = read_log(log)
    header = recorded.header
    played = replay_log(recorded, rebuild(header).core(), definitions=header.definitions)
    lines = [f"{played.events:,} events replayed, {played.actions:,} actions compared"]
    if recorded.cut:
        lines.append(recorded.cut)
    if played.difference is None:
        lines.append("every action equals the recorded one")
    else:
        found = played.difference
        lines.append(f"first difference at record {found.record:,}, {to_s(found.at_ns):.6f} s")
        lines += [f"  recorded: {found.recorded}", f"  replayed: {found.replayed or 'no action'}"]
    return CommandOutput(played, lines, exit_code=1 if played.difference else 0)
