"""Overseers: which of several systems decides for an application, and what they are told.

An overseer is no policy: it chooses whose policies are in force. It is asked in a tick, also when a simulation that it
has ordered is done. Like a policy it is a frozen dataclass of parameters, has no clock and no state, and remembers what
it answers.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct

from sloop.core.protocols import Policies
from sloop.events import Simulated
from sloop.vocabulary import Simulation


class OverseerInput(Struct, frozen=True):
    """What an overseer knows."""

    choices: tuple[str, ...]
    """The names of its systems."""
    choice: str
    """The one that decides now."""
    ended: int
    """Requests of the application that have ended since the last question,"""
    served: int
    """and how many of them in time."""
    simulated: Simulated | None = None
    """The answer to the simulation that it has ordered, once."""


class Guidance(Struct, frozen=True):
    """What an overseer answers."""

    choice: str = ""
    """The system that is to decide from now on; empty: the one that decides now."""
    why: str = ""
    """What it has compared, for the log; empty if there is nothing to say. A change needs it."""
    asks: Simulation | None = None
    """A simulation to order. One that is still under way counts no more."""


class Overseer(Protocol):
    """Which system decides."""

    __slots__ = ()

    @property
    @abstractmethod
    def period_ns(self) -> int:
        """The time between two questions, at least a second."""
        ...

    @property
    @abstractmethod
    def among(self) -> tuple[object, ...]:
        """The systems, each as a user declares one: a name, or a mapping with `name` and parameters."""
        ...

    @abstractmethod
    def decide(self, now_ns: int, given: OverseerInput, memory: Any) -> tuple[Guidance, Any]:  # noqa: ANN401
        """The answer, and what to remember until the next question; `memory` is what it remembered last, None at first.
        It takes less than a millisecond."""
        ...


@dataclass(slots=True, eq=False)
class Attainment:
    """How many requests have ended, and how many of them in time."""

    ended: int = 0
    served: int = 0

    @property
    def share(self) -> float:
        return self.served / self.ended if self.ended else 1.0


@dataclass(slots=True, eq=False)
class Oversight:
    """What a core keeps of the overseer of an application version."""

    overseer: Overseer
    choices: Mapping[str, Policies]
    choice: str
    next_ns: int
    """When to ask it again."""
    memory: Any = None
    requests: Attainment = field(default_factory=Attainment)
    """Since the version began."""
    counted: tuple[int, int] = (0, 0)
    """How many of these had ended at the last question, and how many of them in time."""
    number: int = -1
    """Of the simulation that it waits for; -1 if it waits for none."""

    def decide(self, now_ns: int, simulated: Simulated | None = None) -> Guidance:
        """Ask it."""
        ended, served = self.requests.ended, self.requests.served
        new_ended, new_served = ended - self.counted[0], served - self.counted[1]
        self.counted = ended, served
        given = OverseerInput(tuple(self.choices), self.choice, new_ended, new_served, simulated)
        period_ns = self.overseer.period_ns
        self.next_ns = (now_ns // period_ns + 1) * period_ns
        guidance, self.memory = self.overseer.decide(now_ns, given, self.memory)
        assert guidance.choice in ("", *self.choices), f"the overseer chooses {guidance.choice!r}"
        return guidance


def oversight_of(now_ns: int, overseer: Overseer | None, choices: Mapping[str, Policies]) -> Oversight | None:
    """The oversight of an application that begins now; None without an overseer."""
    if overseer is None:
        return None
    return Oversight(overseer, choices, next(iter(choices)), now_ns + overseer.period_ns)
