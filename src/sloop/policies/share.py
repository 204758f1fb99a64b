"""Share policies: how many batches of a stage run together on a device, and which wait although replicas are idle."""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from sloop.core.protocols import TakeAll, Together
from sloop.core.views import SharedDeviceView
from sloop.options import OutOfRange, check_range
from sloop.solvers.paldia import DeviceModel, Sharing, batches_of, best_split
from sloop.units import NS_PER_MS

__all__ = ["Hybrid", "TakeAll"]

Lane = Literal["work_conserving", "serial"]
"""When a queued batch starts: as soon as one of those that run together has ended, or alone after all of them."""

NO_WAIT: Final = "choose the lane work_conserving"


@dataclass(slots=True)
class GroupSplit:
    """How the requests that waited at one instant are to run, as the sizes of batches that have not started yet."""

    running: deque[int]
    """At most `together` of these run at a time."""
    queued: deque[int]
    """These run one by one, when all of `running` have ended."""
    together: int

    @property
    def is_over(self) -> bool:
        """Whether all batches have started."""
        return not self.running and not self.queued

    def shrink(self, waiting: int) -> None:
        """Make the last batches smaller if fewer requests wait than were split, because some were dropped or cancelled
        or run on another device."""
        excess = sum(self.running) + sum(self.queued) - waiting
        for batches in (self.queued, self.running):
            while excess > 0 and batches:
                size = batches.pop()
                if size > excess:
                    batches.append(size - excess)
                excess -= size


@dataclass(frozen=True, slots=True)
class Hybrid:
    """PALDIA's distributor: some of the waiting requests run together and the others queue, so that the last one ends
    as early as possible, by the law of interference of their model.

    When all batches of a split have started, the requests that wait then are split anew. The oldest run, the newest
    queue. At most as many batches run together as the stage has ready replicas on the device. If several stages use one
    device, each splits as if it were alone there.

    Source: PALDIA, specification sections 2.1 and 2.1.1 (executed plans; (b) for `resident`); `sloop.solvers.paldia`.
    """

    takes_all: ClassVar[bool] = False

    lane: Lane = "work_conserving"
    """`serial`: queued batches run one by one when all that run together have ended; requests that arrive while the
    device is busy all queue. `work_conserving`: a queued batch starts whenever another one ends."""
    sharing: Sharing = "hybrid"
    """`hybrid`: the best split. `together`: as many batches as there are replicas. `queue`: one batch after the other.
    `resident`, which is not PALDIA's: a constant number of batches at a time, each starting when another ends, such
    that the last one ends earliest; it needs the work-conserving lane."""
    even: bool = False
    """Whether batches have equal sizes, instead of full batches and one with the rest."""
    gain_min: float = 0.0
    """The smallest gain for which a split is made: the fraction by which it must be predicted to end earlier than both
    `together` and `queue`; otherwise the better of these two is used. A good value is the error of the law, which
    `sloop profile --sharing` prints: a smaller gain may not be real."""
    _splits: dict[tuple[str, str, str], GroupSplit] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_range("gain_min", self.gain_min, least=0, most=1)
        if self.sharing == "resident" and self.lane == "serial":
            what = "cannot be resident in the serial lane, in which a queued batch waits until no other runs"
            raise OutOfRange("sharing", what, NO_WAIT)

    def start(self, now_ns: int, view: SharedDeviceView) -> Together:
        """See `SharePolicy`."""
        key, busy = (view.node, view.device, view.stage), view.busy
        split = self._splits.get(key)
        if split is not None:
            split.shrink(view.waiting)
        if split is None or split.is_over:
            split = self._split(view, busy)
        room = split.together - busy if split.running else int(not busy)
        if room > 0 or self.lane == "serial":  # otherwise it is found again, with those that come meanwhile
            self._splits[key] = split
        batches, sizes, waiting = split.running or split.queued, list[int](), view.waiting
        while len(sizes) < min(room, view.idle) and waiting and batches:
            sizes.append(min(batches.popleft(), waiting, view.batch_max))  # fewer if some were dropped
            waiting -= sizes[-1]
        return Together(tuple(sizes))

    def _split(self, view: SharedDeviceView, busy: int) -> GroupSplit:
        """A split of the requests that wait now."""
        queued, running = view.waiting, list[int]()
        if self.lane == "work_conserving" or not busy:
            costs_ms = tuple([cost_ns / NS_PER_MS for cost_ns in view.costs_ns])
            model = DeviceModel(costs_ms, view.law, view.largest, view.idle + busy)
            queued = best_split(model, view.waiting, self.sharing, gain_min=self.gain_min).queued
            running = batches_of(view.waiting - queued, view.batch_max, even=self.even)
        later = batches_of(queued, view.batch_max, even=self.even) if queued else []
        if self.lane == "work_conserving":
            return GroupSplit(deque(running + later), deque(), len(running))
        return GroupSplit(deque(running), deque(later), len(running))
