"""Fuzzing: simulates random worlds with all checkers for a given time. See `python -m tests.dst.fuzz --help`.

The worlds are those of `sloop.sim.worlds`, under every system of the catalogue. `play_successors` lets the deciding
process of a world without other faults die once or twice, as the schedules do (`tests.dst.schedules`), but under the
published systems: another process, which knows only what the world declares, adopts the replicas.

Guarantees that a failure prints one command that reproduces it, and that a seed and a system give the same world on
every machine. Every seed that ever failed becomes a named test.
"""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final, cast

from sloop.actions import Action, End
from sloop.app.application import Application
from sloop.core.planner import Planner
from sloop.core.views import PlanInput
from sloop.errors import InputError
from sloop.events import Cancelled
from sloop.runlog import MemoryLog
from sloop.sim import worlds
from sloop.sim.checkers import Checkers
from sloop.sim.engine import RunTotals
from sloop.sim.engine import play as run
from sloop.sim.run import rules_of
from sloop.sim.truth.failure import NO_FAULTS
from sloop.sim.world import World
from sloop.sim.worlds import PATIENCE_S, Make, check_replay, fitting, play
from sloop.streams import stream
from sloop.systems import SYSTEMS
from sloop.systems.registry import POLICIES
from sloop.systems.setup import Setup
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import Outcome, Request, RequestId
from tests.dst.agents import ERA, CoreBegun, CoreDied, FaultBegins, FaultKind, OpenRequests, RemoteCluster

Play = Callable[[World], RunTotals]

ALONE: Final = "an edge answers without a deciding process"


PUBLISHED: Final[Sequence[dict[str, Any]]] = (
    {"partition": True},
    {"multicast": False, "partition": True, "cuts": "filled"},
    {"partition": True, "cuts": "fewest"},
    {"multicast": False, "join": False, "source": "store", "partition": True},
    {"multicast": False, "join": False, "source": "store"},
    {"locality": False, "partition": True, "cuts": "fewest"},
    {"locality": False, "multicast": False, "partition": True, "cuts": "filled"},
)
"""Parameters of `flashpoint`, where it is installed, in every other world with a provision policy."""


def random_world(seed: int, system: str = "static") -> World:
    """The world of a seed, with the command that plays it again."""
    return replace(_as_published(worlds.random_world(seed, system)), origin=_command(seed, system))


def random_deployment(seed: int, system: str = "static") -> World:
    """The deployment of a seed, with the command that plays it again."""
    made = _as_published(worlds.random_deployment(seed, system))
    return replace(made, origin=_command(seed, system, "--deployment"))


def _as_published(world: World) -> World:
    own = stream(world.seed, "published")
    if own.random() < 0.5 or "flashpoint" not in POLICIES["provision"]:
        return world
    chosen = {"name": "flashpoint", **own.choice(PUBLISHED)}

    def provided(application: Application) -> Application:
        if "provision" not in application.system.parameters:
            return application
        system = replace(application.system, parameters={**application.system.parameters, "provision": chosen})
        return replace(application, system=system)

    return replace(
        world,
        deployment=replace(world.deployment, applications=tuple(map(provided, world.deployment.applications))),
        changes=tuple(replace(each, deploy=each.deploy and provided(each.deploy)) for each in world.changes),
    )


def random_succession(seed: int, system: str = "static") -> World:
    """The world of a seed for `play_successors`, without random faults."""
    world = random_world(seed, system)
    return replace(world, faults=NO_FAULTS, origin=_command(seed, system, "--successors"))


class DecidingProcesses:
    """The deciding process of a world, and those that take its place when it has died, each with a log and checkers of
    its own (`CoreInterface`). `opened` are the requests that edges hold; while there is no deciding process, an edge
    answers those by itself that clients cancel or whose deadline has passed."""

    def __init__(self, world: World, opened: OpenRequests) -> None:
        self._world, self._opened = world, opened
        self.logs: list[MemoryLog] = []
        self._is_down = False
        self._begin()

    def _begin(self) -> None:
        setup = setup_of(self._world, len(self.logs))
        self._core, nodes = setup.core(), self._world.deployment.cluster
        self.checkers = Checkers([rules_of(each) for each in setup.applications], nodes, origin=self._world.origin)
        self.logs.append(MemoryLog())

    @property
    def wake_ns(self) -> int:
        """See `CoreInterface`."""
        return FOREVER_NS if self._is_down else self._core.wake_ns

    @property
    def planner(self) -> Planner:
        """See `CoreInterface`."""
        return self._core.planner

    @property
    def plan_input(self) -> PlanInput | None:
        """See `CoreInterface`."""
        return self._core.plan_input

    def append(self, now_ns: int, record: Any) -> None:  # also those of the cluster
        """Check and keep a record of the process that is there."""
        if type(record) is CoreDied:
            self._is_down = True
        elif type(record) is CoreBegun:
            self._is_down = False
            self._begin()
        elif not (self._is_down or (type(record) is End and record.why == ALONE)):
            self.checkers.append(now_ns, record)
            self.logs[-1].append(now_ns, record)

    def handle(self, now_ns: int, event: Any, more_at_this_instant: bool = False) -> Sequence[Action]:
        """See `CoreInterface`."""
        held = self._opened.by_id
        if type(event) is Request:
            held[event.id] = event
        if type(event) is CoreBegun:
            return self._answer_alone([id for id, request in held.items() if request.deadline_ns < now_ns])
        if type(event) is CoreDied or self._is_down:
            return self._answer_alone([event.request] if type(event) is Cancelled else [])
        actions = self._core.handle(now_ns, event, more_at_this_instant)
        for action in actions:
            if type(action) is End:
                held.pop(action.request, None)
        return actions

    def _answer_alone(self, ids: Sequence[RequestId]) -> list[Action]:
        """Edges answer requests of which no deciding process is told."""
        return [End(id, Outcome.REJECTED, ALONE) for id in ids if self._opened.by_id.pop(id, None) is not None]


def setup_of(world: World, number: int) -> Setup:
    """Of the deciding process after so many others."""
    return replace(world.setup(), first_worker=number * ERA)


def play_successors(world: World) -> RunTotals:
    """Simulate a world without faults but these: its deciding process dies once or twice. Raises Violation as `play`
    does; each request must end once, whoever decides."""
    random, opened = stream(world.seed, "deaths"), OpenRequests()
    versions = [version.application for version in world.setup().applications]
    cluster = RemoteCluster(versions, world.truths(), world.deployment.cluster, opened)
    deciding = DecidingProcesses(world, opened)
    for _ in range(random.randint(1, 2)):
        at_ns = random.randrange(world.duration_ns)
        away_ns = ms(random.choice((0.0, 10.0, 500.0, 3_000.0)))
        cluster.schedule(at_ns, FaultBegins(FaultKind.CORE_DOWN, "", 0, away_ns))
    try:
        totals = run(
            *(deciding, cast(Any, cluster), world.ingress()),
            until_ns=world.duration_ns + s(10),
            appends=[deciding.append],
            patience_ns=s(PATIENCE_S),
        )
    finally:
        cluster.close()
    deciding.checkers.finish()
    for number, log in enumerate(deciding.logs):
        check_replay(world, setup_of(world, number), log, f"the replay of deciding process {number + 1}")
    return totals


def _command(seed: int, system: str, *options: str) -> str:
    """The command that simulates this world again."""
    return " ".join(("python -m tests.dst.fuzz --seed", str(seed), "--system", system, *options))


def main(arguments: list[str] | None = None) -> int:
    """Simulate worlds until the time is up. Returns 1 as soon as one breaks an invariant, or if none could be
    simulated; otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.dst.fuzz", description="Play random worlds under all checkers."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="start no world after this time (default: 60)")
    parser.add_argument("--seed", type=int, help="play only the worlds of this seed")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--system", action="append", choices=sorted(SYSTEMS), help="default: all systems")
    parser.add_argument("--deployment", action="store_true", help="only deployments of several applications and kinds")
    parser.add_argument("--successors", action="store_true", help="only worlds whose deciding process dies")
    options = parser.parse_args(arguments)
    systems = options.system or sorted(SYSTEMS)
    seeds = [options.seed] if options.seed is not None else count(options.first)
    sorts: list[tuple[Make, Play]] = [(random_deployment, play)] if options.deployment else []
    sorts += [(random_succession, play_successors)] if options.successors else []
    sorts = sorts or [(random_world, play), (random_deployment, play), (random_succession, play_successors)]
    until_s = time.monotonic() + options.seconds
    worlds = requests = 0
    for seed, system, sort in ((seed, system, sort) for seed in seeds for system in systems for sort in sorts):
        if time.monotonic() > until_s:
            break
        make, simulates = sort
        world = fitting(make, seed, system)
        if world is None:
            continue
        try:
            requests += simulates(world).requests
        except (AssertionError, InputError) as failure:
            sys.stderr.write(f"{type(failure).__name__}: {failure}\nreproduce with: {world.origin}\n")
            return 1
        worlds += 1
    if not worlds:
        sys.stderr.write("no world was played: the systems can serve none of those that were made\n")
        return 1
    sys.stderr.write(f"{worlds} worlds with {requests} requests, every invariant held\n")
    return 0


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # simulated nodes are lost all the time
    sys.exit(main())
