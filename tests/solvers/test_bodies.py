"""Shadows and bodies: the worked example of AsyFunc's specification (section 2.12), and the laws of a pair."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.profile.pairs import MIB, BlockCosts, Floats, SharedBlocks, runs_of
from sloop.solvers.bodies import (
    Objective,
    capacity_rps,
    choose_body,
    choose_shadow,
    largest_batch,
    rank_correlation,
    shadow_candidates,
    shadow_efficiency,
)

# The worked example, section 2.12

WORK = (60.0, 30.0, 6.0)
SLO_MS = 99.0


def example_ms(cores: int) -> Floats:
    """Three blocks in a chain: 1 ms + rows × work / cores."""
    return np.array([[0.0, *(1 + batch * work / cores for batch in range(1, 5))] for work in WORK])


EXAMPLE = BlockCosts(
    example_ms(2), example_ms(4), (1.0 * MIB, 4.0 * MIB, 95.0 * MIB), WORK, (0.5e6, 2e6, 1e6, 0.1e6), 4, SLO_MS
)
EXAMPLE_WHOLE = np.array([np.zeros(5), *(example_ms(cores).sum(axis=0) for cores in range(1, 5))])


def test_latencies_and_capacities_of_the_example() -> None:
    assert EXAMPLE_WHOLE[1:, 1:].tolist() == [
        [99, 195, 291, 387],
        [51, 99, 147, 195],
        [35, 67, 99, 131],
        [27, 51, 75, 99],
    ]
    assert [round(capacity_rps(row, SLO_MS), 3) for row in EXAMPLE_WHOLE[1:]] == [10.101, 20.202, 30.303, 40.404]
    assert [largest_batch(row, SLO_MS) for row in EXAMPLE_WHOLE[1:]] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("weight", "rates", "cores", "batch", "efficiency"),
    [
        (64, (10, 20), 1, 1, 10.2588),
        (64, (40, 60), 4, 2, 10.4167),
        (64, (100, 200, 1000), 4, 3, 10.625),
        (4, (10,), 4, 1, 18.5185),
        (4, (40,), 4, 2, 19.6078),
        (4, (100,), 4, 3, 20.0),
    ],
)
def test_bodies_of_the_example(
    weight: float, rates: tuple[float, ...], cores: int, batch: int, efficiency: float
) -> None:
    for rate in rates:
        found = choose_body(EXAMPLE_WHOLE, rate, SLO_MS, weight)
        assert found is not None
        assert (found.cores, found.batch) == (cores, batch)
        assert found.efficiency == pytest.approx(efficiency, abs=5e-5)


def test_no_body_where_the_slo_cannot_be_kept() -> None:
    assert choose_body(EXAMPLE_WHOLE, 10, 20.0, 64) is None
    resting = choose_body(EXAMPLE_WHOLE, 0, SLO_MS, 64)
    assert resting is not None
    assert resting.batch == 1, "without requests no batch fills"


def test_shadows_of_the_example() -> None:
    assert EXAMPLE.ranked() == [0, 1, 2]
    found = shadow_candidates(EXAMPLE, EXAMPLE.ranked())
    assert [each.shared.blocks for each in found] == [(0,), (0, 1)], "all three take too long to load"
    assert [round(each.load_ms, 4) for each in found] == [7.412, 10.26]
    assert [each.batch for each in found] == [3, 4]
    assert [each.split[:2] for each in found] == [(1, 2), (1, 3)]
    assert [(round(s.body_ms, 3), round(s.shadow_ms, 3)) for s in (each.split for each in found)] == [
        (31, 34.1),
        (47, 72.35),
    ]
    assert [round(each.split.rest_ms, 3) for each in found] == [56, 13]
    assert [round(each.split.latency_ms, 3) for each in found] == [90.1, 85.35]
    assert [round(each.load_ms + each.split.latency_ms, 3) for each in found] == [97.512, 95.61]
    assert [round(each.booked_rps, 2) for each in found] == [33.30, 46.87]
    assert [round(shadow_efficiency(each, 64), 3) for each in found] == [40.233, 19.772]
    assert [round(shadow_efficiency(each, 64, printed=True), 3) for each in found] == [5.896, 9.337]
    assert EXAMPLE.moves.loading_ms(100 * MIB) == pytest.approx(77.9)


@pytest.mark.parametrize(
    ("objective", "need_rps", "blocks", "gain"),
    [
        ("literal", 0.0, (0,), 1.65),
        ("printed", 0.0, (0, 1), 2.32),
        ("demand", 13.09, (0,), 1.65),
        ("demand", 13.10, (0, 1), 2.32),
        ("demand", 26.66, (0, 1), 2.32),
        ("demand", 1000.0, (0, 1), 2.32),
    ],
)
def test_objectives_of_the_example(objective: Objective, need_rps: float, blocks: tuple[int, ...], gain: float) -> None:
    found = choose_shadow(shadow_candidates(EXAMPLE, EXAMPLE.ranked()), 64, objective, need_rps)
    assert found is not None
    assert found.shared.blocks == blocks
    assert round(found.booked_rps / capacity_rps(EXAMPLE.alone_ms, SLO_MS), 2) == gain


def test_dispatch_of_the_pair_of_the_example() -> None:
    shared = SharedBlocks(EXAMPLE, (0, 1))
    splits = [shared.split(batch) for batch in range(1, 5)]
    assert [split[:2] for split in splits] == [(0, 1), (1, 1), (1, 2), (1, 3)]
    assert [round(split.latency_ms, 2) for split in splits] == [29.85, 54, 59.1, 85.35]
    faster_ms = np.minimum(np.array(shared.pair_ms), EXAMPLE.alone_ms)
    assert round(capacity_rps(faster_ms, SLO_MS), 2) == 50.76


# Laws of a pair


@st.composite
def block_costs(draw: st.DrawFn) -> BlockCosts:
    random: Any = np.random.default_rng(draw(st.integers(0, 10**6)))
    count, batches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    work, fixed = random.lognormal(1, 1, count), random.uniform(0, 1, count)

    def table(cores: float) -> Floats:
        rows = np.arange(batches + 1)
        return np.asarray(fixed[:, None] * (rows > 0) + work[:, None] * rows / cores)

    body_cores, shadow_cores = (draw(st.integers(1, 4)) for _ in range(2))
    return BlockCosts(
        table(body_cores),
        table(shadow_cores),
        tuple(random.lognormal(14, 2, count)),
        tuple(work),
        tuple(random.lognormal(12, 1, count + 1)),
        shadow_cores,
        float(table(4).sum(axis=0)[-1] * draw(st.floats(0.5, 3))),
    )


@settings(max_examples=60, deadline=None)
@given(block_costs(), st.booleans())
def test_candidates_keep_their_promises(costs: BlockCosts, is_ranked: bool) -> None:
    """Check 2 of section 7.4."""
    order = costs.ranked() if is_ranked else costs.prefix()
    for found in shadow_candidates(costs, order):
        blocks, split = found.shared.blocks, found.split
        assert blocks == tuple(order[: len(blocks)]), "always the first of the order"
        assert split.body_rows + split.shadow_rows == found.batch
        assert split.shadow_rows >= 1
        assert found.load_ms + split.latency_ms <= costs.slo_ms
        assert found.booked_rps > capacity_rps(costs.alone_ms, costs.slo_ms)
        if not is_ranked:
            assert len(runs_of(blocks)) == 1


@settings(max_examples=60, deadline=None)
@given(block_costs(), st.data())
def test_a_split_is_the_most_even(costs: BlockCosts, data: st.DataObject) -> None:
    count = len(costs.size_bytes)
    blocks = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    shared, batch = SharedBlocks(costs, tuple(blocks)), data.draw(st.integers(1, costs.batch_max))
    runs = runs_of(blocks)
    moved = sum(costs.crossing_bytes[first] + costs.crossing_bytes[last + 1] for first, last in runs)

    def shadow_ms(rows: int) -> float:
        if not rows:
            return 0.0
        alone = sum(float(costs.shadow_ms[block, rows]) for block in blocks)
        return alone + rows * moved * 0.5e-6 + 2 * 0.3 * len(runs)

    def apart_ms(rows: int) -> float:
        return abs(sum(float(costs.body_ms[block, rows]) for block in blocks) - shadow_ms(batch - rows))

    split = shared.split(batch)
    assert apart_ms(split.body_rows) == pytest.approx(min(map(apart_ms, range(batch + 1))), abs=1e-9)
    assert split.shadow_ms == pytest.approx(shadow_ms(split.shadow_rows))
    others = sum(float(costs.body_ms[block, batch]) for block in range(count) if block not in blocks)
    assert split.rest_ms == pytest.approx(others, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(block_costs(), st.floats(0.5, 200), st.floats(0.1, 50))
def test_demand_takes_the_cheapest_that_is_enough(costs: BlockCosts, weight: float, need_rps: float) -> None:
    found = shadow_candidates(costs, costs.prefix())
    chosen = choose_shadow(found, weight, "demand", need_rps)
    if chosen is None:
        assert not found
        return
    alone_rps = capacity_rps(costs.alone_ms, costs.slo_ms)
    enough = [each for each in found if each.booked_rps - alone_rps >= need_rps]
    if enough:
        assert chosen.shared.size_bytes == min(each.shared.size_bytes for each in enough)
    else:
        assert chosen.booked_rps == max(each.booked_rps for each in found)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.5, 300), st.floats(1, 200))
def test_a_body_is_the_best_of_its_rule(seed: int, rate: float, weight: float) -> None:
    """Check 1: the most efficient among the candidates that the printed search visits, each within the SLO."""
    random = np.random.default_rng(seed)
    table = np.array([[(batch and 3.0) + batch * 20 / max(cores, 1) for batch in range(5)] for cores in range(5)])
    table[1:, 1:] *= random.uniform(0.9, 1.1, (4, 4))
    slo_ms = float(table[4, 4])
    found = choose_body(table, rate, slo_ms, weight)
    assert found is not None
    assert 1e3 * (found.batch - 1) / rate + table[found.cores, found.batch] <= slo_ms
    largest = [
        1e3 * batch * (1 / cores + 1 / weight) / float(table[cores, batch])
        for cores in range(1, 5)
        for batch in [max((b for b in range(1, 5) if 1e3 * (b - 1) / rate + table[cores, b] <= slo_ms), default=0)]
        if batch
    ]
    assert found.efficiency >= max(largest) - 1e-9


def test_correlations_of_simple_rows() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    assert np.isnan(rank_correlation([1, 1], [1, 2]))
    assert rank_correlation([1, 1, 2], [1, 2, 3]) == pytest.approx(0.8660, abs=1e-4)
