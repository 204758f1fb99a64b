"""The colocation thesis without simulated requests: plans and their estimates, groups, iGniter, kernels, batches.

Experiments carry the numbers of the specification's checks: A1 to A8 of the planners, B1 and B2 of the router, C6 of an
overloaded replica. Source: Elvinger (ETH Zurich, MSc thesis 505, 2024). The thesis prints few estimates; the others are
derived, by two independent programs over its Table A.1.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations, permutations, product
from statistics import fmean
from typing import Final

from sloop.api import ROUNDING, WIDE_ROUNDING, counted, number
from sloop.api.devices import GpuLimits, KernelLaunch
from sloop.api.experiments import stream
from sloop.api.solvers import WHOLE_DEVICE, BatchOption, content_needs
from sloop_systems.colocation import igniter, usher
from sloop_systems.colocation.experiments.router import SERVING, achieved_rps, run_model
from sloop_systems.colocation.experiments.scene import (
    AO,
    LANGUAGE_MIX,
    MIXED,
    USHER_GROUPS,
    VISION,
    WAO,
    WSM,
    fitted_igniter,
    models_of,
    named,
    options_of,
    placed_models,
    share_slowdown,
)
from sloop_systems.colocation.igniter import igniter_predictions
from sloop_systems.colocation.milp import Colocation, SharedModel, mean_batch, most_goodput
from sloop_systems.colocation.published import IGNITER_V100, IGNITER_V100_MODELS
from sloop_systems.comparison.rows import Claim, Row, bounded, compare

MILP_S: Final = 1.0
"""In which each integer program of the thesis's size should be solved."""
GROUPS: Final = "Usher's groups, deduced from the printed placements"
ESTIMATE: Final = 0.005
"""Estimates are printed with two decimals."""


# A1, A2: worked examples on four GPUs


@dataclass(frozen=True, slots=True)
class WorkedExample:
    """One example of section 5.4 of the thesis: models at one rate, Usher's placement and that of the program."""

    name: str
    models: tuple[str, ...]
    rate_rps: float
    slo_ms: float
    usher_rps: float
    usher_placement: tuple[str, ...]
    milp_rps: float
    milp_placement: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]


WORKED: Final = (
    WorkedExample(
        "5.4.1a",
        ("alexnet", "gpt2", "resnet50", "t5"),
        400,
        200,
        800,
        ("resnet50 b32", "t5 b8", "t5 b8", "t5 b8"),
        1092.04,
        ("alexnet b4", "resnet50 b4", "t5 b16", "t5 b16"),
        ((0, 1, 2, 3),),
    ),
    WorkedExample(
        "5.4.1b",
        ("resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"),
        400,
        300,
        793.57,
        ("bert b32", "bert b32", "bert b32", "resnet50"),
        1331.19,
        ("bert b32", "mobilenet_v2 b4", "resnet50 b4", "vgg19 b4"),
        ((4, 3, 0), (2, 1)),
    ),
    WorkedExample(
        "5.4.2",
        ("alexnet", "resnet50", "mobilenet_v2", "bert"),
        500,
        200,
        1500,
        ("alexnet", "mobilenet_v2", "resnet50"),
        1624.88,
        ("alexnet b4", "bert b16", "mobilenet_v2 b4", "resnet50 b4"),
        ((0, 1, 2, 3),),
    ),
)


def _agreeing(expected: Sequence[Sequence[str]], found: Sequence[Sequence[str]]) -> int:
    """How many devices have the expected contents; devices are interchangeable. An expected model without a batch is
    any replica of it."""
    bare = {name for content in expected for name in content if " " not in name}
    seen = [sorted(own if (own := each.partition(" ")[0]) in bare else each for each in content) for content in found]
    both = Counter(map(tuple, map(sorted, expected))) & Counter(map(tuple, seen))
    return both.total()


def _placement(
    experiment: str,
    metric: str,
    expected: Sequence[Sequence[str]],
    found: Sequence[Sequence[str]],
    *,
    printed: bool = False,
    fitted: str = "",
) -> Row:
    """How many devices have the contents that were printed, or derived. One device more than those is a miss, too."""
    figure = float(len(expected))
    note = "; ".join(" + ".join(content) for content in found) or "no device in use"
    claim = Claim(
        experiment,
        f"{metric}, devices with the contents {'printed' if printed else 'derived'}",
        "",
        known="exact",
        paper=figure if printed else None,
        derived=None if printed else figure,
        note=note,
        fitted=fitted,
    )
    return compare(claim, [_agreeing(expected, found) if len(found) <= len(expected) else -1])


def worked_rows() -> list[Row]:
    """A1 and A2: what order, groups and the multiplier cost Usher on four GPUs, by peak occupancy."""
    rows = []
    for each in WORKED:
        models = models_of(each.models, each.rate_rps, each.slo_ms, AO)
        plans = usher.plan(models, 4, groups=each.groups), most_goodput(models, 4)
        for name, found, paper, derived, fitted in (
            ("Usher", plans[0], each.usher_rps, None, GROUPS),
            ("integer program", plans[1], None, each.milp_rps, ""),
        ):
            metric = f"{each.name}, {name}"
            claim = Claim("A1 worked examples", metric, "requests/s", "exact", paper, derived, fitted=fitted)
            rows.append(compare(claim, [found.total_rps], within=ESTIMATE))
        for name, found, expected in (
            ("Usher", plans[0], each.usher_placement),
            ("integer program", plans[1], each.milp_placement),
        ):
            contents = named(models, found.contents)
            rows.append(
                _placement(
                    "A2 placements",
                    f"{each.name}, {name}",
                    [(replica,) for replica in expected],
                    contents,
                    printed=name == "Usher" or each is WORKED[0],
                    fitted=GROUPS if name == "Usher" else "",
                )
            )
    *others, bert = models_of(WORKED[2].models, 500, 200, AO)
    faster = tuple(replace(each, rate_rps=125.0) if each.batch == 16 else each for each in bert.options)
    found = usher.plan([*others, replace(bert, options=faster)], 4)
    claim = Claim("A2 placements", "5.4.2, Usher with bert at 125.00 requests/s", "requests/s", "exact", derived=1625.0)
    return [*rows, compare(claim, [found.total_rps])]


# A3, estimates of goodput


@dataclass(frozen=True, slots=True)
class EstimateSeries:
    """Derived estimates of one planner, by number of GPUs or by total rate on four."""

    name: str
    plans: Sequence[Callable[[], Colocation]]
    expected: Sequence[float]


TOTALS: Final = (1000, 2000, 3000, 4000, 5000)
PER_MODEL: Final = (1 / 4, 1 / 4, 1 / 4, 1 / 8, 1 / 8)
"""E3b, if two to one is meant for each model."""
AS_TOTALS: Final = (2 / 9, 2 / 9, 2 / 9, 1 / 6, 1 / 6)
"""E3b, if two to one is meant for all vision and all language models."""


@cache
def milp_plan(names: tuple[str, ...], rates: tuple[float, ...], slo_ms: float, metric: str, devices: int) -> Colocation:
    """AO-MILP or WSM-MILP."""
    return most_goodput(models_of(names, rates, slo_ms, metric), devices)


@cache
def usher_plan(names: tuple[str, ...], rate_rps: float, slo_ms: float, metric: str, devices: int) -> Colocation:
    """Usher or WAO-Usher, with pinned groups if there are."""
    groups = USHER_GROUPS.get((metric, names))
    return usher.plan(models_of(names, rate_rps, slo_ms, metric), devices, groups=groups)


def _by_devices(
    name: str, names: tuple[str, ...], rate_rps: float, slo_ms: float, metric: str, expected: Sequence[float]
) -> EstimateSeries:
    rates = (rate_rps,) * len(names)
    devices = range(1, len(expected) + 1)
    plans = (
        [partial(milp_plan, names, rates, slo_ms, metric, n) for n in devices]
        if "MILP" in name
        else [partial(usher_plan, names, rate_rps, slo_ms, metric, n) for n in devices]
    )
    return EstimateSeries(f"{name}, 1 to {len(expected)} GPUs", plans, expected)


def _by_total(
    name: str, names: tuple[str, ...], parts: Sequence[float], slo_ms: float, metric: str, expected: Sequence[float]
) -> EstimateSeries:
    rates = [tuple(total * part for part in parts) for total in TOTALS]
    plans = [partial(milp_plan, names, own, slo_ms, metric, 4) for own in rates]
    return EstimateSeries(f"{name} {slo_ms:g} ms, 1000 to 5000 requests/s", plans, expected)


def estimates() -> list[EstimateSeries]:
    """All cells of the specification's table of estimates."""
    ao_250, wsm_250 = (800, 1600, 2400, 3041.97, 3641.97), (1000, 2000, 2989.78, 3612.17, 4043.76)
    fifth = (1 / 5,) * 5
    return [
        _by_devices("E1 AO-MILP", VISION, 500, 200, AO, (500, 1000, 1500, 2000, 2397.70, 2500)),
        _by_devices("E1 WSM-MILP", VISION, 500, 200, WSM, (1260.13, 1844.10, 2344.10, 2500, 2500, 2500)),
        _by_devices("E1 Usher", VISION, 500, 200, AO, (500, 1000, 1344.10, 1500, 2000, 2500)),
        _by_devices("E1 WAO-Usher", VISION, 500, 200, WAO, (1972.72, 2397.70, 2500, 2500, 2500, 2500)),
        _by_devices("E2 WSM-MILP", MIXED, 300, 300, WSM, (600, 731.19, 862.38, 979.59, 1096.80, 1162.38, 1200, 1200)),
        _by_devices("E2 Usher", MIXED, 300, 300, AO, (300, 600, 731.19, 862.38, 900, 1031.19, 1162.38, 1200)),
        _by_devices("E2 WAO-Usher", MIXED, 300, 300, WAO, (600, 600, *[1200] * 6)),
        _by_devices("E1c AO-MILP", VISION, 1000, 200, AO, (1000, 2000, 3000, 3641.97, 4039.67, 4437.37, 4795.40, 5000)),
        _by_devices(
            "E1c WSM-MILP", VISION, 1000, 200, WSM, (1849.91, 2908.45, 3550.42, 4043.76, 4474.56, 4832.59, 5000, 5000)
        ),
        _by_total("E3 AO-MILP", VISION, fifth, 150, AO, (800, 1600, 2400, 3027.01, 3627.01)),
        _by_total("E3 AO-MILP", VISION, fifth, 250, AO, ao_250),
        _by_total("E3 AO-MILP", VISION, fifth, 350, AO, ao_250),
        _by_total("E3 WSM-MILP", VISION, fifth, 150, WSM, (1000, 2000, 2989.78, 3597.21, 4028.80)),
        _by_total("E3 WSM-MILP", VISION, fifth, 250, WSM, wsm_250),
        _by_total("E3 WSM-MILP", VISION, fifth, 350, WSM, wsm_250),
        *(
            _by_total(f"E3b WSM-MILP {reading}", LANGUAGE_MIX, parts, slo_ms, WSM, expected)
            for reading, parts, slo_ms, expected in (
                ("per model", PER_MODEL, 150, (999.88, 1861.25, 2499.76, 3249.76, 3929.32)),
                ("per model", PER_MODEL, 250, (1000, 1861.49, 2512.38, 3262.38, 3941.94)),
                ("per model", PER_MODEL, 350, (1000, 1867.21, 2512.38, 3262.38, 3941.94)),
                ("as totals", AS_TOTALS, 150, (958.21, 1694.58, 2297.75, 2916.43, 3583.09)),
                ("as totals", AS_TOTALS, 250, (964.52, 1707.20, 2316.68, 2929.05, 3595.71)),
                ("as totals", AS_TOTALS, 350, (964.52, 1712.92, 2316.68, 2929.05, 3595.71)),
            )
        ),
    ]


def estimate_rows() -> list[Row]:
    """A3: each series with how many of its cells are as derived, and how long the slowest program took."""
    rows, slowest = [], 0.0
    for series in estimates():
        found = []
        for make in series.plans:
            begun = time.process_time()
            found.append(make().total_rps)
            slowest = max(slowest, (time.process_time() - begun) if "MILP" in series.name else 0.0)
        agreeing = sum(
            abs(ours - expected) <= ESTIMATE + ROUNDING for ours, expected in zip(found, series.expected, strict=True)
        )
        note = f"requests/s: {', '.join(f'{value:.2f}'.removesuffix('.00') for value in found)}"
        claim = Claim("A3 estimates", f"{series.name}, cells as derived", "", "exact", None, len(found), note)
        rows.append(compare(claim, [agreeing]))
    claim = Claim("A3 estimates", "processor time of the slowest integer program of a cell", "s", computed=True)
    return [*rows, bounded(claim, [slowest], at_most=MILP_S), *_key_placements(), *_five_gpus()]


def _key_placements() -> list[Row]:
    small = ("densenet121 b16", "efficientnet_b7 b8"), ("efficientnet_b7 b8", "resnet50 b4")
    both = (*small, ("alexnet b4", "efficientnet_b7 b8"))
    light = ("densenet121 b8", "efficientnet_b7 b4", "resnet50 b4")
    pair, fours = ("bert b4", "gpt2 b4"), ("vgg19 b16", "efficientnet_b7 b8", "efficientnet_b7 b8", "densenet121 b16")

    def e3(total: float) -> Colocation:
        return milp_plan(VISION, (total / 5,) * 5, 250, WSM, 4)

    checked: list[tuple[str, tuple[str, ...], Colocation, Sequence[Sequence[str]]]] = [
        ("E3 WSM-MILP, 3000", VISION, e3(3000), [*both, ("vgg19 b16",)]),
        ("E3 WSM-MILP, 4000", VISION, e3(4000), [*both, ("vgg19 b128",)]),
        (
            "E3 WSM-MILP, 5000",
            VISION,
            e3(5000),
            [("alexnet b4", "densenet121 b8", "efficientnet_b7 b4"), light, light, ("vgg19 b128",)],
        ),
        (
            "E1 WAO-Usher, 3 GPUs",
            VISION,
            usher_plan(VISION, 500, 200, WAO, 3),
            [("vgg19 b16", "alexnet b4", "resnet50 b4"), small[0], ("efficientnet_b7 b8",)],
        ),
        (
            "E1 Usher, 3 GPUs",
            VISION,
            usher_plan(VISION, 500, 200, AO, 3),
            [("densenet121 b128",), ("vgg19 b16",), ("efficientnet_b7 b16",)],
        ),
        ("E1 Usher, 4 GPUs", VISION, usher_plan(VISION, 500, 200, AO, 4), [(each,) for each in fours]),
        (
            "E1 Usher, 6 GPUs",
            VISION,
            usher_plan(VISION, 500, 200, AO, 6),
            [(each,) for each in (*fours, "resnet50 b4", "alexnet b4")],
        ),
        (
            "E2 WSM-MILP, 5 GPUs",
            MIXED,
            milp_plan(MIXED, (300.0,) * 4, 300, WSM, 5),
            [("resnet50 b4", "mobilenet_v2 b4"), ("bert b32",), ("bert b32",), ("gpt2 b32",), ("gpt2 b32",)],
        ),
        ("E2 WAO-Usher, 3 GPUs", MIXED, usher_plan(MIXED, 300, 300, WAO, 3), [
            (*pair, "resnet50 b4", "mobilenet_v2 b4"), pair, pair,
        ]),
    ]  # fmt: skip
    return [
        _placement(
            "A3 placements",
            name,
            expected,
            named(models_of(names, 1, 1), plan.contents),
            fitted=GROUPS if "Usher" in name else "",
        )
        for name, names, plan, expected in checked
    ]


def _five_gpus() -> list[Row]:
    """E2 on five GPUs by SM use: the rates by model."""
    plan = milp_plan(MIXED, (300.0,) * 4, 300, WSM, 5)
    expected = (300, 300, 262.38, 234.42)
    return [
        compare(
            Claim("A3 estimates", f"E2 WSM-MILP, 5 GPUs: {name}", "requests/s", "exact", derived=figure),
            [ours],
            within=ESTIMATE,
        )
        for name, ours, figure in zip(MIXED, plan.served_rps, expected, strict=True)
    ]


# A4, A5: groups and pairs


def group_rows() -> list[Row]:
    """A4: the first round of the matching, and whether the groups are among those that are tied, for all orders."""
    rows = []
    for what, names, weight, possible in (
        (
            "5.4.1b",
            WORKED[1].models,
            332.09,
            ("bert gpt2 resnet50", "gpt2 mobilenet_v2 resnet50", "gpt2 resnet50 vgg19"),
        ),
        (
            "E1",
            VISION,
            346.00,
            (
                "densenet121 efficientnet_b7 vgg19",
                "efficientnet_b7 resnet50 vgg19",
                "alexnet efficientnet_b7 vgg19",
            ),
        ),
    ):
        orders, first, members = 0, set[float](), 0
        for order in permutations(names):
            models = models_of(order, 400, 300, AO)
            own = [usher.needs_of(model) for model in models]
            weights = [[abs(a[0] + b[0] - a[1] - b[1]) for b in own] for a in own]
            first.add(sum(weights[one][other] for one, other in usher.matching(weights)) / 100)
            groups = [" ".join(sorted(models[at].name for at in group)) for group in usher.grouped(models)]
            orders, members = orders + 1, members + any(group in possible for group in groups)
        claim = Claim("A4 groups", f"{what}, weight of the first matching", "%", "exact", None, weight, places=2)
        rows.append(compare(claim, sorted(first)))
        note = "the thesis's groups are one of three tied ones; which is left to the order of the models"
        claim = Claim(
            "A4 groups", f"{what}, orders of models with tied groups", f"of {orders}", "exact", None, orders, note
        )
        rows.append(compare(claim, [members]))
    return rows


def pair_rows() -> list[Row]:
    """A5: pairs of models and batches that fit on one GPU, by metric."""
    names = sorted({*VISION, *MIXED, "bloom_560", "inception_v3", "resnext50_32x4d", "t5"})
    rows = []
    for metric, label, expected in ((AO, "AO", 0), (WAO, "WAO", 1625), (WSM, "WSM", 124)):
        pairs = [
            (one, other)
            for first, second in combinations(names, 2)
            for one, other in product(options_of(first, metric), options_of(second, metric))
        ]
        fitting = sum(max(content_needs(((0, one), (1, other)))) <= WHOLE_DEVICE for one, other in pairs)
        note = f"of {len(pairs):,} pairs, xlnet left out"
        claim = Claim("A5 pairs", f"pairs that fit on one GPU by {label}", "", "exact", None, expected, note)
        rows.append(compare(claim, [fitting]))
    return rows


# A6, A7: iGniter and kernels

IGNITER_CASES: Final = (
    (
        (("alexnet", 15, 500), ("resnet50", 40, 400), ("vgg19", 60, 200)),
        ((("vgg19", 6, 37.5, 28.73), ("resnet50", 8, 30.0, 18.91), ("alexnet", 4, 10.0, 6.92)),),
    ),
    (
        (("vgg19", 40, 200), ("ssd", 25, 150)),
        ((("ssd", 2, 60.0, 12.28), ("vgg19", 4, 37.5, 19.80)),),
    ),
    (
        (("alexnet", 200, 500), ("resnet50", 200, 500), ("vgg19", 200, 500)),
        ((("vgg19", 49, 85.0, 97.89),), (("resnet50", 49, 30.0, 98.44), ("alexnet", 49, 5.0, 96.89))),
    ),
)
"""Of iGniter's public coefficients: models with deadline and rate; by GPU, model, batch, share and predicted ms."""
IGNITER_SPLITS: Final = (
    (("vgg19", 30, 600), ((7, 100.0, 486), (2, 27.5, 114))),
    (("ssd", 60, 700), ((9, 100.0, 298), (9, 100.0, 298), (4, 37.5, 104))),
)
IGNITER_GPUS: Final[Mapping[str, tuple[tuple[str, ...], float, float, int]]] = {
    "E1, 200 ms, 500 each": (VISION, 500, 200, 5),
    "E2, 300 ms, 300 each": (MIXED, 300, 300, 6),
    **{
        f"E3, 350 ms, {total} in all": (VISION, total / 5, 350, gpus)
        for total, gpus in zip(TOTALS, (2, 3, 8, 8, 8), strict=True)
    },
}
"""How many GPUs iGniter's plans need, as printed: models, rate of each, deadline, GPUs."""
LAUNCHES: Final = (
    (KernelLaunch(64, 1024, 32), 40.0),
    (KernelLaunch(100, 128, 32, 32768), 42.5),
    (KernelLaunch(50 * 2, 256, 128), 62.5),
    (KernelLaunch(640, 32, 16), 25.0),
    (KernelLaunch(4000, 256, 32), 100.0),
)


def igniter_workloads(
    names: Sequence[str], rate_rps: float | Sequence[float], slo_ms: float
) -> list[igniter.IgniterWorkload]:
    """Models of Table A.1 with coefficients that are fitted to it."""
    return [
        igniter.IgniterWorkload(model.name, fitted_igniter(model.name)[0], model.rate_rps, slo_ms)
        for model in models_of(names, rate_rps, slo_ms)
    ]


def igniter_rows() -> list[Row]:
    """A6: plans of the public coefficients; and how many GPUs plans of coefficients fitted to Table A.1 need."""
    rows = []
    for which, (case, expected) in enumerate(IGNITER_CASES, start=1):
        workloads = [igniter.IgniterWorkload(name, IGNITER_V100_MODELS[name], r, slo) for name, slo, r in case]
        found = igniter.plan(IGNITER_V100, workloads, check_new=False)
        labels = [[f"{each.workload.name} b{each.batch} {each.share:g} %" for each in own] for own in found]
        wanted = [[f"{name} b{batch} {share:g} %" for name, batch, share, _ in own] for own in expected]
        rows.append(_placement("A6 iGniter", f"plan {which}", wanted, labels))
        latencies = [
            each.latency_ms for own in found for each in igniter_predictions(IGNITER_V100, [x.resident for x in own])
        ]
        wanted_ms = [own[3] for gpu in expected for own in gpu]
        apart = max(abs(ours - figure) for ours, figure in zip(latencies, wanted_ms, strict=True))
        note = f"ms: {', '.join(f'{value:.2f}' for value in latencies)}"
        claim = Claim("A6 iGniter", f"plan {which}, largest difference in latency", "ms", "exact", None, 0.0, note)
        rows.append(compare(claim, [round(apart, 2)], within=ESTIMATE))
    for (name, limit_ms, load_rps), split in IGNITER_SPLITS:
        heavy = igniter.IgniterWorkload(name, IGNITER_V100_MODELS[name], load_rps, limit_ms)
        parts = [(each.batch, each.share, each.rate_rps) for each in igniter.split(IGNITER_V100, heavy)]
        note = "; ".join(f"b{batch} {share:g} % for {rate:g} requests/s" for batch, share, rate in parts)
        claim = Claim("A6 iGniter", f"{name} split, replicas as derived", "", "exact", None, len(split), note)
        rows.append(compare(claim, [sum(a == b for a, b in zip(parts, split, strict=False))]))
    for what, (names, rate_rps, slo_ms, gpus) in IGNITER_GPUS.items():
        found = igniter.plan(IGNITER_V100, igniter_workloads(names, rate_rps, slo_ms), check_new=False)
        errors = [fitted_igniter(name)[1] for name in names]
        note = f"its coefficients are not printed; fitted to Table A.1, mean error {100 * fmean(errors):.0f} %"
        claim = Claim("A6 iGniter", f"GPUs of its plan, {what}", "GPUs", "exact", gpus, note=note)
        ours = len(found)
        rows.append(compare(claim, [ours], similar=True))
    return rows


def kernel_rows() -> list[Row]:
    """A7: the SMs that launches need on a V100."""
    return [
        compare(
            Claim("A7 SM use", f"{launch.blocks} blocks of {launch.threads} threads", "%", "exact", None, percent),
            [launch.sm_percent(GpuLimits.of((7, 0), 80))],
        )
        for launch, percent in LAUNCHES
    ]


# A8: the program never serves less than Usher


def _random_models(of: int) -> tuple[list[SharedModel], int]:
    """Two to four models with random needs and rates, and a number of GPUs."""
    rng = stream(of, "colocation.models")
    models = []
    for at in range(rng.randint(2, 4)):
        batches = sorted(rng.sample((4, 8, 16, 32), 2))
        options = tuple(
            BatchOption(
                batch,
                rng.uniform(5, 120),
                rng.uniform(50, 400),
                rng.randint(1000, 9900),
                rng.randint(100, 6000),
            )
            for batch in batches
        )
        models.append(SharedModel(f"m{at}", rng.uniform(50, 600), 100.0, options))
    return models, rng.randint(1, 4)


def relaxation_rows(*, quick: bool) -> list[Row]:
    """A8: on random models, and how often the program serves more."""
    count = 40 if quick else 300
    worse, more = 0, 0
    for of in range(count):
        models, devices = _random_models(of)
        ours, theirs = most_goodput(models, devices, small=0.0).total_rps, usher.plan(models, devices).total_rps
        worse += ours < theirs - WIDE_ROUNDING
        more += ours > theirs + WIDE_ROUNDING
    note = f"{count} random sets of models; in {more} the program serves more"
    claim = Claim("A8 relaxation", "sets in which Usher serves more", "", note=note, computed=True)
    return [bounded(claim, [worse], at_most=0)]


# B: the router


def router_rows() -> list[Row]:
    """B1 and B2: shares of batches that go round, and sizes of batches; the clients' rates, and the law of shares."""
    (model,) = placed_models(["efficientnet_b7"], 433.34, 200)
    run = run_model(model, [9, 5, 5, 5], 0, requests=24_000)
    rows = [
        compare(
            Claim("B1 round robin", f"requests of replica {place + 1} of 9/5/5/5", "%", "simulated", None, figure,
                  computed=True),
            [100 * count / sum(run.by_replica)],
            within=1.0,
        )
        for place, (count, figure) in enumerate(zip(run.by_replica, (37.5, 20.83, 20.83, 20.83), strict=True))
    ]  # fmt: skip
    for timer, figures in ((False, (45.33, 59.79, 64.00)), (True, (44.33, 59.16, 64.00))):
        how = "with a timer" if timer else "without a timer"
        for rate_rps, figure in zip((433.34, 600, 1000), figures, strict=True):
            what = f"mean batch of at most 64 {how}, {rate_rps:g} requests/s"
            claim = Claim("B2 batches", f"{what}, closed form", "", "exact", None, figure)
            rows.append(compare(claim, [mean_batch(64, rate_rps, SERVING.wait_ms, timer=timer)], within=ESTIMATE))
            (model,) = placed_models(["efficientnet_b7"], rate_rps, 200)
            sizes = [run_model(model, [64], seed, requests=100_000, timer=timer).batch_mean for seed in range(3)]
            claim = Claim("B2 batches", f"{what}, simulated", "", "simulated", None, figure)
            rows.append(compare(claim, sizes, within=0.01 * figure))
    return [
        *rows,
        *_client_rows(),
        *_law_rows(),
    ]


def _client_rows() -> list[Row]:
    """Table 4.1: rates that clients reach, with one overhead for all."""
    fitted = "each request is 0.2 ms late, by this table; its rows would need 0.15 to 0.22"
    return [
        compare(
            Claim(
                "clients", f"rate reached of {target}", "requests/s", "simulated", paper, fitted=fitted, computed=True
            ),
            [achieved_rps(target)],
        )
        for target, paper in ((400, 368.0), (800, 712.0), (1200, 1022.0), (1600, 1293.0))
    ]


def _law_rows() -> list[Row]:
    """The law of shares at the printed latencies to which it is fitted."""
    rows = []
    for name, share, paper, alone_ms in (("resnet50", 17.55, 4 * 6.8, 6.8), ("bert", 31.83, 180.0, 34.1)):
        metric, fitted = f"{name} b4 with {share:g} % of the SMs", "the exponent, by these two latencies"
        claim = Claim(
            "shares", metric, "ms", "text", paper, note=f"alone {alone_ms:g} ms", computed=True, fitted=fitted
        )
        rows.append(compare(claim, [alone_ms * share_slowdown(name, 4, share)], similar=True))
    return rows


# C6: an overloaded replica


def overload_rows(*, quick: bool) -> list[Row]:
    """C6: what is in time before the queue is too long, estimated and simulated."""
    rows = []
    for name, batch, replicas, rate_rps, slo_ms, closed, simulated in (
        ("gpt2", 4, 2, 276.0, 300.0, 29.7, 33.1),
        ("efficientnet_b7", 16, 1, 433.34, 200.0, 22.7, 27.0),
    ):
        (model,) = placed_models([name], rate_rps, slo_ms)
        option = next(each for each in model.options[0] if each.batch == batch)
        what = f"{name} b{batch} on {counted(replicas, 'replica')}, {number(rate_rps)} requests/s"
        estimate = replace(SERVING, slower=1.0).in_time_rps(model, 0, option, replicas)
        note = "approximate: the specification takes half of the time in which a batch is built"
        claim = Claim("C6 overload", f"{what}, estimated", "requests/s", "text", None, closed, note, computed=True)
        rows.append(compare(claim, [estimate]))
        target = 300 if name == "gpt2" else 500
        runs = [
            run_model(model, [batch] * replicas, seed, requests=8 * target).good_rps
            for seed in range(1 if quick else 24)
        ]
        claim = Claim("C6 overload", f"{what}, simulated", "requests/s", "simulated", None, simulated)
        rows.append(compare(claim, runs, similar=True))
    return rows


OFFLINE: Final[Mapping[str, Callable[[bool], list[Row]]]] = {
    "worked examples": lambda _quick: worked_rows(),
    "estimates": lambda _quick: estimate_rows(),
    "groups and pairs": lambda _quick: [*group_rows(), *pair_rows()],
    "iGniter and kernels": lambda _quick: [*igniter_rows(), *kernel_rows()],
    "the program beside Usher": lambda quick: relaxation_rows(quick=quick),
    "router": lambda _quick: router_rows(),
    "overload": lambda quick: overload_rows(quick=quick),
}
"""The parts of this module by name: each can be computed apart from the others."""


def offline_part(name: str, *, quick: bool) -> list[Row]:
    """The rows of one part; `quick` looks at fewer random models and seeds."""
    return OFFLINE[name](quick)
