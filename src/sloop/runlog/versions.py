"""The versions of applications that a run has, and what the fold must know of each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from sloop.actions import VersionState
from sloop.app.graph import Graph
from sloop.runlog.run import RunState
from sloop.vocabulary import Shape, Slot


class StaticEstimate(Protocol):
    """The estimate of a variant on one kind of hardware, as far as figures and explanations need it; a core's `Belief`
    satisfies it."""

    @property
    def batch_max(self) -> int: ...
    @property
    def accuracy(self) -> float | None: ...

    def costs_ns(self, slot: Slot) -> Sequence[int]:
        """Estimated durations in ns indexed by batch size, from 0 to `batch_max`."""
        ...

    def observe(self, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        """Learn from a finished batch; only explanations do so, as the core did."""
        ...

    def at(self, size: int) -> "StaticEstimate":
        """The estimate for rows of the class of a size; this one for 0."""
        ...

    def of(self, shape: Shape) -> "StaticEstimate":
        """The estimate of replicas of another shape."""
        ...


class VersionParts(Protocol):
    """What the fold needs to know of a version; the core's `ApplicationParts` have it."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def key(self) -> str: ...
    @property
    def graph(self) -> Graph: ...
    @property
    def beliefs(self) -> Mapping[tuple[str, str, str], StaticEstimate]: ...


class OnlyGraph:
    """The parts of an application of which nothing is known but the graph, and perhaps the beliefs."""

    name, version, key = "", "1", ""

    def __init__(self, graph: Graph, beliefs: Mapping[tuple[str, str, str], StaticEstimate] | None = None) -> None:
        self.graph = graph
        self.beliefs = beliefs or {}


Build = Callable[[str, str, Mapping[str, Any]], VersionParts]
"""Makes the parts of a version from its application's name, its version and its definition; see `core.Build`."""


class VersionRecord(Struct, eq=False):
    """One version of an application, from its deployment on, also after it has ended."""

    parts: VersionParts
    run: RunState
    state: VersionState
    share: float
    """Fraction of the application's requests that it gets."""
    since_ns: int
    """When it entered its state."""
    why: str = ""
    """The reason for its state."""
    planner_error: str = ""
    """Why its policy last failed to plan."""
    definition: Mapping[str, Any] | None = None
    """What it was built from; None if it was there from the start, under the system that decides now."""
    choice: str = ""
    """The system that its overseer has chosen; empty without one, and before it has."""

    @property
    def application(self) -> str:
        return self.parts.name

    @property
    def version(self) -> str:
        return self.parts.version

    @property
    def key(self) -> str:
        return self.parts.key

    @property
    def has_ended(self) -> bool:
        return self.state is VersionState.RETIRED
