"""`sloop replay`: does the core still decide as it did?"""

from pathlib import Path

import click

from sloop.cli.command import Answer, command
from sloop.runlog import read_log
from sloop.systems.recording import rebuild, replay_log, together_in
from sloop.units import to_s


@command("replay", example="sloop replay run.jsonl")
@click.argument("log", type=click.Path(dir_okay=False, path_type=Path))
def replay(log: Path) -> Answer:
    """Feed the events recorded in LOG to a fresh core and report the first action that differs. Fails if one does."""
    recorded = read_log(log)
    played = replay_log(recorded, rebuild(recorded.header).core(), together=together_in(recorded.header))
    shown = [f"{played.events:,} events replayed, {played.actions:,} actions compared"]
    if recorded.cut:
        shown.append(recorded.cut)
    if played.difference is None:
        shown.append("every action is as recorded")
    else:
        found = played.difference
        shown.append(f"first difference at record {found.record:,}, {to_s(found.at_ns):.6f} s")
        shown += [f"  recorded: {found.recorded}", f"  replayed: {found.replayed or 'nothing more'}"]
    return Answer(played, shown, exit_code=1 if played.difference else 0)
