"""`sloop trace`: what a trace of arrivals is like, and the same trace in another form."""

from pathlib import Path

import click

from sloop.cli.command import Answer, command
from sloop.cli.number import Number
from sloop.cli.screen import facts
from sloop.cli.source import HELP, trace_at
from sloop.report.arrivals import draw, figure_of
from sloop.workload.stats import statistics
from sloop.workload.write import write_counts, write_times

EXAMPLE = """
sloop trace twitter.txt --duration-s 3600 --plot twitter.png
sloop trace '{kind: burst, rate: 20}' --duration-s 60 --times burst.txt
"""


@command("trace", example=EXAMPLE, more=HELP)
@click.argument("trace", metavar="TRACE")
@click.option("--duration-s", type=Number(min=0, min_open=True), help="Only the first seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn at random.")
@click.option("--counts", type=click.Path(path_type=Path), help="Write requests per second to this file.")
@click.option("--times", type=click.Path(path_type=Path), help="Write every arrival, in ns, to this file.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw requests per second into this file (.png, .svg).")
def trace(
    trace: str, duration_s: float | None, seed: int, counts: Path | None, times: Path | None, plot: Path | None
) -> Answer:
    """Describe a trace of arrivals; convert it, or draw it."""
    found = trace_at(trace, seed=seed, duration_s=duration_s)
    if counts:
        write_counts(found, counts)
    if times:
        write_times(found, times)
    if plot:
        draw(figure_of(found), plot)
    figures = statistics(found)
    return Answer(figures, [facts(figures.rows())])
