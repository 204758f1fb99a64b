"""Usher: the published placements, groups and matchings against all, and placements that keep every promise."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.solvers.contents import WHOLE, BatchOption, needs
from sloop_systems.colocation import usher
from sloop_systems.colocation.experiments.scene import AO, MIXED, VISION, WAO, models_of, named
from sloop_systems.colocation.milp import SharedModel, most_goodput
from sloop_systems.colocation.usher import grouped, matching, needs_of, plan


def groups_of(models: Sequence[SharedModel], names: Sequence[Sequence[str]]) -> list[list[int]]:
    index = {model.name: at for at, model in enumerate(models)}
    return [[index[name] for name in group] for group in names]


# A1, A2: the worked examples of the thesis, on four GPUs


def test_order_inside_a_group() -> None:
    models = models_of(["alexnet", "gpt2", "resnet50", "t5"], 400, 200, AO)
    found = plan(models, 4)
    assert found.total_rps == pytest.approx(800, abs=0.01)
    assert named(models, found.contents) == [["resnet50 b32"], ["t5 b8"], ["t5 b8"], ["t5 b8"]]


def test_order_across_groups() -> None:
    models = models_of(["resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"], 400, 300, AO)
    found = plan(models, 4, groups=groups_of(models, [["bert", "gpt2", "resnet50"], ["mobilenet_v2", "vgg19"]]))
    assert found.total_rps == pytest.approx(793.57, abs=0.01)
    served = {model.name for model, rps in zip(models, found.served_rps, strict=True) if rps}
    assert served == {"resnet50", "bert"}


def test_the_multiplier_leaves_a_gpu_empty() -> None:
    models = models_of(["alexnet", "resnet50", "mobilenet_v2", "bert"], 500, 200, AO)
    found = plan(models, 4)
    assert found.total_rps == pytest.approx(1500)
    assert len(found.contents) == 3
    assert most_goodput(models, 4).total_rps == pytest.approx(1624.88, abs=0.01)
    *others, bert = models
    faster = tuple(
        BatchOption(each.batch, each.latency_ms, 125.0, each.compute, each.memory) if each.batch == 16 else each
        for each in bert.options
    )
    again = plan([*others, SharedModel("bert", 500, 200, faster)], 4)
    assert again.total_rps == pytest.approx(1625), "500 / 125.00 = 4 replicas, of which one finds room"


# A3: the table of estimates


@pytest.mark.parametrize(
    ("names", "rate_rps", "slo_ms", "metric", "groups", "expected"),
    [
        (
            VISION, 500, 200, AO,
            [["densenet121", "efficientnet_b7", "vgg19"], ["alexnet", "resnet50"]],
            [500, 1000, 1344.10, 1500, 2000, 2500],
        ),
        (
            VISION, 500, 200, WAO,
            [["alexnet", "resnet50", "vgg19"], ["densenet121", "efficientnet_b7"]],
            [1972.72, 2397.70, 2500, 2500, 2500, 2500],
        ),
        (MIXED, 300, 300, AO, [MIXED], [300, 600, 731.19, 862.38, 900, 1031.19, 1162.38, 1200]),
        (MIXED, 300, 300, WAO, [MIXED], [600, 600, 1200, 1200, 1200, 1200, 1200, 1200]),
    ],
)  # fmt: skip
def test_estimates(
    names: Sequence[str],
    rate_rps: float,
    slo_ms: float,
    metric: str,
    groups: Sequence[Sequence[str]],
    expected: Sequence[float],
) -> None:
    models = models_of(names, rate_rps, slo_ms, metric)
    pinned = groups_of(models, groups)
    found = [plan(models, devices, groups=pinned) for devices in range(1, len(expected) + 1)]
    assert [each.total_rps for each in found] == pytest.approx(expected, abs=0.01)
    if metric == WAO:
        assert len(found[-1].contents) == 3, "the same three GPUs for every larger cluster"


def test_key_placements() -> None:
    models = models_of(VISION, 500, 200, AO)
    pinned = groups_of(models, [["densenet121", "efficientnet_b7", "vgg19"], ["alexnet", "resnet50"]])
    three, four, six = (named(models, plan(models, n, groups=pinned).contents) for n in (3, 4, 6))
    assert three == [["densenet121 b128"], ["efficientnet_b7 b16"], ["vgg19 b16"]]
    assert four == [["densenet121 b16"], ["efficientnet_b7 b8"], ["efficientnet_b7 b8"], ["vgg19 b16"]]
    assert six == sorted([*four, ["resnet50 b4"], ["alexnet b4"]])
    by_wao = models_of(VISION, 500, 200, WAO)
    pinned = groups_of(by_wao, [["alexnet", "resnet50", "vgg19"], ["densenet121", "efficientnet_b7"]])
    assert named(by_wao, plan(by_wao, 3, groups=pinned).contents) == [
        ["alexnet b4", "resnet50 b4", "vgg19 b16"],
        ["densenet121 b16", "efficientnet_b7 b8"],
        ["efficientnet_b7 b8"],
    ]
    mixed = models_of(MIXED, 300, 300, WAO)
    pair = ["bert b4", "gpt2 b4"]
    assert named(mixed, plan(mixed, 3, groups=[[0, 1, 2, 3]]).contents) == [
        pair,
        pair,
        [*pair, "mobilenet_v2 b4", "resnet50 b4"],
    ]


# The groups (A4)


def first_round(models: Sequence[SharedModel]) -> tuple[int, str]:
    """The weight of the first matching in hundredths, and the model that is left out."""
    own = [needs_of(model) for model in models]
    weights = [[abs(a[0] + b[0] - a[1] - b[1]) for b in own] for a in own]
    pairs = matching(weights)
    (left,) = set(range(len(models))) - {at for pair in pairs for at in pair}
    return sum(weights[one][other] for one, other in pairs), models[left].name


@pytest.mark.parametrize(
    ("names", "weight", "left_out", "possible"),
    [
        (
            ["resnet50", "vgg19", "mobilenet_v2", "gpt2", "bert"], 33209, "resnet50",
            [
                {"bert gpt2 resnet50", "mobilenet_v2 vgg19"},
                {"gpt2 mobilenet_v2 resnet50", "bert vgg19"},
                {"gpt2 resnet50 vgg19", "bert mobilenet_v2"},
            ],
        ),
        (
            VISION, 34600, "efficientnet_b7",
            [
                {"densenet121 efficientnet_b7 vgg19", "alexnet resnet50"},
                {"efficientnet_b7 resnet50 vgg19", "alexnet densenet121"},
                {"alexnet efficientnet_b7 vgg19", "densenet121 resnet50"},
            ],
        ),
    ],
)  # fmt: skip
def test_groups_are_among_the_tied_ones(
    names: Sequence[str], weight: int, left_out: str, possible: list[set[str]]
) -> None:
    for order in itertools.permutations(names):
        models = models_of(order, 400, 300, AO)
        assert first_round(models) == (weight, left_out)
        found = {" ".join(sorted(models[at].name for at in group)) for group in grouped(models)}
        assert found in possible
        assert grouped(models) == grouped(models)


def all_matchings(nodes: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every set of pairs with as many nodes as possible."""
    if len(nodes) < 2:
        yield ()
        return
    first, *rest = nodes
    for other in rest:
        for pairs in all_matchings(tuple(at for at in rest if at != other)):
            yield ((first, other), *pairs)
    if len(nodes) % 2:
        yield from all_matchings(tuple(rest))


@given(st.integers(0, 7), st.data())
def test_no_matching_weighs_less_and_the_first_of_equals_wins(count: int, data: st.DataObject) -> None:
    drawn = {pair: data.draw(st.integers(0, 5)) for pair in itertools.combinations(range(count), 2)}
    weights = [[drawn.get((min(a, b), max(a, b)), 0) for b in range(count)] for a in range(count)]
    every = [pairs for pairs in all_matchings(tuple(range(count))) if len(pairs) == count // 2]
    best = min(every, key=lambda pairs: sum(drawn[pair] for pair in pairs))
    assert matching(weights) == list(best), "the first of the lightest, as enumerated"


def test_many_groups_are_matched_greedily() -> None:
    weights = [[abs(a + b - 20) for b in range(20)] for a in range(20)]
    pairs = matching(weights)
    assert sorted(at for pair in pairs for at in pair) == list(range(20))


# Placements


def test_groups_that_leave_out_a_model_are_refused() -> None:
    with pytest.raises(InputError, match="do not have each model exactly once"):
        plan(models_of(VISION, 500, 200), 2, groups=[[0, 1]])


def test_a_model_that_the_gpus_cannot_carry_is_not_served() -> None:
    (bert,) = models_of(["bert"], 500, 200, AO)
    assert usher.candidates([bert], 0, 4, 6) == [], "500 / 124.88 needs five"
    assert len(usher.candidates([bert], 0, 5, 6)) == 3


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[SharedModel], int]:
    models = []
    for at in range(draw(st.integers(1, 4))):
        batches = sorted(draw(st.sets(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=3)))
        options = tuple(
            BatchOption(
                batch,
                float(draw(st.integers(1, 40))),
                draw(st.integers(1, 40)) / 4,
                100 * draw(st.integers(1, 100)),
                100 * draw(st.integers(0, 100)),
            )
            for batch in batches
        )
        models.append(SharedModel(f"m{at}", draw(st.integers(1, 80)) / 4, 20.0, options))
    return models, draw(st.integers(1, 4))


@settings(max_examples=80)
@given(problems())
def test_placements_fit_and_the_integer_program_is_at_least_as_good(problem: tuple[list[SharedModel], int]) -> None:
    models, devices = problem
    found = plan(models, devices)
    assert len(found.contents) <= devices
    for content in found.contents:
        assert max(needs(content)) <= WHOLE
        assert len({at for at, _ in content}) == len(content)
        assert all(option in models[at].in_time for at, option in content)
    assert most_goodput(models, devices).total_rps >= found.total_rps - 1e-6, "it relaxes groups and multiplier"


@settings(max_examples=40)
@given(problems())
def test_pruning_changes_no_placement(problem: tuple[list[SharedModel], int]) -> None:
    """One group, all combinations in order, each placed: the first with most goodput and then fewest devices."""
    models, devices = problem
    group = tuple(range(len(models)))
    state = (usher._Device(),) * devices
    choices = [own for at in group if (own := usher.candidates(models, at, devices, 6))]
    best: tuple[float, int] = (0.0, 0)
    for combination in itertools.product(*choices) if choices else ():
        placed = usher._placed(models, combination, state, 0)
        if placed.served_rps > best[0] + 1e-9 or (placed.served_rps > best[0] - 1e-9 and placed.used < best[1]):
            best = placed.served_rps, placed.used
    found = plan(models, devices, groups=[group])
    assert found.total_rps == pytest.approx(best[0])
    assert len(found.contents) == best[1]
