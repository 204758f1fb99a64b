"""`sloop explain`: why a request ended as it did, why a decision was taken, and why requests missed their deadlines.

`request`, `decision` and `misses` answer these questions; `estimates` says what the core expected at an instant.

Everything comes from the log, live or simulated: the state at that instant, the estimates, and the outcome. A
`DeploymentState` that is passed in must be fresh. Its beliefs are updated from the log as the core's were, so that each
step shows what the core expected at that instant.
"""

from typing import Final

from msgspec import Struct

from sloop.runlog import RecordedLog
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import Kept
from sloop.systems.replay import beginning_of

RECENT_S: Final = 10
"""Seconds of traffic listed with a decision: about as far as most scaling policies look back."""


class StoryStep(Struct, frozen=True):
    """One event: its time in the run, its description, and the reason if it was decided."""

    at_s: float
    what: str
    why: str = ""


KEPT: Final = Kept(seconds=RECENT_S + 1, routes=False)


def state_of(log: RecordedLog) -> DeploymentState:
    """The state at the start of a log, to explain it."""
    return beginning_of(log, KEPT).fold
