"""How accurate a pipeline is: the product, the sum of ranks, and the product of ranks."""

import pytest

from sloop.solvers.accuracy import combined, fraction, pas, product, ranks, scores


def test_percent_and_fractions_mean_the_same() -> None:
    assert fraction(68.9) == pytest.approx(0.689)
    assert fraction(0.689) == 0.689
    assert fraction(1.0) == 1.0


def test_accuracies_of_stages_are_multiplied() -> None:
    assert pas((0.457, 0.6975)) == pytest.approx(0.3188, abs=1e-4)
    assert pas(()) == 1.0


def test_ranks_are_evenly_spaced_whatever_the_gaps() -> None:
    assert ranks((0.5, 0.9, 0.51), (1, 1, 1), ("a", "b", "c")) == [0.0, 1.0, 0.5]
    assert ranks((0.8,), (1,), ("alone",)) == [1.0]


def test_of_equally_accurate_variants_the_cheaper_ranks_higher() -> None:
    assert ranks((0.8, 0.8, 0.7), (1, 4, 1), ("a", "b", "c")) == [1.0, 0.5, 0.0]
    assert ranks((0.8, 0.8), (1, 1), ("a", "b")) == [0.0, 1.0]


def test_two_variants_in_the_middle_of_three_rank_one_together() -> None:
    """The published example of PAS'."""
    middle = scores("pas_rank", (0.1, 0.2, 0.9), (1, 1, 1), ("a", "b", "c"))[1]
    assert combined("pas_rank", (middle, middle)) == 1.0


def test_the_product_of_ranks_tells_the_worst_from_the_impossible() -> None:
    found = scores("norm_prod", (0.58, 0.64, 0.66), (1, 2, 4), ("s", "m", "l"))
    assert found == pytest.approx([0.05, 0.525, 1.0])
    assert combined("norm_prod", (found[0], found[2])) == pytest.approx(0.05)


def test_the_product_takes_accuracies_as_they_are() -> None:
    assert scores("pas", (0.3, 0.2), (1, 1), ("a", "b")) == [0.3, 0.2]
    assert combined("pas", (0.3, 0.2)) == pytest.approx(0.06)


@pytest.mark.parametrize(
    ("accuracies", "together"), [([0.9, 0.8], 0.72), ([90.0, 80.0], 72.0), ([76.1], 76.1), ([0.5, 1.0], 0.5)]
)
def test_a_product_is_on_the_scale_of_what_it_is_of(accuracies: list[float], together: float) -> None:
    assert product(accuracies) == pytest.approx(together)
