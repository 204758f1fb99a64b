"""One tolerance, one definition of a quantile."""

import math

import numpy as np
import pytest

from sloop.quantities import at_least, quantile, rank, round_down, round_up
from sloop.streams import stream


def test_comparisons_ignore_rounding_and_nothing_more() -> None:
    assert 0.1 + 0.2 != 0.3
    assert at_least(0.3, 0.1 + 0.2)
    assert not at_least(0.3, 0.300001)
    assert round_up(0.6 / 0.1) == 6
    assert round_up(6.000001) == 7
    assert math.floor(0.3 / 0.1) == 2
    assert round_down(0.3 / 0.1) == 3
    assert round_down(2.999999) == 2


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.01, 1), (0.011, 2), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_the_smallest_value_with_that_share_at_or_below(share: float, expected: int) -> None:
    assert quantile(range(1, 101), share) == expected


def test_quantiles_agree_with_numpy_where_products_are_exact() -> None:
    random = stream(1, "quantiles")
    for count in range(1, 60):
        values = sorted(random.random() for _ in range(count))
        for share in (0.25, 0.5, 0.75, 1.0):
            assert quantile(values, share) == np.quantile(values, share, method="inverted_cdf")


def test_a_rank_does_not_suffer_from_the_error_of_its_product() -> None:
    assert math.ceil(0.07 * 100) == 8  # 7.000000000000001
    assert rank(0.07, 100) == 6
    for hundreds in range(1, 200):
        assert rank(0.99, 100 * hundreds) == 99 * hundreds - 1


def test_one_value_is_every_quantile() -> None:
    assert {quantile([3.0], share) for share in (0.0, 0.5, 0.99, 1.0)} == {3.0}
    with pytest.raises(AssertionError, match="nothing has no quantile"):
        rank(0.5, 0)
