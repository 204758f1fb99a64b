"""PALDIA without simulated requests: its equation, the split, the durations of executed splits, the choice of hardware.

PALDIA prints no latency and no bandwidth, and its equation as printed always runs all requests together. The figures
here are derived from the equation with a convex law of interference, by two independent programs (specification, 2.1.1
and 2.3).
Source: Bhasi et al., PALDIA (IPDPS 2024).
"""

import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Final

from sloop.api import ROUNDING, WIDE_ROUNDING, NodeState, ms, s
from sloop.api import Path as StagePath
from sloop.api.devices import BandwidthLaw, DeviceDemand
from sloop.api.experiments import stream
from sloop.api.policies import Bucket, ClusterView, DeviceView, NodeView, StageView, Traffic
from sloop.api.profiles import KINDS, Estimate
from sloop_systems.comparison.rows import Claim, Row, bounded, compare
from sloop_systems.paldia.experiments.traces import counts_of
from sloop_systems.paldia.policy import Paldia
from sloop_systems.paldia.published import PALDIA_MODELS, SLO_MS, paldia_profiles
from sloop_systems.paldia.solver import (
    DelayedTermination,
    DeviceModel,
    HardwareRule,
    batches_of,
    best_split,
    count_mismatch,
    executed_ms,
    workers_needed,
)

EC2: Final = ("m4.xlarge", "c6i.2xlarge", "c6i.4xlarge", "g3s.xlarge", "p2.xlarge", "p3.2xlarge")
VECTORS: Final = (
    (50, 128, 0.50, 0.45, 575, 224.61, 175.28, 112.30, 163, 166.21),
    (80, 64, 0.65, 0.50, 225, 281.25, 300.28, 182.81, 123, 238.11),
    (50, 128, 0.45, 0.60, 700, 273.44, 230.91, 123.05, 268, 204.26),
    (56, 64, 0.62, 0.35, 450, 393.75, 531.16, 244.12, 308, 356.66),
    (50, 128, 0.80, 0.60, 575, 224.61, 459.33, 179.69, 415, 212.11),
)
"""Solo in ms, BS, FBR, α, N; T of all queued, of all together and of the literal equation, best y and its T in ms."""
EXECUTED: Final = (
    (157.88, 149.38, 2, 124.6),
    (236.34, 191.66, 2, 199.6),
    (193.07, 170.59, 3, 136.0),
    (347.37, 308.06, 2, 281.8),
    (212.11, 215.40, 1, 224.6),
)
"""The durations of the best splits in ms, with the serial and with the work-conserving lane; and those of all batches
with a constant number of residents."""
THRESHOLDS: Final[tuple[tuple[str, HardwareRule, tuple[int, ...]], ...]] = (
    ("ResNet50", "slo_first", (1, 5, 11, 21, 172, 236)),
    ("ResNet50", "tolerance", (1, 5, 11, 21, 57, 143)),
    ("VGG19", "slo_first", (1, 7, 16, 31, 259, 357)),
    ("VGG19", "tolerance", (1, 7, 16, 31, 138, 209)),
    ("SENet18", "slo_first", (1, 8, 18, 36, 319, 429)),
    ("DenseNet121", "slo_first", (1, 3, 7, 13, 143, 197)),
    ("BERT", "slo_first", (0, 0, 0, 1, 8, 13)),
)
"""The first N for which each kind of `EC2` is chosen; 0: never."""
N_MAX: Final = 500
COLD_STARTS: Final = (("ResNet50", 29, 2), ("VGG19", 29, 3), ("SENet18", 20, 2), ("BERT", 226, 3))
"""Derived on one trace: cold starts with immediate scale-down, and with keep-alive."""
KEEP_ALIVE_S: Final = 600
SEARCH_MS: Final = 3.0
SEARCH_N: Final = 1024


def proportional(solo_ms: float, batch: int, bandwidth: float, alpha: float) -> DeviceModel:
    """A model whose batches take time in proportion to their size."""
    latencies_ms = tuple(solo_ms * size / batch for size in range(batch + 1))
    return DeviceModel(latencies_ms, BandwidthLaw(alpha), DeviceDemand(bandwidth=bandwidth))


def offline_rows(*, quick: bool) -> list[Row]:
    """All rows of this module."""
    return [
        *vector_rows(),
        *executed_rows(),
        *random_rows(quick=quick),
        *threshold_rows(),
        _monotone_row(quick=quick),
        *hysteresis_rows(),
        *cold_start_rows(1 if quick else 5),
        _search_row(),
    ]


def _ours(experiment: str, metric: str, unit: str, derived: float, note: str = "") -> Claim:
    """What the specification derives from PALDIA's equation with a law of interference and profiles that we assumed."""
    return Claim(experiment, metric, unit, "exact", derived=derived, note=note, itself=True)


# The equation and the split


def vector_rows() -> list[Row]:
    """Check 1: the equation at its vectors."""
    rows = []
    for number, (solo_ms, batch, bandwidth, alpha, count, queued, together, printed, y, best) in enumerate(
        VECTORS, start=1
    ):
        model, literal = (proportional(solo_ms, batch, bandwidth, each) for each in (alpha, 0.0))
        found = best_split(model, count)
        for what, figure, ours in (
            ("all queued", queued, best_split(model, count, "queue").t_max_ms),
            ("all together", together, best_split(model, count, "together").t_max_ms),
            ("equation as printed", printed, best_split(literal, count).t_max_ms),
            ("best split", best, found.t_max_ms),
        ):
            claim = _ours("vectors", f"{number}, T, {what}", "ms", figure)
            rows.append(compare(claim, [ours], within=0.005))
        claim = _ours("vectors", f"{number}, queued requests of the best split", "", y)
        rows.append(compare(claim, [found.queued]))
    return rows


def executed_rows() -> list[Row]:
    """The durations of the best splits of the vectors, executed on an idle GPU."""
    rows = []
    for number, (vector, (serial, conserving, residents, fixed)) in enumerate(
        zip(VECTORS, EXECUTED, strict=True), start=1
    ):
        solo_ms, batch, bandwidth, alpha, count, *_ = vector
        model = proportional(solo_ms, batch, bandwidth, alpha)
        split = best_split(model, count)
        running, queued = batches_of(count - split.queued, batch), batches_of(split.queued, batch)
        for what, figure, ours in (
            ("serial lane", serial, executed_ms(model, running, queued, 0)),
            ("work-conserving lane", conserving, executed_ms(model, running, queued, len(running))),
            (f"all batches, {residents} resident", fixed, executed_ms(model, [], batches_of(count, batch), residents)),
        ):
            rows.append(compare(_ours("executed splits", f"{number}, {what}", "ms", figure), [ours]))
    return rows


def random_rows(*, quick: bool) -> list[Row]:
    """Check 2, and the closed form: for how many random models the split differs from the derived one."""
    rng, cases = stream(0, "paldia/splits"), 200 if quick else 3000
    together, apart, above = 0, 0, 0
    for _ in range(cases):
        solo_ms, batch = rng.uniform(20, 200), rng.choice((8, 32, 64, 128))
        bandwidth, alpha, count = rng.uniform(0.3, 0.99), rng.uniform(0.3, 0.7), rng.randint(batch + 1, 8 * batch)
        literal = best_split(proportional(solo_ms, batch, bandwidth, 0.0), count)
        together += literal.queued > 0 and count * bandwidth / batch > 1
        model = proportional(solo_ms, batch, bandwidth, alpha)
        found = best_split(model, count)
        wanted = closed_form(batch, bandwidth, alpha, count)
        apart += abs((count - found.queued) / batch - wanted) > 1 / batch + ROUNDING
        running, queued = batches_of(count - found.queued, batch), batches_of(found.queued, batch)
        above += executed_ms(model, running, queued, 0) > found.t_max_ms + WIDE_ROUNDING
    note = f"{cases} random models and counts"
    return [
        compare(_ours("vectors", what, "", 0, note), [ours])
        for what, ours in (
            ("equation as printed queues something, cases", together),
            ("split off the closed form by more than a request, cases", apart),
            ("serial lane ends after T, cases", above),
        )
    ]


def closed_form(batch: int, bandwidth: float, alpha: float, count: int) -> float:
    """k*, the batches that run together: where the marginal slowdown is 1, or the kink where bandwidth is used up."""
    if bandwidth * (1 + alpha) < 1:
        k = (1 - (1 - alpha) * bandwidth) / (2 * alpha * bandwidth * bandwidth)
    else:
        k = 1 / bandwidth
    return min(max(k, min(1.0, count / batch)), count / batch)


def _search_row() -> Row:
    """Check 8: how long the search for the best split takes."""
    model = proportional(80, 64, 0.65, 0.5)
    times_ms = []
    for _ in range(200):
        begun = time.process_time()
        best_split(model, SEARCH_N)
        times_ms.append(1000 * (time.process_time() - begun))
    note = f"processor time, the longest of {len(times_ms)} searches {max(times_ms):.2f} ms"
    claim = Claim("vectors", f"search for the split of {SEARCH_N} requests", "ms", note=note, computed=True)
    return bounded(claim, [median(times_ms)], at_most=SEARCH_MS)


# The choice of hardware


@cache
def _beliefs(model: str) -> tuple[Estimate, ...]:
    return tuple(
        Estimate(profile, variant="v", hardware=kind, correct=False) for kind, profile in paldia_profiles(model).items()
    )


def _node(kind: str) -> NodeView:
    node = KINDS[kind].node(f"{kind}-0")
    devices = tuple(DeviceView(each, 1.0, each.memory_bytes, each.clients_max) for each in node.devices)
    return NodeView(node, node.cores, node.memory_bytes, devices, NodeState.READY)


def chosen(model: str, choice: HardwareRule, count: int) -> str:
    """The kind of hardware for `count` requests at once, if nothing runs yet and there is one node of each kind."""
    buckets = [Bucket(0, arrivals=count)]
    stage = StageView(
        name="stage",
        slo_ns=ms(SLO_MS),
        after=(),
        beliefs={("v", belief.hardware): belief for belief in _beliefs(model)},
        replicas=(),
        queue=(),
        running=0,
        buckets=buckets,
        bucket_ns=s(1),
    )
    view = ClusterView(
        (stage,),
        tuple(map(_node, EC2)),
        None,
        {"stage": float(count)},
        Traffic(buckets=buckets, bucket_ns=s(1)),
        0.0,
        (StagePath(("stage",), ms(SLO_MS)),),
    )
    plan, _ = Paldia(choice=choice).plan(0, view, None)
    assert plan is not None
    return plan.stages[0].groups[0].spec.slot.hardware


def first_count(model: str, choice: HardwareRule, kind: str) -> int:
    """The first count for which a kind is chosen, or 0; by bisection, because prices never fall with the count."""
    low, high = 0, N_MAX
    while high - low > 1:
        middle = (low + high) // 2
        is_enough = KINDS[chosen(model, choice, middle)].usd_per_h >= KINDS[kind].usd_per_h
        low, high = (low, middle) if is_enough else (middle, high)
    return high if chosen(model, choice, high) == kind else 0


def threshold_rows() -> list[Row]:
    """Check 6: the thresholds at which the hardware changes, with the calibrated profiles."""
    rows = []
    for model, choice, figures in THRESHOLDS:
        for kind, figure in zip(EC2, figures, strict=True):
            if figure > 1:
                claim = _ours("thresholds", f"{model}, {choice}, first N for {kind}", "requests", figure)
                rows.append(compare(claim, [first_count(model, choice, kind)]))
    return rows


def _monotone_row(*, quick: bool) -> Row:
    """Check 6: more requests never choose a cheaper kind, for any of the 16 models."""
    step, cheaper = 50 if quick else 7, 0
    for model in PALDIA_MODELS:
        prices = [KINDS[chosen(model, "slo_first", count)].usd_per_h for count in range(1, 1000, step)]
        cheaper += sum(after < before for before, after in pairwise(prices))
    note = f"16 models, N below 1,000, in steps of {step}"
    return compare(_ours("thresholds", "steps to a cheaper kind", "", 0, note), [cheaper])


def hysteresis_rows() -> list[Row]:
    """Check 4: after how many mismatches in a row the hardware changes, with the published limit of 3."""

    def switch_at(present: Sequence[bool]) -> int:
        counter = 0
        for place, is_present in enumerate(present, start=1):
            found = count_mismatch(counter, is_present=is_present, is_pending=False, limit=3)
            if found.switches:
                return place
            counter = found.in_a_row
        return 0

    return [
        compare(_ours("thresholds", what, "", figure), [switch_at(present)])
        for what, figure, present in (
            ("decision that switches of A B B B B", 5, (True, False, False, False, False)),
            ("decision that switches of A B B A B B A (0: none)", 0, (True, False, False, True, False, False, True)),
        )
    ]


# Cold starts


def cold_starts(model: str, counts: Sequence[int], keep_alive_s: int) -> int:
    """The number of workers that are started on an M60 for one group of requests a second, if surplus workers are
    stopped after this many seconds."""
    own = PALDIA_MODELS[model]
    device = DeviceModel(
        tuple(own.solo_ms * size / own.batch for size in range(own.batch + 1)),
        BandwidthLaw(own.alpha),
        DeviceDemand(bandwidth=own.bandwidth),
    )
    wanted_of = {count: workers_needed(device, count, best_split(device, count)) for count in set(counts)}
    kept, live, started = DelayedTermination(s(keep_alive_s)), 0, 0
    for second, count in enumerate(counts):
        wanted = wanted_of[count]
        kept = kept.keep(s(second), wanted)
        live, before = kept.count if keep_alive_s else wanted, live
        started += max(0, live - before)
    return started


def cold_start_rows(traces: int) -> list[Row]:
    """Check 5: how many fewer cold starts there are with a keep-alive of ten minutes."""
    rows = []
    for model, immediate, kept in COLD_STARTS:
        least = 95.0 if model == "BERT" else 85.0
        saved, seen = [], []
        for seed in range(traces):
            counts = counts_of("azure", PALDIA_MODELS[model].peak_rps, seed)
            at_once, after = cold_starts(model, counts, 0), cold_starts(model, counts, KEEP_ALIVE_S)
            saved.append(100 * (1 - after / at_once))
            seen.append(f"{at_once} → {after}")
        note = f"published: up to 98 %; {', '.join(seen)}; derived on another trace {immediate} → {kept}"
        claim = Claim("cold starts", f"{model}, saved by a keep-alive of 600 s", "%", note=note)
        rows.append(bounded(claim, saved, at_least=least))
    return rows
