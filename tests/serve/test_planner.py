"""The planner process: the same input as the core's view, and a server that survives whatever a policy does."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import (
    Action,
    RequestPlan,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    VersionState,
)
from sloop.app.load import load_application
from sloop.core import Core
from sloop.core.views import ApplicationView, PlanInput
from sloop.events import (
    WOKE,
    Deployed,
    Event,
    Finished,
    Planned,
    Promoted,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.serve.planner import PlannerProcess, PlanReceiver, PlanRequest, PlanSender
from sloop.systems.setup import build, definition_of, set_up
from sloop.systems.snapshot import Snapshot, restore, save
from sloop.units import ms, s
from sloop.vocabulary import Canary, Request, RequestId

PROFILE = {
    "latency_ms": {"form": "amdahl", "gamma": 5, "epsilon": 5, "delta": 1, "eta": 1},
    "max_batch": 4,
    "max_cores": 2,
    "load_s": 0.5,
    "memory_bytes": 1_000_000,
}
SYSTEM = {"name": "mixed", "cores": [0.25], "batch_max": 4, "period_ms": 500}


def document(name: str, stages: int, system: Mapping[str, object] | str = SYSTEM) -> dict[str, object]:
    names = [f"s{place}" for place in range(stages)]
    described = [
        {"name": each, "after": names[:place][-1:], "variants": [{"name": "v", "profile": PROFILE}]}
        for place, each in enumerate(names)
    ]
    cluster = {"nodes": [{"hardware": "custom", "cores": 4, "count": 3, "memory_bytes": 1 << 34}]}
    return {"name": name, "slo_ms": 400, "stages": described, "system": system, "cluster": cluster}


def definition(name: str, version: str, stages: int, system: Mapping[str, object] | str = SYSTEM) -> Deployed:
    application = load_application(document(name, stages, system)).qualified(version)
    (setup,) = set_up(application).applications
    return Deployed(name, version, definition_of(setup))


def key_of(each: Deployed) -> str:
    return each.application if each.version == "1" else f"{each.application}@{each.version}"


class Mirrored:
    """A core whose every request for a plan is also sent through `PlanSender` and `PlanReceiver`."""

    def __init__(self, *definitions: Deployed) -> None:
        parts = [build(each.application, each.version, each.definition) for each in definitions]
        nodes = load_application(document("x", 1)).cluster
        self.core = Core(parts, nodes, build)
        self.sender, self.receiver = PlanSender(), PlanReceiver()
        self.now_ns = 0
        self.requests = 0
        self.given: list[PlanInput] = []
        self.bytes = 0
        self._later: list[tuple[int, Event]] = []
        for each in definitions:
            self.follow(each)

    def follow(self, each: Deployed) -> None:
        self.receiver.add(build(each.application, each.version, each.definition))

    def tell(self, event: Event) -> None:
        actions = self.core.handle(self.now_ns, event)
        for action in actions:
            self._obey(action)
        if any(isinstance(action, RequestPlan) for action in actions):
            self._plan()

    def run(self, length_ns: int) -> None:
        """Let time pass: the core is woken, and what it has ordered happens."""
        end_ns = self.now_ns + length_ns
        while True:
            self._later.sort(key=lambda each: each[0])
            due_ns = min(self.core.wake_ns, self._later[0][0] if self._later else end_ns)
            if due_ns >= end_ns:
                self.now_ns = end_ns
                return
            self.now_ns = max(self.now_ns, due_ns)
            self.tell(self._later.pop(0)[1] if self._later and self._later[0][0] <= due_ns else WOKE)

    def _obey(self, action: Action) -> None:
        match action:
            case StartWorker():
                self._later.append((self.now_ns + ms(300), WorkerReady(action.worker)))
            case StopWorker():
                self._later.append((self.now_ns + ms(1), WorkerStopped(action.worker)))
            case ResizeWorker():
                self._later.append((self.now_ns + ms(1), WorkerResized(action.worker, action.cores)))
            case StartBatch():
                done = Finished(action.batch, action.replica, ms(4))
                self._later.append((self.now_ns + ms(4 + 3 * len(action.requests)), done))
            case Rollout():
                for key in list(self.core.state.applications):
                    if key.partition("@")[0] == action.application:
                        self.sender.forget_traffic(key)
                if action.state is VersionState.RETIRED:
                    key = action.application if action.version == "1" else f"{action.application}@{action.version}"
                    self.sender.forget(key)
                    self.receiver.discard(key)

    def _plan(self) -> None:
        given = self.core.plan_input
        assert given is not None
        self.given.append(given)
        sent = msgspec.msgpack.encode(self.sender.request_of(given))
        self.bytes, self.requests = len(sent), self.requests + 1
        followed = self.receiver.input_of(msgspec.msgpack.decode(sent, type=PlanRequest))
        assert readable(followed) == readable(given)
        planned = self.core.planner.plan(given)
        answer = msgspec.msgpack.decode(msgspec.msgpack.encode(planned), type=Planned)
        self._later.append((self.now_ns + ms(5), answer))


def readable(given: PlanInput) -> object:
    """An input without the estimates, which are other objects in another process; their corrections instead."""

    def view(each: ApplicationView) -> object:
        stages = [
            (
                *(stage.name, stage.slo_ns, stage.after, stage.replicas, stage.queue, stage.running),
                *(stage.buckets, stage.bucket_ns, stage.visits, stage.starts_ns),
                {
                    key: (belief.correction, belief.prior_weight, belief.mean_ratio, belief.costs_ns(belief.slot(1.0)))
                    for key, belief in stage.beliefs.items()
                },
            )
            for stage in each.stages
        ]
        traffic = (each.ingress.buckets, each.ingress.bucket_ns)
        return (each.key, stages, traffic, each.share, each.weight, each.paths, each.plan)

    return (given.number, given.now_ns, given.nodes, [view(each) for each in given.due], given.others)


def test_the_process_sees_how_long_a_start_takes() -> None:
    mirrored = Mirrored(definition("a", "1", 1, {"name": "headstart"}))
    mirrored.tell(WOKE)
    mirrored.run(s(3))
    seen = [start_ns for given in mirrored.given for start_ns in given.due[0].stages[0].starts_ns.values()]
    assert len(seen) > 1, "what `Mirrored` compares on both sides"
    assert min(seen) > 0


@given(st.integers(0, 10**6))
@settings(max_examples=30)
def test_the_process_sees_what_the_core_shows(seed: int) -> None:
    """Random traffic, lost replicas, versions that come and go: every input is the same on both sides."""
    chance = Random(seed)
    first = [definition("a", "1", chance.choice((1, 2))), definition("b", "1", 1)]
    mirrored = Mirrored(*first[: chance.choice((1, 2))])
    names = [each.application for each in first[: len(mirrored.core.state.applications)]]
    number, version = 0, 1
    for _ in range(chance.randint(20, 60)):
        for _ in range(chance.choice((0, 3, 20))):
            number += 1
            now_ns = mirrored.now_ns
            request = Request(RequestId(number), now_ns, now_ns, now_ns + ms(400), (), chance.choice(names))
            mirrored.tell(request)
            mirrored.run(ms(chance.choice((0, 1, 10))))
        mirrored.run(ms(chance.choice((1, 200, 1500))))
        event = chance.random()
        if event < 0.08 and mirrored.core.state.replicas:
            mirrored.tell(WorkerLost(chance.choice(list(mirrored.core.state.replicas)), "killed"))
        elif event < 0.16:
            version += 1
            new = definition("a", str(version), chance.choice((1, 2)))
            mirrored.follow(new)
            canary = chance.choice((None, Canary(0.3, promote_after_s=2)))
            mirrored.tell(Deployed("a", str(version), dict(new.definition), canary))
        elif event < 0.2:
            mirrored.tell(Promoted("a", str(version)))
    mirrored.run(s(15))
    assert mirrored.requests > 10


def test_the_process_sees_what_was_learnt_about_sizes() -> None:
    mirrored = Mirrored(definition("a", "1", 1))
    for number in range(40):
        size, now_ns = (16, 64, 256)[number % 3], mirrored.now_ns
        mirrored.tell(Request(RequestId(number), now_ns, now_ns, now_ns + ms(400), size=size))
        mirrored.run(ms(250))
    stage = mirrored.given[-1].due[0].stages[0]
    (belief,) = stage.beliefs.values()
    assert [each.size for each in belief.size_lessons.classes] == [16, 64, 256]
    assert sum(each.share for each in belief.size_lessons.classes) == pytest.approx(1)


def test_buckets_are_sent_once() -> None:
    """After ten minutes of traffic, a request for a plan has about as many bytes as after some seconds."""
    mirrored = Mirrored(definition("a", "1", 2))
    sizes = []
    for length_s in (20, 300):
        for number in range(length_s * 4):
            id = RequestId(length_s * 10_000 + number)
            mirrored.tell(Request(id, mirrored.now_ns, mirrored.now_ns, mirrored.now_ns + ms(400)))
            mirrored.run(ms(250))
        sizes.append(mirrored.bytes)
    assert sizes[1] < sizes[0] + 200, sizes
    assert sizes[1] < 2400, sizes


# The process


class Answers:
    """Collects what the process reports."""

    def __init__(self) -> None:
        self.all: list[Planned] = []
        self._came = asyncio.Event()

    def __call__(self, planned: Planned) -> None:
        self.all.append(planned)
        self._came.set()

    async def number(self, number: int) -> Planned:
        """The answer to this request."""
        async with asyncio.timeout(20):
            while not (found := [each for each in self.all if each.number == number]):
                self._came.clear()
                await self._came.wait()
        return found[-1]


Scene = Callable[[PlannerProcess, Answers, PlanInput], Awaitable[None]]


@asynccontextmanager
async def planning(
    *definitions: Deployed, answer_s_max: float = 10.0, late_s: float = 2.0
) -> AsyncIterator[tuple[PlannerProcess, Answers, PlanInput]]:
    """A running process that plans for these versions, and the input of a first plan."""
    planner = PlannerProcess(asyncio.get_running_loop(), answer_s_max=answer_s_max, late_s=late_s)
    answers = Answers()
    planner.attach(answers)
    for each in definitions:
        planner.add(key_of(each), each)
    planner.start()
    core = Core([build(d.application, d.version, d.definition) for d in definitions], NODES, build)
    core.handle(0, WOKE)
    if core.plan_input is None:  # the policies are quick
        core._control._plans_beside = True
        core.handle(core.wake_ns, WOKE)
    assert core.plan_input is not None
    try:
        yield planner, answers, core.plan_input
    finally:
        pid = planner.pid
        await planner.close()
        assert str(pid) not in os.listdir("/proc")


NODES = load_application(document("x", 1)).cluster
live = pytest.mark.live


def again(number: int, given: PlanInput) -> PlanInput:
    return PlanInput(number, given.now_ns + s(number), given.nodes, given.due, given.others)


@live
async def test_it_answers_as_the_core_would_and_learns_of_versions() -> None:
    first, second = definition("a", "1", 2), definition("b", "1", 1)
    async with planning(first) as (planner, answers, given):
        core = Core([build("a", "1", first.definition)], NODES, build)
        core.handle(0, WOKE)
        assert core.plan_input is not None
        planner.request(given)
        answer = await answers.number(1)
        assert answer == core.planner.plan(core.plan_input)
        assert answer.plans["a"].stages
        assert os.sched_getscheduler(planner.pid or 0) == os.SCHED_IDLE
        group = f"/proc/{planner.pid}/autogroup"
        if os.path.exists(group):
            with open(group) as file:
                assert file.read().split()[-1] in ("19", "")
        planner.add("b", second)
        both = Core([build(d.application, d.version, d.definition) for d in (first, second)], NODES, build)
        both.handle(0, WOKE)
        assert both.plan_input is not None
        planner.request(again(2, both.plan_input))
        assert (await answers.number(2)).plans.keys() == {"a", "b"}
        planner.discard("a")
        (_, only) = both.plan_input.due
        planner.request(PlanInput(3, s(3), given.nodes, (only,)))
        assert (await answers.number(3)).plans.keys() == {"b"}


POLICY = """
import math, os, sys, time
from dataclasses import dataclass, field
from sloop.core.protocols import Policies, Scale
from sloop.policies import targets
from sloop.policies.admit import Open
from sloop.policies.batch import WorkConserving
from sloop.policies.divide import MaxMin
from sloop.policies.drop import PredictiveDrop
from sloop.policies.forecast import MovingMax
from sloop.policies.order import Edf
from sloop.policies.place import BestFit
from sloop.policies.route import LeastLoaded
from sloop.systems.system import System
from sloop.units import s
from sloop.vocabulary import Plan

@dataclass(frozen=True, slots=True)
class Trouble(Scale):
    period_ns: int = s(1)

    def plan(self, now_ns, view, memory):
        calls = (memory or 0) + 1
        if now_ns > s(1.5):
            {does}
        plans = [targets.equal_replicas(stage, targets.belief_of(stage), count=1, cores=1.0, batch_max=1)
                 for stage in view.stages]
        return Plan(tuple(plans), f"call {{calls}}"), calls

SYSTEM = System("trouble", "system", "tests", Policies(
    Edf(), WorkConserving(), LeastLoaded(), PredictiveDrop(), Open(), BestFit(), MovingMax(), Trouble(), MaxMin()))
"""


def trouble(folder: Path, does: str) -> Deployed:
    """An application whose policy makes one good plan, and then does something."""
    path = folder / "trouble.py"
    path.write_text(POLICY.format(does=does))
    return definition("a", "1", 1, str(path))


@live
async def test_it_tells_the_state_of_its_policies_for_a_snapshot(tmp_path: Path) -> None:
    own = trouble(tmp_path, "calls = lambda: None")
    key = key_of(own)
    async with planning(own) as (planner, answers, given):
        told: asyncio.Queue[tuple[int, Snapshot | str]] = asyncio.Queue()
        planner.request(given)
        assert planner.save(lambda *saved: told.put_nowait(saved))
        number, state = await asyncio.wait_for(told.get(), 20)
        assert number == 1
        assert isinstance(state, Snapshot)
        core = Core([build(own.application, own.version, own.definition)], NODES, build)
        core.handle(0, WOKE)
        core.handle(0, await answers.number(1))
        saved = msgspec.json.decode(msgspec.json.encode(save(core, 0, planner=state)), type=Snapshot)
        restored, _ = restore(saved, [build(own.application, own.version, own.definition)], build)
        assert restored.planner.memories == {key: 1}, "the core's own policy has made no plan"
        planner.request(again(2, given))
        planner.save(lambda *saved: told.put_nowait(saved))
        number, state = await asyncio.wait_for(told.get(), 20)
        assert number == 2
        assert isinstance(state, str)
        assert "is the function" in state


async def test_a_planner_that_was_never_started_has_no_state() -> None:
    assert not PlannerProcess(asyncio.get_running_loop()).save(lambda *_: None)


@live
@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("raise RuntimeError('no idea')", "RuntimeError: no idea"),
        ("exit()", "SystemExit"),
        ("return 7", "InputError|AttributeError|wrong types"),
        ("print('x' * 1_000_000); raise ValueError('noisy')", "ValueError: noisy"),
    ],
)
async def test_a_policy_that_fails_is_an_error_and_the_process_goes_on(tmp_path: Path, does: str, says: str) -> None:
    async with planning(trouble(tmp_path, does)) as (planner, answers, given):
        planner.request(given)
        assert (await answers.number(1)).plans["a"].why == "call 1"
        pid = planner.pid
        planner.request(again(2, given))
        answer = await answers.number(2)
        assert answer.plans == {}
        assert any(each in answer.errors["a"] for each in says.split("|")), answer
        assert planner.pid == pid
        planner.request(PlanInput(3, s(1), given.nodes, given.due))
        third = await answers.number(3)
        assert third.plans["a"].why == "call 2", "the call that failed left nothing behind"


@live
@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("os._exit(3)", "its socket closed"),
        ("os.kill(os.getpid(), 11)", "its socket closed"),
        ("while True: pass", "has not answered for 1 s"),
        ("time.sleep(3600)", "has not answered for 1 s"),
    ],
)
async def test_a_process_that_dies_or_hangs_is_replaced(
    tmp_path: Path, does: str, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with planning(trouble(tmp_path, does)) as (planner, answers, given):
        planner.request(given)
        await answers.number(1)
        planner._answer_s_max = 1.0 if "1 s" in says else 20.0  # a busy machine lets a death wait
        planner.request(again(2, given))
        answer = await answers.number(2)
        assert answer.restarted
        assert says in answer.errors["a"]
        await asyncio.sleep(0)
        planner._answer_s_max = 10.0
        async with asyncio.timeout(10):
            while planner.pid is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        planner.request(PlanInput(3, s(1), given.nodes, given.due))
        answer = await answers.number(3)
        assert answer.plans["a"].why == "call 1", "its policies begin anew"
        assert not answer.restarted
    assert "the plans in force stay" in caplog.text


@live
async def test_a_process_that_dies_between_plans_is_reported_and_deaths_are_bounded() -> None:
    async with planning(definition("a", "1", 1)) as (planner, answers, given):
        planner.request(given)
        await answers.number(1)
        for _ in range(2):
            async with asyncio.timeout(10):
                while planner.pid is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(planner.pid, signal.SIGKILL)
            count = len(answers.all)
            async with asyncio.timeout(10):
                while len(answers.all) == count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert answers.all[-1] == Planned(1, {}, restarted=True)
        assert planner.pid is None, "the second replacement waits for a second"
        planner.request(again(2, given))
        answer = await answers.number(2)
        assert answer.restarted
        assert "not yet replaced" in answer.errors["a"]


@live
async def test_a_late_answer_gets_the_usual_priority_until_it_comes(tmp_path: Path) -> None:
    async with planning(trouble(tmp_path, "time.sleep(0.5)")) as (planner, answers, given):
        planner.request(given)
        await answers.number(1)
        planner._late_s = 0.1
        planner.request(again(2, given))
        seen = set()
        while len(answers.all) < 2:
            seen.add(os.sched_getscheduler(planner.pid or 0))
            await asyncio.sleep(0.02)
        assert seen == {os.SCHED_IDLE, os.SCHED_OTHER}
        assert os.sched_getscheduler(planner.pid or 0) == os.SCHED_IDLE


@live
async def test_an_application_that_cannot_be_built_does_not_stop_the_others() -> None:
    good, bad = definition("a", "1", 1), definition("b", "1", 1)
    bad.definition["system"]["name"] = "/nowhere/system.py"
    async with planning(good) as (planner, answers, given):
        planner.add("b", bad)
        (view,) = given.due
        other = ApplicationView("b", view.stages, view.ingress, 1.0, 1.0, view.paths, None)
        planner.request(PlanInput(2, s(1), given.nodes, (view, other)))
        answer = await answers.number(2)
        assert answer.plans.keys() == {"a"}
        assert "/nowhere/system.py" in answer.errors["b"]
