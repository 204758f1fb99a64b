"""What is served in time when clients send more than the edge can take: JSON requests to a small model in an open loop.

    python -m benchmarks.edge_overload [--seconds 8]

The server's own process is held to `--cores` of a CPU, so that it, and neither the model nor the load generator, is the
bottleneck. What it can take is found by a closed loop; the same is then offered 1, 1.5, 2, 3 and 5 times, with a
deadline of 50 ms and `early-drop`. Each run is followed by half the load, which shows how soon the server recovers. The
600 kB requests have a deadline that allows for their upload and their reading.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.notebook import arguments, children, publish, say, server_pid, table, workspace
from benchmarks.peers.models import mlp, pool
from benchmarks.peers.peer import Model
from sloop.demo.live import serving
from sloop.load import ClosedLoop, Encoding, LoadPlan, LoadResult, run_load
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
        closed = ClosedLoop(connections=CONNECTIONS, duration_s=4.0, warmup_s=1.0)
        capacity_rps = run_load(plan_of(case, report.http, arrivals=closed)).answered_rps
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
    publish("edge-overload", "More than the edge can take", text, [figure(found)], write=not given.no_write)


if __name__ == "__main__":
    main()
