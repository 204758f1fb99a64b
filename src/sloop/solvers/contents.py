"""Models that share devices: which contents a device can have, and which device gets which content.

A *content* is what one device holds: some models, each with one batch size, whose needs for computing and for memory
add up to at most the whole device. Needs are integers, in hundredths of a percent of a device, so that no content
depends on rounding.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError

WHOLE_DEVICE: Final = 10_000
"""A whole device, in hundredths of a percent."""
CONTENTS_MAX: Final = 5_000
"""The most contents to list; those with fewer models come first."""


@dataclass(frozen=True, slots=True)
class BatchOption:
    """A model with one batch size on one kind of device."""

    batch: int
    latency_ms: float
    rate_rps: float
    """What one replica serves at most."""
    compute: int
    """Its need for computing, in hundredths of a percent of the device."""
    memory: int
    """Its need for memory, likewise."""

    def __post_init__(self) -> None:
        if min(self.compute, self.memory) < 0 or self.batch < 1 or not self.rate_rps >= 0:
            what = f"batch {self.batch}: {self.rate_rps} requests/s, {self.compute} and {self.memory} of a device"
            raise InputError(what, help="a batch is at least 1, and no need is negative")


Resident = tuple[int, BatchOption]
"""A model, by its index, with its batch."""
Content = tuple[Resident, ...]
"""What one device holds, by ascending model."""


def hundredths(percent: float) -> int:
    """A percentage as an integer number of hundredths."""
    return round(100 * percent)


def content_needs(content: Content) -> tuple[int, int]:
    """What the content needs for computing, and of memory."""
    return sum(option.compute for _, option in content), sum(option.memory for _, option in content)


def possible_contents(options: Sequence[Sequence[BatchOption]], *, most: int = CONTENTS_MAX) -> list[Content]:
    """Every content with at least one model, those with fewer models first; at most `most`. `options` are those of each
    model. A content is extended only while it fits on the device."""
    found: list[Content] = []
    size: list[Content] = [()]
    while size and len(found) < most:
        longer = (
            (*content, (at, option))
            for content in size
            for at in range(content[-1][0] + 1 if content else 0, len(options))
            for option in _that_fit(content, options[at])
        )
        size = list(itertools.islice(longer, most - len(found)))
        found += size
    return found


def _that_fit(content: Content, options: Sequence[BatchOption]) -> Iterator[BatchOption]:
    compute, memory = content_needs(content)
    return (each for each in options if max(each.compute + compute, each.memory + memory) <= WHOLE_DEVICE)


# Least change


def relabelled(new: Sequence[Sequence[str]], present: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """For each new content, the index of the device that gets it, chosen so that most replicas stay where they are.

    Contents are given by the names of their models, `present` with an entry for each device, empty for those without
    replicas. Devices must be interchangeable. InputError if there are more contents than devices.
    """
    if len(new) > len(present):
        raise InputError(f"{len(new)} contents for {len(present)} devices", help="place them on as many as there are")
    if not new:
        return ()
    # Of equal overlaps, a device in use comes before an empty one, and the first before later ones.
    costs = [
        [
            -float(sum(name in own for name in content)) + (0.0 if own else 1e-3) + 1e-6 * place / len(present)
            for place, own in enumerate(present)
        ]
        for content in new
    ]
    return cheapest_assignment(np.array(costs))


def cheapest_assignment(costs: NDArray[np.float64]) -> tuple[int, ...]:
    """A column of its own for each row, with the least sum of costs. There are at least as many columns as rows.

    Rows are added one by one along a shortest augmenting path in reduced costs (Jonker and Volgenant 1987; Crouse, IEEE
    Trans. Aerosp. Electron. Syst. 52, 2016).
    """
    rows, columns = costs.shape
    of_row, of_column = np.zeros(rows), np.zeros(columns)  # dual variables
    column_of, row_of = np.full(rows, -1), np.full(columns, -1)
    for row in range(rows):
        length, previous = np.full(columns, np.inf), np.full(columns, -1)
        others = np.arange(columns)[::-1]  # columns that the path may still reach; the order in which SciPy breaks ties
        at, shortest = row, 0.0
        reached: list[int] = []
        while at >= 0:
            through = shortest + costs[at, others] - of_row[at] - of_column[others]
            nearer = through < length[others]
            length[others[nearer]], previous[others[nearer]] = through[nearer], at
            shortest = length[others].min()
            nearest = np.flatnonzero(length[others] == shortest)
            free = nearest[row_of[others[nearest]] < 0]
            place = free[-1] if len(free) else nearest[0]
            last = others[place]
            reached.append(last)
            others[place], others = others[-1], others[:-1]
            at = row_of[last]
        inner = reached[:-1]
        of_row[row] += shortest
        of_row[row_of[inner]] += shortest - length[inner]
        of_column[reached] -= shortest - length[reached]
        while at != row:  # each row of the path takes the column that it reached
            at = previous[last]
            row_of[last] = at
            column_of[at], last = last, column_of[at]
    return tuple(column_of.tolist())
