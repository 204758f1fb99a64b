"""AsyFunc's results without simulated requests: models, latencies of layers, bodies, shadows, and Fig. 1 by counting
the requests above the ready capacity.

Experiments are named by the figures of the publication; "constants" are what the specification derives from its own
parametric latencies, which stand for tables that were not published. Source: AsyFunc specification, sections 2 to 4.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean, median
from typing import Final, Literal, NamedTuple

import numpy as np
from msgspec import structs

from sloop.api.devices import MIB, BlockCosts, Floats, runs_of
from sloop.api.models import block_costs
from sloop.api.profiles import PUBLISHED, LayerProfile
from sloop.api.solvers import (
    Objective,
    ShadowCandidate,
    capacity_rps,
    choose_body,
    choose_shadow,
    largest_batch,
    rank_correlation,
    shadow_candidates,
    size_share,
)
from sloop_systems.asyfunc.experiments.runs import MODELS, VIT, slo_ms
from sloop_systems.asyfunc.experiments.traces import DAY_S, HOURLY_RPS, USUAL, Spikes, counts_of_day
from sloop_systems.asyfunc.published import BATCH_MAX, CORES_MAX, LOAD_MS, LOAD_MS_PER_MIB
from sloop_systems.comparison.rows import Claim, Known, ResultLimits, Row, bounded, compare, directed, outside, over

SIZES_MB: Final = {
    "InceptionV3": 92.0,
    "EfficientNet-b5": 117.0,
    "YOLOv8x": 131.0,
    "SSD300": 136.0,
    "ResNet101": 171.0,
    "VGG19": 548.0,
}
"""Table 2."""
HALF: Final = {
    "InceptionV3": 10.8,
    "EfficientNet-b5": 11.3,
    "YOLOv8x": 12.3,
    "SSD300": 11.5,
    "ResNet101": 27.4,
    "VGG19": 1.4,
}
"""Derived: percent of the weights in the first blocks with half of the multiply-adds (section 3.2)."""
SLOS_MS: Final = {
    "InceptionV3": 151.79,
    "EfficientNet-b5": 350.89,
    "YOLOv8x": 3161.1,
    "SSD300": 841.93,
    "ResNet101": 219.11,
    "VGG19": 499.10,
}
"""Derived from the parametric latencies (section 2.2)."""
RATES: Final = (1, 5, 20, 35, 60, 110, 200, 500)
BODIES: Final = {
    ("InceptionV3", 5.713): "16,1 16,1 16,2 16,3 16,4 16,5 16,6 16,7",
    ("InceptionV3", 64.0): "2,1 2,1 2,1 2,1 2,1 14,5 15,6 16,7",
    ("InceptionV3", 128.0): "2,1 2,1 2,1 2,1 2,1 2,1 2,1 2,1",
    ("EfficientNet-b5", 32.0): "2,1 2,1 8,3 6,3 8,4 10,5 7,4 7,4",
    ("VGG19", 19.63): "2,1 8,2 16,4 16,5 16,6 16,6 16,7 16,7",
    ("YOLOv8x", 128.9): "2,1 2,1 2,1 2,1 2,1 2,1 2,1 2,1",
}
"""Derived: cores and batch of a body by model, K and rate (section 2.7)."""
BODY_CORES: Final = (4, 8, 16)
GAIN: Final = 1.3
SHADOWS: Final = {
    "InceptionV3": (13.0, 4.4, 29.9),
    "EfficientNet-b5": (3.8, 12.5, 20.2),
    "YOLOv8x": (10.6, 9.3, 25.2),
    "SSD300": (4.9, 4.0, 11.5),
    "ResNet101": (31.4, 32.7, 57.1),
    "VGG19": (1.4, 1.0, 1.6),
}
"""Derived: percent of the weights in the cheapest shadow for 1.3 times the capacity of a body with 4, 8 and 16 cores
(section 6.3)."""
FEW_CORES, BATCHES = 2.0, (2, 4)
"""The cores of Figs. 2 to 4 and 7, which are not printed: with two cores the latencies agree."""
CORES: Final = "the number of cores, two, with which the latencies agree"
EFFICIENTNET: Final = "EfficientNet-b5"
LAYERS: Final = 539
"""Of EfficientNet-b5, in Table 2."""
OPT_INSTANCES: Final = 3.85
"""The mean of the optimum in Fig. 1."""


def offline_rows(*, quick: bool) -> list[Row]:
    """All rows of this module; `quick` counts one day of Fig. 1 instead of three, with one load time."""
    return [
        *model_rows(),
        *latency_rows(),
        *load_rows(),
        *body_rows(),
        *shadow_rows(),
        *day_rows(range(1 if quick else 3), LOADS_S[1:2] if quick else LOADS_S),
    ]


def layers_of(model: str) -> LayerProfile:
    """The blocks of a model."""
    layers = PUBLISHED[f"{model}-asyfunc"].layers
    assert layers is not None
    return layers


def costs_of(model: str, body_cores: int, shadow_cores: int = CORES_MAX) -> BlockCosts:
    """The costs of its blocks under the published SLO."""
    deadline_ms = slo_ms(PUBLISHED[f"{model}-asyfunc"])
    return block_costs(layers_of(model), body_cores, shadow_cores, BATCH_MAX, slo_ms=deadline_ms)


@cache
def whole_ms(model: str) -> Floats:
    """The latency of a model by cores and batch, both from 0."""
    law = layers_of(model).latency_ms
    rows = [[0.0, *(law.latency_ms(batch, cores) for batch in range(1, BATCH_MAX + 1))] for cores in range(1, 17)]
    return np.array([[0.0] * (BATCH_MAX + 1), *rows])


# Models (Table 2, Figs. 3 and 7)


def model_rows() -> list[Row]:
    """Sizes, deadlines, and how compute and weights are distributed."""
    rows = [_size_row(model) for model in MODELS]
    rows.append(_named_row())
    against, outputs = 0, 0
    for model in MODELS:
        blocks = layers_of(model).blocks
        sizes = [float(each.param_bytes) for each in blocks]
        compute = [each.multiply_adds for each in blocks]
        against += rank_correlation(compute, sizes) < 0
        outputs += rank_correlation([float(each.output_bytes) for each in blocks], sizes) < 0
        share = 100 * size_share(compute, sizes, costs_of(model, 4).ranked(), 0.5)
        metric = f"{model}: weights with half of the multiply-adds"
        rows.append(compare(_ours("Fig. 3 layers", metric, "%", HALF[model]), [share]))
    why = "of public architectures, blocks of a convolution or a unit; the publication's layers are not known"
    by_compute = Claim(
        "Fig. 3 layers", "models where blocks that compute more weigh less", "of 6", "exact", 6, note=why
    )
    by_output = Claim(
        "Fig. 3 layers", "models where blocks with larger outputs weigh less", "of 6", "exact", 6,
        note=f"{why}; latency that grows with the batch follows the outputs",
    )  # fmt: skip
    return [
        *rows,
        compare(by_compute, [against], shape=ResultLimits(above=3)),
        compare(by_output, [outputs], shape=ResultLimits(above=3)),
    ]


def _size_row(model: str) -> Row:
    size_mib = PUBLISHED[f"{model}-asyfunc"].weights_bytes / MIB
    claim = Claim("Table 2", f"{model}: size", "MiB", "simulated", SIZES_MB[model], computed=True)
    if model == "YOLOv8x":
        half = "CPUs compute in single precision, with which its structure has 260.3 MiB; 131 MB are half precision"
        claim = structs.replace(claim, note=half)
    return compare(claim, [size_mib], within=0.02 * SIZES_MB[model])


def _named_row() -> Row:
    """The publication's ResNet50 has the size and the layers of ResNet101, and its VGG16 those of VGG19."""
    note = "the size and the number of layers that are printed are those of ResNet101"
    claim = Claim("Table 2", "ResNet50: size", "MiB", "simulated", SIZES_MB["ResNet101"], note=note, computed=True)
    return compare(claim, [PUBLISHED["ResNet50-asyfunc"].weights_bytes / MIB])


def _ours(experiment: str, metric: str, unit: str, derived: float, note: str = "") -> Claim:
    """What the specification derives with our formulas from latencies that we assumed, as none are published."""
    return Claim(experiment, metric, unit, "exact", derived=derived, note=note, itself=True)


# Latencies by batch (Figs. 2 to 4 and 7), EfficientNet-b5


@cache
def growth_ms() -> Floats:
    """By how much each block takes longer for four rows than for two, on two cores."""
    fewer, more = (
        np.array([each.latency_ms.latency_ms(batch, FEW_CORES) for each in layers_of(EFFICIENTNET).blocks])
        for batch in BATCHES
    )
    return np.asarray(more - fewer)


def left_after(share: float) -> float:
    """The extra latency that remains, in percent, when a shadow takes this share of the blocks, beginning with those
    whose latency grows most (Fig. 4)."""
    grown = np.sort(growth_ms())[::-1]
    return 100 * float(grown[round(share * len(grown)) :].sum() / grown.sum())


def latency_rows() -> list[Row]:
    """Latency and its growth from two rows to four on two cores."""
    table, grown = whole_ms(EFFICIENTNET), growth_ms()
    note = "parametric latencies, in which a row never costs more than the one before; real ones leave the caches"
    rows = []
    for batch, paper in zip(BATCHES, (673.0, 1571.0), strict=True):
        claim = Claim(
            "Fig. 2 latency", f"batch of {batch}, two cores", "ms", paper=paper, note=note, computed=True, fitted=CORES
        )
        rows.append(compare(claim, [float(table[int(FEW_CORES), batch])], similar=True))
    ratio = float(table[2, 4] / table[2, 2])
    claim = Claim("Fig. 2 latency", "four rows / two rows", "×", paper=2.33, note=note, computed=True, fitted=CORES)
    rows.append(compare(claim, [ratio], within=0.1))
    most = (1571 - 673) / 24 / LAYERS
    many = Claim("Fig. 3 layers", "layers that take more than 24 ms longer", "%", "text", 10.0)
    own = 100 * float((grown > 24).mean())
    rows.append(outside(many, [own], at_most=100 * most, why=f"{LAYERS} layers take 898 ms longer together"))
    top = 100 * float(np.sort(grown)[::-1][: round(0.1 * len(grown))].sum() / grown.sum())
    half = Claim("Fig. 3 layers", "half of the blocks: share of the growth", "%", computed=True)
    tenth = Claim("Fig. 3 layers", "a tenth of the blocks: share of the growth", "%", computed=True)
    rows += [
        bounded(tenth, [top], at_least=50.0),
        bounded(half, [left_after(0.5)], at_most=10.0),
    ]
    curve = Claim("Fig. 4 offloading", "extra latency left, half of the layers", "%", "plot", 0.0, computed=True)
    tenth = Claim("Fig. 4 offloading", "extra latency left, a tenth of the layers", "%", computed=True)
    outputs = [each.output_bytes for each in layers_of(EFFICIENTNET).blocks]
    spread = Claim("Fig. 7 outputs", "largest / median output of a block", "×", note="in proportion to the batch")
    return [
        *rows,
        compare(curve, [left_after(0.5)]),
        bounded(tenth, [left_after(0.1)], at_most=30.0),
        directed(spread, [max(outputs) / median(outputs)], "unequal", above=5),
    ]


# Loading


def load_rows() -> list[Row]:
    """The time to load a model as a number of inferences, by the printed loads; and the printed shadow of YOLOv8x."""
    model = "InceptionV3"
    loads_ms = LOAD_MS + LOAD_MS_PER_MIB * PUBLISHED[f"{model}-asyfunc"].weights_bytes / MIB
    note = "weights by the two printed loads of YOLOv8x, inference on 16 cores; a body has to be set up too"
    claim = Claim("loading", f"{model}: load / inference", "×", "text", 15.0, note=note, computed=True)
    blocks = layers_of("YOLOv8x").blocks
    count, sizes = round(0.1 * len(blocks)), [each.param_bytes / MIB for each in blocks]
    grown = [each.latency_ms.latency_ms(4, 2.0) - each.latency_ms.latency_ms(2, 2.0) for each in blocks]
    by_growth = sum(sizes[at] for at in sorted(range(len(blocks)), key=lambda at: -grown[at])[:count])
    by_output = sum(sizes[at] for at in sorted(range(len(blocks)), key=lambda at: -blocks[at].output_bytes)[:count])
    ranked = sum(sizes[at] for at in costs_of("YOLOv8x", 4).ranked()[:count])
    note = f"single precision; by multiply-adds per byte {ranked:.1f} MiB, by latency growth {by_growth:.1f} MiB"
    top = Claim("loading", "YOLOv8x: a tenth of the blocks, largest outputs first", "MiB", "text", 6.0, 5.8, note, True)
    ratio = loads_ms / float(whole_ms(model)[CORES_MAX, 1])
    return [compare(claim, [ratio], similar=True), compare(top, [by_output], within=0.6)]


# Bodies and shadows


def body_rows() -> list[Row]:
    """Deadlines and capacities, and the bodies that Algorithm 1 chooses: K decides (section 6.3)."""
    rows = []
    for model, derived in SLOS_MS.items():
        claim = _ours("constants", f"{model}: SLO, 8 rows on 16 cores", "ms", derived)
        rows.append(compare(claim, [float(whole_ms(model)[CORES_MAX, BATCH_MAX])]))
    for (model, weight), cells in BODIES.items():
        found = [body_of(model, weight, rate) for rate in RATES]
        same = sum(f"{cores},{batch}" == cell for (cores, batch), cell in zip(found, cells.split(), strict=True))
        metric = f"{model}: rates with the derived body at K = {weight:g}"
        rows.append(compare(_ours("constants", metric, f"of {len(RATES)}", len(RATES), cells), [same]))
    full = sum(
        largest_batch(whole_ms(model)[CORES_MAX], slo_ms(PUBLISHED[f"{model}-asyfunc"])) == BATCH_MAX
        for model in MODELS
    )
    metric = "models whose body with 16 cores has the largest batch alone, so that a shadow cannot raise it"
    return [*rows, compare(_ours("constants", metric, "of 6", 6), [full])]


def body_of(model: str, weight: float, rate_rps: float) -> tuple[int, int]:
    """Cores and batch of a body at this rate."""
    found = choose_body(whole_ms(model), rate_rps, slo_ms(PUBLISHED[f"{model}-asyfunc"]), weight)
    return (found.cores, found.batch) if found is not None else (0, 0)


@cache
def candidates_of(model: str, cores: int, *, is_prefix: bool = False) -> tuple[BlockCosts, list[ShadowCandidate]]:
    """The shadows for a body with these cores."""
    costs = costs_of(model, cores)
    return costs, shadow_candidates(costs, costs.prefix() if is_prefix else costs.ranked())


def cheapest_percent(model: str, cores: int, gain: float, *, is_prefix: bool = False) -> float:
    """The weights, in percent of the model's, of the smallest shadow that multiplies the capacity of a body by this
    factor; inf if none does."""
    costs, found = candidates_of(model, cores, is_prefix=is_prefix)
    alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
    enough = [each.shared.size_bytes for each in found if each.booked_rps >= gain * alone_rps]
    return 100 * min(enough) / costs.size_whole_bytes if enough else math.inf


class ChosenShadow(NamedTuple):
    """The shadow that an objective chooses: its share of the weights in percent, and the pair's capacity divided by the
    body's."""

    percent: float
    gain: float


def chosen_shadows(model: str, objective: Objective, weight: float) -> list[ChosenShadow]:
    """For bodies with 4, 8 and 16 cores."""
    found = []
    for cores in BODY_CORES:
        costs, candidates = candidates_of(model, cores)
        best = choose_shadow(candidates, weight, objective)
        assert best is not None, model
        alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
        percent = 100 * best.shared.size_bytes / costs.size_whole_bytes
        found.append(ChosenShadow(percent, float(best.booked_rps / alone_rps)))
    return found


def shadow_rows() -> list[Row]:
    """How large a shadow has to be, and what the printed objectives choose instead (section 6.3)."""
    rows = []
    for model, percents in SHADOWS.items():
        for cores, derived in zip(BODY_CORES, percents, strict=True):
            metric = f"{model}: weights of the smallest shadow for {GAIN} × the capacity of {cores} cores"
            claim = _ours("shadows", metric, "%", derived)
            rows.append(compare(claim, [cheapest_percent(model, cores, GAIN)], within=0.055))
    literal = [each for model in MODELS for each in chosen_shadows(model, "literal", 128.0)]
    printed = [each for model in MODELS if model != "VGG19" for each in chosen_shadows(model, "printed", 128.0)]
    paper = Claim(
        "shadows", "weights of the layers that the formula chooses, largest", "%", "text", 4.6, computed=True,
        note="the printed example is the top 10 % of YOLOv8x's layers, 6 of 131 MB; formula with the shadow's memory",
    )  # fmt: skip
    whole = Claim(
        "shadows", "the same, formula as printed, smallest", "%", "text", 4.6, computed=True,
        note="with the memory of the whole model in Algorithm 2, almost all blocks are chosen; VGG19: 14 %",
    )  # fmt: skip
    runs = len(runs_of(costs_of(EFFICIENTNET, 4).ranked()[: round(0.3 * 195)]))
    scattered = _ours("shadows", f"{EFFICIENTNET}: runs of the first 30 % of the blocks", "", 28)
    gain = _ours("shadows", "most gain of the formula's shadows", "×", 1.13)
    return [
        *rows,
        compare(paper, [max(each.percent for each in literal)]),
        compare(whole, [min(each.percent for each in printed)]),
        compare(gain, [max(each.gain for each in literal)]),
        compare(scattered, [runs]),
        *_transformer_rows(),
    ]


def _transformer_rows() -> list[Row]:
    """A vision transformer has blocks of equal compute per byte."""
    percent, others = (cheapest_percent(model, 8, GAIN, is_prefix=True) for model in (VIT, "VGG19"))
    claim = Claim("shadows", f"{VIT}: weights of the smallest shadow for {GAIN} × the capacity of 8 cores", "%")
    return [directed(claim, [percent], "many more than twice VGG19's", above=2 * others)]


# Fig. 1 as a count: requests above the capacity that is ready, second by second


class DayCount(NamedTuple):
    """A day under one policy."""

    violations: float
    """Requests above the capacity, in percent of all."""
    replicas: float
    """The mean number of instances, including those that load."""


Reaction = Literal["on-demand", "last-value", "1.5 last-value", "optimum"]
REACTIONS: Final[tuple[Reaction, ...]] = ("on-demand", "last-value", "1.5 last-value", "optimum")
LOADS_S: Final = (2, 5, 10, 20)
DERIVED: Final[dict[Reaction, tuple[float, ...]]] = {
    "on-demand": (5.8, 9.4, 11.7, 11.7),
    "last-value": (7.6, 8.2, 9.0, 9.6),
    "1.5 last-value": (1.8, 2.1, 2.4, 2.6),
}
"""By load time, from another simulation with another trace of the same generator (section 4)."""
MEAN_RPS: Final = fmean(HOURLY_RPS)


@cache
def capacity_of_day(seed: int, spikes: Spikes = USUAL) -> float:
    """The requests/s that one instance carries if the optimum has `OPT_INSTANCES` instances in the mean."""
    counts = np.array(counts_of_day(seed, MEAN_RPS, spikes))
    low, high = 1.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.ceil(counts / middle).mean() > OPT_INSTANCES else (low, middle)
    return high


@cache
def day_count(reaction: Reaction, load_s: int, seed: int = 0, spikes: Spikes = USUAL, period_s: int = 10) -> DayCount:
    """On-demand decides every second, and stops instances that are ready and not needed; the others decide every
    period."""
    counts, each_rps = counts_of_day(seed, MEAN_RPS, spikes), capacity_of_day(seed, spikes)
    if reaction == "optimum":
        return DayCount(0.0, fmean(math.ceil(count / each_rps) for count in counts))
    factor = 1.5 if reaction == "1.5 last-value" else 1.0
    ready, wanted, above, held = math.ceil(counts[0] / each_rps), 0, 0.0, 0
    loading: list[int] = []
    for second, count in enumerate(counts):
        while loading and loading[0] <= second:
            del loading[0]
            ready += 1
        above += max(0.0, count - ready * each_rps)
        held += ready + len(loading)
        if reaction == "on-demand":
            wanted = max(1, math.ceil(count / each_rps))
        elif second % period_s == period_s - 1:
            last_rps = sum(counts[second + 1 - period_s : second + 1]) / period_s
            wanted = max(1, math.ceil(factor * last_rps / each_rps))
        wanted = wanted or ready
        loading += [second + load_s] * (wanted - ready - len(loading))
        ready = min(ready, wanted)
    return DayCount(100 * above / sum(counts), held / DAY_S)


def day_rows(seeds: Sequence[int], loads_s: Sequence[int] = LOADS_S) -> list[Row]:
    """Fig. 1 as a count, by load time; and the calibration whose violations are nearest to the printed ones."""
    rows = []
    for reaction, derived in DERIVED.items():
        for load_s in loads_s:
            figure = derived[LOADS_S.index(load_s)]
            found = [day_count(reaction, load_s, seed).violations for seed in seeds]
            claim = _day(f"violations of {reaction}, loads of {load_s} s", "%", derived=figure)
            rows.append(compare(claim, found, similar=True))
    usual = {reaction: [day_count(reaction, 5, seed) for seed in seeds] for reaction in REACTIONS}
    orders = [
        usual["on-demand"][at].violations > usual["last-value"][at].violations > usual["1.5 last-value"][at].violations
        for at in range(len(seeds))
    ]
    more = [each.replicas / best.replicas for each, best in zip(usual["1.5 last-value"], usual["optimum"], strict=True)]
    return [
        *rows,
        directed(_day("days with on-demand > last-value > 1.5 last-value > optimum", "%"), [100 * fmean(orders)],
                 "all, with loads of 5 s", at_least=100),
        compare(_day("instances of 1.5 last-value / optimum", "×", "text", 1.3, 1.42), more, within=0.15),
        *(row for spikes in WORLDS.items() for row in _world_rows(seeds, *spikes)),
    ]  # fmt: skip


WORLDS: Final[Mapping[str, tuple[Spikes, float, float]]] = {
    "spikes of 0.75 of the height": (USUAL.lower(0.75), 10.3, 7.9),
    "spikes of half the height and half as often": (Spikes(2 * USUAL.gap_s).lower(0.5), 8.2, 5.0),
}
"""Two calibrations with loads of 20 s, each nearest to one of the printed figures in the specification's simulation, in
which none has both (section 4); with the derived violations of on-demand and last-value."""


def _world_rows(seeds: Sequence[int], name: str, world: tuple[Spikes, float, float]) -> list[Row]:
    """Both printed figures, and their ratio, under one load."""
    spikes, *derived = world
    fitted = f"{name}, loads of 20 s; neither is published"
    found = [
        [day_count(reaction, 20, seed, spikes).violations for seed in seeds] for reaction in ("on-demand", "last-value")
    ]
    rows = [
        compare(
            _day(f"violations of {reaction}, {name}", "%", paper=paper, derived=figure, fitted=fitted),
            samples,
            similar=True,
        )
        for reaction, paper, figure, samples in zip(
            ("on-demand", "last-value"), (10.52, 5.46), derived, found, strict=True
        )
    ]
    claim = _day(f"violations of on-demand / last-value, {name}", "×", paper=1.93, fitted=fitted)
    return [*rows, compare(claim, over(*found), similar=True)]


def _day(
    metric: str,
    unit: str,
    known: Known = "simulated",
    paper: float | None = None,
    derived: float | None = None,
    fitted: str = "",
) -> Claim:
    return Claim("Fig. 1, counted", metric, unit, known, paper, derived, fitted=fitted)
