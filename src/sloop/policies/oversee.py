"""Which of several systems decides: the cheapest that keeps a target, as the simulator says of the last requests."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Final

from sloop.core.oversight import Guidance, Overseer, OverseerInput
from sloop.events import Simulated
from sloop.options import Fraction, PositiveInt, Range
from sloop.text import counted, in_s, listed, number
from sloop.units import s, to_s
from sloop.vocabulary import SIMULATION_CORES, SimulatedSystem, Simulation

MARGIN: Final = 0.8
"""A window is chosen so that its simulation is expected to take this part of what it may, because loads differ."""
FIRST_S: Final = 300.0
"""The length of the first window, before it is known how long a simulation takes."""
SETTLE_NS: Final = s(60)
"""What is missed in the first minute after a change does not count: it is the effect of the system before."""
SAME: Final = 0.01
"""A system that is cheaper by no more than this part does not win against the present one."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The requests that have ended between one order of a simulation and the next."""

    from_ns: int
    ended: int = 0
    missed: int = 0
    """Those that were not served in time, under the present system, after its first minute."""


@dataclass(frozen=True, slots=True)
class AutopilotMemory:
    """What an autopilot remembers."""

    asked_ns: int = -1
    """When it last asked for a simulation; -1: never."""
    window_s: float = FIRST_S
    """How long the next window may be."""
    cut: str = ""
    """Why the next window is shorter than `window_ns`, as the end of a decision's reason; empty if it is not."""
    winner: str = ""
    wins: int = 0
    """Which system has won the last comparisons, and how often in a row."""
    previous: str = ""
    """The system that decided before the present one; empty if there is none to step back to."""
    since_ns: int = 0
    """When the present system began to decide."""
    required: float = 0.0
    """The attainment that the present system must keep: the target; or, if no system keeps the target, the low end of
    what was predicted for it."""
    intervals: tuple[Interval, ...] = ()
    """Those of the last window, oldest first."""
    excluded: tuple[tuple[str, int], ...] = ()
    """Systems that have missed too many requests, each with the instant until which it is not taken again."""

    def after_change(self, previous: str, now_ns: int, required: float) -> "AutopilotMemory":
        """What is remembered when another system begins to decide: no misses, which were those of the previous one."""
        intervals = tuple(replace(each, missed=0) for each in self.intervals)
        return replace(self, previous=previous, since_ns=now_ns, required=required, intervals=intervals)


@dataclass(frozen=True, slots=True)
class Autopilot(Overseer):
    """At every period the last hour's requests are simulated under each of its systems. A system keeps the target if
    the low end of its predicted range does; for the present one, whose misses are seen, the prediction itself is
    enough. The cheapest that keeps the target wins or, if none does, the one with the highest low end. It is taken when
    it has won several times in a row.

    As soon as the present system has missed more requests in the last hour than the attainment required of it allows
    (`AutopilotMemory.required`), the previous one decides again. So a wrong choice costs no more than the misses of one
    hour, however little was known when it was made.

    Simulations take at most a tenth of one core. If simulating an hour takes longer than that, the window is shorter.
    """

    period_ns: ClassVar[int] = s(10)

    among: tuple[object, ...] = ("elastic", "hpa")
    """The systems to choose from, with their parameters; the first one decides at first."""
    target: Fraction = 0.99
    """The fraction of requests to be served in time."""
    every_ns: Annotated[int, Range(least=s(60))] = s(300)
    """How often the last requests are simulated."""
    window_ns: Annotated[int, Range(least=s(10))] = s(3600)
    """The requests of so much time are simulated. For as long, a system that has missed too many is not taken again:
    until then, its misses would count against the target."""
    wins: PositiveInt = 3
    """How often in a row a system must win before it is taken."""

    def decide(
        self, now_ns: int, given: OverseerInput, memory: AutopilotMemory | None
    ) -> tuple[Guidance, AutopilotMemory | None]:
        """See `Overseer`."""
        memory = self._counted(now_ns, given, memory or AutopilotMemory(now_ns, intervals=(Interval(now_ns),)))
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

    def _counted(self, now_ns: int, given: OverseerInput, memory: AutopilotMemory) -> AutopilotMemory:
        *before, last = memory.intervals
        missed = given.ended - given.served if now_ns >= memory.since_ns + SETTLE_NS else 0
        return replace(
            memory, intervals=(*before, Interval(last.from_ns, last.ended + given.ended, last.missed + missed))
        )

    def _step_back(
        self, now_ns: int, given: OverseerInput, memory: AutopilotMemory
    ) -> tuple[Guidance, AutopilotMemory] | None:
        """The previous system, if the present one has missed more than it may in `window_ns`."""
        missed = sum(each.missed for each in memory.intervals)
        if not memory.previous or not missed:
            return None
        ended = sum(each.ended for each in memory.intervals)
        passed_ns = max(self.period_ns, now_ns - memory.intervals[0].from_ns)
        allowed = (1 - memory.required) * ended * max(1.0, self.window_ns / passed_ns)
        if missed <= allowed:
            return None
        why = (
            f"back to {memory.previous}: under {given.choice}, {counted(missed, 'request')} were not served in time, "
            f"and {_percent(memory.required)} in time allows {int(allowed)} in {in_s(self.window_ns)}; {given.choice} "
            f"is not taken again for {in_s(self.window_ns)}"
        )
        excluded = (*_still_excluded(now_ns, memory), (given.choice, now_ns + self.window_ns))
        kept = replace(memory.after_change("", now_ns, 0.0), winner="", wins=0, excluded=excluded)
        return Guidance(memory.previous, why), kept

    def _compare(
        self, now_ns: int, given: OverseerInput, simulated: Simulated, memory: AutopilotMemory
    ) -> tuple[Guidance, AutopilotMemory]:
        """Take up what was simulated: who wins, and how long the next window may be."""
        memory = self._with_window(now_ns, simulated, memory)
        if simulated.error or not any(not row.error for row in simulated.systems):
            errors = simulated.error or listed([*dict.fromkeys(row.error for row in simulated.systems)])
            why = f"nothing can be compared: {errors}; {given.choice} goes on{memory.cut}"
            return Guidance(why=why), replace(memory, winner="", wins=0)
        rows = dict(zip(given.choices, simulated.systems, strict=True))
        excluded = dict(_still_excluded(now_ns, memory))
        winner = self._winner(given.choice, {name: row for name, row in rows.items() if name not in excluded})
        wins = memory.wins + 1 if winner == memory.winner else 1
        keeps = max(row.low for row in rows.values() if not row.error) >= self.target
        required = {name: self.target if keeps else row.low for name, row in rows.items()}
        memory = replace(
            memory, winner=winner, wins=wins, required=required[given.choice], excluded=tuple(excluded.items())
        )
        table = "; ".join(f"{name} {_row_text(row)}" for name, row in rows.items())
        numbers = f"{table}; {counted(simulated.requests, 'request')} each{memory.cut}"
        if winner == given.choice:
            return Guidance(why=f"{winner} stays: {numbers}"), memory
        if wins < self.wins:
            return Guidance(why=f"{winner} wins, {wins} of {self.wins} times in a row: {numbers}"), memory
        taken = memory.after_change(given.choice, now_ns, required[winner])
        return Guidance(winner, f"{winner} has won {wins} times in a row: {numbers}"), taken

    def _winner(self, present: str, rows: dict[str, SimulatedSystem]) -> str:
        """The cheapest of these that keeps the target, or else the cheapest with the highest low end (`Autopilot`)."""
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

    def _with_window(self, now_ns: int, simulated: Simulated, memory: AutopilotMemory) -> AutopilotMemory:
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


def _still_excluded(now_ns: int, memory: AutopilotMemory) -> tuple[tuple[str, int], ...]:
    return tuple(each for each in memory.excluded if each[1] > now_ns)


def _row_text(row: SimulatedSystem) -> str:
    if row.error:
        return f"fails ({row.error})"
    price = f"{row.usd_per_h:.4g} USD/h" if row.usd_per_h else f"{row.cores:.3g} cores"
    return f"{_percent(row.attainment)} ({_percent(row.low)} to {_percent(row.high)}) in time for {price}"


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
