"""Usher: groups and matchings against all, and placements that keep every promise. Rows A1 to A4 have the published
placements and estimates (`test_experiments`)."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.solvers.contents import WHOLE_DEVICE, BatchOption, content_needs
from sloop_systems.colocation import usher
from sloop_systems.colocation.experiments.scene import AO, VISION, models_of
from sloop_systems.colocation.milp import SharedModel, most_goodput
from sloop_systems.colocation.usher import grouped, matching, needs_of, plan

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
        assert max(content_needs(content)) <= WHOLE_DEVICE
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
