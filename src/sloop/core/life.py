"""The life of a worker, from the order to start it until it has stopped or is lost, as a table of states.

A replica is one worker, with a shadow two, and each of them has a state. Any of them may be gone at any time, and most
end so after `DRAINING`; the core forgets a worker then, so no state says it.

    STARTING ─────────────────────────────────► SERVING ──► DRAINING    (DRAINING may follow every state)
       │                                           ▲
       │    the parts of a pipeline                │
       ├──► WAITING ──► PIPELINED ─────────────────┤
       │       │            │                      │
       └───────┴────────────┴─────► COMPLETING ────┘

A part goes from `WAITING` to `SERVING` if it has got all layers meanwhile.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from sloop.vocabulary import Life


class WorkerState(StrEnum):
    """What a worker does."""

    STARTING = "starting"
    """It was ordered, and loads what it is to hold at first: its model, its layers or its blocks."""
    WAITING = "waiting"
    """It has its layers, and waits for the other parts of its pipeline."""
    PIPELINED = "pipelined"
    """It serves as a part of its pipeline, and gets the other layers meanwhile."""
    COMPLETING = "completing"
    """Its pipeline has broken up. It serves when it has all layers."""
    SERVING = "serving"
    """It has all that it is to hold, and serves."""
    DRAINING = "draining"
    """It was told to stop, and does so when its batch is over."""


FOLLOWING: Final[Mapping[WorkerState, frozenset[WorkerState]]] = {
    WorkerState.STARTING: frozenset(
        {
            WorkerState.WAITING,
            WorkerState.COMPLETING,  # its pipeline broke up before it had its layers
            WorkerState.SERVING,
            WorkerState.DRAINING,
        }
    ),
    WorkerState.WAITING: frozenset(
        {
            WorkerState.PIPELINED,
            WorkerState.COMPLETING,
            WorkerState.SERVING,  # it had the other layers before the last part started, or its pipeline broke up
            WorkerState.DRAINING,
        }
    ),
    WorkerState.PIPELINED: frozenset({WorkerState.COMPLETING, WorkerState.SERVING, WorkerState.DRAINING}),
    WorkerState.COMPLETING: frozenset({WorkerState.SERVING, WorkerState.DRAINING}),
    WorkerState.SERVING: frozenset({WorkerState.DRAINING}),
    WorkerState.DRAINING: frozenset(),
}
"""The states that may follow each state."""

LIVES: Final[Mapping[WorkerState, Life]] = {
    WorkerState.STARTING: Life.STARTING,
    WorkerState.WAITING: Life.STARTING,
    WorkerState.PIPELINED: Life.READY,
    WorkerState.COMPLETING: Life.STARTING,
    WorkerState.SERVING: Life.READY,
    WorkerState.DRAINING: Life.DRAINING,
}
"""What policies, logs and metrics tell of a replica in each state."""

INCOMPLETE: Final = frozenset(
    {WorkerState.STARTING, WorkerState.WAITING, WorkerState.PIPELINED, WorkerState.COMPLETING}
)
"""It has not all that it is to hold in the end."""


def wrong_step(before: WorkerState, after: WorkerState) -> str:
    """What is wrong if `FOLLOWING` does not allow this step."""
    return f"a worker that is {before} cannot be {after} next"
