"""Open loops with real image models and a deadline: equal arrivals for all servers, below and above one thread's limit.

Each peer's admission limit is swept: a server runs with each of its settings, and the setting with the most goodput
counts at each load. sloop has no such setting.
"""

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.notebook import say
from benchmarks.peers.bare import Limit
from benchmarks.peers.load import open_loop
from benchmarks.peers.peer import Case, Encoding, Limits, Model, Peer, PeerFailed
from benchmarks.peers.serving import Serving, serving
from sloop.load.results import LoadResult
from sloop.workload import trace_from

BURST: Final = 1.6
"""The square wave's high, over its mean; its low is as far below."""
PERIOD_S: Final = 2.5
WARM: Final = 0.5
"""Load of the warming up."""
WARM_S: Final = 2.0
PAUSE_S: Final = 0.5
SETTLE_TRIES: Final = 5


class Wave(Struct, frozen=True):
    """A shape of arrivals."""

    name: str
    square: bool

    def instants_ns(self, rate_rps: float, seconds: float, seed: int) -> NDArray[np.int64]:
        """The times at which requests are due, determined by the seed alone."""
        spec: dict[str, Any] = {"kind": "poisson", "rate": rate_rps}
        if self.square:
            low, high = (2 - BURST) * rate_rps, BURST * rate_rps
            spec = {"kind": "square", "rate": low, "burst_rate": high, "period_s": PERIOD_S, "burst_s": PERIOD_S / 2}
        trace = trace_from(spec, seed=seed, duration_s=seconds, folder=Path())
        return np.fromiter((at for block in trace.blocks() for at in block), np.int64)


def ideal_rps(due_ns: NDArray[np.int64], rps: float, slo_ms: float, seconds: float) -> float:
    """The best possible goodput of a server of throughput `rps`, for equal deadlines.

    It rejects at once the requests that it could not answer in time, and answers the others in order.
    """
    service_ns, slo_ns = 1e9 / rps, slo_ms * 1e6
    free_ns, served = 0.0, 0
    for at_ns in due_ns.tolist():
        done_ns = max(free_ns, at_ns) + service_ns
        if done_ns <= at_ns + slo_ns:
            free_ns, served = done_ns, served + 1
    return served / seconds


SQUARE: Final = Wave("Square wave", True)
STEADY: Final = Wave("Poisson", False)


class Plan(Struct, frozen=True):
    """The comparison for one model."""

    model: Model
    title: str
    bare: Limit
    slo_ms: float
    batch_max: int
    loads: tuple[float, ...]
    """Of what the bare runtime does."""
    swept: tuple[float, ...]
    """The loads at which every setting is tried; the best at the nearest of them serves for the others."""
    waves: tuple[Wave, ...]
    """The first is swept; the others take its best settings."""
    seconds: float
    rounds: int
    seed: int
    folder: Path

    @property
    def queue(self) -> int:
        """The number of requests that can be answered within a deadline."""
        return max(4, round(self.bare.rps * self.slo_ms / 1e3))

    def due_ns(self, wave: Wave, load: float, number: int) -> NDArray[np.int64]:
        """The times at which the requests of a round are due, the same for all servers."""
        return wave.instants_ns(load * self.bare.rps, self.seconds, self.seed + number)

    def limit_rps(self, wave: Wave, load: float) -> float:
        """The goodput of ONNX Runtime as a server without overhead, for the arrivals of the first round."""
        return ideal_rps(self.due_ns(wave, load, 0), self.bare.rps, self.slo_ms, self.seconds)


class Run(Struct, frozen=True):
    """One server under one load."""

    peer: str
    setting: str
    wave: str
    load: float
    number: int
    """Of the round."""
    result: LoadResult
    cores: float
    """Of CPU that the server's process tree used on average, from the first request to the last answer."""


class OpenLoopResults(Struct, frozen=True):
    """The runs of one model, and the failures."""

    runs: list[Run]
    failed: dict[str, str]

    def best(self, peer: str, wave: str, load: float) -> Run | None:
        """The run with the most goodput among all settings; of several rounds with one setting, the median."""
        runs = [run for run in self.runs if (run.peer, run.wave, run.load) == (peer, wave, load)]
        by_setting = {run.setting: sorted((r for r in runs if r.setting == run.setting), key=goodput) for run in runs}
        middle = [same[(len(same) - 1) // 2] for same in by_setting.values()]
        return max(middle, key=goodput, default=None)

    def peers(self) -> list[str]:
        return list(dict.fromkeys(run.peer for run in self.runs))


def goodput(run: Run) -> float:
    return run.result.goodput_rps


def compare(plan: Plan, peers: Iterable[Peer]) -> OpenLoopResults:
    """Sweep each peer's settings with the first wave, then run its best settings with the other waves."""
    found = OpenLoopResults([], {})
    for peer in (one for one in peers if Encoding.BINARY in one.encodings):
        settings = peer.limits(plan.queue, plan.slo_ms)
        for number in range(plan.rounds):
            trials = _swept(plan, settings) if number == 0 else []
            found.runs.extend(_played(plan, peer, trials, settings, number, found))
            rest = _rest(plan, peer, found, number)
            found.runs.extend(_played(plan, peer, rest, settings, number, found))
    return found


Trial = tuple[str, Wave, float]
"""A setting's name, a wave and a load."""


def _swept(plan: Plan, settings: Iterable[str]) -> list[Trial]:
    return [(name, plan.waves[0], load) for name in settings for load in plan.swept]


def _rest(plan: Plan, peer: Peer, found: OpenLoopResults, number: int) -> list[Trial]:
    """Run the loads outside the sweep, each with the best setting of the nearest load in the sweep."""
    chosen: dict[float, str] = {}
    for load in plan.loads:
        best = found.best(peer.name, plan.waves[0].name, nearest(plan.swept, load))
        if best is not None:
            chosen[load] = best.setting
    played = {(run.wave, run.load) for run in found.runs if run.peer == peer.name and run.number == number}
    trials = [(name, wave, load) for load, name in chosen.items() for wave in plan.waves]
    return sorted((t for t in trials if (t[1].name, t[2]) not in played), key=lambda trial: trial[0])


def nearest(swept: Sequence[float], load: float) -> float:
    """The nearest load in `swept` on the same side of saturation."""
    same = [one for one in swept if (one > 1) == (load > 1)] or list(swept)
    return min(same, key=lambda one: abs(one - load))


def _played(
    plan: Plan, peer: Peer, trials: Sequence[Trial], settings: Mapping[str, Limits], number: int, found: OpenLoopResults
) -> Iterator[Run]:
    """Run all loads of each setting on one server with that setting."""
    tuning = next(iter(peer.tunings.values()))
    for name in dict.fromkeys(trial[0] for trial in trials):
        words = re.sub(r"[^a-z0-9]+", "-", f"{plan.model.path.stem} {peer.name} {name}".lower())
        folder = plan.folder / peer.environment.name / words.strip("-")
        case = Case(plan.model, Encoding.BINARY, plan.batch_max, plan.slo_ms, folder, tuning, settings[name])
        say(f"{plan.title}, round {number + 1} of {plan.rounds}: {peer.name}, {name}")
        try:
            with serving(peer, case, plan.seed) as served:
                warming_ns = STEADY.instants_ns(WARM * plan.bare.rps, WARM_S, plan.seed)
                open_loop(served.server.port, served.ask, warming_ns, slo_ms=plan.slo_ms, seconds=WARM_S)
                for trial in (one for one in trials if one[0] == name):
                    yield _run(plan, peer.name, served, trial, number)
        except PeerFailed as error:
            say(f"{peer.name}, {name}: {error}")
            found.failed[f"{peer.name}, {name}"] = str(error)


def _run(plan: Plan, peer: str, served: Serving, trial: Trial, number: int) -> Run:
    name, wave, load = trial
    _settled(served)
    before, begun_s = served.server.tree.used(), time.monotonic()
    due_ns = plan.due_ns(wave, load, number)
    result = open_loop(served.server.port, served.ask, due_ns, slo_ms=plan.slo_ms, seconds=plan.seconds)
    cores = (served.server.tree.used().cpu_s - before.cpu_s) / (time.monotonic() - begun_s)
    say(f"  {wave.name} × {load:g}: {result.goodput_rps:.1f} of {result.offered_rps:.1f}/s in time")
    return Run(peer, name, wave.name, load, number, result, cores)


def _settled(served: Serving) -> None:
    """Wait until the server's queues are empty after an overload, before the next load."""
    for left in reversed(range(SETTLE_TRIES)):
        time.sleep(PAUSE_S)
        try:
            served.settle()
        except PeerFailed:
            if not left:
                raise
        else:
            return
