"""`sloop simulate`: a scenario under one system or several."""

from pathlib import Path

import click
from rich.console import RenderableType

from sloop.app.load import load_scenario
from sloop.cli.command import Answer, command
from sloop.cli.screen import progress, table
from sloop.report import tables
from sloop.report.rows import RunRow
from sloop.report.simulated import choices, play_all

EXAMPLE = """
sloop simulate burst.yaml --seed 7
sloop simulate burst.yaml --system static,sponge --log run.jsonl --json
sloop simulate burst.yaml --recorded .sloop/demo/events.jsonl
"""


@command("simulate", example=EXAMPLE)
@click.argument("scenario", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--system", "names", metavar="A,B", help="These systems rather than those SCENARIO names.")
@click.option("--seed", type=click.IntRange(min=0), help="Another world than the scenario's own.")
@click.option("--log", type=click.Path(path_type=Path), help="Write the event log here, for explain and replay.")
@click.option(
    "--recorded",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Batches take what they took in this event log of a live run, rather than what the profile says, and requests "
    "the branches and parts they had there.",
)
def simulate(scenario: Path, names: str | None, seed: int | None, log: Path | None, recorded: Path | None) -> Answer:
    """Run the scenario in SCENARIO in the simulator: same requests and same truth for each system."""
    world = load_scenario(scenario)
    chosen = choices(world, [name.strip() for name in names.split(",")] if names else [])
    rows: list[RunRow] = []
    with progress("simulating", total=len(chosen)) as advance:
        for counted in play_all(world, chosen, seed, log, recorded):
            rows.append(counted.row)
            advance(len(rows), counted.row.system)
    return Answer({"runs": rows}, shown(rows))


def shown(rows: list[RunRow]) -> list[RenderableType]:
    """Runs side by side."""
    assumed = sorted({line for row in rows for line in row.assumed})
    graphs = [(row.system, row) for row in rows if len(row.stages) > 1]
    made: list[RenderableType] = [table(tables.ends(rows)), table(tables.costs(rows))]
    if graphs:
        made += [table(tables.stages(graphs)), table(tables.routes(graphs))]
    return [*made, *(f"leans on {line}" for line in assumed)]
