"""Which of several systems decides: the cheapest that keeps a target, as the simulator says of the last requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from sloop.core.oversight import Guidance, Overseer, OverseerInput
from sloop.events import Simulated
from sloop.options import Fraction, PositiveInt, Range
from sloop.text import counted, in_s, listed, number
from sloop.units import s, to_s
from sloop.vocabulary import SIMULATION_CORES, SimulatedSystem, Simulation

MARGIN: Final = 0.8
"""A window is chosen so that its simulation is expected to take this part of what it may: loads differ."""
FIRST_S: Final = 300.0
"""The first window, before it is known how long a simulation takes."""
SETTLE_NS: Final = s(60)
"""A system that has just begun to decide is not judged for so long: what it found still goes."""
SAME: Final = 0.01
"""A system that is cheaper by less than this part is not worth a change."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The requests that have ended from one question to the next."""

    from_ns: int
    ended: int = 0
    missed: int = 0
    """Those not in time, under the system that decides now and after it has settled."""


@dataclass(frozen=True, slots=True)
class FlightMemory:
    """What an autopilot remembers."""

    asked_ns: int = -1
    """When it last asked for a simulation; -1: never."""
    window_s: float = FIRST_S
    """How long the next window may be."""
    cut: str = ""
    """Why it is shorter than it is to be."""
    winner: str = ""
    wins: int = 0
    """Which system was best in the last comparisons, and how often in a row."""
    before: str = ""
    """The system that decided before this one."""
    since_ns: int = 0
    """When this one began."""
    least: float = 0.0
    """The attainment that it must have: the target, or what was foretold of it if no system keeps that."""
    intervals: tuple[Interval, ...] = ()
    """Those of the last window, oldest first."""
    grounded: tuple[tuple[str, int], ...] = ()
    """Systems that did worse than foretold, each with the time until which it is not chosen."""

    def under(self, before: str, now_ns: int, least: float) -> "FlightMemory":
        """What is remembered when another system begins to decide: nothing of what was missed."""
        intervals = tuple(replace(each, missed=0) for each in self.intervals)
        return replace(self, before=before, since_ns=now_ns, least=least, intervals=intervals)


@dataclass(frozen=True, slots=True)
class Autopilot(Overseer):
    """At every period the last hour's requests are simulated under each of its systems. The cheapest one of which even
    the low end of the range keeps the target is taken when it has won several times in a row; if none keeps the target,
    the one with the highest low end wins. The system that decides need not keep the target by its low end, for what it
    really does is seen: as soon as it has missed more requests than an hour may have at the target, or at what was
    foretold of it if that is less, the system before decides again.

    So a choice that was wrong costs no more than the misses of one hour, however little was known when it was made.
    Simulations take at most a tenth of one core. Where an hour does not fit into a period, the window is shorter.
    """

    period_ns: ClassVar[int] = s(10)

    among: tuple[object, ...] = ("elastic", "hpa")
    """The systems to choose from, with their parameters; the first one decides at first."""
    target: Fraction = 0.99
    """The fraction of requests to be served in time."""
    every_ns: Annotated[int, Range(least=s(60))] = s(300)
    """How often the last requests are simulated."""
    window_ns: Annotated[int, Range(least=s(10))] = s(3600)
    """How long ago the first of them may be, and for how long a system is not taken again that did worse than foretold:
    until then, requests that it missed would count against the target."""
    wins: PositiveInt = 3
    """How often in a row a system must win before it is taken."""

    def decide(
        self, now_ns: int, given: OverseerInput, memory: FlightMemory | None
    ) -> tuple[Guidance, FlightMemory | None]:
        """See `Overseer`."""
        memory = self._counted(now_ns, given, memory or FlightMemory(now_ns, intervals=(Interval(now_ns),)))
        back = self._step_back(now_ns, given, memory)
        if back is not None:
            return back
        guidance = Guidance()
        if given.simulated is not None:
            guidance, memory = self._compare(now_ns, given, given.simulated, memory)
        if now_ns - memory.asked_ns >= self.every_ns:
            last_s = min(memory.window_s, to_s(self.window_ns), to_s(now_ns))
            asks = Simulation(last_s, self.among, self._budget_s)
            recent = [each for each in memory.intervals if each.from_ns > now_ns - self.window_ns]
            memory = replace(memory, asked_ns=now_ns, intervals=(*recent, Interval(now_ns)))
            return Guidance(guidance.choice, guidance.why, asks), memory
        return guidance, memory

    @property
    def _budget_s(self) -> float:
        """Seconds of a core for each simulation."""
        return SIMULATION_CORES * to_s(self.every_ns)

    def _counted(self, now_ns: int, given: OverseerInput, memory: FlightMemory) -> FlightMemory:
        *before, last = memory.intervals
        missed = given.ended - given.served if now_ns >= memory.since_ns + SETTLE_NS else 0
        return replace(
            memory, intervals=(*before, Interval(last.from_ns, last.ended + given.ended, last.missed + missed))
        )

    def _step_back(
        self, now_ns: int, given: OverseerInput, memory: FlightMemory
    ) -> tuple[Guidance, FlightMemory] | None:
        """The system before, if this one has missed more than an hour may have."""
        missed = sum(each.missed for each in memory.intervals)
        if not memory.before or not missed:
            return None
        ended = sum(each.ended for each in memory.intervals)
        passed_ns = max(self.period_ns, now_ns - memory.intervals[0].from_ns)
        allowed = (1 - memory.least) * ended * max(1.0, self.window_ns / passed_ns)
        if missed <= allowed:
            return None
        why = (
            f"back to {memory.before}: {counted(missed, 'request')} not in time under {given.choice}, and "
            f"{in_s(self.window_ns)} may have {int(allowed)} if {_percent(memory.least)} are to be; it is not taken "
            f"again for {in_s(self.window_ns)}"
        )
        grounded = (*_still(now_ns, memory.grounded), (given.choice, now_ns + self.window_ns))
        kept = replace(memory.under("", now_ns, 0.0), winner="", wins=0, grounded=grounded)
        return Guidance(memory.before, why), kept

    def _compare(
        self, now_ns: int, given: OverseerInput, simulated: Simulated, memory: FlightMemory
    ) -> tuple[Guidance, FlightMemory]:
        """Take up what was simulated: who wins, and how long the next window may be."""
        memory = self._with_window(now_ns, simulated, memory)
        if simulated.error or not any(not row.error for row in simulated.systems):
            errors = simulated.error or listed([*dict.fromkeys(row.error for row in simulated.systems)])
            why = f"nothing can be compared: {errors}; {given.choice} goes on{memory.cut}"
            return Guidance(why=why), replace(memory, winner="", wins=0)
        rows = dict(zip(given.choices, simulated.systems, strict=True))
        grounded = dict(_still(now_ns, memory.grounded))
        winner = self._winner(given.choice, {name: row for name, row in rows.items() if name not in grounded})
        wins = memory.wins + 1 if winner == memory.winner else 1
        keeps = max(row.low for row in rows.values() if not row.error) >= self.target
        low = {name: self.target if keeps else row.low for name, row in rows.items()}
        memory = replace(memory, winner=winner, wins=wins, least=low[given.choice], grounded=tuple(grounded.items()))
        table = "; ".join(f"{name} {_row_text(row)}" for name, row in rows.items())
        numbers = f"{table}; {counted(simulated.requests, 'request')} each{memory.cut}"
        if winner == given.choice:
            return Guidance(why=f"{winner} stays: {numbers}"), memory
        if wins < self.wins:
            return Guidance(why=f"{winner} wins, {wins} of {self.wins} times in a row: {numbers}"), memory
        taken = memory.under(given.choice, now_ns, low[winner])
        return Guidance(winner, f"{winner} has won {wins} times in a row: {numbers}"), taken

    def _winner(self, present: str, rows: dict[str, SimulatedSystem]) -> str:
        """The cheapest of these that keeps the target, or else the cheapest with the highest low end."""
        known = {name: row for name, row in rows.items() if not row.error}
        if not known:
            return present
        least = min(self.target, max(row.low for row in known.values()))
        keeping = {
            name: row
            for name, row in known.items()
            if row.low >= least or (name == present and row.attainment >= self.target)
        }
        has_prices = any(row.usd_per_h for row in keeping.values())
        costs = {name: row.usd_per_h if has_prices else row.cores for name, row in keeping.items()}
        cheapest = min(costs, key=costs.__getitem__)
        is_same = present in costs and costs[present] <= costs[cheapest] * (1 + SAME)
        return present if is_same else cheapest

    def _with_window(self, now_ns: int, simulated: Simulated, memory: FlightMemory) -> FlightMemory:
        """How long the next window may be, from what the last one took."""
        window_s = min(memory.window_s, to_s(self.window_ns), to_s(memory.asked_ns))
        if not simulated.systems:  # it took too long, or something is wrong
            return replace(memory, window_s=max(window_s / 2, to_s(self.period_ns)))
        whole_s = to_s(self.window_ns)
        if simulated.cpu_s <= 0:
            return replace(memory, window_s=whole_s, cut="")
        next_s = min(whole_s, window_s * self._budget_s * MARGIN / simulated.cpu_s)
        cut = ""
        if next_s < whole_s:
            needed_s = simulated.cpu_s * whole_s / window_s
            why = f"{number(whole_s)} s would take {number(needed_s)} s of a core, of {number(self._budget_s)} s"
            cut = f"; the next comparison is of {number(next_s)} s: {why}"
        return replace(memory, window_s=next_s, cut=cut)


def _still(now_ns: int, grounded: Sequence[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    return tuple(each for each in grounded if each[1] > now_ns)


def _row_text(row: SimulatedSystem) -> str:
    if row.error:
        return f"fails ({row.error})"
    price = f"{row.usd_per_h:.4g} USD/h" if row.usd_per_h else f"{row.cores:.3g} cores"
    return f"{_percent(row.attainment)} ({_percent(row.low)} to {_percent(row.high)}) in time for {price}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
