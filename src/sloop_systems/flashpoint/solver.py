"""The planners with which Flashpoint's thesis compares its cuts: those of Gillis and SerFer, which ignore cold starts.
Flashpoint's own plans are found by `sloop.solvers.cuts`. Bytes and seconds; source as there."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, Literal

from sloop.api.solvers import PieceCosts

PIECE_BYTES_MAX: Final = 250e6
"""The most that a function of AWS Lambda may load, which bounds the pieces of Gillis and SerFer."""


def fewest_pieces(sizes_bytes: Sequence[float], transfer_s: Sequence[float], limit_bytes: float) -> tuple[int, ...]:
    """Gillis, as the thesis compares with it: the fewest pieces of at most `limit_bytes`, then the least transfer, then
    the earliest cuts. Ignores cold starts. A single larger layer is a piece of its own."""
    sums = tuple(accumulate(sizes_bytes, initial=0.0))
    best: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]
    for end in range(1, len(sums)):
        first = min(end - 1, bisect_left(sums, sums[end] - limit_bytes))
        best.append(
            min(
                (pieces + 1, moved_s + (transfer_s[start - 1] if start else 0.0), (*cuts, start) if start else cuts)
                for start, (pieces, moved_s, cuts) in enumerate(best[first:], start=first)
            )
        )
    return best[-1][2]


def filled_pieces(sizes_bytes: Sequence[float], limit_bytes: float, *, fill: float = 0.8) -> tuple[int, ...]:
    """SerFer, as the thesis compares with it: from the first layer on, a piece takes layers up to `fill` × the limit.
    Ignores cold starts and transfers."""
    cuts: list[int] = []
    taken_bytes = 0.0
    for number, size_bytes in enumerate(sizes_bytes):
        if number and taken_bytes + size_bytes > fill * limit_bytes:
            cuts.append(number)
            taken_bytes = 0.0
        taken_bytes += size_bytes
    return tuple(cuts)


@lru_cache(maxsize=32)
def filled_cuts(costs: PieceCosts, layer_bytes: tuple[int, ...], how: Literal["fewest", "filled"]) -> tuple[int, ...]:
    """Where the planners with which the thesis compares cut the model (section 5.1)."""
    if how == "fewest":
        return fewest_pieces(layer_bytes, costs.transfer_s, PIECE_BYTES_MAX)
    return filled_pieces(layer_bytes, PIECE_BYTES_MAX)
