"""The frontier against its definition, and the choice against all choices."""

from hypothesis import given
from hypothesis import strategies as st

from sloop.solvers.frontier import PricedWorth, cannot_be_better, cheapest, frontier

FIGURE = st.integers(0, 6).map(lambda value: value / 4)
CHOICES = st.lists(st.tuples(FIGURE, FIGURE), max_size=12)


def beats(one: PricedWorth, other: PricedWorth) -> bool:
    return one[0] <= other[0] and one[1] >= other[1] and one != other


@given(CHOICES)
def test_nothing_beats_what_is_on_the_frontier_and_something_all_else(choices: list[PricedWorth]) -> None:
    on = frontier(choices)
    expected = {
        at
        for at, own in enumerate(choices)
        if not any(beats(other, own) for other in choices) and own not in choices[:at]
    }
    assert set(on) == expected
    assert [choices[at] for at in on] == sorted(choices[at] for at in on)


@given(CHOICES, FIGURE)
def test_the_cheapest_is_good_enough_and_nothing_cheaper_is(choices: list[PricedWorth], wanted: float) -> None:
    at = cheapest(choices, wanted)
    enough = [own for own in choices if own[1] >= wanted]
    assert (at is None) == (not enough)
    if at is not None:
        assert choices[at] in enough
        assert choices[at][0] == min(price for price, _ in enough)


@given(CHOICES, FIGURE, FIGURE)
def test_who_wants_more_pays_no_less(choices: list[PricedWorth], one: float, other: float) -> None:
    less, more = cheapest(choices, min(one, other)), cheapest(choices, max(one, other))
    if more is not None:
        assert less is not None
        assert choices[less][0] <= choices[more][0]


@given(CHOICES, st.integers(0, 11), FIGURE)
def test_a_higher_price_never_makes_a_choice_the_cheapest(
    choices: list[PricedWorth], which: int, wanted: float
) -> None:
    at = cheapest(choices, wanted)
    which %= max(1, len(choices))
    if at is None or which == at:
        return
    dearer = [
        (price + 1.0, worth) if place == which else (price, worth) for place, (price, worth) in enumerate(choices)
    ]
    found = cheapest(dearer, wanted)
    assert found is not None
    assert dearer[found] == choices[at]


@given(CHOICES, FIGURE, FIGURE, FIGURE)
def test_what_cannot_be_better_is_never_on_the_frontier(
    choices: list[PricedWorth], price: float, most: float, less: float
) -> None:
    if cannot_be_better(choices, price, most):
        worth = max(0.0, most - less)
        assert len(choices) not in frontier([*choices, (price, worth)])
