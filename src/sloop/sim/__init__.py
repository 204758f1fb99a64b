"""The simulator: runs the core in virtual time, with true durations and faults that are hidden from the core.

`simulate(World.from_scenario(...))` runs one simulation and writes its event log to the given sinks. `random_world` in
`sloop.sim.worlds` makes a world from any seed. Checkers verify invariants on the log. `FlowNetwork` says how long
transfers over a `Topology` take, without a run.
"""

from sloop.sim.checkers import Checkers, Violation
from sloop.sim.engine import RunTotals
from sloop.sim.run import simulate
from sloop.sim.truth.flows import FlowNetwork, Topology
from sloop.sim.truth.recorded import NOT_RECORDED, RecordedRun
from sloop.sim.world import BYTES_PER_KB, World, recorded_in

__all__ = [
    "BYTES_PER_KB",
    "NOT_RECORDED",
    "Checkers",
    "FlowNetwork",
    "RecordedRun",
    "RunTotals",
    "Topology",
    "Violation",
    "World",
    "recorded_in",
    "simulate",
]
