"""Computations of forecasters: rates of whole seconds."""

from collections.abc import Sequence

from sloop.units import NS_PER_S


def seconds_rps(counts: Sequence[int], bucket_ns: int) -> list[float]:
    """Mean rates of whole seconds in requests per second, oldest first; the last second ends with the last count.

    `counts` are requests in consecutive intervals of `bucket_ns`, oldest first. An incomplete oldest second is omitted
    unless it is the only one. Intervals longer than a second give one rate each.
    """
    width = max(1, round(NS_PER_S / bucket_ns))
    if not counts:
        return []
    if len(counts) < width:
        return [sum(counts) * NS_PER_S / (len(counts) * bucket_ns)]
    length_ns = width * bucket_ns
    if width == 1:
        return [count * NS_PER_S / length_ns for count in counts]
    starts = range(len(counts) % width, len(counts), width)
    return [sum(counts[start : start + width]) * NS_PER_S / length_ns for start in starts]
