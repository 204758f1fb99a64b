from hypothesis import given
from hypothesis import strategies as st

from sloop import units


def test_edges_convert_to_integer_nanoseconds() -> None:
    assert units.ms(2.5) == 2_500_000
    assert units.s(0.1) == 100_000_000
    assert isinstance(units.ms(0.3), int)


def test_rounds_to_nearest_rather_than_down() -> None:
    assert units.ms(0.1 + 0.2) == 300_000
    assert units.s(0.6 / 0.1) == 6 * units.NS_PER_S


@given(st.integers(0, 10**15))
def test_float_units_read_back(value_ns: int) -> None:
    assert units.ms(units.to_ms(value_ns)) == value_ns
    assert units.s(units.to_s(value_ns)) == value_ns


def test_forever_is_later_than_any_sum_of_instants_and_fits_64_bits() -> None:
    assert units.s(290 * 365.25 * 86_400) < units.FOREVER_NS
    assert 2.5 * units.LONGEST_NS < units.FOREVER_NS
    assert units.FOREVER_NS.bit_length() == 63
