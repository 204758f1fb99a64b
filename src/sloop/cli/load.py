"""`sloop load`: a trace against a server."""

from pathlib import Path

import click

from sloop.cli.command import Answer, command
from sloop.cli.lists import shape
from sloop.cli.number import Number
from sloop.cli.screen import facts, progress
from sloop.cli.source import HELP, link_at, trace_at
from sloop.load import Delivery, Encoding, LoadPlan, ProgressReport, run_load
from sloop.load.plan import served_application, split_url
from sloop.units import to_s

EXAMPLE = """
sloop load http://localhost:8000 --trace '{kind: poisson, rate: 50}' --duration-s 60 --slo-ms 200
sloop load http://localhost:8000 --trace burst.txt --slo-ms 1000 --link '{kind: lte}' --payload-kb 284
"""


@command("load", example=EXAMPLE, more=HELP)
@click.argument("url")
@click.option("--trace", required=True, metavar="TRACE", help="When requests are sent.")
@click.option("--slo-ms", type=Number(min=0, min_open=True), required=True, help="End to end, for each.")
@click.option("--model", help="Application or model to ask [default: the one URL serves].")
@click.option("--duration-s", type=Number(min=0, min_open=True), help="Only the trace's first seconds.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of arrivals, link and made-up inputs [0].")
@click.option("--link", metavar="LINK", help="The clients' link: a file, or a mapping such as '{kind: lte}'.")
@click.option("--payload-kb", type=Number(min=0), help="What the link carries [default: the body].")
@click.option(
    "--delivery", type=click.Choice([*map(str, Delivery)]), default="delay", help="What the link does [delay]."
)
@click.option("--encoding", type=click.Choice([*map(str, Encoding)]), default="auto", help="How tensors travel [auto].")
@click.option("--input", "input_file", type=click.Path(path_type=Path), help=".npy tensor or .json body to send.")
@click.option("--shape", "shapes", type=shape, multiple=True, metavar="NAME=SIZES", help="Of an open input, whole.")
@click.option("--timeout-s", type=Number(min=0, min_open=True), default=30.0, help="Per request [30].")
@click.option("--records", type=click.Path(path_type=Path), help="Write a line of JSON for each request here.")
def load(
    url: str,
    trace: str,
    slo_ms: float,
    model: str | None,
    duration_s: float | None,
    seed: int,
    link: str | None,
    payload_kb: float | None,
    delivery: str,
    encoding: str,
    input_file: Path | None,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    timeout_s: float,
    records: Path | None,
) -> Answer:
    """Send a trace to the Open Inference Protocol v2 server at URL: open loop, never waiting for answers."""
    arrivals = trace_at(trace, seed=seed, duration_s=duration_s)
    plan = LoadPlan(
        url=url,
        model=model or served_application(split_url(url), timeout_s=timeout_s),
        arrivals=arrivals,
        slo_ms=slo_ms,
        seed=seed,
        link=link_at(link, seed=seed) if link else None,
        payload_bytes=None if payload_kb is None else round(payload_kb * 1024),
        delivery=Delivery(delivery),
        encoding=Encoding(encoding),
        input_file=input_file,
        shapes=dict(shapes),
        timeout_s=timeout_s,
        records=records,
    )
    with progress("sending", total=to_s(arrivals.duration_ns)) as advance:

        def tell(told: ProgressReport) -> None:
            advance(told.at_s, f"{told.sent:,} sent, {told.ended:,} ended")

        result = run_load(plan, progress=tell)
    return Answer(result, [facts(result.rows())])
