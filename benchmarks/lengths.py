"""A text encoder under texts of different lengths, live, beside an ideal server that knows what each text takes.

    python -m benchmarks.lengths [--seconds 40] [--weights model.safetensors]

The encoder (benchmarks/encoder.py) runs on one core, and the deadline is four times what the longest text takes. The
lengths are those of tweets, of product reviews (512 tokens at most), and nine tweets to one long document. The ideal
server has the same core, knows what each text takes alone, and serves the one with the earliest deadline that it can
serve in time; it joins no texts. Beside them run mosec and Triton (PyTriton) with one worker, each with several
settings: how many texts a batch takes and, for Triton, which joins only texts of one length, whether clients pad
theirs. The best of all settings is what ours is compared with.

The lengths are deciles of texts that Hutto and Gilbert published with VADER (ICWSM 2014), counted in words and
punctuation marks: 4,200 tweets, and the reviews of 300 products from Amazon.
"""

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep
from typing import Any, Final

import msgspec
import numpy as np
import onnxruntime  # type: ignore[import-untyped]
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks import encoder
from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.peers.environments import python_of
from benchmarks.peers.peer import PROGRAMS, Launch
from benchmarks.peers.processes import free_port, running
from benchmarks.peers.servers import mosec, triton
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml

LONGEST: Final = 512
TWEETS: Final = (3, 10, 12, 15, 18, 20, 23, 26, 30, 33, 80)
REVIEWS: Final = (7, 69, 99, 125, 147, 194, 232, 294, 365, 512, 512)
"""Deciles of the lengths, from the least to the most."""
DRAWN: Final = 2_000
TIMED: Final = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
TIMES: Final = 7
FACTOR: Final = 4.0
TRITON_WAIT_MS: Final = "0.1"
"""What Triton's guide on its batcher begins with."""
LOADS: Final = (0.7, 1.4)
"""Times what the core can serve one by one."""
SYSTEMS: Final = {
    "early-drop": {"name": "early-drop", "replicas": 1, "cores": 1},
    "elastic": {"name": "elastic", "cores_max": 1},
}
BATCH_MAX: Final = 8
MOSEC: Final = ((1, 0), (4, 5), (8, 10))
"""The largest batch, and the time in ms that mosec waits for one."""
PADDED: Final = (16, 32, 64, 128, 256, LONGEST)
TRITON: Final = ((1, False), (BATCH_MAX, False), (BATCH_MAX, True))
"""The largest batch, and whether clients pad texts to the next of `PADDED`."""
TIMEOUT_S: Final = 30.0
EXPECTED: Final = 0.97
COLUMNS: Final = (
    *("lengths", "requests/s", "server", "setting", "in time %", "ideal %", "late", "dropped or refused"),
    *("p99 ms", "in time /s"),
)


class Mix(Struct, frozen=True):
    """Lengths, and what they take alone on average."""

    name: str
    lengths: Sequence[int]
    mean_s: float


def mixes(costs_s: "Costs", seed: int) -> list[Mix]:
    """Lengths drawn from the deciles, uniform between them."""
    chance = np.random.default_rng(seed)

    def drawn(deciles: Sequence[int], count: int) -> list[int]:
        places = chance.random(count) * (len(deciles) - 1)
        return [round(float(length)) for length in np.interp(places, range(len(deciles)), deciles)]

    found = {
        "tweets": drawn(TWEETS, DRAWN),
        "reviews": drawn(REVIEWS, DRAWN),
        "tweets and documents": drawn(TWEETS, DRAWN * 9 // 10) + [LONGEST] * (DRAWN // 10),
    }
    return [
        Mix(name, lengths, float(np.mean([costs_s.of(each) for each in lengths]))) for name, lengths in found.items()
    ]


class Costs:
    """What one text takes alone on one core, by its length: medians, and straight lines between them."""

    def __init__(self, model: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self._s = []
        for length in TIMED:
            ids, taken_s = np.ones((1, length), np.int64), []
            for _ in range(TIMES):
                begun_s = perf_counter()
                session.run(None, {"ids": ids, "mask": ids})
                taken_s.append(perf_counter() - begun_s)
            self._s.append(float(np.median(taken_s)))

    def of(self, length: int) -> float:
        return float(np.interp(length, TIMED, self._s))


def ideal(sent: Sequence[tuple[float, int]], costs_s: Costs, slo_s: float) -> float:
    """The share that a server answers in time that knows the costs: the earliest deadline first, without those that it
    cannot serve in time. Pairs are the instant in seconds and the length."""
    waiting: list[tuple[float, int]] = []
    now_s, served, place = 0.0, 0, 0
    while place < len(sent) or waiting:
        if not waiting:
            now_s = max(now_s, sent[place][0])
        while place < len(sent) and sent[place][0] <= now_s:
            heappush(waiting, (sent[place][0] + slo_s, sent[place][1]))
            place += 1
        due_s, length = heappop(waiting)
        if now_s + costs_s.of(length) <= due_s:
            now_s += costs_s.of(length)
            served += 1
    return served / len(sent)


class Answer(Struct, frozen=True):
    """What became of one request."""

    status: int
    """0 without an answer."""
    taken_s: float


def send(port: int, sent: Sequence["Sent"], due_s: Sequence[float]) -> list[Answer]:
    """Send each request when it is due, on a connection of its own, and wait for all answers."""
    found = [Answer(0, 0.0)] * len(sent)

    def ask(place: int) -> None:
        path, fields, body = sent[place]
        begun_s = perf_counter()
        link = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        with closing(link), suppress(OSError, HTTPException):
            link.request("POST", path, body, dict(fields))
            answer = link.getresponse()
            answer.read()
            found[place] = Answer(answer.status, perf_counter() - begun_s)

    first_s, threads = perf_counter(), list[Thread]()
    for place, at_s in enumerate(due_s):
        sleep(max(0.0, first_s + at_s - perf_counter()))
        threads.append(Thread(target=ask, args=(place,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return found


@contextmanager
def ours(folder: Path, model: Path, mix: Mix, slo_ms: float, system: Mapping[str, Any]) -> Iterator[int]:
    """sloop with a profile that knows only what the mean text takes."""
    latency = {"form": "quadratic", "alpha": 0, "beta": 1e3 * mix.mean_s, "gamma": 1}
    profile = {"latency_ms": latency, "max_batch": BATCH_MAX, "load_s": 1, "memory_bytes": 4e8}
    declared = {
        "name": "encoder",
        "slo_ms": slo_ms,
        "stages": [{"name": "encode", "model": str(model), "pad": {"ids": 0, "mask": 0}, "profile": profile}],
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": 1}]},
        "system": dict(system),
    }
    dump_yaml(folder / "app.yaml", declared)
    with serving(folder / "app.yaml", folder / "state") as served:
        yield int(served.http.rpartition(":")[2])


Sent = tuple[str, Mapping[str, str], bytes]
"""Path, head fields and body of a request."""


def protocol_request(ids: NDArray[np.int64], length: int) -> Sent:
    """A text for the Open Inference Protocol, padded to this length, with the tensors in binary."""
    texts = {"ids": ids, "mask": np.ones_like(ids)}
    raw = [np.pad(each, (0, length - len(ids))).tobytes() for each in texts.values()]
    entry = {"datatype": "INT64", "shape": [1, length], "parameters": {"binary_data_size": len(raw[0])}}
    head = msgspec.json.encode(
        {"inputs": [entry | {"name": name} for name in texts], "parameters": {"binary_data_output": True}}
    )
    return "/v2/models/encoder/infer", {"inference-header-content-length": str(len(head))}, b"".join([head, *raw])


def as_it_is(ids: NDArray[np.int64]) -> Sent:
    return protocol_request(ids, len(ids))


def padded(ids: NDArray[np.int64]) -> Sent:
    return protocol_request(ids, next(length for length in PADDED if length >= len(ids)))


def raw_bytes(ids: NDArray[np.int64]) -> Sent:
    return "/inference", {}, ids.tobytes()


@contextmanager
def with_mosec(batch_max: int, wait_ms: int, folder: Path, model: Path, slo_ms: float) -> Iterator[int]:
    """mosec with one worker on one thread, and its limit of time."""
    python, port = python_of(mosec.ENVIRONMENT), free_port()
    settings = {"ENCODER": str(model), "BATCH_MAX": str(batch_max), "WAIT_MS": str(wait_ms)}
    flags = ("--address", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout", str(round(slo_ms)))
    command = (str(python), str(PROGRAMS / "mosec_encoder_program.py"), *flags)
    with running(Launch(command, settings, port, "/"), folder / "mosec.txt"):
        yield port


@contextmanager
def with_triton(batch_max: int, folder: Path, model: Path, slo_ms: float) -> Iterator[int]:
    """Triton with one instance on one thread, which refuses texts that have waited until the longest would be late."""
    python, port = python_of(triton.ENVIRONMENT), free_port()
    settings = {
        "ENCODER": str(model),
        "BATCH_MAX": str(batch_max),
        "WAIT_MS": TRITON_WAIT_MS,
        "TIMEOUT_MS": str((1 - 1 / FACTOR) * slo_ms),
        "PORT": str(port),
        "METRICS_PORT": str(free_port()),
        "LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR")),
    }
    command = (str(python), str(PROGRAMS / "triton_encoder_program.py"))
    with running(Launch(command, settings, port, "/v2/models/encoder/ready"), folder / "triton.txt"):
        yield port


class Server(Struct, frozen=True):
    """A server with one setting."""

    name: str
    setting: str
    start: Callable[[Path, Path, float], AbstractContextManager[int]]
    """Starts it with a folder, the model and the deadline in ms; yields its port."""
    request: Callable[[NDArray[np.int64]], Sent] = as_it_is


def servers(mix: Mix) -> Sequence[Server]:
    """Ours, then the others with each of their settings."""

    def own(system: Mapping[str, Any], folder: Path, model: Path, slo_ms: float) -> AbstractContextManager[int]:
        return ours(folder, model, mix, slo_ms, system)

    return [
        *(Server(name, "", partial(own, system)) for name, system in SYSTEMS.items()),
        *(
            Server("mosec", f"batch {most}, wait {wait_ms} ms", partial(with_mosec, most, wait_ms), raw_bytes)
            for most, wait_ms in MOSEC
        ),
        *(
            Server(
                "Triton",
                f"batch {most}, {'padded by clients' if pads else 'as they are'}",
                partial(with_triton, most),
                padded if pads else as_it_is,
            )
            for most, pads in TRITON
        ),
    ]


class Row(Struct, frozen=True):
    """One run."""

    mix: str
    rate: float
    server: str
    setting: str
    in_time: float
    ideal: float
    late: int
    lost: int
    p99_ms: float
    goodput: float
    """Texts in time per second."""


def run_once(mix: Mix, rate: float, server: Server, port: int, costs_s: Costs, slo_ms: float, given: Any) -> Row:  # noqa: ANN401
    """Send the texts of a mix at this rate to a server that is ready."""
    chance = np.random.default_rng(given.seed)
    count = round(rate * given.seconds)
    due_s = np.cumsum(chance.exponential(1 / rate, count)).tolist()
    lengths = chance.choice(mix.lengths, count).tolist()
    sent = [server.request(chance.integers(1_000, encoder.WORDS, length)) for length in lengths]
    answers = send(port, sent, due_s)
    taken_ms = [1e3 * each.taken_s for each in answers if each.status == 200]
    good = sum(each <= slo_ms for each in taken_ms)
    best = ideal(list(zip(due_s, lengths, strict=True)), costs_s, slo_ms / 1e3)
    p99_ms = float(np.quantile(taken_ms, 0.99)) if taken_ms else 0.0
    late, lost = len(taken_ms) - good, count - len(taken_ms)
    share, goodput = good / count, good / due_s[-1]
    return Row(mix.name, rate, server.name, server.setting, share, best, late, lost, p99_ms, goodput)


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=40.0, quick=8.0)
    parser.add_argument("--weights", type=Path, help="the model.safetensors of the package (default: random weights)")
    parser.add_argument("--only", nargs="*", default=[], help="these lengths (default: all)")
    parser.add_argument("--ours", action="store_true", help="without the other servers")
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        weights = encoder.read_safetensors(given.weights) if given.weights else None
        model = encoder.write(folder / "encoder.onnx", weights)
        costs_s = Costs(model)
        slo_ms = round(1e3 * FACTOR * costs_s.of(LONGEST))
        rows = []
        for mix in mixes(costs_s, given.seed):
            if given.only and mix.name not in given.only:
                continue
            for load in LOADS:
                rate = round(load / mix.mean_s, 1)
                for place, server in enumerate(servers(mix)):
                    if given.ours and server.name not in SYSTEMS:
                        continue
                    say(f"{mix.name}, {rate:g} requests/s, {server.name} {server.setting}")
                    own = folder / f"{mix.name} {load:g} {place}"
                    own.mkdir(parents=True, exist_ok=True)
                    with server.start(own, model, slo_ms) as port:
                        rows.append(run_once(mix, rate, server, port, costs_s, slo_ms, given))
                    say(f"  {100 * rows[-1].in_time:.1f} % in time, ideal {100 * rows[-1].ideal:.1f} %")
        publish("lengths", "Texts of different lengths, live", page(rows, costs_s, slo_ms), write=not given.no_write)


def page(rows: Sequence[Row], costs_s: Costs, slo_ms: float) -> str:
    """The table, and what was expected of it."""
    told = ", ".join(f"{length} tokens {1e3 * costs_s.of(length):.1f} ms" for length in (16, 64, 128, 256, LONGEST))
    cells = [
        (
            *(each.mix, each.rate, each.server, each.setting, 100 * each.in_time, 100 * each.ideal),
            *(each.late, each.lost, each.p99_ms, each.goodput),
        )
        for each in rows
    ]
    best = dict[tuple[str, float], float]()
    for each in rows:
        if each.server not in SYSTEMS:
            best[each.mix, each.rate] = max(each.goodput, best.get((each.mix, each.rate), 0.0))
    verdicts = [
        (
            f"{each.mix}, {each.rate:g}/s, {each.server}",
            each.in_time >= EXPECTED * each.ideal,
            each.goodput >= best.get((each.mix, each.rate), 0.0),
        )
        for each in rows
        if each.server in SYSTEMS
    ]
    return "\n\n".join(
        [
            f"Deadline {slo_ms:g} ms. One text alone takes, on one core: {told}.",
            table(COLUMNS, cells),
            table(("run", f"at least {EXPECTED:g} of the ideal server", "as many in time as the best other"), verdicts),
        ]
    )


if __name__ == "__main__":
    main()
