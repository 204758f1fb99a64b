"""The driver between a scripted core and a backend that only takes notes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest
from msgspec import structs

from sloop.actions import (
    AcquireNode,
    Action,
    Assigned,
    CancelTransfer,
    Decided,
    End,
    Evict,
    Order,
    ReleaseNode,
    RequestPlan,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    Transfer,
    VersionState,
)
from sloop.core.planner import Planner
from sloop.core.protocols import Explains, ServiceGap
from sloop.core.views import PlanInput
from sloop.errors import MachineError
from sloop.events import (
    WOKE,
    BatchFailed,
    Cancelled,
    Draining,
    Event,
    Finished,
    NodeLost,
    NodeReleased,
    Planned,
    TransferFailed,
    Woke,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
)
from sloop.runlog import MemoryLog, Record
from sloop.serve.blocks import Block
from sloop.serve.dataflow import APPLICATION, Decision, Source, StageWiring, Wiring, wire
from sloop.serve.driver import (
    FAILURE_LINES_MAX,
    LOST_S,
    TRACE_S,
    TURN_BOUNDS_NS,
    Driver,
    FailureLog,
    ServedVersion,
    Turns,
)
from sloop.serve.messages import RequestEnded, Run
from sloop.serve.protocols import BackendListener, EdgeClient, OnDifference, Servable, SpareProcesses, VariantJoining
from sloop.shared_memory import Address
from sloop.tensor import Port, Signature
from sloop.units import FOREVER_NS, ms, s
from sloop.user_code import ModelFailure
from sloop.vocabulary import (
    STORE,
    BatchId,
    ModelWeights,
    Outcome,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Slot,
    TransferId,
    Worker,
    WorkerId,
)
from tests.serve.graphs import graph_of

PORT = Port("x", "UINT8", (-1, -1))
MODEL = Signature((PORT,), (Port("y", "UINT8", (-1, -1)),))
ONE = wire(graph_of({"a": ()}), {("a", "v"): MODEL})
TWO = wire(graph_of({"a": (), "b": ("a",)}), {("a", "v"): MODEL, ("b", "v"): MODEL})
R, SPEC = ReplicaId(1), ReplicaSpec("a", "v", Slot(1.0), "here")
PAIR = structs.replace(SPEC, shape=(Worker(1.0, (0,)),))


async def turn() -> None:
    """The event loop's turn ends, and the core is told."""
    await asyncio.sleep(0)


class Waiting:
    """An edge that waits for the ends of its requests."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestId] = {}
        self.ended: list[RequestEnded] = []

    def on_end(self, ended: RequestEnded) -> None:
        self.requests.pop(ended.number, None)
        self.ended.append(ended)


def submit(driver: Driver, edge: EdgeClient, content: Block, **options: Any) -> RequestId:
    """A request, which its edge calls as the core does. The driver does not look at what it consists of."""
    return driver.submit(content, edge, driver._last_id + 1, **{"application": "app", **options})


class Notes:
    """A backend that writes down its orders; a start reports progress at once, from within the call."""

    def __init__(self) -> None:
        self.orders: list[Any] = []
        self.runs: list[Run] = []
        self.listener: BackendListener | None = None
        self.on_difference: OnDifference = lambda replica, stage, variant, why: None

    def run_alone(self, stage: str, variant: str, why: str) -> None:
        self.orders.append(("run_alone", stage, variant, why))

    def attach(self, listener: BackendListener) -> None:
        self.listener = listener

    def order(self, order: Order) -> None:
        self.orders.append(order)
        if isinstance(order, StartWorker):
            assert self.listener is not None
            self.listener.on_event(WorkerProgressed(order.worker, "spawning"))

    def spare_processes(self) -> dict[str, SpareProcesses]:
        return {}

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        self.orders.append(("run", batch, replica, order.blocks))
        self.runs.append(order)

    async def close(self) -> None:
        self.orders.append(("close",))

    async def open(self) -> None: ...

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None: ...

    def forget(self, stages: Iterable[str]) -> None:
        self.orders.append(("forget", tuple(stages)))


class Plans:
    """A planner that writes down what it is asked and told."""

    def __init__(self) -> None:
        self.notes: list[tuple[object, ...]] = []

    def attach(self, report: Callable[[Planned], None]) -> None: ...

    def request(self, given: PlanInput) -> None:
        self.notes.append(("request", given.number))

    def traffic_changed(self, key: str) -> None:
        self.notes.append(("traffic", key))

    def change_system(self, key: str) -> None:
        self.notes.append(("system", key))

    def discard(self, key: str) -> None:
        self.notes.append(("discard", key))

    async def close(self) -> None:
        self.notes.append(("close",))


class Script:
    """A core that answers events by a function, writes them down, and checks that no call happens inside another."""

    def __init__(self, answer: Callable[[Event], list[Action]], wake_ns: int = FOREVER_NS) -> None:
        self._answer = answer
        self.wake_ns = wake_ns
        self.planner = Planner()
        self.plan_input: PlanInput | None = None
        self.events: list[Event] = []
        self.more: list[bool] = []
        self._is_inside = False

    def handle(self, now_ns: int, event: Event, more_at_this_instant: bool = False) -> Sequence[Action]:
        assert not self._is_inside
        self.more.append(more_at_this_instant)
        self._is_inside = True
        self.events.append(event)
        try:
            yielded = self._answer(event)
        finally:
            self._is_inside = False
        return yielded


@asynccontextmanager
async def driven(
    answer: Callable[[Event], list[Action]] = lambda _: [],
    *,
    wiring: Wiring = ONE,
    others: Sequence[ServedVersion] = (),
    planner: Plans | None = None,
    log: MemoryLog | None = None,
    wake_ns: int = FOREVER_NS,
    freed: list[Address] | None = None,
    backend: Notes | None = None,
    explains: Explains | None = None,
) -> AsyncIterator[tuple[Driver, Notes, Script]]:
    """A driver, its backend and its core."""
    orders, core = backend or Notes(), Script(answer, wake_ns)
    versions = [ServedVersion("app", "app", "1", ms(200), wiring), *others]
    free = [] if freed is None else freed
    driver = Driver(
        *(core, orders, versions),
        planner=planner or Plans(),
        explains=explains,
        recorders=[] if log is None else [log],
        free=free.append,
    )
    yield driver, orders, core


def finish_at_once(event: Event) -> list[Action]:
    """Runs each request alone, on a replica of its own, and serves it."""
    if isinstance(event, Request):
        return [StartBatch(BatchId(event.id), ReplicaId(event.id), "a", (event.id,))]
    if isinstance(event, Finished):
        return [End(RequestId(event.batch), Outcome.SERVED)]
    return []


async def test_a_request_is_run_and_answered_with_the_models_outputs() -> None:
    log = MemoryLog()
    async with driven(finish_at_once, log=log) as (driver, backend, core):
        edge = Waiting()
        first = submit(driver, edge, b"in", elapsed_ns=ms(5), began_ns=time.monotonic_ns() - ms(2))
        await turn()
        assert backend.orders == [("run", 1, R, [b"in"])]
        driver.on_finished(Finished(BatchId(first), R, 7), [b"out"], {})
        await turn()
        assert edge.ended == [RequestEnded(first, Outcome.SERVED, "1", [b"out"])]
        assert not edge.requests
        assert driver.open_requests == 0
        [request, _] = core.events
        assert isinstance(request, Request)
        assert request.slo_ns == ms(200)
        assert request.elapsed_ns == ms(5)
        kinds: list[type[Record]] = [Request, StartBatch, Finished, End]
        assert [type(record) for _, record in log] == kinds
        assert log.records[0][0] >= request.arrived_ns + ms(2)


async def test_the_core_is_told_of_rows_and_their_size_and_of_one_row_where_a_model_may_mix_them() -> None:
    def joining(obstacle: str) -> dict[tuple[str, str], VariantJoining]:
        return {("a", "v"): VariantJoining("a", "v", obstacle, "")}

    async with driven() as (driver, backend, core):
        edge = Waiting()
        submit(driver, edge, b"1")
        submit(driver, edge, b"2", rows=3, size=8, shape=(2, 4), request_id="mine")
        submit(driver, edge, b"3", rows=3, is_whole=True)
        submit(driver, edge, b"3", rows=3)
        driver.add(ServedVersion("app@2", "app", "2", ms(200), ONE, joining=joining("it sorts")))
        driver.add(ServedVersion("app@3", "app", "3", ms(200), ONE, joining=joining("")))
        submit(driver, edge, b"0", version="2")
        submit(driver, edge, b"4", rows=3, size=8, shape=(2, 4), version="2")
        submit(driver, edge, b"5", version="2")
        submit(driver, edge, b"6", rows=3, version="3")
        backend.on_difference(R, "a", "v", "it differs")
        submit(driver, edge, b"7", rows=3, version="3")
        await turn()
        found = [(event.rows, event.size, event.shape) for event in core.events if isinstance(event, Request)]
        assert found[:4] == [(1, 0, ()), (3, 8, (2, 4)), (1, 3, ()), (3, 0, ())]
        assert found[4:7] == [(1, 0, ()), (1, 24, ()), (1, 1, ())], "sizes are told when there are several"
        assert found[7:] == [(3, 0, ()), (1, 3, ())]


async def test_outputs_of_a_stage_are_the_inputs_of_the_next() -> None:
    def answer(event: Event) -> list[Action]:
        match event:
            case Request():
                return [StartBatch(BatchId(1), R, "a", (event.id,))]
            case Finished(batch=1):
                return [StartBatch(BatchId(2), R, "b", (RequestId(1),))]
            case Finished(batch=2):
                return [End(RequestId(1), Outcome.LATE, "late")]
        return []

    async with driven(answer, wiring=TWO) as (driver, backend, _):
        edge = Waiting()
        submit(driver, edge, b"1", slo_ns=ms(1))
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [b"2"], {})
        await turn()
        assert backend.orders[-1] == ("run", 2, R, [b"2"])
        driver.on_finished(Finished(BatchId(1), R, 7), [b"stale"], {})
        driver.on_finished(Finished(BatchId(2), R, 7), [b"3"], {})
        await turn()
        assert edge.ended == [RequestEnded(1, Outcome.LATE, "1", [b"3"], "late")]


async def test_events_from_within_an_order_wait_their_turn() -> None:
    def answer(event: Event) -> list[Action]:
        return [StartWorker(R, SPEC), ResizeWorker(R, 2), StopWorker(R, "done")] if isinstance(event, Woke) else []

    async with driven(answer) as (driver, backend, core):
        driver.start()
        await turn()
        assert [type(order) for order in backend.orders] == [StartWorker, ResizeWorker, StopWorker]
        assert core.events == [WOKE, WorkerProgressed(R, "spawning")]


async def test_what_one_turn_brings_is_told_together_at_an_instant_of_its_own() -> None:
    log = MemoryLog()
    async with driven(log=log) as (driver, _, core):
        for size in (3, 1, 2):
            for _ in range(size):
                submit(driver, Waiting(), b"in", application="app")
            await turn()
        assert core.more == [True, True, False, False, True, False]
        instants = [now_ns for now_ns, record in log if isinstance(record, Request)]
        assert instants[0] == instants[2] < instants[3] < instants[4] == instants[5]


async def test_a_rejection_is_answered_without_outputs() -> None:
    def answer(event: Event) -> list[Action]:
        return [End(event.id, Outcome.REJECTED, "full", s(2))] if isinstance(event, Request) else []

    async with driven(answer) as (driver, _, _):
        edge = Waiting()
        submit(driver, edge, b"")
        assert not edge.ended, "answered from within"
        await turn()
        assert edge.ended == [RequestEnded(1, Outcome.REJECTED, "1", [], "full", s(2))]


async def test_after_cancel_nothing_is_told_though_the_batch_goes_on() -> None:
    async with driven(finish_at_once) as (driver, _, core):
        edge = Waiting()
        request = submit(driver, edge, b"in")
        driver.cancel(request)
        driver.cancel(request)
        await turn()
        assert core.events[1:] == [Cancelled(request)]
        driver.on_finished(Finished(BatchId(request), R, 7), [b"out"], {})
        await turn()
        assert not edge.ended
        assert driver.open_requests == 0
        driver.cancel(request)


async def test_the_core_is_woken_when_it_wishes_not_before() -> None:
    async with driven() as (driver, _, core):
        woken = asyncio.Event()

        def answer(event: Event) -> list[Action]:
            if isinstance(event, Woke):
                assert driver.now_ns >= core.wake_ns
                core.wake_ns = FOREVER_NS
                woken.set()
            return []

        core._answer = answer
        core.wake_ns = s(100)
        driver.on_event(WorkerReady(R))
        await turn()
        core.wake_ns = driver.now_ns + ms(30)
        driver.on_event(WorkerReady(R))
        await turn()
        core.wake_ns += ms(10)  # a later wish: the timer that is set fires too early, and asks
        driver.on_event(WorkerReady(R))
        await asyncio.wait_for(woken.wait(), 5)
        assert len(core.events) == 4


async def test_draining_waits_for_what_is_open_and_fails_what_is_not_done_in_time() -> None:
    async with driven(finish_at_once) as (driver, backend, core):
        edge = Waiting()
        for content in (b"quick", b"stuck"):
            submit(driver, edge, content)
        await turn()
        draining = asyncio.ensure_future(driver.drain(0.05))
        await turn()
        await turn()
        assert isinstance(core.events[-1], Draining)
        driver.on_finished(Finished(BatchId(1), R, 7), [b"out"], {})
        await draining
        assert [end.outcome for end in edge.ended] == [Outcome.SERVED, Outcome.FAILED]
        assert "it waited 0.05 s" in edge.ended[1].why
        assert backend.orders[-1] == ("close",)
        driver.on_finished(Finished(BatchId(2), R, 7), [b"out"], {})
        submit(driver, edge, b"")
        assert [(end.outcome, end.retry_after_ns) for end in edge.ended[2:]] == [(Outcome.REJECTED, s(1))]


async def test_requests_of_the_very_turn_in_which_a_drained_server_stops_are_rejected() -> None:
    is_draining = False

    def answer(event: Event) -> list[Action]:
        nonlocal is_draining
        is_draining = is_draining or isinstance(event, Draining)
        if isinstance(event, Request) and is_draining:
            return [End(event.id, Outcome.REJECTED, "draining")]
        return finish_at_once(event)

    async with driven(answer) as (driver, _, _):
        edge = Waiting()

        async def delivered() -> None:
            submit(driver, edge, b"late")

        submit(driver, edge, b"in")
        await turn()
        draining = asyncio.ensure_future(driver.drain(5, delivered))
        driver.on_finished(Finished(BatchId(1), R, 7), [b"out"], {})
        await draining
        assert [end.outcome for end in edge.ended] == [Outcome.SERVED, Outcome.REJECTED]


async def test_replicas_are_stopped_when_edges_have_the_answers_that_are_on_their_nodes() -> None:
    async with driven(finish_at_once) as (driver, backend, _):

        async def delivered() -> None:
            backend.orders.append(("delivered",))

        edge = Waiting()
        submit(driver, edge, b"in")
        await turn()
        draining = asyncio.ensure_future(driver.drain(5, delivered))
        driver.on_finished(Finished(BatchId(1), R, 7), [address(2)], {})
        await draining
        assert [end.outcome for end in edge.ended] == [Outcome.SERVED]
        assert backend.orders[-2:] == [("delivered",), ("close",)]


async def test_requests_whose_deadline_passes_before_the_core_begins_are_rejected_then() -> None:
    freed: list[Address] = []
    async with driven(finish_at_once, freed=freed) as (driver, _, core):
        edge = Waiting()
        driver.wait()
        submit(driver, edge, address(1), slo_ns=ms(1))
        gone = submit(driver, edge, address(2), slo_ns=ms(1))
        left = submit(driver, edge, b"in", slo_ns=s(60))
        driver.cancel(gone)
        async with asyncio.timeout(5):
            while not edge.ended:  # noqa: ASYNC110  # the driver looks from time to time
                await asyncio.sleep(0.001)
        (end,) = edge.ended
        assert (end.number, end.outcome, end.retry_after_ns) == (1, Outcome.REJECTED, s(1))
        assert "waits for the agents" in end.why
        assert freed == [address(1), address(2)]
        driver.start()
        await turn()
        assert [event.id for event in core.events if isinstance(event, Request)] == [left]
        assert not any(isinstance(event, Cancelled) for event in core.events)
        driver.on_finished(Finished(BatchId(left), ReplicaId(left), 7), [b"out"], {})
        await turn()
        assert [end.number for end in edge.ended] == [1, left]
        assert not edge.requests.keys() - {gone}


async def test_when_the_core_breaks_every_request_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    def answer(event: Event) -> list[Action]:
        assert not isinstance(event, WorkerLost), "a bug"
        return []

    async with driven(answer) as (driver, _, _):
        edge = Waiting()
        for _ in range(2):
            submit(driver, edge, b"")
        driver.on_event(WorkerLost(R, "gone"))
        await turn()
        submit(driver, edge, b"")
        assert [end.outcome for end in edge.ended] == [Outcome.FAILED] * 3
        assert "a bug" in edge.ended[2].why
        assert isinstance(driver.crash, AssertionError)
        await driver.drain(1)
    assert "the core failed" in caplog.text


class Buggy(Notes):
    """A backend that raises on these orders, and says nothing of itself."""

    def __init__(self, *orders: type) -> None:
        super().__init__()
        self._fails = orders

    def order(self, order: Order) -> None:
        if isinstance(order, self._fails):
            raise KeyError("of the backend")
        super().order(order)

    def run(self, batch: BatchId, replica: ReplicaId, order: Run) -> None:
        if StartBatch in self._fails:
            raise KeyError("of the backend")


STOPS: Final = (StartBatch(BatchId(1), R, "a", (RequestId(1),)), StartWorker(R, SPEC), ResizeWorker(R, 1.0))


@pytest.mark.parametrize(
    ("orders", "action", "reports", "stops"),
    [
        *(((type(each),), each, [WorkerLost], [R]) for each in STOPS),
        ((ResizeWorker, StopWorker), ResizeWorker(R, 1.0), [WorkerLost], []),
        ((StopWorker,), StopWorker(R, "why"), [WorkerLost], []),
        ((StartWorker,), StartWorker(WorkerId(3), PAIR, R), [WorkerLost], [WorkerId(3)]),
        ((Transfer,), Transfer(TransferId(1), ModelWeights("m", 1), "", ("n", "o")), [TransferFailed] * 2, []),
        ((AcquireNode,), AcquireNode("n"), [NodeLost], []),
        ((ReleaseNode,), ReleaseNode("n"), [NodeReleased], []),
        ((Evict,), Evict("n", ModelWeights("m", 1)), [], []),
    ],
)
async def test_a_bug_of_the_backend_ends_what_the_order_was_for_and_not_the_server(
    caplog: pytest.LogCaptureFixture,
    orders: Sequence[type],
    action: Action,
    reports: Sequence[type],
    stops: Sequence[WorkerId],
) -> None:
    backend = Buggy(*orders)
    async with driven(lambda event: [action] if isinstance(event, Request) else [], backend=backend) as (
        driver,
        _,
        core,
    ):
        edge = Waiting()
        for _ in range(5):
            submit(driver, edge, b"")
            await turn()
        await turn()
        assert [type(event) for event in core.events if not isinstance(event, Request)] == [*reports] * 5
        assert driver.crash is None
        stopped = [order for order in backend.orders if isinstance(order, StopWorker)]
        assert [order.worker for order in stopped] == [*stops] * 5
        assert all(order.why.startswith("the backend failed on an order") for order in stopped)
    told = [record for record in caplog.records if "the backend failed on the order" in record.getMessage()]
    about = [record for record in told if type(action).__name__ in record.getMessage()]
    assert 1 <= len(about) <= 2, "not five times the same"
    assert about[0].exc_info is not None
    assert "KeyError" in str(about[0].exc_info[1].__repr__())


class Told:
    """What a core tells of its state."""

    def __init__(self) -> None:
        self.gap: ServiceGap | None = None
        self.error = ""

    def service_gap(self, now_ns: int, key: str, stage: str) -> ServiceGap | None:
        return self.gap

    def plan_error(self, key: str) -> str:
        return self.error


async def test_a_dropped_request_is_told_that_nothing_can_start_and_when_it_is_tried() -> None:
    told = Told()

    def answer(event: Event) -> list[Action]:
        return [End(event.id, Outcome.DROPPED, "too late", 0, "a")] if isinstance(event, Request) else []

    async with driven(answer, explains=told) as (driver, _, _):
        edge = Waiting()
        submit(driver, edge, b"")
        await turn()
        told.gap = ServiceGap("no replica of stage 'a' can start: no file; next attempt in 4 s", True, s(5))
        submit(driver, edge, b"")
        await turn()
        assert [(end.why, end.retry_after_ns) for end in edge.ended] == [
            ("too late", 0),
            ("no replica of stage 'a' can start: no file; next attempt in 4 s (too late)", s(5)),
        ]
        await driver.drain(1)


async def test_the_end_of_losses_and_of_failed_plans_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told = Told()
    told.gap, told.error = ServiceGap("no replica", True, 1), "KeyError: 3"
    lost = Decided("lost", "no file; a replacement starts at once", "a")
    unplanned = Decided("planner", "no new plan: KeyError: 3", application="app")
    async with driven(lambda event: [lost, unplanned] if isinstance(event, Woke) else [], explains=told) as (
        driver,
        _,
        _,
    ):
        for _ in range(4):
            driver.on_event(WOKE)
            await turn()
        caplog.clear()
        told.gap, told.error = None, ""
        driver.on_event(WorkerProgressed(R, "loading"))
        await turn()
        assert not caplog.records
        driver.on_event(WorkerReady(R))
        await turn()
        assert [record.getMessage() for record in caplog.records] == [
            "stage 'a' has a ready replica again, after 4 losses",
            "app: it is planned again, after 4 failed attempts",
        ]


async def test_a_stage_without_room_is_written_with_the_reason_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """A stage that serves with fewer replicas than planned is in the decisions alone."""
    told = Told()
    told.gap = ServiceGap("no replica", True, 1)
    short = Decided("shortage", "no node has room for a replica of v with 1 core: all cores are taken", "a")
    async with driven(lambda event: [short] if isinstance(event, Woke) else [], explains=told) as (driver, _, _):
        driver.on_event(WOKE)
        await turn()
        assert [record.getMessage() for record in caplog.records] == [f"no replica of stage 'a' can start: {short.why}"]
        caplog.clear()
        told.gap = None
        driver.on_event(WorkerReady(R))
        await turn()
        driver.on_event(WOKE)
        await turn()
        assert [record.getMessage() for record in caplog.records] == ["stage 'a' has a ready replica now"]


async def test_a_version_that_ends_is_not_said_to_be_ready_or_planned_again(caplog: pytest.LogCaptureFixture) -> None:
    """As a canary that died in a loop and was given up."""
    told = Told()
    told.gap, told.error = ServiceGap("no replica", True, 1), "KeyError: 3"
    lost = Decided("lost", "no file; a replacement starts at once", "app@2/only")
    unplanned = Decided("planner", "no new plan: KeyError: 3", application="app@2")
    retired = Rollout("app", "2", VersionState.RETIRED, 0.0, "it was given up")

    def answer(event: Event) -> list[Action]:
        return [lost, unplanned] if isinstance(event, Woke) else [retired]

    async with driven(answer, explains=told) as (driver, _, _):
        driver.add(version_of("app", "2"))
        driver.on_event(WOKE)
        await turn()
        assert len(caplog.records) == 2
        told.gap, told.error = None, ""
        driver.on_event(WorkerReady(R))
        await turn()
        assert len(caplog.records) == 2


async def test_an_edge_that_raises_and_a_log_that_is_full_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryLog):
        def extend(self, records: Iterable[tuple[int, Record]]) -> None:
            raise MachineError("the disk is full")

    class Broken(Waiting):
        def on_end(self, ended: RequestEnded) -> None:
            raise RuntimeError("oops")

    async with driven(finish_at_once, log=Full()) as (driver, _, _):
        edge = Waiting()
        for each in (Broken(), edge):
            request = submit(driver, each, b"in")
            await turn()
            driver.on_finished(Finished(BatchId(request), ReplicaId(request), 7), [b"out"], {})
        await turn()
        assert len(edge.ended) == 1
    assert "a request could not be answered" in caplog.text
    assert "the disk is full" in caplog.text


async def test_stages_are_told_what_requests_need_if_that_is_not_all() -> None:
    """Of one batch, the first request wants the second output, the second one all."""
    model = Signature((PORT,), (Port("y", "UINT8", (-1, -1)), Port("z", "UINT8", (-1, -1))))
    wiring = wire(graph_of({"a": ()}), {("a", "v"): model})

    def answer(event: Event) -> list[Action]:
        match event:
            case Request(id=2 | 4):
                return [StartBatch(BatchId(event.id), R, "a", (RequestId(event.id - 1), RequestId(event.id)))]
        return []

    async with driven(answer, wiring=wiring) as (driver, backend, _):
        edge = Waiting()
        for outputs in ((1,), (), (), ()):
            submit(driver, edge, b"in", outputs=outputs)
            await turn()
        assert [order.outputs for order in backend.runs] == [((1,), ()), ()]


async def test_a_visit_is_as_large_as_what_its_stage_reads_of_the_client() -> None:
    other = Signature((Port("y", "UINT8", (-1, -1)), PORT), (Port("z", "UINT8", (-1, -1)),))
    wiring = wire(graph_of({"a": (), "b": ("a",)}), {("a", "v"): MODEL, ("b", "v"): other})

    def answer(event: Event) -> list[Action]:
        return [StartBatch(BatchId(1), R, "a", (RequestId(1), RequestId(2)))] if event.id == 2 else []  # type: ignore[union-attr]

    async with driven(lambda event: answer(event) if isinstance(event, Request) else [], wiring=wiring) as (
        driver,
        _,
        core,
    ):
        edge = Waiting()
        for size in (9, 2):
            submit(driver, edge, b"in", size=size)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7, sizes=(((1, 4),), ((1, 4),))), [b"x", b"y"], {})
        await turn()
        assert [event.sizes for event in core.events if isinstance(event, Finished)] == [(((1, 9),), ((1, 4),))]


PARTED = Wiring(
    Signature((PORT,), (PORT,)),
    inputs={"a": ((Source(APPLICATION, 0),),), "b": ((Source("a", 0),),), "c": ((Source("b", 0),),)},
    outputs=((Source("c", 0),),),
    decisions={"a": (Decision("b", when=0), Decision("c", when=0))},
)
"""`c` needs what `b` gives, which not every request passes: no file is wired like this."""


def together(stage: str, batch: int) -> StartBatch:
    return StartBatch(BatchId(batch), R, stage, (RequestId(1), RequestId(2)))


def chained(event: Event) -> list[Action]:
    """Two requests go through `a`, then the first through `b`, then both through `c`; what does not fit fails."""
    match event:
        case Request(id=2):
            return [together("a", 1)]
        case Finished(batch=1, faults=(0,)):
            return [End(RequestId(1), Outcome.FAILED, "does not fit", stage="a")]
        case Finished(batch=1):
            return [StartBatch(BatchId(2), R, "b", (RequestId(1),))]
        case Finished(batch=2):
            return [together("c", 3)]
        case Finished(batch=3, faults=faults):
            outcomes = [Outcome.FAILED if index in faults else Outcome.SERVED for index in range(2)]
            return [End(RequestId(index + 1), outcome) for index, outcome in enumerate(outcomes)]
    return []


async def test_outputs_that_say_nothing_about_an_edge_fail_their_request_alone() -> None:
    async with driven(chained, wiring=PARTED) as (driver, _, core):
        edge = Waiting()
        for content in (b"1", b"2"):
            submit(driver, edge, content)
        await turn()
        finished = Finished(BatchId(1), R, 7, ((), (1, 1)), faults=(0,))
        driver.on_finished(finished, [None, b"2"], {0: "its outputs decide nothing"})
        await turn()
        assert core.events[-1] == finished
        assert edge.ended == [RequestEnded(1, Outcome.FAILED, "1", [], "its outputs decide nothing; request id 1")]


async def test_a_request_that_lacks_an_input_is_left_out_of_its_batch_and_fails_with_it() -> None:
    async with driven(chained, wiring=PARTED) as (driver, backend, _):
        edge = Waiting()
        for content in (b"1", b"2"):
            submit(driver, edge, content)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7, ((1, 1), (1, 1))), [b"a", b"a"], {})
        await turn()
        driver.on_finished(Finished(BatchId(2), R, 7), [b"b"], {})
        await turn()
        assert backend.orders[-1] == ("run", 3, R, [b"b", None])
        driver.on_finished(Finished(BatchId(3), R, 7, ((), ()), faults=(1,)), [b"c", None], {1: "it needs 'b'"})
        await turn()
        assert edge.ended == [
            RequestEnded(1, Outcome.SERVED, "1", [b"c"]),
            RequestEnded(2, Outcome.FAILED, "1", [], "it needs 'b'; request id 2"),
        ]


async def test_a_visit_that_fails_alone_is_a_failed_batch() -> None:
    def alone(event: Event) -> list[Action]:
        if isinstance(event, Request):
            return [StartBatch(BatchId(1), R, "c", (event.id,))]
        return [End(RequestId(1), Outcome.FAILED, event.error)] if isinstance(event, BatchFailed) else []

    async with driven(alone, wiring=PARTED) as (driver, _, core):
        edge = Waiting()
        submit(driver, edge, b"1")
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7, ((),), faults=(0,)), [None], {0: "it needs 'b'"})
        await turn()
        assert core.events[1:] == [BatchFailed(BatchId(1), R, "it needs 'b'")]
        assert edge.ended == [RequestEnded(1, Outcome.FAILED, "1", [], "it needs 'b'; request id 1")]


# Blocks in shared memory


def address(number: int) -> Address:
    return Address(1, number, 100)


async def test_blocks_are_free_when_the_request_has_ended_but_for_those_of_the_answer() -> None:
    def answer(event: Event) -> list[Action]:
        match event:
            case Request():
                return [StartBatch(BatchId(1), R, "a", (event.id,))]
            case Finished(batch=1):
                return [StartBatch(BatchId(2), R, "b", (RequestId(1),))]
            case Finished(batch=2):
                return [End(RequestId(1), Outcome.SERVED)]
        return []

    freed: list[Address] = []
    async with driven(answer, wiring=TWO, freed=freed) as (driver, _, _):
        edge = Waiting()
        submit(driver, edge, address(1))
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [address(2)], {})
        await turn()
        assert not freed, "a batch may fail, and run again"
        driver.on_finished(Finished(BatchId(2), R, 7), [address(3)], {})
        await turn()
        assert edge.ended == [RequestEnded(1, Outcome.SERVED, "1", [address(3)])]
        assert freed == [address(1), address(2)]


@pytest.mark.parametrize("is_late", [False, True])
async def test_what_a_batch_reads_is_free_when_it_is_over_though_its_request_has_ended_before(is_late: bool) -> None:
    def answer(event: Event) -> list[Action]:
        if isinstance(event, Request):
            return [StartBatch(BatchId(1), R, "a", (event.id,))]
        return [End(RequestId(1), Outcome.DROPPED, "its deadline has passed")] if isinstance(event, Woke) else []

    freed: list[Address] = []
    async with driven(answer, freed=freed) as (driver, _, _):
        submit(driver, Waiting(), address(1))
        await turn()
        driver.on_event(WOKE)
        await turn()
        assert not freed, "the worker may read it at this moment"
        if is_late:
            driver.on_finished(Finished(BatchId(1), R, 7), [address(2)], {})
        else:
            driver.on_event(WorkerLost(R, "gone"))
        await turn()
        assert freed == ([address(2), address(1)] if is_late else [address(1)])


async def test_the_answer_to_a_client_that_has_left_is_freed() -> None:
    freed: list[Address] = []
    async with driven(finish_at_once, freed=freed) as (driver, _, _):
        edge = Waiting()
        request = submit(driver, edge, address(1))
        driver.cancel(request)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [address(2)], {})
        await turn()
        assert freed == [address(1), address(2)]
        await driver.drain(1)
        submit(driver, edge, address(3))
        assert freed[2:] == [address(3)], "it is refused"


async def test_what_a_model_raised_is_in_the_log_with_the_request_and_not_in_its_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def alone(event: Event) -> list[Action]:
        if isinstance(event, Request):
            return [StartBatch(BatchId(1), R, "a", (event.id,))]
        return [End(RequestId(1), Outcome.FAILED, event.error)] if isinstance(event, BatchFailed) else []

    async with driven(alone) as (driver, _, core):
        edge = Waiting()
        submit(driver, edge, b"1")
        await turn()
        driver.on_failed(BatchId(1), R, ModelFailure("the model raised OSError", "OSError: secret (a.py:3)", "line 3"))
        await turn()
        assert core.events[-1] == BatchFailed(BatchId(1), R, "the model raised OSError", "OSError: secret (a.py:3)")
        assert [each.why for each in edge.ended] == ["the model raised OSError; request id 1"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "request 1 failed at stage 'a': the model raised OSError: OSError: secret (a.py:3)\nline 3"


def test_the_log_of_failures_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    log, failure = FailureLog(), ModelFailure("the model raised E", "E: 1 (a.py:3)", "TRACE")

    def batch(*ids: int) -> StartBatch:
        return StartBatch(BatchId(1), R, "only", tuple(map(RequestId, ids)))

    log.note(0.0, batch(1, 2, 3), failure)
    log.note(0.1, batch(1, 2), failure)
    log.note(0.2, batch(1), failure)
    assert [record.getMessage() for record in caplog.records] == [
        "requests 1, 2 and 3 failed at stage 'only': the model raised E: E: 1 (a.py:3); "
        "each half of them is tried again\nTRACE",
        "request 1 failed at stage 'only': the model raised E: E: 1 (a.py:3)",
    ]
    caplog.clear()
    for id in range(1000):
        log.note(1.0, batch(id), failure)
    assert len(caplog.records) == FAILURE_LINES_MAX
    caplog.clear()
    log.note(TRACE_S, batch(7), failure)
    first, second = [record.getMessage() for record in caplog.records]
    assert first == f"{1000 - FAILURE_LINES_MAX} more failures of models were not written here"
    assert second.endswith("TRACE")


def test_losses_in_a_loop_are_written_ever_less_often(caplog: pytest.LogCaptureFixture) -> None:
    """A model that cannot start: it is tried after 0, 1, 2, 4, 8, 16, 30, 30, … s."""
    log, at_s = FailureLog(), 0.0
    for number in range(500):
        wait_s = 0 if not number else min(30, 2 ** (number - 1))
        log.note_lost(at_s, Decided("lost", f"no file; a replacement starts in {wait_s} s", "only"))
        at_s += wait_s
    said = [record.getMessage() for record in caplog.records]
    assert said[:3] == [
        "a replica of stage 'only' is lost: no file; a replacement starts in 0 s",
        "a replica of stage 'only' is lost: no file; a replacement starts in 1 s",
        "a replica of stage 'only' is lost: no file; a replacement starts in 2 s",
    ]
    waits = [int(line.partition("starts in ")[2].split()[0]) for line in said]
    assert waits[:8] == [0, 1, 2, 4, 8, 16, 30, 30], "each attempt of the first minute"
    assert said[-1].endswith("in 30 s (19 more losses like this before)"), "one line in ten minutes"
    assert len(said) < 40
    assert log.losses == {"only": 500}


def test_another_reason_is_written_at_once_and_a_loss_after_quiet_is_new(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for at_s, why in ((0, "no file"), (0, "no file"), (0, "no file"), (0.1, "no room"), (2 * LOST_S, "no file")):
        log.note_lost(at_s, Decided("lost", f"{why}; a replacement starts at once", "only"))
    assert [record.getMessage().partition("lost: ")[2] for record in caplog.records] == [
        "no file; a replacement starts at once",
        "no file; a replacement starts at once",
        "no room; a replacement starts at once",
        "no file; a replacement starts at once",
    ]


def test_a_policy_that_fails_at_each_tick_is_not_written_at_each(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for second in range(3_600):
        log.note_unplanned(second, Decided("planner", "no new plan: KeyError: 3", application="shop"))
    log.note_unplanned(3_600, Decided("planner", "no new plan: ValueError: 4", application="shop"))
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "shop: no new plan: KeyError: 3; the plan in force stays"
    assert said[-2] == "shop: no new plan: KeyError: 3 (599 more attempts like this before); the plan in force stays"
    assert said[-1] == "shop: no new plan: ValueError: 4; the plan in force stays"
    assert len(said) < 20


def version_of(name: str, version: str, *, output: str = "y", slo_ns: int = ms(50)) -> ServedVersion:
    """A version with one stage, `KEY/only`."""
    key = name if version == "1" else f"{name}@{version}"
    model = Signature((PORT,), (Port(output, "UINT8", (-1, -1)),))
    wiring = wire(graph_of({f"{key}/only": ()}), {(f"{key}/only", "v"): model})
    return ServedVersion(key, name, version, slo_ns, wiring)


async def test_a_request_names_its_application_only_where_there_are_several() -> None:
    async with driven() as (driver, _, core):
        submit(driver, Waiting(), b"1")
        submit(driver, Waiting(), b"2", version="1")
        driver.add(version_of("shop", "1", slo_ns=ms(70)))
        for name in ("app", "shop"):
            submit(driver, Waiting(), b"3", application=name)
        await turn()
        requests = [event for event in core.events if isinstance(event, Request)]
        assert [(each.application, each.version) for each in requests] == [
            ("", ""),
            ("app", "1"),
            ("app", ""),
            ("shop", ""),
        ]
        assert [each.slo_ns for each in requests] == [ms(200), ms(200), ms(200), ms(70)]


async def test_the_outputs_are_those_of_the_version_that_ran_the_request() -> None:
    def answer(event: Event) -> list[Action]:
        match event:
            case Request(id=1):
                return [Assigned(event.id, "shop@2"), StartBatch(BatchId(1), R, "shop@2/only", (event.id,))]
            case Request(id=2):
                return [StartBatch(BatchId(2), ReplicaId(2), "shop/only", (event.id,))]
            case Finished():
                return [End(RequestId(event.batch), Outcome.SERVED)]
        return []

    others = [version_of("shop", "1", output="old"), version_of("shop", "2", output="new")]
    async with driven(answer, others=others) as (driver, _, _):
        edge = Waiting()
        for _ in range(2):
            submit(driver, edge, b"in", application="shop")
        await turn()
        for number in (1, 2):
            driver.on_finished(Finished(BatchId(number), ReplicaId(number), 7), [b"out"], {})
        await turn()
        assert [each.version for each in edge.ended] == ["2", "1"]


async def test_a_version_that_serves_gives_the_deadline_and_one_that_retired_is_forgotten() -> None:
    rollouts = iter(
        [
            Rollout("shop", "2", VersionState.SERVING, 1.0, "it is ready"),
            Rollout("shop", "1", VersionState.RETIRED, 0.0, "version 2 serves all requests"),
            Rollout("shop", "2", VersionState.RETIRED, 0.0, "it was removed"),
        ]
    )
    planner = Plans()
    others = [version_of("shop", "1"), version_of("shop", "2", slo_ns=ms(90))]
    async with driven(others=others, planner=planner) as (driver, backend, core):
        core._answer = lambda event: [next(rollouts)] if isinstance(event, Woke) else []
        edge = Waiting()
        for left in (3, 2, 1, 0):
            submit(driver, edge, b"in", application="shop")
            submit(driver, edge, b"in", application="shop", version="1")
            await turn()
            if left:
                driver.on_event(WOKE)
            await turn()
        requests = [event for event in core.events if isinstance(event, Request)]
        assert [(each.version, each.slo_ns) for each in requests] == [
            ("", ms(50)),
            ("1", ms(50)),
            ("", ms(90)),
            ("1", ms(50)),
            ("", ms(90)),
        ]
        assert [each.why for each in edge.ended] == ["application 'shop' has ended"] * 3
        assert [order for order in backend.orders if isinstance(order, tuple) and order[0] == "forget"] == [
            ("forget", ("shop/only",)),
            ("forget", ("shop@2/only",)),
        ]
        assert planner.notes == [
            ("traffic", "shop"),
            ("traffic", "shop@2"),
            ("discard", "shop"),
            ("traffic", "shop@2"),
            ("discard", "shop@2"),
        ]


async def test_plans_go_to_the_planner_and_nodes_to_the_backend() -> None:
    planner = Plans()

    def answer(event: Event) -> list[Action]:
        return [RequestPlan(3), AcquireNode("n"), ReleaseNode("n"), Decided("node", "why")]

    async with driven(answer, planner=planner) as (driver, backend, core):
        core.plan_input = PlanInput(3, 0, (), ())
        driver.start()
        await turn()
        assert planner.notes == [("request", 3)]
        assert backend.orders == [AcquireNode("n"), ReleaseNode("n")]
        await driver.close()
        assert planner.notes[-1] == backend.orders[-1] == ("close",)


async def test_transfers_evictions_and_starts_that_wait_go_to_the_backend() -> None:
    weights = ModelWeights("a", 100)
    sent = Transfer(TransferId(3), weights, STORE, ("here",))
    start = StartWorker(R, SPEC, transfer=TransferId(3))
    evicted, given_up = Evict("here", weights), CancelTransfer(TransferId(3), "here")

    def answer(event: Event) -> list[Action]:
        return [evicted, sent, start, given_up] if event is WOKE else []

    async with driven(answer) as (driver, backend, _):
        driver.start()
        await turn()
        assert backend.orders == [evicted, sent, start, given_up]


async def test_an_unknown_action_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async with driven(lambda _: [object()]) as (driver, _, _):  # type: ignore[list-item]
        driver.start()
        await turn()
        assert "does not know the action" in str(driver.crash)


def test_turns_are_counted_by_how_long_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    for spent_ns in (0, 100_000, 100_001, ms(1), ms(30), ms(1000)):
        monkeypatch.setattr(time, "monotonic_ns", lambda spent_ns=spent_ns: 7 + spent_ns)
        turns.note(7)
    counted = dict(zip((*TURN_BOUNDS_NS, FOREVER_NS), turns.counts, strict=True))
    assert {bound: count for bound, count in counted.items() if count} == {
        100_000: 2,
        250_000: 1,
        ms(1): 1,
        ms(100): 1,
        FOREVER_NS: 1,
    }
    assert (turns.total_ns, turns.longest_ns) == (ms(1031) + 200_001, ms(1000))
