"""Overseers in the core: when they are asked, what they are told, and what their choice changes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sloop.actions import Action, Decided, End, RequestPlan, RequestSimulation, StartBatch, StopWorker
from sloop.core import ApplicationParts, Core
from sloop.core.oversight import Guidance, Overseer, OverseerInput
from sloop.core.protocols import Policies
from sloop.events import WOKE, Finished, Simulated, SystemChanged
from sloop.policies.drop import Never
from sloop.policies.order import Edf, Fifo
from sloop.units import ms, s
from sloop.vocabulary import Outcome, ReplicaId, SimulatedSystem, Simulation
from tests.core.scene import NODE, Acting, Script, beliefs_of, graph, plan_of, policies_of, request

R = ReplicaId(0)
ASK = Simulation(60.0, ("one", "two"), 3.0)


@dataclass
class Told(Overseer):
    """Answers what the test has put into `answers`, and keeps what it was told."""

    answers: list[Guidance | Exception] = field(default_factory=list)
    told: list[tuple[int, OverseerInput, Any]] = field(default_factory=list)
    period_ns: int = s(10)
    among: tuple[object, ...] = ("one", "two")

    def decide(self, now_ns: int, given: OverseerInput, memory: Any) -> tuple[Guidance, Any]:
        self.told.append((now_ns, given, memory))
        answer = self.answers.pop(0) if self.answers else Guidance()
        if isinstance(answer, Exception):
            raise answer
        return answer, len(self.told)


class Scene(Acting):
    """One application of one replica; `one` decides at first."""

    def __init__(self, *answers: Guidance | Exception, is_quick: bool = True) -> None:
        super().__init__()
        self.overseer = Told(list(answers))
        self.scripts = {
            "one": Script(plan_of(1), is_quick=is_quick),
            "two": Script(plan_of(1, cores=2.0), is_quick=is_quick),
        }
        self.core = Core([self.parts("", "1", {})], [NODE], self.parts)
        self.warm_up()

    def parts(self, name: str, version: str, definition: Any) -> ApplicationParts:
        application = graph(only={})
        choices = {
            "one": policies_of(self.scripts["one"], order=Fifo(), drop=Never()),
            "two": policies_of(self.scripts["two"], order=Edf(), drop=Never()),
        }
        return ApplicationParts(
            graph=application.graph,
            beliefs=beliefs_of(application),
            policies=choices["one"],
            name=name,
            version=version,
            overseer=self.overseer,
            choices=choices,
        )


def of(kind: type, actions: list[Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def test_it_is_asked_once_a_period_and_told_what_has_ended() -> None:
    scene = Scene()
    for number in range(3):
        scene.act(1000 * number, request(number, at_ms=1000 * number, slo_ms=10 if number else 1000))
        batch = scene.actions[-1]
        assert isinstance(batch, StartBatch)
        scene.act(1000 * number + 20, Finished(batch.batch, R, ms(20)))
    for at_s in range(3, 32):
        scene.act(1000 * at_s, WOKE)
    assert [at_ns for at_ns, _, _ in scene.overseer.told] == [s(10), s(20), s(30)]
    first = scene.overseer.told[0][1]
    assert (first.choices, first.choice, first.ended, first.served) == (("one", "two"), "one", 3, 1)
    assert [given.ended for _, given, _ in scene.overseer.told] == [3, 0, 0]
    assert [memory for _, _, memory in scene.overseer.told] == [None, 1, 2]
    assert not scene.core.state.applications[""].open_requests


def test_its_choice_decides_from_then_on_and_everything_else_stays() -> None:
    scene = Scene(Guidance("two", "it is better"), Guidance("two"))
    scene.act(9_900, *[request(number, at_ms=9_900, slo_ms=900 - 100 * number) for number in range(4)])
    actions = scene.act(10_000, WOKE)
    assert of(Decided, actions) == [Decided("overseer", "it is better", application="", choice="two")]
    (application,) = scene.core.state.applications.values()
    assert [visit.request.id for visit in application.all_stages[0].queue.visits] == [3, 2, 1], "by deadline now"
    assert not of(StopWorker, actions)
    assert scene.core.planner.policies[""].scale is scene.scripts["two"]
    scene.act(10_001, WOKE)
    assert scene.scripts["two"].seen[0].plan is None
    ended = scene.act(10_005, Finished(of(StartBatch, scene.actions)[0].batch, R, ms(11)))
    assert [end.outcome for end in of(End, ended)] == [Outcome.SERVED]
    assert not of(Decided, scene.act(20_000, WOKE)), "the same again is no change"


def test_a_simulation_is_ordered_and_only_its_answer_comes_back() -> None:
    scene = Scene(Guidance(asks=ASK), Guidance(why="as before"))
    (order,) = of(RequestSimulation, scene.act(10_000, WOKE))
    assert order == RequestSimulation(1, "", ASK)
    assert scene.act(11_000, Simulated(7)) == []
    answer = Simulated(1, (SimulatedSystem(0.9), SimulatedSystem(1.0)), 20, 0.5)
    (told,) = of(Decided, scene.act(12_000, answer))
    assert told.why == "as before"
    assert scene.overseer.told[-1][1].simulated == answer
    assert not of(Decided, scene.act(13_000, answer)), "once"


def test_one_that_raises_changes_nothing_and_is_asked_again() -> None:
    scene = Scene(ValueError("no idea"), Guidance("three", "it does not exist"), Guidance("two", "now"))
    kinds = []
    for at_s in range(10, 31):
        kinds += [(action.why, action.choice) for action in of(Decided, scene.act(1000 * at_s, WOKE))]
    assert kinds[:2] == [
        ("its overseer fails: ValueError: no idea", ""),
        ("its overseer fails: AssertionError: the overseer chooses 'three'", ""),
    ]
    assert kinds[2] == ("now", "two")


def test_plans_are_made_beside_the_loop_if_any_of_its_systems_needs_that() -> None:
    scene = Scene(is_quick=False)
    assert of(RequestPlan, scene.act(2_000, WOKE))


def test_another_system_may_take_its_place() -> None:
    scene = Scene(Guidance("two", "first"))
    scene.act(10_000, WOKE)
    plain: Callable[..., Policies] = policies_of

    def build(name: str, version: str, definition: Any) -> ApplicationParts:
        application = graph(only={})
        return ApplicationParts(
            graph=application.graph, beliefs=beliefs_of(application), policies=plain(Script(plan_of(1)), drop=Never())
        )

    scene.core.build = build
    scene.act(11_000, SystemChanged("", "1", {}))
    (application,) = scene.core.state.applications.values()
    assert application.oversight is None
    assert scene.core._is_plain
    for at_s in range(12, 32):
        scene.act(1000 * at_s, WOKE)
    assert len(scene.overseer.told) == 1
