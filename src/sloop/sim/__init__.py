"""The simulator: the core under virtual time, in worlds whose truth it does not know.

`simulate(World.from_scenario(...))` plays a run; its product, the event log, goes to the sinks given. A seed is a world
(`world_from_seed`), and checkers watch every step.
"""

from sloop.sim.checkers import Checkers, Violation
from sloop.sim.run import Run, simulate
from sloop.sim.world import World

__all__ = ["Checkers", "Run", "Violation", "World", "simulate"]
