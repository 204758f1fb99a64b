"""A simulated run: a world played to its end, under the eyes of the checkers.

Promises that nothing but the world enters the run, and that whoever wants its product, the event log, gets it through
a sink: a file, a list, or the folds of a report.
"""

from collections.abc import Sequence

from msgspec import Struct

from sloop.policies.order.edf import Edf
from sloop.runlog import Sink, Tee
from sloop.sim.checkers import Checkers
from sloop.sim.engine import PATIENCE_NS, CoreLike, Played, play
from sloop.sim.world import World


class Run(Struct, frozen=True):
    """What a run was and how it went; what happened in it is in the sinks."""

    world: World
    played: Played


def simulate(
    world: World,
    sinks: Sequence[Sink] = (),
    *,
    checkers: bool = True,
    core: CoreLike | None = None,
    patience_ns: int = PATIENCE_NS,
) -> Run:
    """Play `world`. With `checkers`, raises Violation at the first record that breaks an invariant.

    `core` replaces the world's own, to prove that the checkers catch a broken one.
    """
    setup = world.setup()
    edf = isinstance(setup.system.policies.order, Edf)
    nodes = world.application.cluster
    hopeless = setup.system.policies.drop.is_hopeless
    checking = (
        Checkers(world.application, nodes, edf=edf, is_hopeless=hopeless, origin=world.origin) if checkers else None
    )
    listening: list[Sink] = [*sinks, *([checking] if checking else [])]
    sink = listening[0] if len(listening) == 1 else Tee(*listening) if listening else None
    played = play(
        core or setup.core(),
        world.cluster(),
        world.outside(),
        until_ns=world.lead_ns + world.duration_ns,
        sink=sink,
        patience_ns=patience_ns,
    )
    if checking:
        checking.finish()
    return Run(world, played)
