"""Counts of any short interval as rates of whole seconds, which is what forecasters were published for.

Promises that the newest second ends where the counts end. Knows numbers only.
"""

from collections.abc import Sequence

from sloop.units import NS_PER_S


def seconds_rps(counts: Sequence[int], bucket_ns: int) -> list[float]:
    """Mean rates in requests per second of whole seconds, oldest first.

    `counts` are requests in consecutive intervals of `bucket_ns` each, the newest last. What is older than the oldest
    whole second is left out, unless it is all there is; intervals longer than a second stand for themselves.
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


def peaks_of(rates_rps: Sequence[float], bin_s: int) -> list[float]:
    """The largest of each `bin_s` rates, oldest first; an unfinished oldest bin is left out."""
    starts = range(len(rates_rps) % bin_s, len(rates_rps), bin_s)
    return [max(rates_rps[start : start + bin_s]) for start in starts]
