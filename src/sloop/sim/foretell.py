"""What would become of the last requests of an application under other systems: the answer to `RequestSimulation`.

A server asks with its log (`sloop.page.answers`), a simulated one with the requests of its own run. Both simulate for
real, from the profiles alone. In a simulated run the answer comes after the time that it would have taken a server, by
a model: a fixed part of a core for each request and system.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from sloop.actions import RequestSimulation
from sloop.app.application import Application
from sloop.app.scenario import Scenario
from sloop.errors import SloopError
from sloop.events import Simulated
from sloop.options import Value
from sloop.runlog import Header, Record
from sloop.runlog.durations import VariantKey
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import Kept, RunState
from sloop.sim.ranges import speed_factors
from sloop.sim.run import simulate
from sloop.sim.traffic import RequestsSoFar
from sloop.sim.world import World
from sloop.systems.catalogue import choice_of
from sloop.units import NS_PER_S, s, score_interval, to_s
from sloop.vocabulary import SIMULATION_CORES, SimulatedSystem, version_key

LEAD: Final = 0.1
LEAD_S: Final = 180.0
"""Every system begins without replicas, and some scale up once in a quarter of a minute. The first tenth of the time is
not counted, and at least three minutes if that is no more than half of it."""
CPU_S_PER_REQUEST: Final = 100e-6
"""What the simulation of a request takes of a core, with reading it from the log: 30 to 90 µs were measured."""
Z: Final = 1.28
"""Normal quantile of an 80 % interval. It is asked what will become of *other* requests like these, so that a share of
so many is widened for their randomness."""
HISTORY_S: Final = 3_600.0
"""How many seconds of requests a simulated run keeps for its questions."""


def foretell(scenario: Scenario, name: str, systems: Sequence[object]) -> tuple[list[SimulatedSystem], int]:
    """What would become of the requests of one application under each of these systems, while the others stay under
    theirs; and how many of its requests count. A system that cannot run has an `error`."""
    length_s = scenario.duration_s
    lead_s = min(max(LEAD * length_s, LEAD_S), length_s / 2)
    found, counted = list[SimulatedSystem](), 0
    for value in Value(systems, "systems").elements():
        try:
            row, requests = _foretold(_under(scenario, name, value), name, lead_s)
            counted = max(counted, requests)
        except SloopError as error:
            row = SimulatedSystem(error=error.what)
        except Exception as error:  # a user's system may raise anything
            row = SimulatedSystem(error=f"it raised {type(error).__name__}: {error}")
        found.append(row)
    return found, counted


def _under(scenario: Scenario, name: str, value: Value) -> Scenario:
    """The scenario with another system for one application."""
    choice, deployment = choice_of(value), scenario.deployment

    def under(application: Application) -> Application:
        return replace(application, system=choice) if application.name == name else application

    applications = tuple(map(under, deployment.applications))
    system = choice if len(applications) == 1 else deployment.system
    return replace(
        scenario, deployment=replace(deployment, applications=applications, system=system), systems=(system,)
    )


class _Counted:
    """A sink: what one application had and cost from an instant on."""

    def __init__(self, state: DeploymentState, name: str, from_ns: int) -> None:
        self._state, self._name, self._from_ns = state, name, from_ns
        self._spent = (0.0, 0)
        self._has_begun = False

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        if now_ns >= self._from_ns and not self._has_begun:
            self._has_begun, self._spent = True, self._spent_at(self._from_ns)
        self._state.append(now_ns, record)

    @property
    def _run(self) -> RunState:
        (run,) = [record.run for record in self._state.records if record.application == self._name]
        return run

    def _spent_at(self, now_ns: int) -> tuple[float, int]:
        """US dollars and microcores × ns."""
        run = self._run
        run.cost.charge(now_ns)
        return run.cost.usd, run.cost.total_microcore_ns

    def row(self, until_ns: int) -> tuple[SimulatedSystem, int]:
        """It, without a range, with the requests that count."""
        run = self._run
        seconds = [each for each in run.seconds if each.start_s * NS_PER_S >= self._from_ns]
        requests, served = sum(each.arrivals for each in seconds), sum(each.served for each in seconds)
        usd, microcore_ns = self._spent_at(max(until_ns, run.cost.charged_ns))
        passed_ns = max(1, max(until_ns, run.cost.charged_ns) - self._from_ns)
        made = SimulatedSystem(
            attainment=served / requests if requests else 1.0,
            usd_per_h=(usd - self._spent[0]) * 3600 / to_s(passed_ns),
            cores=(microcore_ns - self._spent[1]) / 1e6 / passed_ns,
        )
        return made, requests


def _foretold(scenario: Scenario, name: str, lead_s: float) -> tuple[SimulatedSystem, int]:
    world = World.from_scenario(scenario)
    rows, requests = list[SimulatedSystem](), 0
    for errors in ({}, *(speed_factors(world) or ())):
        row, requests, is_open = _played(world, name, lead_s, errors)
        if is_open and not errors:
            return SimulatedSystem(error="it does not answer all requests"), requests
        rows.append(row)
    first, attainments = rows[0], [row.attainment for row in rows]
    low = score_interval(min(attainments), requests, Z)[0]
    high = score_interval(max(attainments), requests, Z)[1]
    return SimulatedSystem(first.attainment, low, high, first.usd_per_h, first.cores), requests


def _played(
    world: World, name: str, lead_s: float, errors: Mapping[VariantKey, float]
) -> tuple[SimulatedSystem, int, bool]:
    """One run: its row, the requests that count, and whether some were never answered."""
    setup = world.setup()
    state = DeploymentState(setup.parts(), nodes=world.deployment.cluster, start_ns=0, kept=Kept(routes=False))
    sink = _Counted(state, name, s(lead_s))
    slower = {key: error * errors.get(key, 1.0) for key, error in world.all_errors.items()}
    totals = simulate(replace(world, errors=slower) if errors else world, [sink], check_first=0)
    return *sink.row(world.duration_ns), totals.open > 0


class OwnSimulations:
    """Answers the questions of the systems of a simulated run with the requests of the run itself. It is a sink."""

    def __init__(self, header: Header) -> None:
        self._requests = RequestsSoFar(header, HISTORY_S)
        self.append = self._requests.append

    def answer(self, now_ns: int, asked: RequestSimulation) -> tuple[int, Simulated]:
        """When the answer comes, and the answer."""
        asks = asked.asks
        scenario = self._requests.scenario(now_ns, asks.last_s)
        names = {version_key(each.name, each.version): each.name for each in scenario.deployment.applications}
        name = names.get(asked.application) or asked.application.partition("@")[0]
        if name not in scenario.deployment.by_name:
            return now_ns + 1, Simulated(asked.number, error="there were no requests")
        sent = scenario.traces[name]
        count = len(list(sent.times_ns()))  # type: ignore[union-attr]  # a trace of requests that have come
        cpu_s = count * len(asks.systems) * CPU_S_PER_REQUEST
        if cpu_s > asks.cpu_s_max:
            late_ns = s(asks.cpu_s_max / SIMULATION_CORES)
            return now_ns + late_ns, Simulated(asked.number, cpu_s=asks.cpu_s_max, error=TOO_LONG)
        rows, requests = foretell(scenario, name, asks.systems)
        return now_ns + max(1, s(cpu_s / SIMULATION_CORES)), Simulated(asked.number, tuple(rows), requests, cpu_s)


TOO_LONG: Final = "the simulation took longer than it may"
