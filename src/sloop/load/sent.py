"""What the requests of a load run brought, and its results by the size of their rows."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.sizes import class_to_show
from sloop.workload import Work


class SentWorks(msgspec.Struct, frozen=True):
    """What each request brought, in the order in which they were due."""

    works: tuple[Work, ...]
    """Different ones; at least one."""
    kinds: NDArray[np.int32]
    """Of each request, the place of its work in `works`; empty if all bring the same."""

    @classmethod
    def of(cls, works: Sequence[Work]) -> "SentWorks":
        """Of requests that bring these; if there are none, each brings one row of the only size."""
        known = {work: place for place, work in enumerate(dict.fromkeys(works))}
        return cls(tuple(known) or (Work(),), np.array([known[work] for work in works], dtype=np.int32))

    def bodies(self, variants: int) -> NDArray[np.int32]:
        """The place of each request's body, if there are so many bodies for each of `works`, sent in turn."""
        return self.kinds * variants + np.arange(len(self.kinds), dtype=np.int32) % variants

    def ordered(self, order: NDArray[np.int64]) -> "SentWorks":
        """The same, of requests in another order."""
        return SentWorks(self.works, self.kinds[order])

    @property
    def rows(self) -> NDArray[np.int64]:
        """How many rows each request had."""
        rows: NDArray[np.int64] = np.array([work.rows for work in self.works])[self.kinds]
        return rows

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size of each request's rows."""
        sizes: NDArray[np.int64] = np.array([work.size for work in self.works])[self.kinds]
        return sizes

    @property
    def classes(self) -> NDArray[np.int64]:
        """The class of each request's size, named by its upper bound."""
        class_of = class_to_show({work.size for work in self.works})
        classes: NDArray[np.int64] = np.array([class_of(work.size) for work in self.works])[self.kinds]
        return classes
