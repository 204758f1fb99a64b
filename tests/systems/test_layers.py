"""Proposals from measured layers: where to cut, and what a shadow should hold, against numbers made by hand."""

import pytest

from sloop.profile.profile import LatencyTable, LayerBlock, LayerProfile
from sloop.systems.layers import BlockTable, layer_proposals

MB = 1_000_000


def block(name: str, work_ms: float, param_mb: float, load_ms: float, crossing_bytes: int = 1000) -> LayerBlock:
    """`work_ms` for each row."""
    return LayerBlock(
        end=name,
        operators="Conv",
        layers=1,
        param_bytes=int(param_mb * MB),
        output_bytes=crossing_bytes,
        crossing_bytes=crossing_bytes,
        load_ms=load_ms,
        latency_ms=LatencyTable({batch: {1.0: batch * work_ms, 2.0: batch * work_ms / 2} for batch in (1, 4)}),
    )


def profile(*blocks: LayerBlock, load_ms: float) -> LayerProfile:
    work_ms = sum(each.latency_ms.latency_ms(1, 1.0) for each in blocks)
    return LayerProfile(
        blocks=blocks,
        load_ms=load_ms,
        latency_ms=LatencyTable({batch: {1.0: batch * work_ms, 2.0: batch * work_ms / 2} for batch in (1, 4)}),
        input_bytes=1000,
        move_ms_per_mb=1.0,
        difference=0.0,
    )


NETWORK = profile(block("early", 40, 1, 12), block("middle", 40, 3, 32), block("late", 2, 100, 1002), load_ms=1042)
"""Convolutions that compute, and a dense layer that weighs; every load takes 2 ms whatever the size."""


def test_how_compute_and_weight_relate() -> None:
    found = layer_proposals(NETWORK)
    assert found.half_compute_share == pytest.approx((1 + 3) / 104), "the first has 160 of 328 ms, just too little"
    assert found.correlation == pytest.approx(-0.8660, abs=1e-4)
    assert (found.batch, found.shadow_batch, found.cores) == (1, 4, 1.0)
    alike = profile(block("a", 1, 1, 1), block("b", 1, 2, 1), load_ms=2)
    assert layer_proposals(alike).correlation is None


def test_what_every_load_takes() -> None:
    """Three blocks take 1046 ms together, the whole model 1042: 2 ms for each load beyond the first."""
    table = BlockTable(NETWORK)
    assert table.costs.moves.load_ms == pytest.approx(2)
    assert table.load_ms([0, 1]) == pytest.approx(42)
    assert BlockTable(NETWORK, fetch_mbps=8.0).load_ms([0, 1]) == pytest.approx(42 + 4000), "a megabyte each second"


def test_proposed_cuts() -> None:
    halves, thirds = layer_proposals(NETWORK).cuts
    assert (halves.pieces, halves.after) == (2, ("middle",))
    assert halves.load_ms == pytest.approx(1002)
    assert halves.load_saved_ms == pytest.approx(40)
    assert halves.slowest_ms == pytest.approx(80)
    assert halves.request_ms == pytest.approx(82 + 0.3 + 0.001), "one transfer of 1000 bytes"
    assert halves.param_bytes_max == 100 * MB
    assert thirds.after == ("early", "middle")


def test_proposed_cuts_keep_the_memory() -> None:
    assert [each.pieces for each in layer_proposals(NETWORK, memory_bytes_max=102 * MB).cuts] == [2, 3]
    tight = layer_proposals(NETWORK, memory_bytes_max=3.5 * MB)
    assert tight.cuts == (), "one block alone is too heavy"
    assert tight.queues == ()


def test_pieces_for_a_queue() -> None:
    found = {(each.processes, each.waiting): each for each in layer_proposals(NETWORK, fetch_mbps=100.0).queues}
    assert found[2, 1].pieces == 2
    assert found[2, 1].mean_ms < found[2, 1].whole_ms
    assert found[2, 1].whole_ms == pytest.approx(1042 + 104 * 80 + 82), "fetched, loaded, run"
    for each in found.values():
        assert each.mean_ms <= each.whole_ms + 1e-9
        assert len(each.after) == each.pieces - 1 < each.processes


def test_proposed_shadow() -> None:
    """Both convolutions: nearly twice the rows, for 4 % of the weights and of the load time."""
    best = layer_proposals(NETWORK).shadows[0]
    assert (best.selection, best.blocks, best.runs) == ("prefix", ("early", "middle"), 1)
    assert (best.batch, best.body_rows, best.shadow_rows) == (4, 2, 2)
    assert best.alone_ms == pytest.approx(4 * 82)
    assert best.pair_ms == pytest.approx(4 * 2 + 2 * 80 + 2 * 2000 * 1e-6 + 0.6)
    assert best.gain == pytest.approx(best.alone_ms / best.pair_ms)
    assert best.param_share == pytest.approx(4 / 104)
    assert best.load_ms == pytest.approx(42)
    assert best.load_saved_ms == pytest.approx(1000)


def test_no_shadow_where_moving_costs_more_than_it_saves() -> None:
    heavy = [block(name, 1, 1, 5, crossing_bytes=40 * MB) for name in "abc"]
    assert layer_proposals(profile(*heavy, load_ms=15)).shadows == ()


def test_a_single_block_has_nothing_to_propose() -> None:
    found = layer_proposals(profile(block("all", 5, 1, 4), load_ms=4))
    assert (found.cuts, found.shadows) == ((), ())
    assert all(each.pieces == 1 for each in found.queues)


def test_a_model_without_weights() -> None:
    found = layer_proposals(profile(block("a", 5, 0, 4), block("b", 5, 0, 4), load_ms=8))
    assert found.half_compute_share == 0.0
    assert found.shadows
