"""How long a pipeline takes for a batch, computed from the durations of the model's layers.

Each worker of a pipeline holds consecutive layers of the model and passes its results on. A batch is sent while the
next one is computed, so parts and transfers are stations of one line. I, the sum of all stations, is the time of one
batch through the idle line; B, the slowest station, is the time from each batch to the next (San Juan, "Flashpoint",
thesis, Waterloo 2023; sections 2.3 and 2.14 of our specification). Each worker has at most one batch in the line. If
all p workers always have one, each batch takes max(I, p·B).

Beliefs and the simulator's truth both use these functions, the truth with profiles and links of its own.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final

from sloop.profile.profile import FLOOR_MS, LayerProfile
from sloop.vocabulary import LINK_MBPS, LayerSet

MS_PER_S: Final = 1e3

BITS_PER_BYTE: Final = 8
BITS_PER_MEGABIT: Final = 1e6


def moving_ms(size_bytes: float, link_mbps: float) -> float:
    """The duration of a transfer over a link of this rate; 0 if the rate is 0, which means no limit."""
    return size_bytes * BITS_PER_BYTE / (link_mbps * BITS_PER_MEGABIT) * MS_PER_S if link_mbps else 0.0


def stations_ms(
    layers: LayerProfile, cores: float, bounds: Sequence[int], batch: int, link_mbps: float = LINK_MBPS
) -> list[float]:
    """The durations of the stations of a pipeline in order: parts and the transfers between them alternate. `bounds`
    are 0, each cut, and the number of layers."""
    own_ms = [max(FLOOR_MS, each.latency_ms.latency_ms(batch, cores)) for each in layers.blocks]
    found: list[float] = []
    for first, end in pairwise(bounds):
        found.append(sum(own_ms[first:end]))
        if end != bounds[-1]:
            found.append(moving_ms(batch * layers.blocks[end - 1].crossing_bytes, link_mbps))
    return found


def whole_ms(layers: LayerProfile, cores: float, batch: int) -> float:
    """The duration of all layers on one worker."""
    return stations_ms(layers, cores, (0, len(layers.blocks)), batch)[0]


def member_ms(stations: Sequence[float]) -> float:
    """The duration of a batch if each worker of the pipeline has one batch in it: max(I, p·B)."""
    parts = (len(stations) + 1) // 2
    return max(sum(stations), parts * max(stations))


def pipeline_shares(layers: LayerProfile, cores: float, bounds: Sequence[int], batch_max: int) -> tuple[float, ...]:
    """`member_ms` as a multiple of the whole model's time, by batch from 0."""
    return (
        1.0,
        *(
            member_ms(stations_ms(layers, cores, bounds, batch)) / whole_ms(layers, cores, batch)
            for batch in range(1, batch_max + 1)
        ),
    )


def passed_line(now: float, stations: Iterable[float], left: Sequence[float]) -> list[float]:
    """When a batch that arrives `now` leaves each station. `left` says when the batch before it leaves them; it is
    empty if there was none. There is no buffer between stations: a batch stays in a station until the next one is free
    (blocking after service)."""
    found: list[float] = []
    times = list(stations)
    enters = max(now, left[0]) if left else now
    for place, taken in enumerate(times):
        done = enters + taken
        if left and place + 1 < len(times):
            done = max(done, left[place + 1])
        found.append(done)
        enters = done
    return found


def layer_share(layers: LayerProfile, kept: LayerSet) -> float:
    """The share of these layers in the model's bytes."""
    whole = sum(block.param_bytes for block in layers.blocks)
    blocks = [layers.blocks[place] for place in kept.positions(len(layers.blocks))]
    return sum(block.param_bytes for block in blocks) / whole if whole else len(blocks) / len(layers.blocks)
