"""Range checks name key, value, range and unit."""

import math

import pytest

from sloop.errors import InputError
from sloop.policies.bounds import above, at_least, between, within
from sloop.units import ms


def test_what_is_in_range_passes() -> None:
    at_least("queue_max", 1, 1)
    above("cores", 0.1, 0)
    within("margin", 1, 0, 1)


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf])
def test_what_is_out_of_range_is_named(value: float) -> None:
    with pytest.raises(InputError, match=rf"cores = {value:g} is out of range\nhelp: cores must be above 0"):
        above("cores", value, 0)


def test_durations_are_named_as_users_write_them() -> None:
    with pytest.raises(InputError, match=r"wait_ms = -2.5 is out of range\nhelp: wait_ms must be at least 0"):
        at_least("wait_ns", ms(-2.5), 0)


def test_both_ends_may_be_in_it() -> None:
    for end in (0, 1):
        between("share", end, 0, 1)
    for value in (-0.1, 1.01, math.nan, math.inf):
        with pytest.raises(InputError, match="share must be at least 0 and at most 1"):
            between("share", value, 0, 1)


def test_both_ends_are_named() -> None:
    for value in (0, 1.01, math.nan):
        with pytest.raises(InputError, match="margin must be above 0 and at most 1"):
            within("margin", value, 0, 1)
