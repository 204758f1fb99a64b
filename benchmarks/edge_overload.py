"""What is served in time when clients send more than the edge can take: JSON requests to a small model in an open loop.

    python -m benchmarks.edge_overload [--seconds 8]

The server's own process is held to `--cores` of a CPU, so that it, and neither the model nor the load generator, is the
bottleneck. What it can take is found by a closed loop; the same is then offered 1, 1.5, 2, 3 and 5 times, with a
deadline of 50 ms and `early-drop`. Each run is followed by half the load, which shows how soon the server recovers. The
600 kB requests have a deadline that allows for their upload and their reading.

Then the edge is stopped for 0.8 s, twenty times, while small requests come at three times the rate that it can take,
from clients that give up after 0.4 s and connect again: how soon does it serve as many in time as before?
"""

import json
import os
import signal
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.notebook import arguments, children, publish, say, server_pid, table, workspace
from benchmarks.peers.load import closed_at_sloop
from benchmarks.peers.models import mlp, pool
from benchmarks.peers.peer import Model
from sloop.demo.live import serving
from sloop.load import Encoding, LoadPlan, LoadResult, run_load
from sloop.profile.measure import measure
from sloop.profile.profile import path_beside, save_profile
from sloop.report.plots import Figure, Panel, Series
from sloop.serve.cpu_quota import confined
from sloop.workload import trace_from

FACTORS: Final = (1.0, 1.5, 2.0, 3.0, 5.0)
AFTER_S: Final = 5
CALM: Final = 0.5
RECOVERED: Final = 0.95
CONNECTIONS: Final = 64
STALLS: Final = 20
STALL_S: Final = 0.8
STALL_EACH_S: Final = 4
"""From one stall to the next."""
GIVE_UP_S: Final = 0.4
STALL_FACTOR: Final = 3.0
RETURNED: Final = 0.8
"""Of the goodput before the first stall."""


class Case(Struct, frozen=True):
    """One kind of request."""

    name: str
    model: Model
    slo_ms: float
    cores: float
    connections_max: int


class Run(Struct, frozen=True):
    """One offered load and what became of it."""

    factor: float
    result: LoadResult
    seconds: int

    @property
    def goodput_rps(self) -> float:
        """Requests answered in time, while the load was this high; the first second is left out."""
        rows = self.result.seconds[1 : self.seconds]
        return sum(row.ok for row in rows) / len(rows)

    def share(self, kind: str) -> float:
        """Of the requests sent meanwhile, in per cent."""
        rows = self.result.seconds[1 : self.seconds]
        return 100.0 * sum(int(getattr(row, kind)) for row in rows) / max(1, sum(row.sent for row in rows))

    @property
    def recovery_s(self) -> float:
        """Seconds of the calm after which nearly all requests are served in time."""
        calm = self.result.seconds[self.seconds :]
        late = [place for place, row in enumerate(calm) if row.ok < RECOVERED * row.sent]
        return float(late[-1] + 1) if late else 0.0


def app_in(folder: Path, case: Case) -> Path:
    """The application's file; its model has been profiled."""
    path = folder / f"{case.name}.yaml"
    path.write_text(
        json.dumps(
            {
                "name": case.name,
                "slo_ms": case.slo_ms,
                "stages": [{"name": "only", "model": str(case.model.path)}],
                "system": "early-drop",
            }
        )
    )
    return path


def plan_of(case: Case, url: str, **options: object) -> LoadPlan:
    """Requests of this kind, as JSON."""
    given = {"connections_max": case.connections_max, "timeout_s": 5.0} | options
    return LoadPlan(url=url, model=case.name, slo_ms=case.slo_ms, encoding=Encoding.JSON, **given)  # type: ignore[arg-type]


def play(folder: Path, case: Case, given: Namespace) -> tuple[float, list[Run]]:
    """What the edge can take, in requests a second, and a run for each factor, each with a server of its own start."""
    runs: list[Run] = []
    with serving(app_in(folder, case), folder / case.name) as report, confined(front_pid(), case.cores):
        capacity_rps = closed_at_sloop(report.http, case.name, CONNECTIONS, 3.0, slo_ms=case.slo_ms).answered_rps
        say(f"{case.name}: the edge takes {capacity_rps:,.0f} requests/s")
        for factor in FACTORS:
            seconds = round(given.seconds)
            rates = [factor * capacity_rps] * seconds + [CALM * capacity_rps] * AFTER_S
            length_s = float(seconds + AFTER_S)
            stepped = {"kind": "step", "rates": rates, "each_s": 1}
            trace = trace_from(stepped, seed=given.seed, duration_s=length_s, folder=folder)
            run = Run(factor, run_load(plan_of(case, report.http, arrivals=trace)), seconds)
            say(
                f"{case.name}: {factor:g} × → {run.goodput_rps:,.0f}/s in time, recovered after {run.recovery_s:g} s, "
                f"generator's lag p99 {run.result.lag_p99_ms:.2f} ms"
            )
            runs.append(run)
    return capacity_rps, runs


def play_stalls(folder: Path, case: Case, given: Namespace, capacity_rps: float) -> tuple[float, list[int]]:
    """The goodput before the first stall, and after how many whole seconds it has returned after each; the time to the
    next one if it has not."""
    before_s, length_s = STALL_EACH_S, STALL_EACH_S * (STALLS + 1)
    rate_rps = STALL_FACTOR * capacity_rps
    trace = trace_from({"kind": "poisson", "rate": rate_rps}, seed=given.seed, duration_s=length_s, folder=folder)
    with serving(app_in(folder, case), folder / "stalls") as report:
        pid = front_pid()
        with confined(pid, case.cores):
            plan = plan_of(case, report.http, arrivals=trace, timeout_s=GIVE_UP_S)
            stalls = threading.Thread(target=stall, args=(pid, time.monotonic() + before_s), daemon=True)
            stalls.start()
            seconds = run_load(plan).seconds
            stalls.join()
    usual_rps = sum(row.ok for row in seconds[1:before_s]) / (before_s - 1)
    returns = []
    for begin in range(before_s, length_s, STALL_EACH_S):
        found = [row.ok >= max(1.0, RETURNED * usual_rps) for row in seconds[begin + 1 : begin + STALL_EACH_S]]
        returns.append(1 + (found.index(True) if True in found else len(found)))
    say(f"stalls: {usual_rps:,.0f}/s in time before them; back after {returns} s")
    return usual_rps, returns


def stalls_text(usual_rps: float, returns: list[int]) -> str:
    """The result of `play_stalls` in words."""
    late = sum(each > 2 for each in returns)
    return (
        f"**Stalls.** Small requests at {STALL_FACTOR:g} × what the edge takes, from clients that give up after "
        f"{GIVE_UP_S:g} s and connect again. Before the first stall, {usual_rps:,.0f} requests/s are answered in time. "
        f"The edge is stopped for {STALL_S:g} s, {STALLS} times, every {STALL_EACH_S} s. {RETURNED:.0%} of that "
        f"goodput are reached again in the first whole second after {returns.count(1)} stalls, in the second one after "
        f"{returns.count(2)}, and later or not before the next stall after {late} (wanted: 0)."
    )


def stall(pid: int, begin_s: float) -> None:
    """Stop a process for a while, again and again."""
    for number in range(STALLS):
        time.sleep(max(0.0, begin_s + number * STALL_EACH_S - time.monotonic()))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STALL_S)
        os.kill(pid, signal.SIGCONT)


def front_pid() -> int:
    """The process that faces the network: the edge, or the server itself if it has none."""
    server = server_pid()
    return next((pid for pid, command in children(server) if "sloop.serve.edge" in command), server)


def rows(capacity_rps: float, runs: list[Run]) -> list[tuple[object, ...]]:
    """One row per factor."""
    most = max(run.goodput_rps for run in runs)
    return [
        (
            *(f"{run.factor:g} ×", run.factor * capacity_rps, run.goodput_rps, run.goodput_rps / most),
            *(run.share("ok"), run.share("late"), run.share("rejected"), run.share("dropped"), run.share("errors")),
            *(run.result.response_p99_ms, run.recovery_s, run.result.lag_p99_ms),
        )
        for run in runs
    ]


COLUMNS: Final = (
    *("offered", "requests/s", "in time/s", "of the most", "in time %", "late %", "503 %", "504 %", "no answer %"),
    *("response p99 ms", "recovered after s", "generator's lag p99 ms"),
)


def figure(found: dict[str, tuple[float, list[Run]]]) -> Figure:
    """Goodput over the offered load, both as multiples of the most."""
    series = []
    for name, (_, runs) in found.items():
        most = max(run.goodput_rps for run in runs)
        series.append(Series(name, FACTORS, tuple(run.goodput_rps / most for run in runs)))
    return Figure(
        name="goodput",
        title="Goodput under overload of the edge",
        x_label="offered, × what the edge can take",
        panels=(Panel(y_label="in time, of the most", series=tuple(series)),),
        alt="Goodput over the offered load, each as a multiple of the most.",
    )


def main() -> None:
    """Measure both kinds of requests, and publish."""
    parser = arguments(__doc__, seconds=8.0, quick=4.0)
    parser.add_argument("--cores", type=float, default=0.2, help="of the server's process (default 0.2)")
    given = parser.parse_args()
    found: dict[str, tuple[float, list[Run]]] = {}
    with workspace(given.keep) as folder:
        cases = (
            Case("small", mlp(folder), 50.0, given.cores, 4096),
            Case("image", pool(folder), 1000.0, 2 * given.cores, 512),
        )
        for case in cases:
            say(f"profile of {case.name}")
            profile = measure(case.model.path, batches=(1, 4, 16), cores=(1.0,), seconds=0.5, passes=1, limit=confined)
            save_profile(profile, path_beside(case.model.path))
            found[case.name] = play(folder, case, given)
        usual_rps, returns = play_stalls(folder, cases[0], given, found["small"][0])
    text = "\n\n".join(
        f"**{name}**: the edge takes {capacity_rps:,.0f} requests/s in a closed loop.\n\n"
        + table(COLUMNS, rows(capacity_rps, runs))
        for name, (capacity_rps, runs) in found.items()
    )
    worst = {name: runs[-1].goodput_rps / max(run.goodput_rps for run in runs) for name, (_, runs) in found.items()}
    verdict = ", ".join(f"{name} {value:.2f}" for name, value in worst.items())
    slowest = max(run.recovery_s for _, runs in found.values() for run in runs)
    text += f"\n\nGoodput at 5 × as a share of the most: {verdict} (wanted: 0.7). "
    text += f"Longest recovery {slowest:g} s (wanted: 2 s)."
    text += "\n\n" + stalls_text(usual_rps, returns)
    publish("edge-overload", "More than the edge can take", text, [figure(found)], write=not given.no_write)


if __name__ == "__main__":
    main()
