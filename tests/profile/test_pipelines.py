"""What a pipeline takes, against the exact line of the Flashpoint specification (section 2.3)."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.estimate import Estimate
from sloop.profile.pipelines import (
    layer_share,
    member_ms,
    moving_ms,
    passed_line,
    pipeline_shares,
    stations_ms,
    whole_ms,
)
from sloop.solvers.cuts import PieceCosts
from sloop.units import ms
from sloop.vocabulary import ALONE, LINK_MBPS, LayerSet, Slot, bounds_of, parts_at
from tests.profile.test_blocks import EXAMPLE, PROFILE

SLOT = Slot(2.0)
TIMES = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(TIMES.filter(lambda times: len(times) % 2), st.integers(1, 12))
def test_requests_that_come_together_leave_as_the_formula_says(stations: list[int], count: int) -> None:
    """L(p, x) = B (x - 1) + I, exactly."""
    left: list[float] = []
    for request in range(count):
        left = passed_line(0, stations, left)
        assert left[-1] == max(stations) * request + sum(stations)


@given(TIMES, st.lists(st.integers(0, 200), min_size=1, max_size=12))
def test_no_two_requests_are_in_one_station_and_none_waits_without_need(stations: list[int], comes: list[int]) -> None:
    """Against the recursion by instants: a batch enters a station when it has left the one before and the one ahead of
    it has left this one."""
    before: list[float] = []
    for now in sorted(comes):
        left = passed_line(now, stations, before)
        entered = [max(now, before[0]) if before else now, *left[:-1]]
        for place, taken in enumerate(stations):
            done = entered[place] + taken
            free = before[place + 1] if before and place + 1 < len(stations) else done
            assert left[place] == max(done, free)
            assert not before or entered[place] >= before[place]
        before = left


@given(TIMES.filter(lambda times: len(times) % 2 and max(times)))
def test_a_busy_member_takes_what_is_believed(stations: list[int]) -> None:
    """Each of p members begins a batch when its last one has left: in the long run each takes max(I, p·B)."""
    parts = (len(stations) + 1) // 2
    free, left = [0.0] * parts, list[float]()
    for _ in range(60):
        for member in range(parts):
            left = passed_line(free[member], stations, left)
            free[member] = left[-1]
    last = free[0]
    left = passed_line(free[0], stations, left)
    assert left[-1] - last == pytest.approx(member_ms(stations), abs=1e-6) or left[-1] - last <= member_ms(stations)
    assert (free[-1]) / 60 == pytest.approx(member_ms(stations), rel=0.1)


def test_the_solver_and_the_pipeline_agree() -> None:
    bounds = (0, 1, 2, len(EXAMPLE.blocks))
    stations = stations_ms(EXAMPLE, 2.0, bounds, 1)
    costs = PieceCosts(
        (1.0,) * len(EXAMPLE.blocks),
        tuple(stations_ms(EXAMPLE, 2.0, range(len(EXAMPLE.blocks) + 1), 1)[::2]),
        tuple(moving_ms(each.crossing_bytes, LINK_MBPS) for each in EXAMPLE.blocks[:-1]),
    )
    plan = costs.plan(bounds[1:-1])
    assert sum(stations) == pytest.approx(plan.request_s)
    assert max(stations) == pytest.approx(plan.slowest_s)
    assert moving_ms(1_000_000, 8.0) == 1000.0
    assert moving_ms(1_000_000, 0.0) == 0.0, "a link without a limit"


def test_shares_of_layers_sum_to_the_model() -> None:
    bounds = (0, 1, 2, len(EXAMPLE.blocks))
    assert sum(layer_share(EXAMPLE, LayerSet(*layers)) for layers in pairwise(bounds)) == pytest.approx(1.0)
    assert layer_share(EXAMPLE, LayerSet(0, 2).others) == pytest.approx(1 - layer_share(EXAMPLE, LayerSet(0, 2)))


def test_a_form_is_as_slow_as_a_busy_member_and_learns_apart() -> None:
    shape = parts_at((0, 2, len(EXAMPLE.blocks)))
    whole = Estimate(PROFILE)
    part = whole.of(shape)
    shares = pipeline_shares(EXAMPLE, 2.0, bounds_of(shape), PROFILE.max_batch)
    own_ms = whole_ms(EXAMPLE, 2.0, 1)
    assert shares[1] * own_ms == pytest.approx(member_ms(stations_ms(EXAMPLE, 2.0, bounds_of(shape), 1)))
    assert part.costs_ns(SLOT)[1] == pytest.approx(whole.costs_ns(SLOT)[1] * shares[1], abs=1)
    before_ns = whole.costs_ns(SLOT)
    for _ in range(256):
        part.observe(1, SLOT, 2 * part.costs_ns(SLOT)[1] + ms(1))
    assert part.correction > 1.0
    assert whole.costs_ns(SLOT) == before_ns
    assert whole.of(ALONE) is whole
    bare = Estimate(structs.replace(PROFILE, layers=None))
    assert bare.of(shape).costs_ns(SLOT) == bare.costs_ns(SLOT), "without layers nothing is known of parts"
