"""Computes the times of a pair (`sloop.profile.pairs`) from the measured layers of a profile.

Beliefs and the simulator's truth both use these functions, the truth with profiles of its own.
"""

from math import inf

import numpy as np

from sloop.profile.pairs import NOTIFY_MS, BlockCosts, Floats, MoveCosts, SharedBlocks
from sloop.profile.profile import FLOOR_MS, LayerProfile
from sloop.vocabulary import Worker


def block_costs(
    layers: LayerProfile,
    body_cores: float,
    shadow_cores: float,
    batch_max: int,
    *,
    factor: float = 1.0,
    slo_ms: float = inf,
) -> BlockCosts:
    """The costs of a model's blocks on the cores of a body and of its shadow; durations are multiplied by `factor`.

    Blocks are ranked by their multiply-adds per byte of weights. If the multiply-adds of a block are unknown, the
    duration of the largest batch on one core replaces them.
    """
    blocks = layers.blocks
    if all(each.multiply_adds for each in blocks):
        compute = tuple(each.multiply_adds for each in blocks)
    else:
        compute = tuple(each.latency_ms.latency_ms(batch_max, 1.0) for each in blocks)
    move_ms_per_byte = layers.move_ms_per_mb / 1e6 or MoveCosts().move_ms_per_byte
    return BlockCosts(
        _table_ms(layers, body_cores, batch_max, factor),
        _table_ms(layers, shadow_cores, batch_max, factor),
        tuple(float(max(1, each.param_bytes)) for each in blocks),
        compute,
        (layers.input_bytes, *(each.crossing_bytes for each in blocks)),
        shadow_cores,
        slo_ms,
        MoveCosts(layers.load_fixed_ms, 0.0, move_ms_per_byte, NOTIFY_MS),
        tuple(each.load_ms - layers.load_fixed_ms for each in blocks),
    )


def _table_ms(layers: LayerProfile, cores: float, batch_max: int, factor: float) -> Floats:
    rows = range(1, batch_max + 1)
    return np.array(
        [
            [0.0, *(max(FLOOR_MS, each.latency_ms.latency_ms(batch, cores)) * factor for batch in rows)]
            for each in layers.blocks
        ]
    )


def shared_blocks(layers: LayerProfile, body_cores: float, shadow: Worker, batch_max: int) -> SharedBlocks:
    """A body on these cores with a shadow."""
    return SharedBlocks(block_costs(layers, body_cores, shadow.cores, batch_max), shadow.layers)


def pair_shares(layers: LayerProfile, body_cores: float, shadow: Worker, batch_max: int) -> tuple[float, ...]:
    """The believed time of a body with a shadow, divided by that of the body alone, by batch from 0. At most 1, because
    a batch that the pair would not run faster runs on the body alone. By equation (6), which is a lower bound if the
    blocks form several runs."""
    shared = shared_blocks(layers, body_cores, shadow, batch_max)
    alone_ms = shared.costs.alone_ms
    pairs = zip(shared.pair_ms[1:], alone_ms[1:], strict=True)
    return (1.0, *(min(1.0, pair_ms / float(own_ms)) for pair_ms, own_ms in pairs))


def true_pair_shares(layers: LayerProfile, body_cores: float, shadow: Worker, batch_max: int) -> tuple[float, ...]:
    """The true time of a body with a shadow, divided by that of the body alone, by batch from 0. The shadow is used for
    batches that it is believed to make faster, and the pair waits at the end of each run of blocks."""
    shared = shared_blocks(layers, body_cores, shadow, batch_max)
    triples = zip(shared.pair_ms[1:], shared.waiting_ms[1:], shared.costs.alone_ms[1:], strict=True)
    return (1.0, *(waiting_ms / float(own_ms) if pair_ms < own_ms else 1.0 for pair_ms, waiting_ms, own_ms in triples))


def shared_rows(
    layers: LayerProfile, body_cores: float, shadow: Worker, batch_max: int
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """By batch from 0: the number of rows that the shadow computes, and the milliseconds that they are predicted to
    take there. The number is 0 if the body alone is predicted to be as fast; this prediction includes the pair's waits
    at the end of each run of blocks."""
    shared = shared_blocks(layers, body_cores, shadow, batch_max)
    splits = [shared.split(batch) for batch in range(1, batch_max + 1)]
    pays = [waiting_ms < own_ms for waiting_ms, own_ms in zip(shared.waiting_ms, shared.costs.alone_ms, strict=True)]
    rows = (0, *(split.shadow_rows if used else 0 for split, used in zip(splits, pays[1:], strict=True)))
    return rows, (0.0, *(split.shadow_ms for split in splits))


def shadow_load_ms(layers: LayerProfile, shadow: Worker) -> float:
    """The time to load a shadow's blocks into a running process."""
    fixed_ms = layers.load_fixed_ms
    return fixed_ms + sum(layers.blocks[place].load_ms - fixed_ms for place in shadow.layers)
