"""`sloop reproduce`: a publication's figures beside ours."""

from pathlib import Path

import click
from rich.console import RenderableType

from sloop.cli.command import Answer, command
from sloop.cli.screen import progress, table
from sloop.reproduce import REPRODUCTIONS, Reproduction
from sloop.reproduce import reproduce as reproduced

EXAMPLE = """
sloop reproduce sponge --quick
sloop reproduce all --data ~/traces --page out/reproduce --json
"""


@command("reproduce", example=EXAMPLE, more=f"NAME is one of {', '.join(REPRODUCTIONS)}, or all.")
@click.argument("name")
@click.option("--quick", is_flag=True, help="Under a minute: one seed, no ablations.")
@click.option("--data", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Folder of public data.")
@click.option("--processes", type=click.IntRange(min=0), default=0, help="At once; 0 for one per core [0].")
@click.option("--page", type=click.Path(file_okay=False, path_type=Path), help="Write NAME.html into this folder.")
def reproduce(name: str, quick: bool, data: Path | None, processes: int, page: Path | None) -> Answer:
    """Repeat the experiments of a publication and set what comes out beside what was printed, with a verdict."""
    names = list(REPRODUCTIONS) if name == "all" else [name]
    found: list[Reproduction] = []
    for chosen in names:
        with progress(f"reproducing {chosen}", total=1.0) as advance:
            found.append(reproduced(chosen, quick=quick, data=data, processes=processes, progress=advance))
    if page is not None:
        page.mkdir(parents=True, exist_ok=True)
        for made in found:
            (page / f"{made.name}.html").write_text(made.page(), encoding="utf-8")
    assumed = [line for made in found for line in made.assumed]
    value = {
        "rows": [row for made in found for row in made.rows],
        "summary": {made.name: made.summary for made in found},
        "assumed": assumed,
    }
    shown: list[RenderableType] = []
    for made in found:
        shown += [*(table(each) for each in made.tables()), f"{made.name}: {made.summary}"]
    return Answer(value, [*shown, *(f"leans on {line}" for line in assumed)])
