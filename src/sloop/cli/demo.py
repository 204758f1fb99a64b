"""`sloop demo`: a real model under bursts, live and simulated, with a report."""

from datetime import UTC, datetime
from pathlib import Path

import click

from sloop.cli.command import FOLDER, CommandOutput, check_folder, check_temporary, command, progress, table
from sloop.demo import write_example
from sloop.demo.page import html, live_timeline, result, summary
from sloop.demo.run import demonstrate
from sloop.report.svg import write_figure

EXAMPLE = """
sloop demo
sloop demo --files .
sloop demo --seconds 30 --out /tmp/demo --json
"""


@command("demo", example=EXAMPLE)
@click.option(
    "--files",
    type=FOLDER,
    help="Only write a small trained model, a request to it, an application and a scenario to this folder, to try the "
    "other commands.",
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("out/demo"),
    show_default=True,
    help="Folder for the model, the logs and the report.",
)
@click.option(
    "--seconds",
    "duration_s",
    type=click.IntRange(10, 600),
    default=40,
    show_default=True,
    help="Seconds of each live run.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Seed of the arrivals and of the clients' network.",
)
def demo(files: Path | None, out: Path, duration_s: int, seed: int) -> CommandOutput:
    """Profile a real model, serve it under bursts with the systems `static` and `sponge`, simulate both, and write a
    report. It takes about two minutes. The model comes with the package onnx (pip install onnx).
    """
    if files is not None:
        check_folder(files, "--files")
        written = [str(path) for path in write_example(files)]
        return CommandOutput({"files": written}, [f"wrote {name}" for name in written])
    check_temporary()
    check_folder(out, "--out")
    with progress("demo", total=1.0) as advance:
        results = demonstrate(out, duration_s=duration_s, seed=seed, progress=advance)
    report, plot = out / "report.html", out / "timeline.svg"
    report.write_text(html(results, str(out), made=datetime.now(UTC)), encoding="utf-8")
    write_figure(live_timeline(results), plot)
    rows, why_inconclusive = result(results), results.why_inconclusive
    keys = [column.replace(" %", "").replace(" ", "_") for column in rows.columns]
    runs = [dict(zip(keys, row, strict=True)) for row in rows.rows]
    value = {"runs": runs, "report": str(report), "why_inconclusive": why_inconclusive}
    printed = [why_inconclusive] if why_inconclusive else [summary(results), table(rows)]
    return CommandOutput(value, [*printed, f"report: {report}"])
