"""The simulator compared with queueing theory: waits, the share that waits, requests present, Little's law.

    python -m benchmarks.theory [--runs 20] [--requests 30000]

Each queue is simulated with independent seeds. The mean of the runs has a 95 % confidence interval (Student's t), which
should contain the theoretical value. One row in twenty misses by chance; a wrong simulator misses the same rows with
every `--seed`. Source: Kleinrock, Queueing Systems I; formulas and scenarios are those of tests/sim/theory.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

from scipy.stats import t as student

from benchmarks.notebook import arguments, publish, say, table
from sloop.app.scenario import NoiseShape
from sloop.units import to_s
from tests.sim.theory.queues import SERVICE_S, erlang_c, visits, wait_many_s, wait_one_s

CONFIDENCE = 0.95
SETTLING = 0.1
"""Of a run's requests, left out because the queue began empty."""


class Queue(NamedTuple):
    """A queue: `servers`, each with utilisation `load`; `variation` is the squared CV of service times."""

    name: str
    servers: int
    load: float
    shape: NoiseShape
    variation: float = 1.0
    cv: float = 0.0


QUEUES = (
    *(Queue("M/M/1", 1, load, "exponential") for load in (0.3, 0.5, 0.7, 0.9)),
    *(Queue("M/D/1", 1, load, "deterministic", 0.0) for load in (0.3, 0.5, 0.7, 0.9)),
    Queue("M/G/1, CV 0.3", 1, 0.8, "normal", 0.09, 0.3),
    *(Queue(f"M/M/{servers}", servers, load, "exponential") for servers in (2, 8) for load in (0.5, 0.7, 0.9)),
    Queue("M/M/64", 64, 0.9, "exponential"),
)


class QueueRun(NamedTuple):
    """One run."""

    wait_ms: float
    waiting: float
    """Share of requests that waited."""
    present: float
    """Mean number in the system."""
    little: float
    """Mean number present over arrival rate × mean stay, less 1, taken over the whole run."""


def simulated(queue: Queue, seed: int, requests: int) -> QueueRun:
    play = partial(visits, seed, servers=queue.servers, load=queue.load, shape=queue.shape, cv=queue.cv)
    settled = play(requests=requests, settling=round(SETTLING * requests))
    whole = play(requests=requests // 10)
    rate_rps = len(whole.stays_s) / to_s(whole.changed_ns)
    return QueueRun(
        wait_ms=1e3 * fmean(settled.waits_s),
        waiting=fmean(wait_s > 0 for wait_s in settled.waits_s),
        present=settled.mean_present,
        little=whole.mean_present / (rate_rps * fmean(whole.stays_s)) - 1,
    )


def theory(queue: Queue) -> tuple[float, float, float]:
    """Theory's mean wait in ms, share that waits, and mean number present (Little: λ × (wait + service))."""
    if queue.servers == 1:
        wait_s, waiting = wait_one_s(queue.load, queue.variation), queue.load
    else:
        wait_s, waiting = wait_many_s(queue.servers, queue.load), erlang_c(queue.servers, queue.load)
    return 1e3 * wait_s, waiting, queue.load * queue.servers / SERVICE_S * (wait_s + SERVICE_S)


def compared(queue: Queue, runs: Sequence[QueueRun]) -> list[tuple[object, ...]]:
    """One row per measure: theory, the mean of the runs, and half the width of its confidence interval."""
    measures: tuple[tuple[str, Callable[[QueueRun], float]], ...] = (
        ("mean wait, ms", lambda seen: seen.wait_ms),
        ("share that waits", lambda seen: seen.waiting),
        ("mean number present", lambda seen: seen.present),
    )
    found: list[tuple[object, ...]] = []
    for (measure, of), expected in zip(measures, theory(queue), strict=True):
        values = [of(seen) for seen in runs]
        half = float(student.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
        mean = fmean(values)
        inside = abs(mean - expected) <= half
        shown = f"{mean:.4g} ± {half:.2g}"
        found.append((queue.name, queue.load, measure, expected, shown, f"{100 * (mean / expected - 1):+.2f}", inside))
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="independent seeds for each queue (default 20)")
    parser.add_argument("--requests", type=int, default=30_000, help="requests in each run (default 30,000)")
    parser.add_argument("--quick", action=Quick, help="5 runs of 5,000 requests")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args()
    orders = [
        (queue, 1_000_000 * given.seed + 1000 * place + run, given.requests)
        for place, queue in enumerate(QUEUES)
        for run in range(given.runs)
    ]
    say(f"{len(orders)} runs of {given.requests:,} requests")
    with multiprocessing.Pool(given.processes) as pool:
        seen = pool.starmap(simulated, orders, chunksize=1)
    rows = [
        row
        for place, queue in enumerate(QUEUES)
        for row in compared(queue, seen[place * given.runs : (place + 1) * given.runs])
    ]
    inside = sum(row[-1] is True for row in rows)
    little = max(abs(run.little) for run in seen)
    text = "\n\n".join(
        [
            f"{given.runs} independent runs of {given.requests:,} requests for each queue, service of mean "
            f"{1e3 * SERVICE_S:g} ms, first come first served, the first {SETTLING:.0%} of each run left out. "
            f"The interval is the {CONFIDENCE:.0%} confidence interval of the runs' mean: "
            f"**{inside} of {len(rows)} rows inside** ({CONFIDENCE * len(rows):.0f} are to be expected of a true "
            "simulator).",
            table(("queue", "ρ", "measure", "theory", "simulated, mean ± half interval", "apart, %", "inside"), rows),
            "Little's law, L = λW with each side counted from the log in its own way over whole runs: apart by at most "
            f"{little:.1e} of L in {len(seen)} runs.",
        ]
    )
    publish("theory", "The simulator against queueing theory", text, write=not given.no_write)


class Quick(argparse.Action):
    """Fewer, shorter runs."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        namespace.runs, namespace.requests = 5, 5_000


if __name__ == "__main__":
    main()
