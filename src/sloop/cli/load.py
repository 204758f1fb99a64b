"""`sloop load`: sends the requests of a trace to a server."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click
import msgspec

from sloop.cli.command import (
    FILE,
    TRACE_HELP,
    CommandOutput,
    Number,
    command,
    facts,
    link_at,
    progress,
    shape,
    table,
    trace_at,
    with_works,
    works_options,
)
from sloop.errors import InputError
from sloop.load import Delivery, Encoding, LoadPlan, ProgressReport, run_load
from sloop.load.plan import only_model, split_url
from sloop.load.results import SizeRow
from sloop.report.tables import Table
from sloop.units import to_s

KEY_VARIABLE: Final = "SLOOP_API_KEY"
EXAMPLE = """
sloop load http://localhost:8000 --trace '{kind: poisson, rate: 50}' --duration-s 60 --slo-ms 200
sloop load http://localhost:8000 --trace burst.txt --slo-ms 1000 --link '{kind: lte}' --payload-kb 284
sloop load http://localhost:8000 --trace '{kind: equal, rate: 20}' --sizes '[16, 512]' --duration-s 60 --slo-ms 200
sloop load http://localhost:8000 --model words --version 2 --trace '{kind: equal, rate: 5}' --duration-s 60 --slo-ms 200
"""


@command("load", example=EXAMPLE, notes=TRACE_HELP)
@click.argument("url")
@click.option("--trace", required=True, metavar="TRACE", help="When to send requests; see below.")
@click.option(
    "--slo-ms", type=Number(min=0, min_open=True), required=True, help="Deadline of each request, end to end, in ms."
)
@click.option("--model", help="Application or model to send requests to [default: the only one at URL].")
@click.option(
    "--version", metavar="V", default="", help="Version of the model to ask for [default: the server chooses]."
)
@click.option(
    "--api-key-file",
    type=FILE,
    help=f"File whose first line is the key for the server, as KEY or NAME KEY [default: the variable {KEY_VARIABLE}].",
)
@click.option(
    "--duration-s", type=Number(min=0, min_open=True), help="Send only this many seconds of the trace, from its start."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of random arrivals, link and inputs."
)
@works_options
@click.option(
    "--link",
    metavar="LINK",
    help="Simulate the clients' network: a file of bandwidths, or a mapping such as '{kind: lte}'.",
)
@click.option(
    "--payload-kb", type=Number(min=0), help="Size of each request on the link in KiB [default: the size of the body]."
)
@click.option(
    "--delivery",
    type=click.Choice([*map(str, Delivery)]),
    default="delay",
    show_default=True,
    help="What the link's transfer time does: delay each request, or shorten its deadline (attach).",
)
@click.option(
    "--encoding",
    type=click.Choice([*map(str, Encoding)]),
    default="auto",
    show_default=True,
    help="How tensors are sent: binary, JSON, or binary where the server can read it (auto).",
)
@click.option(
    "--input",
    "input_file",
    type=click.Path(path_type=Path),
    help="Tensor (.npy) or body (.json) to send with every request [default: random values].",
)
@click.option(
    "--shape",
    "shapes",
    type=shape,
    multiple=True,
    metavar="NAME=SIZES",
    help="Full shape of an input whose dimensions the server leaves open, such as data=1,3,224,224. -1 stands for rows "
    "(first) and sizes, as in data=-1,3,-1,-1.",
)
@click.option(
    "--timeout-s",
    type=Number(min=0, min_open=True),
    default=30.0,
    show_default=True,
    help="Seconds after which a request without an answer counts as an error.",
)
@click.option("--records", type=click.Path(path_type=Path), help="Write one line of JSON per request to this file.")
def load(
    url: str,
    trace: str,
    slo_ms: float,
    model: str | None,
    version: str,
    api_key_file: Path | None,
    duration_s: float | None,
    seed: int,
    rows: str | None,
    sizes: str | None,
    link: str | None,
    payload_kb: float | None,
    delivery: str,
    encoding: str,
    input_file: Path | None,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    timeout_s: float,
    records: Path | None,
) -> CommandOutput:
    """Send the requests of a trace to the Open Inference Protocol v2 server at URL and count how they end.

    The load is open loop: requests are sent when the trace says, whether or not earlier ones have been answered.
    """
    arrivals = trace_at(trace, seed=seed, duration_s=duration_s, application=model or "", option="--model")
    arrivals = with_works(arrivals, rows, sizes, seed=seed)
    api_key = key_in(api_key_file) if api_key_file else os.environ.get(KEY_VARIABLE, "")
    plan = LoadPlan(
        url=url,
        model=model or only_model(split_url(url), timeout_s=timeout_s, api_key=api_key),
        version=version,
        api_key=api_key,
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

        def update(report: ProgressReport) -> None:
            advance(report.at_s, f"{report.sent:,} sent, {report.ended:,} ended")

        result = run_load(plan, progress=update)
    asked = {"model": plan.model, "version": version or None}
    by_size = [table(_by_size(result.sizes))] if result.sizes else []
    return CommandOutput({**asked, **msgspec.to_builtins(result)}, [facts(result.rows()), *by_size])


def _by_size(rows: Sequence[SizeRow]) -> Table:
    """What became of the requests by the size of their rows."""
    cells = tuple((row.size, row.sent, row.ok, 100 * row.attainment, row.p50_ms, row.p99_ms) for row in rows)
    return Table("By size", ("size up to", "sent", "in time", "attainment %", "p50 ms", "p99 ms"), cells)


def key_in(path: Path) -> str:
    """The key in the first line of a file that is not empty. InputError if there is none."""
    try:
        words = path.read_text(encoding="utf-8").split("\n", 1)[0].split()
    except (OSError, ValueError) as error:
        raise InputError("cannot read the key", where=str(path), help="check the path") from error
    if not 1 <= len(words) <= 2:
        raise InputError("its first line is no key", where=str(path), help="write KEY, or NAME KEY")
    return words[-1]
