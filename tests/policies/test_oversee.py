"""The autopilot: which of its systems wins and is taken, when the previous one decides again, how much it asks for."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from sloop.core.oversight import Guidance, OverseerInput
from sloop.errors import InputError
from sloop.events import Simulated
from sloop.options import check_ranges
from sloop.policies.oversee import Autopilot, AutopilotMemory
from sloop.systems import build_system
from sloop.units import s
from sloop.vocabulary import SimulatedSystem

NAMES = ("dear", "cheap", "weak")
DEAR, CHEAP, WEAK = (
    SimulatedSystem(1.0, 0.999, 1.0, usd_per_h=4.0, cores=4),
    SimulatedSystem(0.997, 0.993, 0.999, usd_per_h=2.0, cores=2),
    SimulatedSystem(0.97, 0.96, 0.98, usd_per_h=1.0, cores=1),
)


class Flight:
    """An autopilot at work: what it is told, and what it answers."""

    def __init__(self, pilot: Autopilot | None = None) -> None:
        self.pilot = pilot or Autopilot(among=NAMES)
        self.choice = NAMES[0]
        self.now_s = 0
        self.memory: AutopilotMemory | None = None
        self.asked = 0

    def tell(
        self, *, ended: int = 0, served: int = 0, simulated: Simulated | None = None, after_s: int = 10
    ) -> Guidance:
        self.now_s += after_s
        given = OverseerInput(NAMES, self.choice, ended, served, simulated)
        guidance, self.memory = self.pilot.decide(s(self.now_s), given, self.memory)
        self.choice = guidance.choice or self.choice
        self.asked += guidance.asks is not None
        return guidance

    def period(self, *rows: SimulatedSystem, cpu_s: float = 1.0) -> Guidance:
        """Time passes until it asks, and it gets this answer 10 s later."""
        while self.tell().asks is None:
            pass
        return self.tell(simulated=Simulated(self.asked, rows, 1_000, cpu_s))


def test_the_cheapest_that_keeps_the_target_is_taken_when_it_has_won_three_times() -> None:
    flight = Flight()
    assert [flight.period(DEAR, CHEAP, WEAK).choice for _ in range(3)] == ["", "", "cheap"]
    guidance = flight.period(DEAR, CHEAP, WEAK)
    assert (guidance.choice, flight.choice) == ("", "cheap")
    assert guidance.why == (
        "cheap stays: dear 100.00 % (99.90 % to 100.00 %) in time for 4 USD/h; cheap 99.70 % (99.30 % to 99.90 %) in "
        "time for 2 USD/h; weak 97.00 % (96.00 % to 98.00 %) in time for 1 USD/h; 1000 requests each"
    )


def test_a_win_of_another_begins_the_count_anew() -> None:
    flight = Flight()
    near = replace_row(CHEAP, usd_per_h=3.99)
    told = [flight.period(DEAR, row, WEAK).choice for row in (CHEAP, CHEAP, near, CHEAP, CHEAP, CHEAP)]
    assert told == ["", "", "", "", "", "cheap"], "what is hardly cheaper is no reason to change"


def replace_row(row: SimulatedSystem, **changes: float) -> SimulatedSystem:
    return structs.replace(row, **changes)


@pytest.mark.parametrize(
    ("rows", "winner"),
    [
        ((DEAR, CHEAP, WEAK), "cheap"),
        ((WEAK, replace_row(WEAK, attainment=0.98, low=0.97), WEAK), "cheap"),
        ((replace_row(DEAR, usd_per_h=0), replace_row(CHEAP, usd_per_h=0), WEAK), "cheap"),
        ((DEAR, SimulatedSystem(error="it raised"), WEAK), "dear"),
        ((SimulatedSystem(error="no"), SimulatedSystem(error="no"), WEAK), "weak"),
        ((replace_row(DEAR, low=0.98), replace_row(CHEAP, low=0.98), WEAK), "cheap"),
    ],
    ids=["keeps", "best", "cores", "error", "only", "equal"],
)
def test_who_wins(rows: Sequence[SimulatedSystem], winner: str) -> None:
    pilot = Autopilot(among=NAMES)
    assert pilot._winner("dear", dict(zip(NAMES, rows, strict=True))) == winner


def taken() -> Flight:
    flight = Flight()
    for _ in range(3):
        flight.period(DEAR, CHEAP, WEAK)
    assert flight.choice == "cheap"
    return flight


def test_the_previous_system_decides_again_when_more_was_missed_than_an_hour_allows() -> None:
    flight = taken()
    flight.tell(ended=300, served=100)  # what it found, not what it did
    for _ in range(6):
        assert not flight.tell().choice
    # 1,000 requests in about as many seconds: an hour has 3,600, and 36 of them may miss.
    flight.now_s = 980
    assert not flight.tell(ended=660, served=625).choice
    guidance = flight.tell(ended=40, served=30)
    assert guidance.choice == "dear"
    assert guidance.why == (
        "back to dear: under cheap, 45 requests were not served in time, and 99.00 % in time allows 36 in 3600 s; "
        "cheap is not taken again for 3600 s"
    )
    assert [flight.period(DEAR, CHEAP, WEAK).choice for _ in range(4)] == [""] * 4
    flight.now_s += 3600
    assert [flight.period(DEAR, CHEAP, WEAK).choice for _ in range(3)] == ["", "", "cheap"]


def test_what_it_missed_counts_for_an_hour() -> None:
    flight = taken()
    flight.tell(after_s=60)
    for _ in range(30):  # 5 hours
        assert not flight.period(DEAR, CHEAP, WEAK).choice
        assert not flight.tell(ended=300, served=298).choice
    assert flight.memory is not None
    assert len(flight.memory.intervals) <= 13
    assert flight.tell(ended=300, served=250).choice == "dear"


def test_where_no_system_keeps_the_target_it_must_keep_its_predicted_low_end() -> None:
    flight = Flight()
    far = [replace_row(row, low=low) for row, low in ((DEAR, 0.90), (CHEAP, 0.95), (WEAK, 0.80))]
    assert [flight.period(*far).choice for _ in range(3)] == ["", "", "cheap"]
    flight.tell(after_s=60)
    assert not flight.tell(ended=400, served=360).choice
    assert flight.tell(ended=400, served=200).choice == "dear"


def test_a_system_that_decides_goes_on_while_it_keeps_the_target_although_its_low_end_does_not() -> None:
    flight = taken()
    near = replace_row(CHEAP, attainment=0.991, low=0.985)
    assert [flight.period(DEAR, near, WEAK).choice for _ in range(4)] == [""] * 4
    worse = replace_row(CHEAP, attainment=0.989, low=0.985)
    assert [flight.period(DEAR, worse, WEAK).choice for _ in range(3)] == ["", "", "dear"]
    assert [flight.period(DEAR, near, WEAK).choice for _ in range(4)] == [""] * 4, "to be taken it must"


def test_it_asks_once_in_a_period_and_for_as_much_as_a_tenth_of_a_core_can_do() -> None:
    flight = Flight(Autopilot(among=NAMES, every_ns=s(300)))
    asks = []
    for _ in range(130):
        guidance = flight.tell()
        if guidance.asks is not None:
            asks.append(guidance.asks)
            # 90 s of a core for an hour: three times as much as there is
            flight.tell(simulated=Simulated(1, (DEAR, CHEAP, WEAK), 10, guidance.asks.last_s * 0.025))
    assert [round(ask.last_s) for ask in asks] == [300, 610, 910, 960], "as much as there is, then 0.8 × 30 / 0.025"
    assert {ask.cpu_s_max for ask in asks} == {30.0}
    assert {ask.systems for ask in asks} == {NAMES}
    assert flight.memory is not None
    assert flight.memory.cut == "; the next comparison is of 960 s: 3,600 s would take 90 s of a core, of 30 s"


def test_without_an_answer_it_goes_on_and_asks_for_less() -> None:
    flight = Flight()
    flight.period(DEAR, CHEAP, WEAK)
    flight.period(DEAR, CHEAP, WEAK)
    while flight.tell().asks is None:
        pass
    guidance = flight.tell(simulated=Simulated(3, error="it took too long"))
    assert guidance.why.startswith("nothing can be compared: it took too long; dear goes on")
    assert flight.memory is not None
    window_s, wins = flight.memory.window_s, flight.memory.wins
    assert (window_s < 3600, wins) == (True, 0)
    assert [flight.period(DEAR, CHEAP, WEAK).choice for _ in range(3)] == ["", "", "cheap"]


def test_it_is_a_system_whose_parameters_are_its_own() -> None:
    among = ["hpa", {"name": "static", "cores": 2}]
    system = build_system("autopilot", {"among": among, "target": 0.95, "every_s": 120})
    assert system.overseer == Autopilot(among=("hpa", {"name": "static", "cores": 2}), target=0.95, every_ns=s(120))
    assert list(system.choices) == ["hpa", "static (cores 2)"]
    assert system.policies is system.choices["hpa"]
    assert not system.resizes
    assert build_system("autopilot").resizes


@pytest.mark.parametrize(
    ("declared", "what"),
    [
        ({"among": ["hpa"]}, "must be at least 2 systems"),
        ({"among": ["hpa", "hpa"]}, "must be at least 2 systems, each with its own parameters"),
        ({"among": ["hpa", "hpaa"]}, r"among\[1\].*unknown system 'hpaa'"),
        ({"among": ["hpa", {"name": "hpa", "targett": 1}]}, "unknown key 'targett'"),
        ({"among": ["hpa", {"target": 1}]}, "the key 'name' is missing"),
        ({"among": ["hpa", "headstart"]}, "'headstart' and 'hpa' cannot take over from each other"),
        ({"among": ["hpa", "autopilot"]}, "it chooses among systems itself"),
        ({"every_s": 5}, "must be a time of at least 60,?000 ms"),
        ({"order": "edf"}, "unknown key 'order'"),
    ],
)
def test_what_it_cannot_be_is_refused(declared: dict[str, object], what: str) -> None:
    with pytest.raises(InputError, match=what):
        build_system("autopilot", declared)


def test_parameters_in_python_are_checked_too() -> None:
    with pytest.raises(InputError, match="target"):
        check_ranges(replace(Autopilot(), target=1.5))
