"""What a simulated request costs, counted: events, decisions, calls, instructions, memory. Bounds as in `tests.core`.

The bounds stand some per cent above what is counted today on CPython 3.11. Records go to the fold in blocks: that is
more instructions and four calls fewer, and takes less time.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

from sloop.runlog import Record
from sloop.runlog.summary import RunSummary
from sloop.sim import World, simulate
from sloop.units import ms, s
from sloop.workload import trace_of
from tests.counting import calls_of, instructions_of
from tests.sim.scene import WORK_CONSERVING, with_clients, world

CALLS_A_REQUEST = {"plain": 20, "counted": 20.5, "checked": 39.5}
INSTRUCTIONS_A_REQUEST = {"plain": 1_180, "counted": 1_545, "checked": 2_080}
POLICIES = ("Open.retry_after_ns", "Fifo.key", "Never.is_hopeless", "WorkConserving.decide")


def quiet(requests: int, *, every_ns: int = ms(20), replicas: int = 4, **changes: Any) -> World:
    """Requests at equal distances, each served alone by the first of some replicas before the next one comes."""
    trace = trace_of(range(0, requests * every_ns, every_ns), name="equal", provenance="assumed: for counting")
    system = WORK_CONSERVING | {"replicas": replicas, "cores": 1.0}
    made = world(system=system, trace={"kind": "poisson", "rate": 1}, cores=float(replicas), slo_ms=1e6, **changes)
    return replace(with_clients(made, trace=trace), duration_ns=requests * every_ns)


CHECK_FIRST = {"plain": 0, "counted": 0, "checked": None}
LENGTHS = (300, 800)


def each(counted: Sequence[int]) -> float:
    """What one more request costs, from runs of `LENGTHS` requests: setting up falls out."""
    return (counted[1] - counted[0]) / (LENGTHS[1] - LENGTHS[0])


def play(requests: int, style: str) -> None:
    """A run as it is, with the figures that `sloop simulate` counts, or with all checkers."""
    made = quiet(requests)
    sinks = [RunSummary(made.setup().parts(), nodes=made.deployment.cluster)] if style == "counted" else []
    simulate(made, sinks, check_first=CHECK_FIRST[style])


def test_a_request_is_two_events_and_heartbeats_come_once_a_second() -> None:
    played = simulate(quiet(1_500))
    assert played.requests == 1_500
    assert played.events <= 2 * 1_500 + 2 * 30 + 10


@pytest.mark.parametrize("style", CALLS_A_REQUEST)
def test_a_request_costs_few_calls(style: str) -> None:
    short, long = (calls_of(partial(play, n, style)) for n in LENGTHS)
    found = each((short.total(), long.total()))
    assert found <= CALLS_A_REQUEST[style], f"{found} for each request: {(long - short).most_common(40)}"
    once = dict.fromkeys(POLICIES, 1.0)
    expected = once | {"Fifo.key": 2.0} if style == "checked" else once  # the checkers ask for the key, too
    assert {name: each((short[name], long[name])) for name in POLICIES} == pytest.approx(expected)


@pytest.mark.parametrize("style", CALLS_A_REQUEST)
def test_a_request_costs_few_instructions(style: str) -> None:
    short, long = (instructions_of(partial(play, n, style)) for n in LENGTHS)
    assert each((short, long)) <= INSTRUCTIONS_A_REQUEST[style]


def test_a_request_costs_the_same_among_many_replicas() -> None:
    """Enough of them to serve each request alone; the one heartbeat shows them all, nothing else visits them."""

    def cost(replicas: int) -> float:
        worlds = [quiet(requests, replicas=replicas, every_ns=ms(1)) for requests in LENGTHS]
        return each([calls_of(partial(simulate, each_world, check_first=0)).total() for each_world in worlds])

    assert cost(400) <= cost(40) + 3.0


@dataclass
class Blocks:
    """A sink that takes down how many blocks of memory are in use at these instants."""

    at_ns: Sequence[int]
    seen: list[int] = field(default_factory=list)

    def append(self, now_ns: int, record: Record) -> None:
        if len(self.seen) < len(self.at_ns) and now_ns >= self.at_ns[len(self.seen)]:
            self.seen.append(sys.getallocatedblocks())


@pytest.mark.parametrize("check_first", [0, None])
def test_memory_does_not_grow_with_the_length_of_a_run(check_first: int | None) -> None:
    """Four requests a second for longer than any window that is kept, then twice as long; some are made ahead."""
    blocks = Blocks((s(800), s(2_400)))
    simulate(quiet(10_000, every_ns=ms(250)), [blocks], check_first=check_first)
    assert blocks.seen[1] - blocks.seen[0] < 3_200, "6,400 requests between the two; from 2,000 s on it is constant"
