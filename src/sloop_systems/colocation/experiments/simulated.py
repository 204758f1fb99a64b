"""Cells of the colocation thesis in core and simulator: systems of the catalogue place the models and serve them.

Each published system plans once, for the rates of its cell, as in the thesis. Our system plans again after a warm-up,
with the durations that it has measured. A router without a timer gives batches to idle replicas in turn; that of the
thesis, and of the small stack, binds each batch to a replica that may still be busy. True durations are the profile's ×
κ × the law of shares: batches are slower if their share is a limit (MPS, in the modes of the thesis), and if the models
on a device together need more SMs than it has. Arrivals are those of the small stack in `router`. The simulator has
neither the two calls nor the transfer of a batch; their times are added to each latency.
Source: Elvinger (ETH Zurich, MSc thesis 505, 2024), chapters 4 and 6.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from random import Random
from typing import Any, Final

from msgspec import Struct, structs

from sloop.api import NS_PER_MS, Device, Node, Path, Plan, ReplicaId, Request, RequestId, listed, ms, s
from sloop.api.devices import IgniterLaw, ShareLaw
from sloop.api.experiments import (
    Application,
    Clients,
    Deployment,
    Finished,
    InterferenceTruth,
    Record,
    ServiceTruth,
    Stage,
    StartBatch,
    SystemChoice,
    Truth,
    Variant,
    World,
    simulate,
    trace_of,
)
from sloop.api.policies import ClusterView, Harbor, Never, Policies, RoundRobin, Scale
from sloop.api.profiles import PUBLISHED, Profile
from sloop.api.systems import SYSTEMS
from sloop_systems.colocation.batch import Untimed
from sloop_systems.colocation.experiments.router import SERVING
from sloop_systems.colocation.experiments.runs import (
    BASELINES,
    MAIN,
    OURS,
    SLOWER_E1,
    Cell,
    Placements,
    Policy,
    e1,
    e2,
    e3,
)
from sloop_systems.colocation.experiments.scene import AO, USHER_GROUPS, WAO, fitted_igniter
from sloop_systems.colocation.milp import SHARES_ARE_LIMITS
from sloop_systems.colocation.policy import Colocate, Igniter, Usher
from sloop_systems.colocation.published import IGNITER_V100, V100_MEMORY_BYTES
from sloop_systems.comparison.rows import Claim, Row, bounded, directed

ONCE_NS: Final = s(3600)
"""The planning period of published systems: one plan for the run."""
WARM_UP_S: Final = 15.0
"""The warm-up in which our system measures; its requests do not count. The thesis has a warm-up too, of unknown length
(1.10)."""
AGAIN_NS: Final = s(60)
"""When our system plans again. Before that, the last queues of the warm-up are served."""
COUNTED_MS: Final = 61_000.0
"""When the requests that count begin, after a warm-up."""
BATCHES: Final = (4, 8, 16, 32, 64, 128)
"""That the thesis has profiled."""
CORES: Final = 8.0
"""Of each GPU's node; replicas need none of them."""
EXPERIMENT: Final = "E1 to E3 in sloop"
APART: Final = 1.0
"""By how many percent of a cell's rate the simulator may differ from the small stack: it adds the transfer of a batch
at its end, not at its beginning."""
BOUND_EARLY: Final = "0.87 on 2026-11-29, when core and simulator could still bind batches to busy replicas"
"""What the largest difference was with the thesis's router, whose batches wait for a certain replica."""
CELLS: Final = (
    *(e1(gpus) for gpus in (2, 3, 4, 6)),
    *(e2(gpus) for gpus in (1, 5, 7)),
    e3(3000, 150),
    *(e3(total, 250) for total in (3000, 4000, 5000)),
)
"""With the cells in which ours, unmeasured, falls below a baseline in the small stack."""
CROWDED: Final[Policy] = "usher-wao"
"""The policy that puts models on a GPU that together need more SMs than it has. Only its limits, which add up to at
most a GPU, slow them down, by the law of shares."""
MEASURED: Final = 0.1
"""A belief in which the weight of the profile alone is larger than this has not measured κ."""
CHECKED: Final = 5_000
"""Records that the checkers see of the first seed."""


class SimulatedTrial(Struct, frozen=True):
    """One system in one cell, with one factor and one seed."""

    cell: Cell
    policy: Policy
    slower: float
    seed: int

    def __str__(self) -> str:
        return f"{self.cell}: {self.policy} in the simulator, κ {self.slower:g}, seed {self.seed}"


class SimulatedRun(Struct, frozen=True):
    """The results of one run."""

    good_rps: tuple[float, ...]
    """In time, by model, per second of submission."""
    batches: tuple[float, ...]
    """Mean batch, by model; 0 without a replica."""
    contents: tuple[str, ...]
    """Of the devices, as `resnet50 b4 + vgg19 b16`."""
    measured: tuple[float, ...] = ()
    """κ as learnt by the beliefs of the served models."""


def play_simulated(trial: SimulatedTrial) -> SimulatedRun:
    """Let the system place the models, and simulate their requests."""
    world = world_of(trial)
    counts = GoodRequests(trial.cell, ms(COUNTED_MS) if trial.policy == OURS else 0)
    core = world.setup().core()
    simulate(world, [counts], core=core, check_first=CHECKED if trial.seed == 0 else 0)
    plan = core.plan_of(world.application.key)
    assert plan is not None, f"{trial}: there is no plan"
    placed: dict[tuple[str | None, str | None], list[str]] = {}
    for target in plan.stages:
        for group in target.groups:
            name = f"{target.stage} b{group.batch_max}"
            placed.setdefault((group.spec.node, group.spec.device), []).extend([name] * group.count)
    contents = tuple(sorted(" + ".join(sorted(names)) for names in placed.values()))
    (own,) = core.state.applications.values()
    measured = tuple(each.correction for each in own.parts.beliefs.values() if each.prior_weight < MEASURED)
    return SimulatedRun(counts.good_rps(), counts.mean_batches(), contents, measured)


# Worlds


def arrivals_ms(name: str, rate_rps: float, count: int, seed: int) -> list[float]:
    """When a client sends; the same as in the small stack."""
    random, now, found = Random(f"{name}/{seed}"), 0.0, []
    for _ in range(count):
        now += random.expovariate(rate_rps / 1000.0)
        found.append(now)
    return found


def world_of(trial: SimulatedTrial) -> World:
    """The cell as a world: a node with one GPU each, and a stage for each model, which its own requests enter."""
    cell, is_limited = trial.cell, _is_limited(trial.policy)
    paths = tuple(
        Path((name,), ms(cell.slo_ms), rate / sum(cell.targets_rps))
        for name, rate in zip(cell.names, cell.targets_rps, strict=True)
    )
    stages = tuple(
        Stage(name, (Variant(name, profile=_profile(name, trial.policy, is_limited=is_limited)),))
        for name in cell.names
    )
    nodes = tuple(
        Node(f"host-{number}", "gcp", CORES, 64 << 30, (Device("gpu-0", "V100", V100_MEMORY_BYTES),))
        for number in range(cell.gpus)
    )
    application = Application("models", cell.slo_ms, stages, SystemChoice(trial.policy), nodes, declared_paths=paths)
    requests = list(merge(*_streams(trial)))
    times_ns = [ms(at_ms) for at_ms, _ in requests]
    trace = trace_of(times_ns, name="clients", provenance="generated: Poisson, as in the small stack")
    clients = Clients(trace, paths=tuple(place for _, place in requests))
    return World(
        seed=trial.seed,
        deployment=Deployment.of(application),
        clients={application.name: clients},
        duration_ns=trace.duration_ns,
        truth=Truth(
            service=ServiceTruth(ratio=1.0, shape="deterministic"),
            profile_error=trial.slower,
            quota_ms=0.0,
            interference=InterferenceTruth(ShareLaw()),
        ),
        policies=policies_of(trial),
    )


def _streams(trial: SimulatedTrial) -> Iterator[list[tuple[float, int]]]:
    """When the requests of each model are sent, with the model; before those that count, the warm-up of ours."""
    cell, warms_up = trial.cell, trial.policy == OURS
    for place, (name, rate, count) in enumerate(zip(cell.names, cell.rates_rps, cell.requests, strict=True)):
        if warms_up:
            early_ms = arrivals_ms(f"{name}/warm-up", rate, round(WARM_UP_S * rate), trial.seed)
            yield [(at_ms, place) for at_ms in early_ms]
        begins_ms = COUNTED_MS if warms_up else 0.0
        yield [(begins_ms + at_ms, place) for at_ms in arrivals_ms(name, rate, count, trial.seed)]


def _is_limited(policy: Policy) -> bool:
    return SHARES_ARE_LIMITS.get(policy, False)


def _profile(name: str, policy: Policy, *, is_limited: bool) -> Profile:
    """The published profile. Memory is that of the planned batch, as in the thesis, not that of the largest one.
    iGniter believes in its own law."""
    found = PUBLISHED[f"{name}-V100"]
    sharing = found.sharing
    assert sharing is not None, name
    law = IgniterLaw(IGNITER_V100, fitted_igniter(name)[0]) if policy == "igniter" else sharing.law
    return structs.replace(
        found, device_memory_bytes=0, load_s=0.001, sharing=structs.replace(sharing, law=law, is_capped=is_limited)
    )


def policies_of(trial: SimulatedTrial) -> Policies:
    """The system's placement behind the router of the thesis. Nothing is dropped."""
    cell, given = trial.cell, SYSTEMS[trial.policy].policies
    rates = cell.rates_rps if trial.policy == OURS else cell.targets_rps
    scale = given.scale
    assert isinstance(scale, Colocate | Harbor | Igniter | Usher), trial.policy
    fixed: Scale = replace(scale, initial_rps=sum(rates), period_ns=ONCE_NS, rescue=False, batches=BATCHES)
    if isinstance(fixed, Igniter):
        fixed = replace(fixed, check_new=False)
    groups = USHER_GROUPS.get((WAO if trial.policy == "usher-wao" else AO, cell.names))
    if isinstance(fixed, Usher) and groups is not None:
        fixed = replace(fixed, groups=tuple(tuple(cell.names[at] for at in group) for group in groups))
    if isinstance(fixed, Harbor):
        # No replica is worth keeping between warm-up and experiment. Views do not include the time on the network.
        transport_ms = 2 * SERVING.rpc_ms + SERVING.transfer_ms(0)
        fixed = replace(fixed, gain=0.0, horizon_ns=ms(1000 * SERVING.horizon_s), transport_ns=ms(transport_ms))
        fixed = AtKnownRates(replace(fixed, period_ns=AGAIN_NS), dict(zip(cell.names, rates, strict=True)))
    return replace(
        given,
        order=SYSTEMS["usher"].policies.order,
        batch=Untimed(wait_ns=ms(SERVING.wait_ms)),
        route=RoundRobin(),
        drop=Never(),
        scale=fixed,
    )


@dataclass(frozen=True, slots=True)
class AtKnownRates(Scale):
    """A scaling policy whose view has these rates, by stage, instead of forecasts."""

    inner: Scale
    rates_rps: Mapping[str, float]

    @property
    def period_ns(self) -> int:
        return self.inner.period_ns

    def plan(self, now_ns: int, view: ClusterView, memory: Any) -> tuple[Plan | None, Any]:  # noqa: ANN401
        return self.inner.plan(now_ns, replace(view, demand_rps=self.rates_rps), memory)


class GoodRequests:
    """A sink: the requests of each model whose latency, with the calls and the transfer of their batch, is in time.
    Those sent before `begins_ns` do not count."""

    def __init__(self, cell: Cell, begins_ns: int = 0) -> None:
        self._cell = cell
        self._begins_ns = begins_ns
        self._bytes = {model.name: model.request_bytes for model in cell.placed()}
        self._sent_ns: dict[RequestId, int] = {}
        self._running: dict[ReplicaId, StartBatch] = {}
        self._last_ns: dict[str, int] = {}
        self._good = dict.fromkeys(cell.names, 0)
        self._served = dict.fromkeys(cell.names, 0)
        self._batches = dict.fromkeys(cell.names, 0)

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if isinstance(record, Request):
            self._sent_ns[record.id] = record.sent_ns
            self._last_ns[record.enters[0]] = record.sent_ns
        elif isinstance(record, StartBatch):
            self._running[record.replica] = record
        elif isinstance(record, Finished) and record.replica in self._running:
            batch = self._running.pop(record.replica)
            name, size = batch.stage, len(batch.requests)
            outside_ns = ms(2 * SERVING.rpc_ms + SERVING.transfer_ms(size * self._bytes[name]))
            until_ns = now_ns + outside_ns - ms(self._cell.slo_ms)
            if self._sent_ns[batch.requests[0]] < self._begins_ns:
                return
            self._good[name] += sum(self._sent_ns[id] >= until_ns for id in batch.requests)
            self._served[name] += size
            self._batches[name] += 1

    def good_rps(self) -> tuple[float, ...]:
        """By model, per second until its last request was sent."""
        return tuple(
            1000.0 * NS_PER_MS * good / (self._last_ns[name] - self._begins_ns) if self._last_ns.get(name) else 0.0
            for name, good in self._good.items()
        )

    def mean_batches(self) -> tuple[float, ...]:
        """By model; 0 if it was never served."""
        return tuple(served / max(1, self._batches[name]) for name, served in self._served.items())


# Trials and rows

Runs = Mapping[SimulatedTrial, SimulatedRun]


def wanted_in_sloop(*, quick: bool) -> list[SimulatedTrial]:
    """Our system in all cells and all policies in eleven of them, with one seed; in these eleven, our system also with
    the κ that it expects. With `quick`, three policies in three cells."""
    if quick:
        three: tuple[Policy, ...] = (CROWDED, "wsm-milp", OURS)
        return [SimulatedTrial(cell, policy, 1.0, 0) for cell in (e1(3), e2(5), e3(3000, 250)) for policy in three]
    return [
        *(SimulatedTrial(cell, policy, 1.0, 0) for cell in CELLS for policy in BASELINES),
        *(SimulatedTrial(cell, OURS, 1.0, 0) for cell in MAIN),
        *(SimulatedTrial(cell, OURS, SLOWER_E1, 0) for cell in CELLS),
    ]


def sloop_rows(found: Placements, runs: Runs) -> list[Row]:
    """The systems in core and simulator, beside the solvers' placements in the small stack, on the same requests."""
    return [*_agreement_rows(found, runs), _measured_row(runs), _crowded_row(runs), _ours_row(runs)]


def _agreement_rows(found: Placements, runs: Runs) -> list[Row]:
    equal = [trial for trial, run in runs.items() if run.contents == _contents(found, trial)]
    others = [f"{trial.cell}: {trial.policy}, κ {trial.slower:g}" for trial in runs if trial not in equal]
    claim = Claim(EXPERIMENT, "placements that are those of the solvers", f"of {len(runs)}",
                  note=f"others: {listed(others) if others else 'none'}", computed=True)  # fmt: skip
    rows = [bounded(claim, [len(equal)], at_least=len(runs))]
    apart = {
        str(trial): 100 * abs(sum(runs[trial].good_rps) - _small(found, trial)) / sum(trial.cell.rates_rps)
        for trial in equal
    }
    most = max(apart, key=lambda name: apart[name])
    claim = Claim(EXPERIMENT, "goodput, largest difference from the small stack on the same placement", "%",
                  note=f"{len(apart)} runs; at {most}; {BOUND_EARLY}")  # fmt: skip
    return [*rows, bounded(claim, [apart[most]], at_most=APART, runs=len(apart))]


def _measured_row(runs: Runs) -> Row:
    """The κ that the beliefs of our system have learnt."""
    apart = [
        100 * abs(factor / trial.slower - 1)
        for trial, run in runs.items()
        if trial.policy == OURS
        for factor in run.measured
    ]
    slower = sorted({trial.slower for trial in runs if trial.policy == OURS})
    claim = Claim(EXPERIMENT, "κ as ours measures it, largest difference from κ", "%",
                  note=f"{len(apart)} models, κ {listed([f'{factor:g}' for factor in slower])}")  # fmt: skip
    return bounded(claim, [max(apart, default=100.0)], at_most=1.0, runs=len(apart))


def _crowded_row(runs: Runs) -> Row:
    worst = []
    for cell in _compared(runs):
        good = _good_in(cell, runs)
        worst.append(good[CROWDED] <= min(good.values()))
    claim = Claim(EXPERIMENT, f"cells of {len(worst)} in which {CROWDED} is the worst", "", note="one seed")
    return directed(claim, [sum(worst)], "more than half", above=len(worst) / 2)


def _ours_row(runs: Runs) -> Row:
    """Ours beside the best baseline of each cell, all behind the router of the thesis."""
    below = []
    cells = _compared(runs)
    for cell in cells:
        good = _good_in(cell, runs)
        best = max((policy for policy in good if policy != OURS), key=lambda policy: good[policy])
        if good[OURS] < good[best]:
            below.append(f"{cell} {good[OURS]:.0f}, {best} {good[best]:.0f}")
    claim = Claim(EXPERIMENT, f"cells of {len(cells)} with {OURS} below the best baseline", "",
                  note=f"κ 1, one seed; {listed(below) if below else 'none'}")  # fmt: skip
    return bounded(claim, [len(below)], at_most=0)


def _compared(runs: Runs) -> list[Cell]:
    """The cells in which baselines were simulated."""
    return list(dict.fromkeys(each.cell for each in runs if each.policy != OURS))


def _good_in(cell: Cell, runs: Runs) -> dict[Policy, float]:
    """Goodput of each policy in a cell where durations are as profiled."""
    return {each.policy: sum(run.good_rps) for each, run in runs.items() if each.cell == cell and each.slower == 1.0}


def _contents(found: Placements, trial: SimulatedTrial) -> tuple[str, ...]:
    return tuple(sorted(found.contents(trial.cell, trial.policy, trial.slower)))


def _small(found: Placements, trial: SimulatedTrial) -> float:
    """The same requests in the small stack, on the solver's placement."""
    return found.good(trial.cell, trial.policy, trial.slower)[trial.seed]


def runs_of(trials: Sequence[SimulatedTrial], done: Sequence[SimulatedRun]) -> Runs:
    """The results in the order of the trials."""
    return dict(zip(trials, done, strict=True))
