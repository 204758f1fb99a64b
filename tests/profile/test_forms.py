"""Forms: their values, and that tables keep the order of their cells everywhere."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.forms import Amdahl, Latency, Quadratic, Table

TABLE = Table({1: {1: 40.0, 4: 16.0}, 5: {1: 120.0, 4: 48.0}})


def test_values() -> None:
    assert Quadratic(alpha=2, beta=3, gamma=5).latency_ms(4, 7) == 2 * 16 + 3 * 4 + 5
    assert Amdahl(gamma=8, epsilon=4, delta=3, eta=5).latency_ms(2, 4) == 8 * 2 / 4 + 4 / 4 + 3 * 2 + 5


@pytest.mark.parametrize(
    ("batch", "cores", "latency_ms"),
    [
        (1, 1, 40.0),
        (5, 4, 48.0),
        (1, 2, 24.0),  # Amdahl: 8 + 32/c
        (3, 1, 80.0),  # half-way between rows
        (3, 2, 48.0),
        (1, 8, 16.0),  # more cores than measured bring nothing
        (1, 0.5, 80.0),  # fewer cost in proportion
        (7, 1, 160.0),  # the last slope, 20 ms per request, goes on
    ],
)
def test_table_between_and_beyond_its_cells(batch: int, cores: float, latency_ms: float) -> None:
    assert TABLE.latency_ms(batch, cores) == pytest.approx(latency_ms)


def test_table_below_its_smallest_batch_and_with_one_row() -> None:
    table = Table({4: {2: 30.0}})
    assert table.latency_ms(1, 2) == 30.0
    assert table.latency_ms(8, 2) == 60.0


@pytest.mark.parametrize("table", [{}, {1: {}}, {0: {1: 1.0}}, {1: {0: 1.0}}, {1: {1: -1.0}}, {1: {1: float("nan")}}])
def test_table_refuses_what_is_no_table(table: dict[int, dict[float, float]]) -> None:
    with pytest.raises(ValueError, match="table"):
        Table(table)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 16.0]), min_size=1, max_size=5, unique=True),
)
@settings(max_examples=100, deadline=None)
def test_a_monotone_table_gives_a_monotone_latency(batches: list[int], cores: list[float]) -> None:
    table = Table({batch: {core: (3 * batch + 7) / core + batch**1.5 + 2 for core in cores} for batch in batches})
    sizes = range(1, 50)
    for core in (0.1, 0.7, 1.0, 3.0, 20.0):
        row = [table.latency_ms(batch, core) for batch in sizes]
        assert all(high >= low - 1e-9 for low, high in itertools.pairwise(row))
    for batch in sizes:
        column = [table.latency_ms(batch, core) for core in (0.1, 0.25, 0.3, 1.0, 1.2, 4.0, 9.0, 30.0)]
        assert all(low >= high - 1e-9 for low, high in itertools.pairwise(column))


@pytest.mark.parametrize("form", [Quadratic(1, 2, 3), Amdahl(1, 2, 3, 4), TABLE])
def test_forms_survive_json(form: Latency) -> None:
    TABLE.latency_ms(2, 2)  # what it keeps for itself is not written
    raw = msgspec.json.encode(form)
    assert msgspec.json.decode(raw, type=Latency) == form
    assert msgspec.json.decode(raw)["form"] in ("quadratic", "amdahl", "table")
