"""Applications and their system in random worlds, for whoever writes policies (`sloop check --worlds`).

Each world is simulated under the checkers and replayed (`sim.worlds`). What goes wrong there is a mistake of a policy,
or of sloop: an exception, a plan that cannot be used, other answers to the same arguments, or a broken invariant. That
few requests are served in time is no mistake: most worlds are cruel.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from sloop.actions import Decided, End
from sloop.app.application import Deployment
from sloop.core import Core
from sloop.errors import InputError
from sloop.runlog import Record
from sloop.sim.checkers import Violation
from sloop.sim.world import World
from sloop.sim.worlds import play, world_around
from sloop.user_code import failure_of
from sloop.vocabulary import Outcome


class WorldFailure(Struct, frozen=True):
    """A kind of mistake, and the first world that shows it."""

    seed: int
    """Of the first world."""
    worlds: int
    """How many worlds end with it."""
    what: str
    """One line."""
    detail: str = ""
    """The traceback of an exception, or the record that breaks an invariant."""


class WorldsReport(Struct, frozen=True, kw_only=True):
    """What has become of the worlds and of their requests."""

    worlds: int
    refused: int
    """Worlds that the system refuses, such as one with half of the deadline."""
    requests: int
    """Of the worlds that were played to their end, with how they ended:"""
    served: int
    late: int
    dropped: int
    rejected: int
    failed: int
    unanswered: int
    """Requests that never ended, because no node had room for a replica, or no plan had one."""
    failures: tuple[WorldFailure, ...]
    """The most frequent first."""


def check_in_worlds(
    deployment: Deployment,
    rates_rps: Mapping[str, float],
    seeds: Iterable[int],
    *,
    played: Callable[[int], None] = lambda done: None,
) -> WorldsReport:
    """Play the worlds of these seeds; `played` is told how many are done.

    `rates_rps` is the expected rate of each application. Raises InputError if the system refuses all of the worlds.
    """
    ends, found, refusal = Counter[str](), dict[str, list[WorldFailure]](), None
    worlds = refused = 0
    for seed in seeds:
        worlds += 1
        try:
            world = world_around(deployment, rates_rps, seed)
            world.check()
        except InputError as error:
            refused, refusal = refused + 1, error
        else:
            failure = _played(world, ends)
            if failure is not None:
                found.setdefault(_kind_of(failure), []).append(failure)
        played(worlds)
    if refusal is not None and refused == worlds:
        raise refusal
    failures = (WorldFailure(own[0].seed, len(own), own[0].what, own[0].detail) for own in found.values())
    return WorldsReport(
        worlds=worlds,
        refused=refused,
        requests=ends["requests"],
        **{outcome.value: ends[outcome.value] for outcome in Outcome},
        unanswered=ends["unanswered"],
        failures=tuple(sorted(failures, key=lambda failure: (-failure.worlds, failure.seed))),
    )


class _Watch:
    """A sink that counts how requests end, and raises what a scaling policy has raised instead of making a plan."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self.ends: Counter[str] = Counter()

    def append(self, now_ns: int, record: Record) -> None:
        """Look at one record."""
        if type(record) is End:
            self.ends[record.outcome.value] += 1
        elif type(record) is Decided and record.kind == "planner":
            raise self._core.planner.failures[record.application]


def _played(world: World, ends: Counter[str]) -> WorldFailure | None:
    """Play a world and count how its requests ended. The mistake that it shows, if it does."""
    core = world.setup().core()
    watch = _Watch(core)
    try:
        totals = play(world, [watch], core)
    except (Violation, InputError) as error:
        what, _, detail = str(error).partition("\n")
        return WorldFailure(world.seed, 1, what, detail)
    except Exception as error:  # whatever a policy raises
        failure = failure_of(error)
        return WorldFailure(world.seed, 1, failure.detail, failure.trace)
    ends.update(watch.ends)
    ends["requests"] += totals.requests
    ends["unanswered"] += totals.open
    return None


def _kind_of(failure: WorldFailure) -> str:
    """The mistake without numbers and names, which differ from world to world."""
    return re.sub(r"'.*?'|\d[\d.,]*", "#", failure.what)
