"""Repeat published experiments and compare the results with the publication."""

import sys
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import RenderableType

from sloop.api.commands import FOLDER, CommandOutput, command, progress, table
from sloop_systems.comparison import REPRODUCTIONS, Reproduction
from sloop_systems.comparison import reproduce as reproduced

EXAMPLE = """
sloop reproduce sponge --quick
sloop reproduce all --data ~/traces --page out/reproduce --json
"""


def tell(share: float, what: str) -> None:
    """A line for each run that is done, where no bar is drawn."""
    click.echo(f"{share:4.0%} {what}", err=True)


@command("reproduce", example=EXAMPLE, notes=f"NAME is one of {', '.join(REPRODUCTIONS)}, or all.")
@click.argument("name")
@click.option("--quick", is_flag=True, help="One seed and no ablations: under a minute.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the public traces; without it, synthetic ones take their place.",
)
@click.option(
    "--processes",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of parallel processes; 0 uses one per core.",
)
@click.option("--page", type=FOLDER, help="Also write a report to this folder, as NAME.html.")
def reproduce(name: str, quick: bool, data: Path | None, processes: int, page: Path | None) -> CommandOutput:
    """Repeat the experiments of a publication and compare each result with the published figure."""
    names = list(REPRODUCTIONS) if name == "all" else [name]
    found: list[Reproduction] = []
    for chosen in names:
        with progress(f"reproducing {chosen}", total=1.0) as advance:
            show = advance if sys.stderr.isatty() else tell
            found.append(reproduced(chosen, quick=quick, data=data, processes=processes, progress=show))
    if page is not None:
        page.mkdir(parents=True, exist_ok=True)
        for made in found:
            (page / f"{made.name}.html").write_text(made.page(made=datetime.now(UTC)), encoding="utf-8")
    assumed = [line for made in found for line in made.assumed]
    value = {
        "rows": [row for made in found for row in made.rows],
        "summary": {made.name: made.summary for made in found},
        "assumed": assumed,
    }
    display: list[RenderableType] = []
    for made in found:
        display += [*(table(each) for each in made.tables()), f"{made.name}: {made.summary}"]
    return CommandOutput(value, [*display, *(f"based on {line}" for line in assumed)])
