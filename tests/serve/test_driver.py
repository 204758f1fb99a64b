"""The driver between a scripted core and a backend that only takes notes."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import pytest

from sloop.actions import Action, End, ResizeReplica, StartBatch, StartReplica, StopReplica
from sloop.errors import MachineError
from sloop.events import (
    WOKE,
    BatchFailed,
    Cancelled,
    Draining,
    Event,
    Finished,
    ReplicaLost,
    ReplicaProgressed,
    ReplicaReady,
    Woke,
)
from sloop.runlog import MemoryLog, Record
from sloop.serve.dataflow import APPLICATION, Decision, Source, Wiring, wire
from sloop.serve.driver import Driver
from sloop.serve.protocols import BackendListener, RequestResult
from sloop.tensor import Port, Signature, Tensor
from sloop.units import FOREVER_NS, ms, s
from sloop.vocabulary import BatchId, Outcome, ReplicaId, ReplicaSpec, Request, RequestId
from tests.serve.graphs import graph_of

PORT = Port("x", "UINT8", (-1, -1))
MODEL = Signature((PORT,), (Port("y", "UINT8", (-1, -1)),))
ONE = wire(graph_of({"a": ()}), {("a", "v"): MODEL})
TWO = wire(graph_of({"a": (), "b": ("a",)}), {("a", "v"): MODEL, ("b", "v"): MODEL})
R, SPEC = ReplicaId(1), ReplicaSpec("a", "v", 1.0, "here")


async def turn() -> None:
    """The event loop's turn ends, and the core is told."""
    await asyncio.sleep(0)


def tensor(content: bytes) -> Tensor:
    return Tensor("UINT8", (1, len(content)), content)


class Notes:
    """A backend that writes down its orders; a start reports progress at once, from within the call."""

    def __init__(self) -> None:
        self.orders: list[tuple[object, ...]] = []
        self.listener: BackendListener | None = None

    def attach(self, listener: BackendListener) -> None:
        self.listener = listener

    def start(self, replica: ReplicaId, spec: ReplicaSpec) -> None:
        self.orders.append(("start", replica, spec))
        assert self.listener is not None
        self.listener.on_event(ReplicaProgressed(replica, "spawning"))

    def stop(self, replica: ReplicaId) -> None:
        self.orders.append(("stop", replica))

    def resize(self, replica: ReplicaId, cores: float) -> None:
        self.orders.append(("resize", replica, cores))

    def run(self, batch: BatchId, replica: ReplicaId, requests: Sequence[Sequence[Tensor]]) -> None:
        self.orders.append(("run", batch, replica, [[bytes(t.data) for t in tensors] for tensors in requests]))

    async def close(self) -> None:
        self.orders.append(("close",))


class Script:
    """A core that answers events by a function, writes them down, and checks that no call happens inside another."""

    def __init__(self, answer: Callable[[Event], list[Action]], wake_ns: int = FOREVER_NS) -> None:
        self._answer = answer
        self.wake_ns = wake_ns
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


def play(
    scene: Callable[[Driver, Notes, Script], Awaitable[None]],
    answer: Callable[[Event], list[Action]] = lambda _: [],
    *,
    wiring: object = ONE,
    log: MemoryLog | None = None,
    wake_ns: int = FOREVER_NS,
) -> None:
    async def main() -> None:
        core, backend = Script(answer, wake_ns), Notes()
        recorders = [] if log is None else [log]
        driver = Driver(core, backend, wiring, slo_ns=ms(200), recorders=recorders)  # type: ignore[arg-type]
        await scene(driver, backend, core)

    asyncio.run(main())


def finish_at_once(event: Event) -> list[Action]:
    """Runs each request alone, on a replica of its own, and serves it."""
    if isinstance(event, Request):
        return [StartBatch(BatchId(event.id), ReplicaId(event.id), "a", (event.id,))]
    if isinstance(event, Finished):
        return [End(RequestId(event.batch), Outcome.SERVED)]
    return []


def test_a_request_is_run_and_answered_with_the_models_outputs() -> None:
    log = MemoryLog()

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        first = driver.submit(
            {"x": tensor(b"in")}, elapsed_ns=ms(5), began_ns=time.monotonic_ns() - ms(2), on_end=ended.append
        )
        await turn()
        assert backend.orders == [("run", 1, R, [[b"in"]])]
        driver.on_finished(Finished(BatchId(first), R, 7), [[tensor(b"out")]])
        await turn()
        assert ended == [RequestResult(Outcome.SERVED, {"y": tensor(b"out")})]
        assert driver.open_requests == 0
        [request, _] = core.events
        assert isinstance(request, Request)
        assert request.slo_ns == ms(200)
        assert request.elapsed_ns == ms(5)
        kinds: list[type[Record]] = [Request, StartBatch, Finished, End]
        assert [type(record) for _, record in log] == kinds
        assert log.records[0][0] >= request.arrived_ns + ms(2)

    play(scene, finish_at_once, log=log)


def test_outputs_of_a_stage_are_the_inputs_of_the_next() -> None:
    def answer(event: Event) -> list[Action]:
        match event:
            case Request():
                return [StartBatch(BatchId(1), R, "a", (event.id,))]
            case Finished(batch=1):
                return [StartBatch(BatchId(2), R, "b", (RequestId(1),))]
            case Finished(batch=2):
                return [End(RequestId(1), Outcome.LATE, "late")]
        return []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        driver.submit({"x": tensor(b"1")}, slo_ns=ms(1), on_end=ended.append)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [[tensor(b"2")]])
        await turn()
        assert backend.orders[-1] == ("run", 2, R, [[b"2"]])
        driver.on_finished(Finished(BatchId(1), R, 7), [[tensor(b"stale")]])
        driver.on_finished(Finished(BatchId(2), R, 7), [[tensor(b"3")]])
        await turn()
        assert ended == [RequestResult(Outcome.LATE, {"y": tensor(b"3")}, "late")]

    play(scene, answer, wiring=TWO)


def test_events_from_within_an_order_wait_their_turn() -> None:
    def answer(event: Event) -> list[Action]:
        return [StartReplica(R, SPEC), ResizeReplica(R, 2), StopReplica(R, "done")] if isinstance(event, Woke) else []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        driver.start()
        await turn()
        assert [order[0] for order in backend.orders] == ["start", "resize", "stop"]
        assert core.events == [WOKE, ReplicaProgressed(R, "spawning")]

    play(scene, answer)


def test_what_one_turn_brings_is_told_together_at_an_instant_of_its_own() -> None:
    log = MemoryLog()

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        for size in (3, 1, 2):
            for _ in range(size):
                driver.submit({"x": tensor(b"in")}, on_end=lambda _: None)
            await turn()
        assert core.more == [True, True, False, False, True, False]
        instants = [now_ns for now_ns, record in log if isinstance(record, Request)]
        assert instants[0] == instants[2] < instants[3] < instants[4] == instants[5]

    play(scene, log=log)


def test_a_rejection_is_answered_without_outputs() -> None:
    def answer(event: Event) -> list[Action]:
        return [End(event.id, Outcome.REJECTED, "full", s(2))] if isinstance(event, Request) else []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        driver.submit({"x": tensor(b"")}, on_end=ended.append)
        assert not ended, "answered from within"
        await turn()
        assert ended == [RequestResult(Outcome.REJECTED, {}, "full", s(2))]

    play(scene, answer)


def test_after_cancel_nothing_is_told_though_the_batch_goes_on() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        request = driver.submit({"x": tensor(b"in")}, on_end=ended.append)
        driver.cancel(request)
        driver.cancel(request)
        await turn()
        assert core.events[1:] == [Cancelled(request)]
        driver.on_finished(Finished(BatchId(request), R, 7), [[tensor(b"out")]])
        await turn()
        assert not ended
        assert driver.open_requests == 0
        driver.cancel(request)

    play(scene, finish_at_once)


def test_the_core_is_woken_when_it_wishes_not_before() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        woken = asyncio.Event()

        def answer(event: Event) -> list[Action]:
            if isinstance(event, Woke):
                assert driver.now_ns >= core.wake_ns
                core.wake_ns = FOREVER_NS
                woken.set()
            return []

        core._answer = answer
        core.wake_ns = s(100)
        driver.on_event(ReplicaReady(R))
        await turn()
        core.wake_ns = driver.now_ns + ms(30)
        driver.on_event(ReplicaReady(R))
        await turn()
        core.wake_ns += ms(10)  # a later wish: the timer that is set fires too early, and asks
        driver.on_event(ReplicaReady(R))
        await asyncio.wait_for(woken.wait(), 5)
        assert len(core.events) == 4

    play(scene)


def test_draining_waits_for_what_is_open_and_fails_what_is_not_done_in_time() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        for content in (b"quick", b"stuck"):
            driver.submit({"x": tensor(content)}, on_end=ended.append)
        await turn()
        draining = asyncio.ensure_future(driver.drain(0.05))
        await turn()
        await turn()
        assert isinstance(core.events[-1], Draining)
        driver.on_finished(Finished(BatchId(1), R, 7), [[tensor(b"out")]])
        await draining
        assert [end.outcome for end in ended] == [Outcome.SERVED, Outcome.FAILED]
        assert "it waited 0.05 s" in ended[1].why
        assert backend.orders[-1] == ("close",)
        driver.on_finished(Finished(BatchId(2), R, 7), [[tensor(b"out")]])
        driver.submit({"x": tensor(b"")}, on_end=ended.append)
        assert [(end.outcome, end.retry_after_ns) for end in ended[2:]] == [(Outcome.REJECTED, s(1))]

    play(scene, finish_at_once)


def test_when_the_core_breaks_every_request_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    def answer(event: Event) -> list[Action]:
        assert not isinstance(event, ReplicaLost), "a bug"
        return []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        for _ in range(2):
            driver.submit({"x": tensor(b"")}, on_end=ended.append)
        driver.on_event(ReplicaLost(R, "gone"))
        await turn()
        driver.submit({"x": tensor(b"")}, on_end=ended.append)
        assert [end.outcome for end in ended] == [Outcome.FAILED] * 3
        assert "a bug" in ended[2].why
        assert isinstance(driver.crash, AssertionError)
        await driver.drain(1)

    play(scene, answer)
    assert "the core failed" in caplog.text


def test_a_gateway_that_raises_and_a_log_that_is_full_stop_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Full(MemoryLog):
        def extend(self, now_ns: int, records: Sequence[Record]) -> None:
            raise MachineError("the disk is full")

    def raises(ended: RequestResult) -> None:
        raise RuntimeError("oops")

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        for on_end in (raises, ended.append):
            request = driver.submit({"x": tensor(b"in")}, on_end=on_end)
            await turn()
            driver.on_finished(Finished(BatchId(request), ReplicaId(request), 7), [[tensor(b"out")]])
        await turn()
        assert len(ended) == 1

    play(scene, finish_at_once, log=Full())
    assert "a request could not be answered" in caplog.text
    assert "the disk is full" in caplog.text


PARTED = Wiring(
    Signature((PORT,), (PORT,)),
    inputs={"a": ((Source(APPLICATION, 0),),), "b": ((Source("a", 0),),), "c": ((Source("b", 0),),)},
    outputs=((Source("c", 0),),),
    decisions={"a": (Decision("b", when=0), Decision("c", when=0))},
    is_plain=False,
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


def test_outputs_that_say_nothing_about_an_edge_fail_their_request_alone() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        for content in (b"1", b"2"):
            driver.submit({"x": tensor(content)}, on_end=ended.append)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [[tensor(b"12")], [tensor(b"\1")]])
        await turn()
        assert core.events[-1] == Finished(BatchId(1), R, 7, ((), (1, 1)), faults=(0,))
        (failed,) = ended
        assert failed.outcome is Outcome.FAILED
        assert "returned 2 numbers (shape [1, 2]) to decide about 'b'; expected 1" in failed.why

    play(scene, chained, wiring=PARTED)


def test_a_request_that_lacks_an_input_is_left_out_of_its_batch_and_fails_with_it() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        for content in (b"1", b"2"):
            driver.submit({"x": tensor(content)}, on_end=ended.append)
        await turn()
        driver.on_finished(Finished(BatchId(1), R, 7), [[tensor(b"\1")], [tensor(b"\1")]])
        await turn()
        driver.on_finished(Finished(BatchId(2), R, 7), [[tensor(b"b")]])
        await turn()
        assert backend.orders[-1] == ("run", 3, R, [[b"b"]])
        driver.on_finished(Finished(BatchId(3), R, 7), [[tensor(b"c")]])
        await turn()
        assert core.events[-1] == Finished(BatchId(3), R, 7, ((), ()), faults=(1,))
        assert ended == [
            RequestResult(Outcome.SERVED, {"x": tensor(b"c")}),
            RequestResult(Outcome.FAILED, why="stage 'c' needs an output of 'b', which did not run for this request"),
        ]

    play(scene, chained, wiring=PARTED)


def test_a_batch_of_which_nothing_can_be_run_has_failed() -> None:
    def alone(event: Event) -> list[Action]:
        if isinstance(event, Request):
            return [StartBatch(BatchId(1), R, "c", (event.id,))]
        return [End(RequestId(1), Outcome.FAILED, event.error)] if isinstance(event, BatchFailed) else []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[RequestResult] = []
        driver.submit({"x": tensor(b"1")}, on_end=ended.append)
        await turn()
        why = "stage 'c' needs an output of 'b', which did not run for this request"
        assert core.events[1:] == [BatchFailed(BatchId(1), R, why)]
        assert ended == [RequestResult(Outcome.FAILED, why=why)]
        assert not backend.orders

    play(scene, alone, wiring=PARTED)
