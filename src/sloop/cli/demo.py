"""`sloop demo`: from nothing to a report."""

from pathlib import Path

import click

from sloop.cli.command import Answer, command
from sloop.cli.screen import progress, table
from sloop.demo.page import html, live_timeline, result, words
from sloop.demo.run import demonstrate
from sloop.report.plots import png

EXAMPLE = """
sloop demo
sloop demo --seconds 30 --out /tmp/demo --json
"""


@command("demo", example=EXAMPLE)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out/demo"), help="[out/demo]")
@click.option("--seconds", "duration_s", type=click.IntRange(10, 600), default=40, help="Of each live run [40].")
@click.option("--seed", type=click.IntRange(min=0), default=1, help="Of arrivals and link [1].")
def demo(out: Path, duration_s: int, seed: int) -> Answer:
    """Profile a real model, serve it under waves of bursts with `static` and `sponge`, foretell both, and report."""
    with progress("demo", total=1.0) as advance:
        shown = demonstrate(out, duration_s=duration_s, seed=seed, tell=advance)
    report, plot = out / "report.html", out / "timeline.png"
    report.write_text(html(shown, str(out)), encoding="utf-8")
    plot.write_bytes(png(live_timeline(shown)))
    rows = result(shown)
    keys = [column.replace(" %", "").replace(" ", "_") for column in rows.columns]
    value = {"runs": [dict(zip(keys, row, strict=True)) for row in rows.rows], "report": str(report)}
    return Answer(value, [words(shown), table(rows), f"report: {report}"])
