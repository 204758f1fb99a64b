"""From measured layers to pair times: beliefs and the truth, against the pair computed by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.profile.blocks import block_costs, pair_shares, shadow_load_ms, shared_blocks, true_pair_shares
from sloop.profile.estimate import EVERY, Estimate
from sloop.profile.pairs import MIB, MoveCosts, runs_of
from sloop.profile.profile import LayerBlock, LayerProfile, ParametricLatency, Profile
from sloop.units import ms
from sloop.vocabulary import Slot, Worker

WORK_MS, SIZES_MIB, CROSSING = (60.0, 30.0, 6.0), (1, 4, 95), (2_000_000, 1_000_000, 100_000)


def block(work_ms: float, mib: float, crossing_bytes: int, multiply_adds: float = 0.0) -> LayerBlock:
    return LayerBlock(
        end="",
        operators="Conv",
        layers=1,
        param_bytes=int(mib * MIB),
        output_bytes=crossing_bytes,
        crossing_bytes=crossing_bytes,
        load_ms=6.7 + 0.712 * mib,
        latency_ms=ParametricLatency(1.0, work_ms, 0.0, 0.0, 1.0),
        multiply_adds=multiply_adds,
    )


def layers_of(*blocks: LayerBlock, load_ms: float = 6.7 + 0.712 * 100) -> LayerProfile:
    work_ms = sum(each.latency_ms.latency_ms(1, 1.0) - 1 for each in blocks)
    return LayerProfile(
        blocks=blocks,
        load_ms=load_ms,
        latency_ms=ParametricLatency(float(len(blocks)), work_ms, 0.0, 0.0, 1.0),
        input_bytes=500_000,
        move_ms_per_mb=0.5,
        difference=0.0,
    )


EXAMPLE = layers_of(*map(block, WORK_MS, SIZES_MIB, CROSSING))
"""Section 2.12 of AsyFunc's specification: three blocks in a chain."""
PROFILE = Profile(latency_ms=EXAMPLE.latency_ms, max_batch=4, max_cores=4, memory_bytes=100 * MIB, layers=EXAMPLE)
PAIR = (Worker(4.0, (0, 1)),)


def test_the_pair_of_the_worked_example() -> None:
    whole = Estimate(PROFILE)
    pair, slot = whole.of(PAIR), Slot(2.0)
    assert [round(pair.latency_ms(batch, slot), 6) for batch in (1, 2, 3, 4)] == [29.85, 54.0, 59.1, 85.35]
    assert pair.costs_ns(slot) == (0, ms(29.85), ms(54), ms(59.1), ms(85.35))
    assert whole.costs_ns(slot) == (0, ms(51), ms(99), ms(147), ms(195))
    assert shadow_load_ms(EXAMPLE, Worker(4.0, (0,))) == pytest.approx(7.412)
    assert shadow_load_ms(EXAMPLE, Worker(4.0, (0, 1))) == pytest.approx(10.26)
    assert shared_blocks(EXAMPLE, 2.0, Worker(4.0, (0, 1, 2)), 4).load_ms == pytest.approx(77.9)
    assert (whole.memory_bytes, pair.memory_bytes) == (100 * MIB, 105 * MIB)
    assert whole.blocks(2.0, 4.0) is not None
    assert Estimate(structs.replace(PROFILE, layers=None)).blocks(2.0, 4.0) is None


def test_a_pair_is_never_believed_slower_than_its_body() -> None:
    """A shadow with a tenth of a core: it would be slower, so batches run on the body alone."""
    whole, slot = Estimate(PROFILE), Slot(4.0)
    slow = whole.of((Worker(0.001, (2,)),))
    assert slow.costs_ns(slot) == whole.costs_ns(slot)
    assert true_pair_shares(EXAMPLE, 4.0, Worker(0.001, (2,)), 4) == (1.0,) * 5


def test_without_layers_a_form_is_as_fast_as_the_whole_until_it_learns() -> None:
    whole = Estimate(structs.replace(PROFILE, layers=None))
    assert whole.of(PAIR).costs_ns(Slot(2.0)) == whole.costs_ns(Slot(2.0))
    assert whole.of(PAIR).memory_bytes == whole.memory_bytes


def test_a_pair_learns_a_factor_of_its_own() -> None:
    whole, slot = Estimate(PROFILE), Slot(2.0)
    pair = whole.of(PAIR)
    for _ in range(60 * EVERY):
        pair.observe(4, slot, ms(85.35 * 1.2))
    assert pair.correction == pytest.approx(1.2, abs=0.01)
    assert pair.costs_ns(slot)[4] == pytest.approx(ms(85.35 * 1.2), rel=0.01)
    assert whole.correction == 1.0


def test_blocks_without_multiply_adds_are_ranked_by_their_time() -> None:
    assert block_costs(EXAMPLE, 2.0, 4.0, 4).ranked() == [0, 1, 2]
    by_work = layers_of(
        *(
            block(*each, multiply_adds)
            for each, multiply_adds in zip(zip(WORK_MS, SIZES_MIB, CROSSING, strict=True), (1.0, 1e3, 1e6), strict=True)
        )
    )
    assert block_costs(by_work, 2.0, 4.0, 4).ranked() == [2, 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 60), st.floats(0.1, 50), st.integers(1, 3_000_000)), min_size=1, max_size=6),
    st.data(),
)
def test_the_truth_waits_at_the_end_of_each_run(rows: list[tuple[float, float, int]], data: st.DataObject) -> None:
    """Against the sum by hand; with one run it is what the belief says."""
    layers = layers_of(*(block(*row) for row in rows), load_ms=6.7 + sum(0.712 * mib for _, mib, _ in rows))
    blocks = tuple(sorted(data.draw(st.sets(st.integers(0, len(rows) - 1), min_size=1))))
    cores, shadow = data.draw(st.sampled_from((1.0, 2.0, 4.0))), Worker(data.draw(st.sampled_from((1.0, 4.0))), blocks)
    shared = shared_blocks(layers, cores, shadow, 4)
    believed, true = (shares(layers, cores, shadow, 4) for shares in (pair_shares, true_pair_shares))
    crossing = (layers.input_bytes, *(each.crossing_bytes for each in layers.blocks))
    for batch in range(1, 5):
        body_rows, shadow_rows, *_ = shared.split(batch)
        alone_ms = sum(1 + batch * work_ms / cores for work_ms, _, _ in rows)
        waited_ms = sum(1 + batch * work_ms / cores for at, (work_ms, _, _) in enumerate(rows) if at not in blocks)
        for first, last in runs_of(blocks):
            work = [rows[at][0] for at in range(first, last + 1)]
            body_ms = sum(1 + body_rows * each / cores for each in work) if body_rows else 0.0
            moved_ms = shadow_rows * (crossing[first] + crossing[last + 1]) * MoveCosts().move_ms_per_byte + 0.6
            shadow_ms = sum(1 + shadow_rows * each / shadow.cores for each in work) + moved_ms if shadow_rows else 0.0
            waited_ms += max(body_ms, shadow_ms)
        assert believed[batch] == pytest.approx(min(1.0, shared.pair_ms[batch] / alone_ms))
        assert true[batch] == pytest.approx(waited_ms / alone_ms if shared.pair_ms[batch] < alone_ms else 1.0)
        assert true[batch] >= believed[batch] - 1e-9
        if len(runs_of(blocks)) == 1:
            assert true[batch] == pytest.approx(believed[batch])
