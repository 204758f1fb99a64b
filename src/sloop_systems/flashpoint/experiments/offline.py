"""Flashpoint's results without simulated requests: traces, Atoll's replicas, cold starts, pieces, chains.

Experiments are named as in the specification (section 5.2): E5 pieces, E6 plans, E10 sources, E12 transfers, E13 the
size of scale-ups. Source: San Juan, Flashpoint (thesis, Waterloo 2023).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, geometric_mean, harmonic_mean, median
from typing import Any, Final

from sloop.api import FOREVER_NS, LINK_MBPS, STORE_MBPS, Node, s, to_s
from sloop.api import Path as StagePath
from sloop.api.experiments import FlowNetwork, Topology, TopologyTruth
from sloop.api.policies import Bucket, ClusterView, NodeView, StageView, Traffic
from sloop.api.profiles import Estimate
from sloop.api.solvers import PieceCosts, PiecePlan, best_plan, plan_fronts
from sloop_systems.comparison.rows import Claim, Row, compare, contradicted, directed, outside
from sloop_systems.flashpoint.experiments.traces import (
    AZURE,
    AZURE_STATISTICS,
    HOURS,
    LONG_STATISTICS,
    TWITTER_STATISTICS,
    requests_of,
)
from sloop_systems.flashpoint.policy import AtollRate
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS, PROFILES
from sloop_systems.flashpoint.solver import PIECE_BYTES_MAX, fewest_pieces, filled_pieces

T5: Final = "T5-3B"
WINDOW_S, PERIOD_S, HOUR_S = 60, 15, 3600
REPLICAS_MAX: Final = 1600

ATOLL: Final[Mapping[str, tuple[int, int, int, int, int]]] = {
    "470042": (37, 37, 27, 50, 11),
    "1652593": (10, 36, 27, 51, 15),
    "470470": (11, 36, 31, 57, 13),
    "10800": (11, 39, 27, 53, 16),
}
"""Derived for T5 and each hour of the Twitter trace: first and largest target of Atoll's policy, how often it grows,
how many replicas that starts, and the most at once (section 7.5, check 26)."""
QUEUES: Final = (1, 10, 100, 300, 1000, 3000)
RECEIVERS: Final = (1, 2, 3, 4)
SEARCHED: Final = "the window was searched for this median and peak"
MADE: Final = "the hour is generated from this median and peak"
TEN_GBIT_MBPS: Final = 9700.0
"""Of the testbed's network, with a goodput of 0.97."""


def offline_rows(data: Path | None) -> list[Row]:
    """All rows of this module. Without the Twitter trace, its windows and what follows from them are left out."""
    is_there = requests_of(HOURS[0], data).is_measured
    recorded = [*trace_rows(data), *atoll_rows(data), *growth_rows(data)] if is_there else []
    return [*recorded, *azure_rows(), *source_rows(), *piece_rows(), *plan_rows(), *transfer_rows()]


# The traces


def trace_rows(data: Path | None) -> list[Row]:
    """Medians and peaks of the windows that are taken for the thesis's unknown ones."""
    rows = []
    for name, (middle, ratio) in (*((hour, TWITTER_STATISTICS) for hour in HOURS[:3]), ("10h", LONG_STATISTICS)):
        counts = requests_of(name, data).counts
        rows += [
            compare(_exact("traces", f"median of window {name}", "requests/s", middle, SEARCHED), [median(counts)]),
            compare(
                _exact("traces", f"peak/median of window {name}", "×", ratio, SEARCHED), [max(counts) / median(counts)]
            ),
        ]
    return rows


def azure_rows() -> list[Row]:
    """The generated hour has the printed statistics within 1 %."""
    counts = requests_of(AZURE, None).counts
    claim = Claim(
        "traces",
        "peak/median of the generated Azure hour",
        "×",
        "text",
        AZURE_STATISTICS[1],
        computed=True,
        fitted=MADE,
    )
    middle = _exact("traces", "median of the generated Azure hour", "requests/s", AZURE_STATISTICS[0], MADE)
    ratio = max(counts) / median(counts)
    return [compare(middle, [median(counts)]), compare(claim, [ratio], within=0.01 * AZURE_STATISTICS[1])]


# Atoll's policy over the traces


@cache
def _belief() -> Estimate:
    return Estimate(PROFILES[T5], variant="v", hardware="", correct=False)


def atoll_targets(counts: Sequence[int], model: Estimate | None = None) -> list[int]:
    """The number of replicas that the policy wants: first for the first minute, then every 15 s for the last minute."""
    belief = model or _belief()
    buckets = [Bucket(s(at), arrivals=count) for at, count in enumerate(counts)]
    policy = AtollRate(replicas_max=REPLICAS_MAX)

    memory: Any = None

    def target(end_s: int) -> int:
        nonlocal memory
        stage = StageView(
            name="model",
            slo_ns=FOREVER_NS,
            after=(),
            beliefs={("v", ""): belief},
            replicas=(),
            queue=(),
            running=0,
            buckets=buckets[max(0, end_s - WINDOW_S) : end_s],
            bucket_ns=s(1),
        )
        plan, memory = policy.plan(s(end_s), _view(stage), memory)
        return plan.stages[0].groups[0].count

    return [target(WINDOW_S), *(target(end_s) for end_s in range(PERIOD_S, len(counts), PERIOD_S))]


def _view(stage: StageView) -> ClusterView:
    nodes: tuple[NodeView, ...] = ()
    ingress = Traffic(buckets=stage.buckets, bucket_ns=stage.bucket_ns)
    paths = (StagePath((stage.name,), stage.slo_ns),)
    return ClusterView((stage,), nodes, None, {stage.name: 0.0}, ingress, 0.0, paths)


def growth_of(targets: Sequence[int]) -> list[tuple[int, int]]:
    """For each scale-up, the number of replicas before it, and how many more are wanted."""
    return [(before, after - before) for before, after in pairwise(targets) if after > before]


def atoll_rows(data: Path | None) -> list[Row]:
    """Check 26: the whole sequence of targets in five figures for each window."""
    rows = []
    for name, figures in ATOLL.items():
        targets = atoll_targets(requests_of(name, data).counts)
        steps = [more for _, more in growth_of(targets)]
        found = (targets[0], max(targets), len(steps), sum(steps), max(steps))
        for what, figure, ours in zip(
            ("first target", "largest target", "scale-ups", "replicas started", "most started at once"),
            figures, found, strict=True,
        ):  # fmt: skip
            claim = Claim("Atoll's targets", f"{what}, window {name}", "", "exact", derived=figure)
            rows.append(compare(claim, [ours]))
    return rows


def growth_rows(data: Path | None) -> list[Row]:
    """E13: the thesis plots more than one new replica for each that runs, in every scale-up of every policy."""
    ratios = [
        more / before
        for name in HOURS
        for before, more in growth_of(atoll_targets(requests_of(name, data).counts))
    ]  # fmt: skip
    claim = Claim("E13 scale-ups", "new replicas for each that runs, mean, Atoll's policy", "×", "plot", 1.0)
    why = "OpenWhisk's policy grows by 1/0.6 at most, so that it adds at most 0.67 for each that runs"
    return [outside(claim, [fmean(ratios)], at_most=2 / 3, why=why)]


# Cold starts from different sources


def stages_s(name: str, mbps: float) -> tuple[float, float, float]:
    """Download at this rate, load and send of a model."""
    model = FLASHPOINT_MODELS[name]
    return model.size_bytes.value * 8 / (mbps * 1e6), model.load_s.value, model.send_s.value


def source_rows() -> list[Row]:
    """E10: cold starts from this host, another host and the store, in inferences; means over the six models."""
    exec_s = {name: model.exec_ms.value / 1e3 for name, model in FLASHPOINT_MODELS.items()}
    remote = [sum(stages_s(name, LINK_MBPS)) / exec_s[name] for name in exec_s]
    faster = [sum(stages_s(name, STORE_MBPS)) / FLASHPOINT_MODELS[name].send_s.value for name in exec_s]
    why = "download from another host at 7,507 Mbit/s, load and send; the printed one leaves no time to download"
    far = Claim("E10 sources", "cold start from another host", "× inference", "simulated", 232.2, computed=True)
    fitted = "load and send of five models are calibrated to the printed means"
    near = Claim("E10 sources", "store / same host, mean", "×", "simulated", 45.8, computed=True, fitted=fitted)
    return [contradicted(far, [fmean(remote)], other=402.6, why=why), compare(near, [fmean(faster)])]


# Queueing (section 2.2)


def backlog(arrival_rps: float, served_rps: float, cold_s: float) -> float:
    """L: the requests that wait when the replicas become ready that were started because the rate had risen."""
    return max(0.0, arrival_rps - served_rps) * cold_s


def expected_wait_s(arrival_rps: float, served_before_rps: float, served_after_rps: float, cold_s: float) -> float:
    """E(d_w): the wait of a request that arrives at that instant. The sign in the printed formula differs; with it, the
    wait would be negative if the new replicas suffice."""
    return backlog(arrival_rps, served_before_rps, cold_s) / served_after_rps


def expected_cold_s(growth: float, download_s: float, load_s: float, send_s: float) -> float:
    """E(d_c) if the number of replicas grows by this fraction and all new ones download over one link, which carries as
    many copies as there are new replicas for each old one, at least one."""
    return max(1.0, growth) * download_s + load_s + send_s


# Pieces


def piece_costs(name: str, mbps: float = LINK_MBPS) -> PieceCosts:
    """What the layers of a model cost: cold start in proportion to bytes, at this rate of downloads."""
    profile = PROFILES[name]
    assert profile.layers is not None
    blocks = profile.layers.blocks
    per_byte = sum(stages_s(name, mbps)) / profile.weights_bytes
    boundary_s = blocks[0].crossing_bytes * 8 / (LINK_MBPS * 1e6)
    return PieceCosts(
        tuple(block.param_bytes * per_byte for block in blocks),
        tuple(block.latency_ms.latency_ms(1, 1.0) / 1e3 for block in blocks),
        (boundary_s,) * (len(blocks) - 1),
        tuple(float(block.param_bytes) for block in blocks),
    )


@cache
def fronts_of(name: str) -> list[list[PiecePlan]]:
    """All plans of a model that can be best, by number of pieces."""
    return plan_fronts(piece_costs(name))


def piece_rows() -> list[Row]:
    """E5: how much sooner a model starts in as many pieces as it has layers."""
    faster = {}
    for name in FLASHPOINT_MODELS:
        costs = piece_costs(name)
        cold_s = min(plan.cold_s for front in fronts_of(name) for plan in front)
        faster[name] = sum(costs.cold_s) / cold_s
    note = "layers of the public architecture, cold start in proportion to bytes"
    means = f"harmonic {harmonic_mean(faster.values()):.3g}, geometric {geometric_mean(faster.values()):.3g}"
    own = Claim("E5 pieces", "cold start of T5, whole / in pieces", "×", "simulated", 44.10, note=note, computed=True)
    mean = Claim(
        "E5 pieces", "the same, arithmetic mean of six models", "×", "simulated", 7.1, note=means, computed=True
    )
    why = "44.1 for T5 and at least 1 for each of the five others"
    return [
        compare(own, [faster[T5]]),
        outside(mean, [fmean(faster.values())], at_least=(44.1 + 5) / 6, why=why),
    ]


@dataclass(frozen=True, slots=True)
class PlanBenefit:
    """The fractions of the mean time of a queue that plans save, compared with whole models."""

    ours: PiecePlan
    best: float
    gillis: float
    serfer: float


@cache
def benefits(name: str, requests: int) -> PlanBenefit:
    """The plans of Flashpoint, Gillis and SerFer, with as many devices as the model has layers."""
    costs = piece_costs(name)
    sizes, devices = costs.memory_bytes, costs.layers
    best = best_plan(fronts_of(name), requests, devices)
    assert best is not None, "no memory bounds the pieces"
    whole_s = costs.plan(()).mean_s(requests, devices)
    others = (
        costs.plan(fewest_pieces(sizes, costs.transfer_s, PIECE_BYTES_MAX)),
        costs.plan(filled_pieces(sizes, PIECE_BYTES_MAX)),
    )
    saved = [1 - plan.mean_s(requests, devices) / whole_s for plan in (best, *others)]
    return PlanBenefit(best, *saved)


def plan_rows() -> list[Row]:
    """E6: what the thesis says of its plans and those of Gillis and SerFer, for queues of 1 to 3,000 requests."""
    rows = []
    for name in ("CodeBERT", "BART-large", "GPT-2-XL"):
        apart = min(benefits(name, x).best - max(benefits(name, x).gillis, benefits(name, x).serfer) for x in QUEUES)
        metric = f"{name}: least saving over Gillis and SerFer, in points of the whole model's time"
        rows.append(directed(_plotted(metric, "points"), [100 * apart], "always better", above=1e-7))
    for name in ("DialoGPT-large", T5):
        apart = min(benefits(name, x).best - benefits(name, x).gillis for x in QUEUES)
        rows.append(
            directed(_plotted(f"{name}: least saving over Gillis", "points"), [100 * apart],
                     "no worse; about equal is printed for DialoGPT", at_least=0)
        )  # fmt: skip
    pieces = [benefits("ALBERT-xxlarge", x).ours.pieces for x in QUEUES if x >= 100]
    losing = max(benefits("ALBERT-xxlarge", 3000).gillis, benefits("ALBERT-xxlarge", 3000).serfer)
    rows += [
        directed(_plotted("ALBERT-xxlarge: most pieces from 100 requests on", ""), [max(pieces)],
                 "not cut, for its layers share their weights; ours also has an embedding of 85 MB to cut off",
                 at_most=1),
        directed(_plotted("ALBERT-xxlarge: saving of Gillis and SerFer, 3,000 requests", "points"), [100 * losing],
                 "they lose", below=0),
    ]  # fmt: skip
    own, others = benefits(T5, 1).ours.pieces, len(_gillis_cuts(T5)) + 1
    rows.append(
        directed(_plotted("T5-3B: pieces for one request, ours / Gillis", "×"), [own / others],
                 f"about as many ({own} and {others})", at_least=0.8, at_most=1.2)
    )  # fmt: skip
    return rows


def _gillis_cuts(name: str) -> tuple[int, ...]:
    costs = piece_costs(name)
    return fewest_pieces(costs.memory_bytes, costs.transfer_s, PIECE_BYTES_MAX)


# Transfers


def transfer_s(receivers: int, *, is_chain: bool, mbps: float = TEN_GBIT_MBPS) -> float:
    """Until all receivers have T5's file from one other host, by the simulator's flows."""
    nodes = [Node(f"n{place}", "gpu", 1.0, 1) for place in range(receivers + 1)]
    topology, network = Topology(TopologyTruth(STORE_MBPS, node_mbps=mbps), nodes), FlowNetwork()
    source, *others = [node.name for node in nodes]
    routes = [topology.chain(source, others)] if is_chain else [topology.route(source, other) for other in others]
    for route in routes:
        network.start(0, route, FLASHPOINT_MODELS[T5].size_bytes.value)
    end_ns = 0
    while network.due_ns < FOREVER_NS:
        end_ns = network.due_ns
        network.ended(end_ns)
    return to_s(end_ns)


def transfer_rows() -> list[Row]:
    """E12: T5 to up to four hosts at once; the plotted times seem to include sending it to the accelerator."""
    send_s = FLASHPOINT_MODELS[T5].send_s.value
    chain, plain = ([transfer_s(k, is_chain=is_chain) for k in RECEIVERS] for is_chain in (True, False))
    ratio = Claim(
        "E12 transfers", "plain / chain, four receivers, with sending", "×", "simulated", 3.30,
        note="the flow model knows no overhead of a chain; measured 3.94 without sending in a network of 400 Mbit/s",
        computed=True,
    )  # fmt: skip
    flat = Claim("E12 transfers", "chain to four / to one receiver", "×", "exact", derived=1.0, itself=True)
    linear = Claim("E12 transfers", "plain to four / to one receiver", "×", "exact", derived=4.0, itself=True)
    return [
        compare(ratio, [(plain[-1] + send_s) / (chain[-1] + send_s)], similar=True),
        compare(flat, [chain[-1] / chain[0]]),
        compare(linear, [plain[-1] / plain[0]]),
    ]


def _exact(experiment: str, metric: str, unit: str, paper: float, fitted: str) -> Claim:
    return Claim(experiment, metric, unit, "exact", paper, fitted=fitted)


def _plotted(metric: str, unit: str) -> Claim:
    return Claim("E6 plans", metric, unit)
