"""`sloop trace`: statistics of a trace of arrivals, and the trace in other formats."""

from pathlib import Path

import click

from sloop.cli.command import TRACE_HELP, CommandOutput, Number, command, facts, trace_at, with_works, works_options
from sloop.report.plots import arrivals_figure
from sloop.report.svg import write_figure
from sloop.workload.trace import statistics, write_counts, write_times

EXAMPLE = """
sloop trace '{kind: diurnal, rate: 50, period_s: 600}' --duration-s 600 --counts day.txt --plot day.svg
sloop trace '{file: day.txt, scale: 2, spread: poisson}' --times twice.txt
sloop trace .sloop/digits --times requests.csv
"""


@command("trace", example=EXAMPLE, notes=TRACE_HELP)
@click.argument("trace", metavar="TRACE")
@click.option(
    "--duration-s", type=Number(min=0, min_open=True), help="Use only this many seconds of the trace, from its start."
)
@works_options
@click.option(
    "--application", default="", metavar="NAME", help="Which trace of a scenario or a log with several applications."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random arrivals.")
@click.option(
    "--counts",
    type=click.Path(path_type=Path),
    help="Write the number of requests in each second to this file, one per line.",
)
@click.option(
    "--times",
    type=click.Path(path_type=Path),
    help="Write the time of every arrival to this file, in ns; with rows and sizes, as CSV.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Plot requests per second to this file (.svg).")
def trace(
    trace: str,
    duration_s: float | None,
    rows: str | None,
    sizes: str | None,
    application: str,
    seed: int,
    counts: Path | None,
    times: Path | None,
    plot: Path | None,
) -> CommandOutput:
    """Show statistics of a trace of arrivals, and optionally convert or plot it."""
    found = trace_at(trace, seed=seed, duration_s=duration_s, application=application)
    found = with_works(found, rows, sizes, seed=seed)
    if counts:
        write_counts(found, counts)
    if times:
        write_times(found, times)
    if plot:
        write_figure(arrivals_figure(found), plot)
    figures = statistics(found)
    return CommandOutput(figures, [facts(figures.rows())])
