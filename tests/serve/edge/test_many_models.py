"""An edge with 200 models that rest: its memory, and what they cost when somebody asks about one or all of them."""

import asyncio
import gc
import tracemalloc
from functools import partial
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sloop.app.load import load_deployment
from sloop.events import WOKE, Event, WorkerReady
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.exchange import Exchange
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.large import LargeJson
from sloop.serve.edge.rest import Rest
from sloop.serve.edge.service import InferenceService, Model
from sloop.serve.insight import Insight
from sloop.serve.messages import Ask, Topic
from sloop.serve.metrics import Metrics
from sloop.serve.protocols import ModelState
from sloop.systems.setup import Setup, build, set_up
from sloop.units import s
from tests.counting import calls_of
from tests.serve.edge.fakes import SIGNATURE, FakeDriver, sink_of

MODELS = 200
RESTING_BYTES_MAX = 2**20
PROFILE = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.01, "gamma": 0.1}, "max_batch": 8, "max_cores": 1}


def setup_of(models: int) -> Setup:
    """Models that rest after a second without requests."""
    applications = [
        {
            "name": f"model-{number:03}",
            "slo_ms": 100,
            "rest_after_s": 1,
            "stages": [{"name": "only", "variants": [{"name": "v", "profile": PROFILE}]}],
        }
        for number in range(models)
    ]
    nodes = [{"hardware": "custom", "count": 1, "cores": models, "memory_bytes": 1 << 30}]
    return set_up(
        load_deployment({"name": "many", "applications": applications, "system": "static", "cluster": {"nodes": nodes}})
    )


class Resting:
    """An edge whose models have had a replica each and rest now."""

    def __init__(self, models: int) -> None:
        self.models = models
        setup = setup_of(models)
        self.core = core = setup.core()
        self._bytes = 0
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        self.metrics = Metrics(setup.parts(), nodes=setup.deployment.cluster, build=build)
        system = setup.applications[0].system
        self.insight = Insight(
            core,
            self.metrics,
            deployment="many",
            system=system,
            clock=lambda: s(5),
            answered_rows=lambda model, version: 0,
        )
        self.service = InferenceService(sink_of(FakeDriver(), self.insight.ask), BodyMemory(1000))
        for application in setup.deployment.applications:
            validator = InputValidator(SIGNATURE)
            self.service.add(Model(application.name, application.slo_ns, validator, application.limits))
        self.rest = Rest(self.service, LargeJson())
        self._live()
        self.metrics.exposition()
        self.bodies = [self.get("/v2/models"), self.get_later("/openapi.json"), self.get("/v2/sloop/state")]
        gc.collect()
        self.bytes = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()

    def _live(self) -> None:
        """Five seconds in which nobody asks for anything. What the core keeps of them is counted too."""
        for second in range(5):
            self._act(s(second), WOKE)
            if self.core.plan_input is not None:
                self._act(s(second) + 1, self.core.planner.plan(self.core.plan_input))
            for replica in list(self.core.state.replicas):
                self._act(s(second) + 2, WorkerReady(replica))

    def _act(self, now_ns: int, event: Event) -> None:
        self.metrics.state.append(now_ns, event)
        self.metrics.state.extend([(now_ns, action) for action in self.core.handle(now_ns, event)])

    def get(self, path: str) -> bytes:
        wire = Wire()
        self.rest.answer(Exchange(wire, "GET", {}, 0, path=path))
        assert wire.status == 200
        return wire.body

    def get_later(self, path: str) -> bytes:
        """The same of an answer that takes several turns of the event loop."""

        async def answered() -> Wire:
            wire = Wire()
            self.rest.answer(Exchange(wire, "GET", {}, 0, path=path))
            while not wire.status:  # noqa: ASYNC110  # the answer comes in a later turn
                await asyncio.sleep(0)
            return wire

        return asyncio.run(answered()).body


class Wire:
    """Keeps the answer."""

    status, body, address = 0, b"", ""

    def answer(self, exchange: Exchange, status: int, body: Any, content_type: str, headers: object) -> None:
        self.status, self.body = status, body


@pytest.fixture(scope="module")
def many() -> Resting:
    return Resting(MODELS)


@pytest.fixture(scope="module")
def few() -> Resting:
    return Resting(MODELS // 10)


def test_all_models_rest(many: Resting) -> None:
    readiness = many.insight.readiness("model-007")
    assert readiness is not None
    assert readiness.state is ModelState.RESTING
    assert many.insight.server_readiness().why == ""
    assert many.get("/v2/models").count(b'"resting"') == MODELS


def test_the_memory_of_a_resting_model_is_small(many: Resting, few: Resting) -> None:
    bytes_a_model = (many.bytes - few.bytes) / (MODELS - MODELS // 10)
    assert 0 < bytes_a_model < RESTING_BYTES_MAX / 4


def calls_to_get(gateway: Resting, path: str) -> int:
    return calls_of(partial(gateway.get, path)).total()


@pytest.mark.parametrize(
    "path", ["/v2/models/model-007", "/v2/models/model-007/ready", "/v2/models/model-007/versions/1"]
)
def test_asking_about_one_model_costs_the_same_beside_many(many: Resting, few: Resting, path: str) -> None:
    assert calls_to_get(many, path) == calls_to_get(few, path) < 60


def test_a_scrape_collects_the_rows_of_resting_models_and_does_little_else(many: Resting) -> None:
    """What it costs to write them is prometheus_client's matter."""
    many.metrics.exposition()
    text = many.metrics.exposition()
    rows = sum(len(family.samples) for family in text_string_to_metric_families(text.decode()))
    assert rows >= 20 * MODELS
    records = many.metrics.state.records
    collect = many.metrics.families
    assert calls_of(lambda: [list(collect(each.application, [each], {})) for each in records]).total() <= 8 * rows


async def test_a_scrape_lets_the_event_loop_turn_after_each_model(many: Resting) -> None:
    turns: list[int] = []
    answers: list[bytes] = []
    many.insight.ask(Ask(Topic.METRICS), answers.append)
    many.insight.ask(Ask(Topic.METRICS), answers.append)  # shares the first one's work
    while len(answers) < 2:
        turns.append(0)
        await asyncio.sleep(0)
    assert len(turns) >= MODELS
    assert answers == [many.metrics.exposition()] * 2


def test_no_step_of_a_scrape_does_more_than_one_model_needs(many: Resting, few: Resting) -> None:
    def longest(gateway: Resting) -> int:
        steps = gateway.metrics.steps()
        next(steps)  # looks once at the decisions of all
        return max(calls_of(lambda: next(steps, None)).total() for _ in range(gateway.models))

    assert 100 < longest(many) <= 1.1 * longest(few)


def test_a_description_is_made_once(many: Resting) -> None:
    many.get("/openapi.json")
    assert calls_to_get(many, "/openapi.json") < 20 * MODELS, "the names and versions are compared, nothing is made"
    many.service.remove("model-199")
    assert b"model-199" not in many.get_later("/openapi.json")
