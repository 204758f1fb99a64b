"""Labelled requests to a running server: how many came in time, and how many of the answers were right.

    python -m examples.digits.score http://127.0.0.1:8000 --trace '{kind: poisson, rate: 40}' --duration-s 30

Promises an open loop, as `sloop load` is one, on whose sender and schedule it stands. The pictures are of handwriting
that no model has learned from. An answer is right where all six digits are.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Final

import msgspec
import numpy as np
import uvloop

from examples.digits.pictures import Labels, Levels, held_out
from sloop.cli.command import trace_at
from sloop.errors import InputError, MachineError
from sloop.load import Delivery, LoadResult
from sloop.load.connections import RequestHead, Server
from sloop.load.plan import Body, default_port, split_url
from sloop.load.results import RecordWriter, join, read_records, summarise
from sloop.load.run import schedule_of
from sloop.load.sender import Target, allowed_connections, send_open
from sloop.units import ms, s, to_s
from sloop.workload import Trace

APPLICATION: Final = "digits"
SLO_MS: Final = 250.0
PICTURES: Final = 1000
"""Different ones, sent in turn."""
SEED: Final = 11
CONNECTIONS: Final = 512
TIMEOUT_S: Final = 10.0


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """What a client saw, in per cent where it ends so."""

    load: LoadResult
    answered: int
    """With status 200, in time or late."""
    accuracy_percent: float | None
    """Right, of those answered; None of nothing."""
    right_in_time_percent: float
    """Right and in time, of all that were sent; what is late counts as wrong."""


class Output(msgspec.Struct, frozen=True):
    """A tensor of an answer."""

    name: str
    data: list[int]


class Answered(msgspec.Struct, frozen=True):
    """The body of an answer."""

    outputs: list[Output]


def score(url: str, trace: Trace, *, slo_ms: float, pictures: int = PICTURES, application: str = APPLICATION) -> Scored:
    """Send the trace; blocks until the last request has ended. InputError for a URL or trace that will not do."""
    parts = split_url(url)
    shown = held_out(pictures, SEED)
    bodies = [body_of(picture) for picture in shown.damaged]
    path = f"{parts.path.rstrip('/')}/v2/models/{application}/infer"
    answers: dict[int, bytes] = {}
    target = Target(
        server=Server(parts.hostname or "", parts.port or default_port(parts), parts.scheme == "https"),
        heads=[_head(path, parts.netloc, body, slo_ms) for body in bodies],
        bodies=[body.content for body in bodies],
        connections_max=allowed_connections(CONNECTIONS),
        warm_connections=16,
        timeout_ns=s(TIMEOUT_S),
        keep=answers.__setitem__,
    )
    schedule = schedule_of(trace, None, 0, Delivery.DELAY)[:, :2]
    begun_s = monotonic()
    with tempfile.TemporaryDirectory(prefix="digits-") as folder:
        with (Path(folder) / "records").open("wb") as file:
            records = RecordWriter(file)
            uvloop.run(send_open(target, schedule.ravel().tolist(), records, lambda progress: None))
            records.flush()
        measured = join(read_records(Path(folder) / "records"), schedule)
    slo_ns = ms(slo_ms)
    wall_s = round(monotonic() - begun_s, 3)
    load = summarise(measured, slo_ns=slo_ns, duration_s=to_s(trace.duration_ns), connections=0, wall_s=wall_s)
    in_time = measured.is_answered() & (measured.latency_ns <= slo_ns)
    right = {number for number, body in answers.items() if is_right(body, shown.labels[number % pictures])}
    return Scored(
        load=load,
        answered=len(answers),
        accuracy_percent=100 * len(right) / len(answers) if answers else None,
        right_in_time_percent=100 * sum(1 for number in right if in_time[number]) / len(schedule),
    )


def body_of(picture: Levels) -> Body:
    """A request for one picture, its pixels as raw bytes; the answer is asked for as JSON."""
    pixels = picture.tobytes()
    parameters = {"binary_data_size": len(pixels)}
    tensor = {"name": "picture", "datatype": "UINT8", "shape": [1, *picture.shape], "parameters": parameters}
    head = msgspec.json.encode({"inputs": [tensor]})
    return Body(head + pixels, len(head))


def is_right(body: bytes, labels: Labels) -> bool:
    """Whether an answer names every digit."""
    outputs: Mapping[str, list[int]] = {one.name: one.data for one in msgspec.json.decode(body, type=Answered).outputs}
    return bool(np.array_equal(outputs.get("digits", []), labels))


def _head(path: str, host: str, body: Body, slo_ms: float) -> RequestHead:
    return RequestHead(path=path, host=host, slo_ms=slo_ms, content_bytes=len(body.content), json_bytes=body.json_bytes)


def said(scored: Scored) -> str:
    """For people."""
    accuracy = "–" if scored.accuracy_percent is None else f"{scored.accuracy_percent:.1f} %"
    rows = [
        *scored.load.rows(),
        ("right, of those answered", accuracy),
        ("right and in time, of all", f"{scored.right_in_time_percent:.1f} %"),
    ]
    return "".join(f"{label:<34}{value}\n" for label, value in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--trace", required=True, help="a file, or a mapping as `sloop load --trace` takes it")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--slo-ms", type=float, default=SLO_MS)
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    given = parser.parse_args()
    try:
        trace = trace_at(given.trace, seed=given.seed, duration_s=given.duration_s)
        found = score(given.url, trace, slo_ms=given.slo_ms)
    except (InputError, MachineError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(msgspec.json.encode(found).decode() + "\n" if given.json else said(found))


if __name__ == "__main__":
    main()
