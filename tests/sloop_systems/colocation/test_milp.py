"""Contents of devices and the most goodput: both forms of the program, routing, relabelling. Rows A1 to A5 have the
published placements and estimates (`test_experiments`)."""

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
from sloop.solvers.contents import (
    WHOLE_DEVICE,
    BatchOption,
    cheapest_assignment,
    content_needs,
    possible_contents,
    relabelled,
)
from sloop_systems.colocation.experiments.scene import (
    LANGUAGE_MIX,
    MIXED,
    VISION,
    models_of,
    named,
    options_of,
)
from sloop_systems.colocation.milp import SHARES_ARE_LIMITS, SharedModel, mean_batch, most_goodput, planned_rates


def test_of_equal_placements_the_one_with_small_batches() -> None:
    models = models_of(["resnet50"], 400, 300)
    assert named(models, most_goodput(models, 2).contents) == [["resnet50 b4"]]
    large = most_goodput(models, 2, small=-1e-4)
    assert named(models, large.contents) == [["resnet50 b128"]]


# A5: what may share a device


def test_known_pairs_by_sm_use() -> None:
    def content(*names: tuple[str, int]) -> int:
        return sum(each.compute for name, batch in names for each in options_of(name) if each.batch == batch)

    assert content(("resnet50", 4), ("alexnet", 4)) == 8333
    assert content(("efficientnet_b7", 8), ("densenet121", 16)) == 9765
    heavy = [options_of(name) for name in ("bert", "gpt2", "vgg19")]
    assert all(
        a.compute + b.compute > WHOLE_DEVICE
        for one, other in itertools.combinations(heavy, 2)
        for a in one
        for b in other
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
        rows.append(({x[c, device]: options[c][1].compute for c in range(len(options))}, -math.inf, WHOLE_DEVICE))
        rows.append(({x[c, device]: options[c][1].memory for c in range(len(options))}, -math.inf, WHOLE_DEVICE))
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
        assert max(content_needs(content)) <= WHOLE_DEVICE
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


def test_shares_are_limits_where_the_thesis_has_them_so() -> None:
    assert {name for name, is_limit in SHARES_ARE_LIMITS.items() if is_limit} == {"igniter", "usher", "usher-wao"}


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
