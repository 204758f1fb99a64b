"""A text encoder under texts of different lengths, live, beside an ideal server that knows what each text takes.

    python -m benchmarks.lengths [--seconds 40] [--weights model.safetensors]

The encoder (benchmarks/encoder.py) runs on one core, and the deadline is four times what the longest text takes. The
lengths are those of tweets, of product reviews (512 tokens at most), and nine tweets to one long document. The ideal
server has the same core, knows what each text takes alone, and serves the one with the earliest deadline that it can
serve in time; it joins no texts. Beside them runs mosec with one worker, which pads the texts of a batch.

The lengths are deciles of texts that Hutto and Gilbert published with VADER (ICWSM 2014), counted in words and
punctuation marks: 4,200 tweets, and the reviews of 300 products from Amazon.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
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
from benchmarks.peers.servers.mosec import ENVIRONMENT
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
LOADS: Final = (0.7, 1.4)
"""Times what the core can serve one by one."""
SYSTEMS: Final = {
    "early-drop": {"name": "early-drop", "replicas": 1, "cores": 1},
    "elastic": {"name": "elastic", "cores_max": 1},
}
BATCH_MAX, WAIT_MS = 8, 10
TIMEOUT_S: Final = 30.0
EXPECTED: Final = 0.97
COLUMNS: Final = (
    *("lengths", "requests/s", "server", "in time %", "ideal %", "late", "dropped or refused", "p99 ms"),
    "in time /s",
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


def send(
    port: int, path: str, fields: Sequence[Mapping[str, str]], bodies: Sequence[bytes], due_s: Sequence[float]
) -> list[Answer]:
    """Send each body when it is due, on a connection of its own, and wait for all answers."""
    found = [Answer(0, 0.0)] * len(bodies)

    def ask(place: int) -> None:
        begun_s = perf_counter()
        link = HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        with closing(link), suppress(OSError, HTTPException):
            link.request("POST", path, bodies[place], dict(fields[place]))
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


def our_request(ids: NDArray[np.int64]) -> tuple[str, dict[str, str], bytes]:
    """Path, head fields and body, with the tensors in binary."""
    raw = ids.tobytes()
    entry = {"datatype": "INT64", "shape": [1, len(ids)], "parameters": {"binary_data_size": len(raw)}}
    inputs = [entry | {"name": name} for name in ("ids", "mask")]
    head = msgspec.json.encode({"inputs": inputs, "parameters": {"binary_data_output": True}})
    return "/v2/models/encoder/infer", {"inference-header-content-length": str(len(head))}, head + raw + raw


@contextmanager
def mosec(folder: Path, model: Path, slo_ms: float) -> Iterator[int]:
    """mosec with one worker on one thread, and its limit of time."""
    python, port = python_of(ENVIRONMENT), free_port()
    settings = {"ENCODER": str(model), "BATCH_MAX": str(BATCH_MAX), "WAIT_MS": str(WAIT_MS)}
    flags = ("--address", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout", str(round(slo_ms)))
    command = (str(python), str(PROGRAMS / "mosec_encoder_program.py"), *flags)
    with running(Launch(command, settings, port, "/"), folder / "mosec.txt"):
        yield port


class Row(Struct, frozen=True):
    """One run."""

    mix: str
    rate: float
    server: str
    in_time: float
    ideal: float
    late: int
    lost: int
    p99_ms: float
    goodput: float
    """Texts in time per second."""


def run_once(mix: Mix, rate: float, server: str, port: int, costs_s: Costs, slo_ms: float, given: Any) -> Row:  # noqa: ANN401
    """Send the texts of a mix at this rate to a server that is ready."""
    chance = np.random.default_rng(given.seed)
    count = round(rate * given.seconds)
    due_s = np.cumsum(chance.exponential(1 / rate, count)).tolist()
    lengths = chance.choice(mix.lengths, count).tolist()
    ids = [chance.integers(1_000, encoder.WORDS, length) for length in lengths]
    if server == "mosec":
        path, fields, bodies = "/inference", dict[str, str](), [each.tobytes() for each in ids]
        answers = send(port, path, [fields] * count, bodies, due_s)
    else:
        path, *_ = our_request(ids[0])
        pairs = [our_request(each)[1:] for each in ids]
        answers = send(port, path, [fields for fields, _ in pairs], [body for _, body in pairs], due_s)
    taken_ms = [1e3 * each.taken_s for each in answers if each.status == 200]
    good = sum(each <= slo_ms for each in taken_ms)
    best = ideal(list(zip(due_s, lengths, strict=True)), costs_s, slo_ms / 1e3)
    p99_ms = float(np.quantile(taken_ms, 0.99)) if taken_ms else 0.0
    late, lost = len(taken_ms) - good, count - len(taken_ms)
    return Row(mix.name, rate, server, good / count, best, late, lost, p99_ms, good / due_s[-1])


def main() -> None:
    """Measure and publish."""
    parser = arguments(__doc__, seconds=40.0, quick=8.0)
    parser.add_argument("--weights", type=Path, help="the model.safetensors of the package (default: random weights)")
    parser.add_argument("--only", nargs="*", default=[], help="these lengths (default: all)")
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
                for server in (*SYSTEMS, "mosec"):
                    say(f"{mix.name}, {rate:g} requests/s, {server}")
                    own = folder / f"{mix.name} {load:g} {server}"
                    own.mkdir(parents=True, exist_ok=True)
                    started = (
                        mosec(own, model, slo_ms)
                        if server == "mosec"
                        else ours(own, model, mix, slo_ms, SYSTEMS[server])
                    )
                    with started as port:
                        rows.append(run_once(mix, rate, server, port, costs_s, slo_ms, given))
                    say(f"  {100 * rows[-1].in_time:.1f} % in time, ideal {100 * rows[-1].ideal:.1f} %")
        publish("lengths", "Texts of different lengths, live", page(rows, costs_s, slo_ms), write=not given.no_write)


def page(rows: Sequence[Row], costs_s: Costs, slo_ms: float) -> str:
    """The table, and what was expected of it."""
    told = ", ".join(f"{length} tokens {1e3 * costs_s.of(length):.1f} ms" for length in (16, 64, 128, 256, LONGEST))
    cells = [
        (
            each.mix,
            each.rate,
            each.server,
            100 * each.in_time,
            100 * each.ideal,
            each.late,
            each.lost,
            each.p99_ms,
            each.goodput,
        )
        for each in rows
    ]
    good = {(each.mix, each.rate, each.server): each for each in rows}
    verdicts = [
        (
            f"{each.mix}, {each.rate:g}/s, {each.server}",
            each.in_time >= EXPECTED * each.ideal,
            beside is None or each.goodput >= beside.goodput,
        )
        for each in rows
        if each.server != "mosec"
        for beside in [good.get((each.mix, each.rate, "mosec"))]
    ]
    return "\n\n".join(
        [
            f"Deadline {slo_ms:g} ms. One text alone takes, on one core: {told}.",
            table(COLUMNS, cells),
            table(("run", f"at least {EXPECTED:g} of the ideal server", "as many in time as mosec"), verdicts),
        ]
    )


if __name__ == "__main__":
    main()
