"""The frontier of price against worth: the choices that no other choice beats, the cheapest that is good enough, and
what each cheaper one gives up.

A choice is a pair of its price and its worth; less of the first is better, and more of the second.
"""

from collections.abc import Sequence

PricedWorth = tuple[float, float]
"""The price of a choice, and what it is worth."""


def frontier(choices: Sequence[PricedWorth]) -> list[int]:
    """The positions of the choices that no other beats, the cheapest first.

    A choice beats another if it costs no more and is worth no less, and one of both is better; of equal choices the
    first stays. Takes n log n steps.
    """
    found: list[int] = []
    for at in sorted(range(len(choices)), key=lambda at: (choices[at][0], -choices[at][1], at)):
        if not found or choices[at][1] > choices[found[-1]][1]:
            found.append(at)
    return found


def cheapest(choices: Sequence[PricedWorth], wanted: float) -> int | None:
    """The position of the cheapest choice that is worth `wanted` or more; of equally cheap ones, the one that is worth
    most. None if there is none."""
    return next((at for at in frontier(choices) if choices[at][1] >= wanted), None)


def cannot_be_better(choices: Sequence[PricedWorth], price: float, worth_max: float) -> bool:
    """Whether a choice of this price that is worth at most `worth_max` cannot be on the frontier with these."""
    return any(other <= price and worth >= worth_max for other, worth in choices)
