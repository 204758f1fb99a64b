"""Tensors that fit no stage or no edge, between a scripted core and a backend that only takes notes."""

from sloop.actions import Action, End, StartBatch
from sloop.app.journey import UNFIT
from sloop.events import BatchFailed, Event, Finished
from sloop.serve.driver import Driver
from sloop.serve.submission import Ended
from sloop.serve.wiring import APPLICATION, Decision, Source, Wiring
from sloop.tensor import Signature
from sloop.vocabulary import BatchId, Outcome, Request, RequestId
from tests.serve.test_driver import PORT, Notes, R, Script, play, tensor, turn

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
        case Finished(batch=1, edge_counts=((-1,), _)):
            return [End(RequestId(1), Outcome.FAILED, "does not fit", stage="a")]
        case Finished(batch=1):
            return [StartBatch(BatchId(2), R, "b", (RequestId(1),))]
        case Finished(batch=2):
            return [together("c", 3)]
        case Finished(batch=3, edge_counts=ways):
            return [
                End(RequestId(place + 1), Outcome.FAILED if way == UNFIT else Outcome.SERVED)
                for place, way in enumerate(ways)
            ]
    return []


def test_outputs_that_say_nothing_about_an_edge_fail_their_request_alone() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[Ended] = []
        for content in (b"1", b"2"):
            driver.submit({"x": tensor(content)}, on_end=ended.append)
        await turn()
        driver.finished(Finished(BatchId(1), R, 7), [[tensor(b"12")], [tensor(b"\1")]])
        await turn()
        assert core.events[-1] == Finished(BatchId(1), R, 7, (UNFIT, (1, 1)))
        (failed,) = ended
        assert failed.outcome is Outcome.FAILED
        assert "gave 2 numbers [1, 2] that decide about 'b'; 1 is wanted" in failed.why

    play(scene, chained, wiring=PARTED)


def test_a_request_that_lacks_an_input_is_left_out_of_its_batch_and_fails_with_it() -> None:
    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[Ended] = []
        for content in (b"1", b"2"):
            driver.submit({"x": tensor(content)}, on_end=ended.append)
        await turn()
        driver.finished(Finished(BatchId(1), R, 7), [[tensor(b"\1")], [tensor(b"\1")]])
        await turn()
        driver.finished(Finished(BatchId(2), R, 7), [[tensor(b"b")]])
        await turn()
        assert backend.orders[-1] == ("run", 3, R, [[b"b"]])
        driver.finished(Finished(BatchId(3), R, 7), [[tensor(b"c")]])
        await turn()
        assert core.events[-1] == Finished(BatchId(3), R, 7, ((), UNFIT))
        assert ended == [
            Ended(Outcome.SERVED, {"x": tensor(b"c")}),
            Ended(Outcome.FAILED, why="stage 'c' needs what 'b' gives, which this request did not pass"),
        ]

    play(scene, chained, wiring=PARTED)


def test_a_batch_of_which_nothing_can_be_run_has_failed() -> None:
    def alone(event: Event) -> list[Action]:
        if isinstance(event, Request):
            return [StartBatch(BatchId(1), R, "c", (event.id,))]
        return [End(RequestId(1), Outcome.FAILED, event.error)] if isinstance(event, BatchFailed) else []

    async def scene(driver: Driver, backend: Notes, core: Script) -> None:
        ended: list[Ended] = []
        driver.submit({"x": tensor(b"1")}, on_end=ended.append)
        await turn()
        why = "stage 'c' needs what 'b' gives, which this request did not pass"
        assert core.events[1:] == [BatchFailed(BatchId(1), R, why)]
        assert ended == [Ended(Outcome.FAILED, why=why)]
        assert not backend.orders

    play(scene, alone, wiring=PARTED)
