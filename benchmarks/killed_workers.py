"""Workers killed at random under load: is every request answered exactly once, and how soon is a worker replaced?

    python -m benchmarks.killed_workers [--seconds 60] [--rate 200] [--gap 4] [--replicas 2]

A server process with real workers gets Poisson requests over HTTP, while workers are killed (SIGKILL) at random
instants, whatever they are doing. The clients' records are then compared with the server's log, request by request; the
simulator's checkers check the log, and it is replayed.
"""

import contextlib
import os
import signal
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from msgspec import Struct

from benchmarks.models import small
from benchmarks.notebook import arguments, publish, quantile, say, table, worker_pids, workspace
from benchmarks.request_audit import Numbering, account, check, check_rows
from benchmarks.watch import state_of, wait_ready
from sloop.actions import StartWorker
from sloop.demo.live import serving
from sloop.demo.run import dump_yaml
from sloop.events import WorkerLost, WorkerReady
from sloop.load import Delivery, LoadPlan, LoadResult, run_load
from sloop.profile.measure import measure
from sloop.profile.profile import path_beside, save_profile
from sloop.runlog import read_log
from sloop.serve.cpu_quota import confined
from sloop.units import s, to_ms, to_s
from sloop.vocabulary import ReplicaId
from sloop.workload import trace_from

SLO_MS: Final = 250.0
CORES: Final = 0.75
"""Of each replica; what two leave of two cores is for server and load generator."""
BATCHES: Final = (1, 2, 4, 8)


class Loss(Struct, frozen=True):
    """A worker that died, according to the log."""

    at_ns: int
    ready_ns: int | None
    """When a replacement could serve; None where the run ended before."""


class Losses(Struct, frozen=True):
    """The lost workers in the log, and how long no worker could serve."""

    losses: list[Loss]
    nobody_s: float


def losses_of(log: Path) -> Losses:
    """Each loss, with the time at which its replacement was ready: the next started replica that replaces no other."""
    waiting: deque[int] = deque()
    replaces: dict[ReplicaId, int] = {}
    found: list[Loss] = []
    ready: set[ReplicaId] = set()
    nobody_ns = last_ns = 0
    served = False
    for now_ns, record in read_log(log):
        if served and not ready:
            nobody_ns += now_ns - last_ns
        last_ns = now_ns
        if isinstance(record, WorkerLost):
            ready.discard(record.worker)
            # A replacement that died itself leaves its own loss to replace, and the one it stood for with it.
            waiting.append(replaces.pop(record.worker, now_ns))
        elif isinstance(record, StartWorker) and waiting:
            replaces[record.worker] = waiting.popleft()
        elif isinstance(record, WorkerReady):
            served = True
            ready.add(record.worker)
            if record.worker in replaces:
                found.append(Loss(replaces.pop(record.worker), now_ns))
    found += [Loss(at_ns, None) for at_ns in (*waiting, *replaces.values())]
    return Losses(sorted(found, key=lambda loss: loss.at_ns), to_s(nobody_ns))


@contextmanager
def kill_workers(url: str, *, gap_s: float, seed: int) -> Iterator[list[float]]:
    """Kill a worker at random instants, `gap_s` apart on average; adds each instant, in the server's seconds, to the
    list."""
    zero_s = time.monotonic() - state_of(url).now_s
    chance, killed_s, over = Random(seed), [], threading.Event()

    def kill() -> None:
        while not over.wait(chance.expovariate(1 / gap_s)):
            pids = worker_pids()
            if pids:
                with contextlib.suppress(ProcessLookupError):
                    killed_s.append(time.monotonic() - zero_s)
                    os.kill(chance.choice(sorted(pids)), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed_s
    finally:
        over.set()
        killer.join()


def run(folder: Path, given: Namespace) -> tuple[LoadResult, list[float], Path, Path]:
    """Send the load and kill workers; returns the clients' records and the server's log."""
    model = small(folder, "squeezenet", 128)
    say("profile")
    profile = measure(model, batches=BATCHES, cores=(CORES,), seconds=0.5, passes=1, limit=confined)
    save_profile(profile, path_beside(model))
    app, records = folder / "app.yaml", folder / "records.jsonl"
    dump_yaml(
        app,
        {
            "name": "killed",
            "slo_ms": SLO_MS,
            "stages": [{"name": "classify", "model": model.name}],
            "system": {"name": "static", "replicas": given.replicas, "cores": CORES},
        },
    )
    with serving(app, folder / "state") as where:
        wait_ready(where.http, given.replicas)
        say(f"{given.rate:g} requests/s for {given.seconds:g} s")
        span = {"seed": given.seed, "duration_s": given.seconds, "folder": folder}
        plan = LoadPlan(
            url=where.http,
            model=where.application,
            arrivals=trace_from({"kind": "poisson", "rate": given.rate}, **span),
            slo_ms=SLO_MS,
            link=Numbering(),
            delivery=Delivery.ATTACH,
            records=records,
        )
        with kill_workers(where.http, gap_s=given.gap, seed=given.seed) as killed_s:
            result = run_load(plan)
        wait_ready(where.http, given.replicas)
    return result, killed_s, records, Path(where.log)


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=15)
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second (default 200)")
    parser.add_argument("--gap", type=float, default=4.0, help="mean seconds between kills (default 4)")
    parser.add_argument("--replicas", type=int, default=2)
    given = parser.parse_args()
    with workspace(given.keep) as folder:
        result, killed_s, records, log = run(folder, given)
        books, (complaint, played), losses = account(records, log), check(log), losses_of(log)
        noticed = [now_ns for now_ns, record in read_log(log) if isinstance(record, WorkerLost)]
    pairs = zip(sorted(killed_s), noticed, strict=False)
    notice_ms = [to_ms(now_ns - s(at_s)) for at_s, now_ns in pairs] if len(noticed) == len(killed_s) else []
    replaced_s = [to_s(loss.ready_ns - loss.at_ns) for loss in losses.losses if loss.ready_ns is not None]
    rows = [
        *books.rows(),
        ("attainment seen by clients, %", None if result.attainment is None else 100 * result.attainment),
        ("p50 / p99 of responses, ms", f"{result.response_p50_ms:.3g} / {result.response_p99_ms:.3g}"),
        ("workers killed", len(killed_s)),
        ("losses in the log", len(noticed)),
        ("from the kill to the loss in the log, ms, p50 / max", spread(notice_ms)),
        ("from a loss to its replacement being ready, s, p50 / max", spread(replaced_s)),
        ("time without any ready replica, s", losses.nobody_s),
        *check_rows(complaint, played),
    ]
    text = "\n\n".join(
        [
            f"SqueezeNet on images of 128 × 128, {given.replicas} replicas of {CORES:g} cores, system static, "
            f"{given.rate:g} requests/s (Poisson) for {given.seconds:g} s, deadline {SLO_MS:g} ms. A worker chosen at "
            f"random is killed at random instants, {given.gap:g} s apart on average. Each request carries its number, "
            "by which the answer that its client got is held against its end in the server's log.",
            table(("", "found"), rows),
        ]
    )
    publish("killed-workers", "Workers killed under load", text, write=not given.no_write)


def spread(values: list[float]) -> str:
    middle = quantile(values, 0.5)
    return "–" if middle is None else f"{middle:.3g} / {max(values):.3g}"


if __name__ == "__main__":
    main()
