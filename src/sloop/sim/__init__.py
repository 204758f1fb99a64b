"""The simulator: the core under virtual time, in worlds whose truth it does not know.

`simulate(World.from_scenario(...))` plays a run; its product, the event log, goes to the sinks given. `random_world` in
`sloop.sim.fuzz` makes a world of any seed, and checkers watch the log.
"""

from sloop.sim.checkers import Checkers, Violation
from sloop.sim.engine import RunTotals
from sloop.sim.run import simulate
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun
from sloop.sim.world import BYTES_PER_KB, World, recorded_in

__all__ = [
    "BYTES_PER_KB",
    "NOT_RECORDED",
    "Checkers",
    "RecordedRun",
    "RunTotals",
    "Violation",
    "World",
    "recorded_in",
    "simulate",
]
