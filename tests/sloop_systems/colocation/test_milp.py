"""Contents of devices and the most goodput: published estimates, both forms of the program, routing, relabelling."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from sloop.errors import InputError
from sloop.solvers import highs
from sloop.solvers.contents import WHOLE, BatchOption, cheapest_assignment, needs, possible_contents, relabelled
from sloop_systems.colocation.experiments.scene import (
    AO,
    LANGUAGE_MIX,
    MIXED,
    VISION,
    WAO,
    WSM,
    models_of,
    named,
    options_of,
)
from sloop_systems.colocation.milp import WORKER_MODES, SharedModel, mean_batch, most_goodput, planned_rates

# A1 and A3: estimates


@pytest.mark.parametrize(
    ("names", "rate_rps", "slo_ms", "expected", "placement"),
    [
        (
            ["alexnet", "gpt2", "resnet50", "t5"], 400, 200, 1092.04,
            [["alexnet b4"], ["resnet50 b4"], ["t5 b16"], ["t5 b16"]],
        ),
        (
            ["resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"], 400, 300, 1331.19,
            [["bert b32"], ["mobilenet_v2 b4"], ["resnet50 b4"], ["vgg19 b4"]],
        ),
        (
            ["alexnet", "resnet50", "mobilenet_v2", "bert"], 500, 200, 1624.88,
            [["alexnet b4"], ["bert b16"], ["mobilenet_v2 b4"], ["resnet50 b4"]],
        ),
    ],
)  # fmt: skip
def test_the_worked_examples(
    names: Sequence[str], rate_rps: float, slo_ms: float, expected: float, placement: list[list[str]]
) -> None:
    models = models_of(names, rate_rps, slo_ms, AO)
    found = most_goodput(models, 4)
    assert found.total_rps == pytest.approx(expected, abs=0.01)
    assert found.proven
    assert named(models, found.contents) == placement


@pytest.mark.parametrize(
    ("names", "rate_rps", "slo_ms", "metric", "expected"),
    [
        (VISION, 500, 200, AO, [500, 1000, 1500, 2000, 2397.70, 2500]),
        (VISION, 500, 200, WSM, [1260.13, 1844.10, 2344.10, 2500, 2500, 2500]),
        (MIXED, 300, 300, WSM, [600, 731.19, 862.38, 979.59, 1096.80, 1162.38, 1200, 1200]),
        (VISION, 1000, 200, AO, [1000, 2000, 3000, 3641.97, 4039.67, 4437.37, 4795.40, 5000]),
        (VISION, 1000, 200, WSM, [1849.91, 2908.45, 3550.42, 4043.76, 4474.56, 4832.59, 5000, 5000]),
    ],
)
def test_estimates_by_number_of_gpus(
    names: Sequence[str], rate_rps: float, slo_ms: float, metric: str, expected: Sequence[float]
) -> None:
    models = models_of(names, rate_rps, slo_ms, metric)
    found = [most_goodput(models, devices) for devices in range(1, len(expected) + 1)]
    assert [each.total_rps for each in found] == pytest.approx(expected, abs=0.01)
    assert all(each.proven for each in found)


TOTALS = (1000, 2000, 3000, 4000, 5000)


@pytest.mark.parametrize(
    ("names", "parts", "metric", "slo_ms", "expected"),
    [
        (VISION, [1 / 5] * 5, AO, 150, [800, 1600, 2400, 3027.01, 3627.01]),
        (VISION, [1 / 5] * 5, AO, 250, [800, 1600, 2400, 3041.97, 3641.97]),
        (VISION, [1 / 5] * 5, AO, 350, [800, 1600, 2400, 3041.97, 3641.97]),
        (VISION, [1 / 5] * 5, WSM, 150, [1000, 2000, 2989.78, 3597.21, 4028.80]),
        (VISION, [1 / 5] * 5, WSM, 250, [1000, 2000, 2989.78, 3612.17, 4043.76]),
        (VISION, [1 / 5] * 5, WSM, 350, [1000, 2000, 2989.78, 3612.17, 4043.76]),
        (LANGUAGE_MIX, [1 / 4] * 3 + [1 / 8] * 2, WSM, 150, [999.88, 1861.25, 2499.76, 3249.76, 3929.32]),
        (LANGUAGE_MIX, [1 / 4] * 3 + [1 / 8] * 2, WSM, 250, [1000, 1861.49, 2512.38, 3262.38, 3941.94]),
        (LANGUAGE_MIX, [1 / 4] * 3 + [1 / 8] * 2, WSM, 350, [1000, 1867.21, 2512.38, 3262.38, 3941.94]),
        (LANGUAGE_MIX, [2 / 9] * 3 + [1 / 6] * 2, WSM, 150, [958.21, 1694.58, 2297.75, 2916.43, 3583.09]),
        (LANGUAGE_MIX, [2 / 9] * 3 + [1 / 6] * 2, WSM, 250, [964.52, 1707.20, 2316.68, 2929.05, 3595.71]),
        (LANGUAGE_MIX, [2 / 9] * 3 + [1 / 6] * 2, WSM, 350, [964.52, 1712.92, 2316.68, 2929.05, 3595.71]),
    ],
)
def test_estimates_by_rate_and_deadline(
    names: Sequence[str], parts: Sequence[float], metric: str, slo_ms: float, expected: Sequence[float]
) -> None:
    found = [most_goodput(models_of(names, [total * part for part in parts], slo_ms, metric), 4) for total in TOTALS]
    assert [each.total_rps for each in found] == pytest.approx(expected, abs=0.01)


def test_key_placements() -> None:
    models = models_of(VISION, 500, 200, AO)
    six = named(models, most_goodput(models, 6).contents)
    assert [name for (name,) in six].count("efficientnet_b7 b8") == 2
    assert len(six) == 6
    models = models_of(MIXED, 300, 300)
    found = most_goodput(models, 5)
    assert named(models, found.contents) == [
        ["bert b32"], ["bert b32"], ["gpt2 b32"], ["gpt2 b32"], ["mobilenet_v2 b4", "resnet50 b4"],
    ]  # fmt: skip
    assert found.served_rps == pytest.approx((300, 300, 262.38, 234.42))
    third_bert = 300 + 300 + 300 + 117.21
    assert found.total_rps > third_bert == pytest.approx(1017.2, abs=0.02)
    small = [["alexnet b4", "efficientnet_b7 b8"], ["densenet121 b16", "efficientnet_b7 b8"]]
    small.append(["efficientnet_b7 b8", "resnet50 b4"])
    for total, expected in (
        (3000, sorted([*small, ["vgg19 b16"]])),
        (4000, sorted([*small, ["vgg19 b128"]])),
        (
            5000,
            [
                ["alexnet b4", "densenet121 b8", "efficientnet_b7 b4"],
                ["densenet121 b8", "efficientnet_b7 b4", "resnet50 b4"],
                ["densenet121 b8", "efficientnet_b7 b4", "resnet50 b4"],
                ["vgg19 b128"],
            ],
        ),
    ):
        models = models_of(VISION, total / 5, 250)
        assert named(models, most_goodput(models, 4).contents) == expected


def test_of_equal_placements_the_one_with_small_batches() -> None:
    models = models_of(["resnet50"], 400, 300)
    assert named(models, most_goodput(models, 2).contents) == [["resnet50 b4"]]
    large = most_goodput(models, 2, small=-1e-4)
    assert named(models, large.contents) == [["resnet50 b128"]]


# A5: what may share a device


@pytest.mark.parametrize(("metric", "expected"), [(AO, 0), (WAO, 1625), (WSM, 124)])
def test_pairs_that_fit_one_gpu(metric: str, expected: int) -> None:
    names = sorted({*VISION, *MIXED, "bloom_560", "inception_v3", "resnext50_32x4d", "t5"})
    pairs = [
        (one, other)
        for a, b in itertools.combinations(names, 2)
        for one in options_of(a, metric)
        for other in options_of(b, metric)
    ]
    assert len(pairs) == 1991
    fit = [pair for pair in pairs if max(needs(tuple(enumerate(pair)))) <= WHOLE]
    assert len(fit) == expected


def test_known_pairs_by_sm_use() -> None:
    def content(*names: tuple[str, int]) -> int:
        return sum(each.compute for name, batch in names for each in options_of(name) if each.batch == batch)

    assert content(("resnet50", 4), ("alexnet", 4)) == 8333
    assert content(("efficientnet_b7", 8), ("densenet121", 16)) == 9765
    heavy = [options_of(name) for name in ("bert", "gpt2", "vgg19")]
    assert all(
        a.compute + b.compute > WHOLE for one, other in itertools.combinations(heavy, 2) for a in one for b in other
    )


def test_contents_of_the_vision_models() -> None:
    contents = possible_contents([model.in_time for model in models_of(VISION, 500, 200)])
    assert len(contents) == len(set(contents)) == 61
    assert [len(content) for content in contents] == sorted(len(content) for content in contents)
    assert possible_contents([model.in_time for model in models_of(VISION, 500, 200)], most=40) == contents[:40]


# The program, against the printed form and all placements


def printed_form(models: Sequence[SharedModel], devices: int) -> float:
    """The thesis's program with a variable for each model, batch and device, its printed errors corrected."""
    options = [(at, option) for at, model in enumerate(models) for option in model.in_time]
    if not options:
        return 0.0
    cells = [(choice, device) for choice in range(len(options)) for device in range(devices)]
    x = {cell: column for column, cell in enumerate(cells)}
    y = {choice: len(cells) + choice for choice in range(len(options))}
    w = {at: len(cells) + len(options) + at for at in range(len(models))}
    rows: list[highs.Row] = [({x[c, g]: 1.0, y[c]: -1.0}, -math.inf, 0.0) for c, g in cells]
    for at in range(len(models)):
        own = [choice for choice, (of, _) in enumerate(options) if of == at]
        if own:
            rows.append(({y[choice]: 1.0 for choice in own}, -math.inf, 1.0))
            rows += [({x[choice, device]: 1.0 for choice in own}, -math.inf, 1.0) for device in range(devices)]
        served = {x[c, g]: -options[c][1].rate_rps for c in own for g in range(devices)}
        rows.append(({w[at]: 1.0} | served, -math.inf, 0.0))
    for device in range(devices):
        rows.append(({x[c, device]: options[c][1].compute for c in range(len(options))}, -math.inf, WHOLE))
        rows.append(({x[c, device]: options[c][1].memory for c in range(len(options))}, -math.inf, WHOLE))
    costs = [0.0] * (len(cells) + len(options)) + [-1.0] * len(models)
    most = [1.0] * (len(cells) + len(options)) + [model.rate_rps for model in models]
    found = highs.minimise(costs, rows, integers=len(cells) + len(options), nodes_max=5_000, most=most)
    assert found.proven
    assert found.values is not None
    return -float(np.dot(costs, found.values))


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[SharedModel], int]:
    models = []
    for at in range(draw(st.integers(1, 3))):
        batches = sorted(draw(st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)))
        options = tuple(
            BatchOption(
                batch,
                float(draw(st.integers(1, 40))),
                draw(st.integers(1, 40)) / 4,
                100 * draw(st.integers(1, 110)),
                100 * draw(st.integers(0, 110)),
            )
            for batch in batches
        )
        models.append(SharedModel(f"m{at}", draw(st.integers(0, 80)) / 4, 20.0, options))
    return models, draw(st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(problems())
def test_both_forms_of_the_program_agree(problem: tuple[list[SharedModel], int]) -> None:
    models, devices = problem
    found = most_goodput(models, devices)
    assert found.total_rps == pytest.approx(printed_form(models, devices), abs=0.02)
    assert len(found.contents) <= devices
    for content in found.contents:
        assert max(needs(content)) <= WHOLE
    for at in range(len(models)):
        assert len({option for content in found.contents for of, option in content if of == at}) <= 1


@pytest.mark.parametrize("models", [2, 3, 5])
def test_equal_placements_are_decided_for_the_fewest_devices(models: int) -> None:
    options = (BatchOption(4, 20.0, 100.0, 1000, 1000), BatchOption(8, 30.0, 150.0, 1000, 1000))
    found = most_goodput([SharedModel(f"m{at}", 10.0, 200.0, options) for at in range(models)], 4)
    assert [[option.batch for _, option in content] for content in found.contents] == [[4] * models]


def test_batches_that_are_never_better_leave_room_for_larger_contents() -> None:
    """With five batches each, eight models have 6^8 contents, of which only those with few models were kept."""
    options = tuple(BatchOption(2**power, 10.0 + power, 100.0 * 2**power, 1200, 100) for power in range(5))
    models = [SharedModel(f"m{at}", 50.0, 200.0, options) for at in range(8)]
    found = most_goodput(models, 1)
    assert found.total_rps == pytest.approx(400.0)
    assert found.proven
    assert [[option.batch for _, option in content] for content in found.contents] == [[1] * 8]


def test_a_limit_of_replicas() -> None:
    (model,) = models_of(["gpt2"], 300, 300)
    assert len(most_goodput([model], 5, replicas_max=2).contents) == 2


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="no need is negative"):
        BatchOption(4, 1.0, 100.0, -1, 0)


# Routing


@pytest.mark.parametrize(
    ("rate_rps", "without", "with_timer"), [(433.34, 45.33, 44.33), (600, 59.79, 59.16), (1000, 64.00, 64.00)]
)
def test_the_mean_batch_before_its_timeout(rate_rps: float, without: float, with_timer: float) -> None:
    assert mean_batch(64, rate_rps, 100, timer=False) == pytest.approx(without, abs=0.005)
    assert mean_batch(64, rate_rps, 100) == pytest.approx(with_timer, abs=0.005)


@given(st.integers(1, 300), st.floats(0, 50_000), st.floats(0, 1000), st.booleans())
def test_mean_batches_are_between_one_and_full(batch: int, rate_rps: float, wait_ms: float, timer: bool) -> None:
    mean = mean_batch(batch, rate_rps, wait_ms, timer=timer)
    assert 1 - 1e-9 <= mean <= batch + 1e-9
    assert mean <= (1 if timer else 2) + rate_rps * wait_ms / 1000 + 1e-6


def test_planned_rates_are_in_proportion_to_what_replicas_serve() -> None:
    models = models_of(MIXED, 300, 300)
    found = most_goodput(models, 5)
    rates = planned_rates(models, found.contents)
    for at in range(len(models)):
        own = [
            rate
            for content, of in zip(found.contents, rates, strict=True)
            for (m, _), rate in zip(content, of, strict=True)
            if m == at
        ]
        assert sum(own) == pytest.approx(300)
        assert max(own) == pytest.approx(min(own))


def test_worker_modes() -> None:
    assert {name for name, mode in WORKER_MODES.items() if mode.is_limited} == {"igniter", "usher", "usher-wao"}
    assert all(mode.is_streaming for mode in WORKER_MODES.values())


# Least change


names_of = st.lists(st.lists(st.sampled_from("abcde"), max_size=3, unique=True), max_size=5)


@settings(deadline=None)
@given(names_of, names_of)
def test_no_labels_keep_more_replicas(new: list[list[str]], present: list[list[str]]) -> None:
    new, present = [each for each in new if each], [*present, *([[]] * max(0, len(new) - len(present)))]
    found = relabelled(new, present)

    def kept(labels: Sequence[int]) -> int:
        return sum(len(set(own) & set(present[at])) for own, at in zip(new, labels, strict=True))

    assert len(set(found)) == len(new)
    assert kept(found) == max(kept(labels) for labels in itertools.permutations(range(len(present)), len(new)))


def test_unchanged_contents_stay() -> None:
    assert relabelled([["b"], ["a"]], [["a"], ["b"], []]) == (1, 0)
    assert relabelled([["c"], ["a", "b"]], [["a", "b"], [], []]) == (1, 0)
    with pytest.raises(InputError, match="2 contents for 1 devices"):
        relabelled([["a"], ["b"]], [[]])


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """With rates instead of parts of rates, HiGHS printed to standard output here, where `--json` is."""
    for total in (3000, 5000):
        most_goodput(models_of(LANGUAGE_MIX, [total * 2 / 9] * 3 + [total / 6] * 2, 350), 4)
    assert capfd.readouterr().out == ""


@settings(deadline=None)
@given(st.integers(1, 7).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(rows, 9))), st.data())
def test_an_assignment_is_scipys(shape: tuple[int, int], data: st.DataObject) -> None:
    """Ties, of which there are many here, included."""
    costs = np.array(data.draw(st.lists(st.integers(-3, 3), min_size=math.prod(shape), max_size=math.prod(shape))))
    costs = costs.reshape(shape).astype(np.float64)
    assert cheapest_assignment(costs) == tuple(linear_sum_assignment(costs)[1])
