"""One simulated run of a world, under the checkers.

Guarantees that the run depends only on the world. The event log goes to the sinks: a file, a list, or the fold behind a
report.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sloop.actions import RequestSimulation
from sloop.app.application import Application
from sloop.core.protocols import CoreInterface, Policies
from sloop.errors import InputError
from sloop.events import Simulated, SystemChanged
from sloop.runlog import Record, Recorder, Sink
from sloop.sim.checkers import Checkers, Rules
from sloop.sim.engine import PATIENCE_NS, Append, RunTotals, play
from sloop.sim.world import World
from sloop.systems.setup import ApplicationSetup, application_in, set_up


class Simulations(Protocol):
    """A sink that answers questions to the simulator within a run; `sloop.sim.foretell.OwnSimulations`."""

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        ...

    def answer(self, now_ns: int, asked: RequestSimulation) -> tuple[int, Simulated]:
        """When the answer comes, and the answer."""
        ...


def simulate(
    world: World,
    sinks: Sequence[Sink | Recorder] = (),
    *,
    check_first: int | None = None,
    core: CoreInterface | None = None,
    patience_ns: int = PATIENCE_NS,
    own: Simulations | None = None,
) -> RunTotals:
    """Simulate `world`. Raises Violation at the first record that breaks an invariant, and InputError if its batches
    take longer than a run.

    The checkers read the first `check_first` records: by default all, with 0 none. Checking the whole log takes as long
    as the simulation. `core` replaces the world's core, to test that the checkers detect a broken one. `own` answers
    the questions of its systems to the simulator; without, they are refused. Recorders get the records in blocks.
    """
    setup = world.setup()
    checkers = Checkers(
        [rules_of(each) for each in setup.applications],
        world.deployment.cluster,
        later=[rules_of(each.setup()) for each in world.later],
        rules_under=_rules_under if world.systems else None,
        origin=world.origin,
    )
    appends: list[Append] = [sink.append for sink in sinks if not isinstance(sink, Recorder)]
    watching = _watch(checkers, appends, check_first)
    cluster = world.cluster()
    if own is not None:
        cluster.answer = own.answer
        appends.append(own.append)
    if world.is_mixed or world.processes is not None:
        appends.append(cluster.note)
    totals = play(
        core or setup.core(),
        cluster,
        world.ingress(),
        until_ns=world.lead_ns + world.duration_ns,
        appends=appends,
        extends=[sink.extend for sink in sinks if isinstance(sink, Recorder)],
        patience_ns=patience_ns,
    )
    if watching in appends:
        if totals.open and (batches := cluster.unfinished(totals.ended_ns)):
            raise InputError(
                f"batch {batches[0]} still runs long after the last arrival",
                help="correct the latency of the profile, or `truth.profile_error`: batches take hours",
            )
        checkers.finish()
    return totals


def rules_of(setup: ApplicationSetup) -> Rules:
    """What the records of an application version are checked against."""
    application, system = setup.application, setup.system
    choices = {name: _rules(application, policies) for name, policies in system.choices.items()}
    return replace(_rules(application, system.policies), choices=choices)


def _rules(application: Application, policies: Policies) -> Rules:
    return Rules(application, policies.order, policies.drop.is_hopeless, provides=policies.provision.brings_weights)


def _rules_under(changed: SystemChanged) -> Rules:
    (setup,) = set_up(application_in(changed.definition), must_fit=False).applications
    return rules_of(setup)


def _watch(checkers: Checkers, appends: list[Append], first: int | None) -> Append:
    """Add the checkers for the first records (None: all). They are the last sink, so that they can remove themselves
    without disturbing others."""
    left = first

    def append(now_ns: int, record: Record) -> None:
        nonlocal left
        assert left is not None
        checkers.append(now_ns, record)
        left -= 1
        if not left:
            appends.remove(append)

    watching = checkers.append if first is None else append
    if first != 0:
        appends.append(watching)
    return watching
