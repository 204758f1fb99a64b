"""`sloop replay`: checks that the core still takes the decisions of a recorded run."""

from pathlib import Path

import click

from sloop.cli.command import CommandOutput, command
from sloop.runlog import read_log
from sloop.systems.replay import beginning_of, changed_systems, replay_log, require_all
from sloop.units import to_s


@command("replay", example="sloop replay run.jsonl")
@click.argument("log", type=click.Path(path_type=Path))
def replay(log: Path) -> CommandOutput:
    """Feed the events recorded in LOG to a core and compare its actions with the recorded ones.

    LOG is a file, a segment, or the state folder of a server. The core is fresh; if LOG begins in the middle of a run,
    it is the core of the snapshot there. Exit code 1 if an action differs; the first difference is shown.
    """
    recorded = read_log(log)
    require_all(recorded, "a replay")
    played = replay_log(recorded, beginning_of(recorded).core, definitions=recorded.header.definitions)
    lines = [f"{played.events:,} events replayed, {played.actions:,} actions compared", *recorded.missing]
    lines += changed_systems(recorded)
    if recorded.cut:
        lines.append(recorded.cut)
    if played.difference is None:
        lines.append("every action equals the recorded one")
    else:
        found = played.difference
        lines.append(f"first difference at record {found.record:,}, {to_s(found.at_ns):.6f} s")
        lines += [f"  recorded: {found.recorded}", f"  replayed: {found.replayed or 'no action'}"]
    return CommandOutput(played, lines, exit_code=1 if played.difference else 0)
