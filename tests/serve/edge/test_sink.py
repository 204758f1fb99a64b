"""An edge's way to the deciding process, which is a list of records here."""

import gc
import os
from collections.abc import Iterator

import numpy as np
import pytest

from sloop.app.application import Limits
from sloop.serve.blocks import BlockReader, write_block
from sloop.serve.dataflow import Assembly, Need, Source
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.edge.steps import at_once
from sloop.serve.messages import (
    Ask,
    AskReady,
    Cancel,
    Free,
    FromEdge,
    OfferModel,
    Page,
    Release,
    RequestEnded,
    Submit,
)
from sloop.serve.protocols import RequestResult
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import Port, Signature, Tensor
from sloop.vocabulary import Outcome

SIGNATURE = Signature((Port("x", "UINT8", (-1,)), Port("k", "UINT8", (-1,))), (Port("y", "UINT8", (-1,)),))
ANSWERS = {"1": Assembly(((Source("only", 0),),), (Need("only", "whole"),))}
OFFER = OfferModel("demo", 1000, SIGNATURE, Limits(), {}, ("1",), ANSWERS)


def bytes_tensor(data: bytes) -> Tensor:
    return Tensor("UINT8", (len(data),), data)


class Scene:
    """A sink, what it has sent, and an arena of a worker."""

    def __init__(self, arenas: Arenas, size: int) -> None:
        self.sent: list[FromEdge] = []
        own, workers = arenas.make(size, lambda _: None), arenas.make(1 << 20, lambda _: None)
        if own is None or workers is None:
            pytest.skip("this system has no memory to share")
        self.arena, self.worker = Arena(own.number, own.fd), Arena(workers.number, workers.fd)
        self.sink = EdgeSink(self.sent.append, self.arena, os.getpid())
        self.sink.offer(OFFER)
        self.ended: list[RequestResult] = []

    def submit(self, x: bytes) -> int:
        tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(x)}
        return self.sink.submit(tensors, application="demo", slo_ns=7, began_ns=3, on_end=self.ended.append)

    def answer(self, number: int, y: bytes) -> Address | bytes:
        block = write_block([bytes_tensor(y)], self.worker)
        self.sink.on_end(RequestEnded(number, Outcome.SERVED, "1", [block]))
        return block


@pytest.fixture
def scene() -> Iterator[Scene]:
    arenas = Arenas()
    yield Scene(arenas, 1 << 20)
    for held in list(arenas._held.values()):
        arenas.abandon(held)


def test_a_small_request_is_within_its_record_in_the_models_order(scene: Scene) -> None:
    number = scene.submit(b"abc")
    (submit,) = scene.sent
    assert isinstance(submit, Submit)
    assert (submit.number, submit.application, submit.slo_ns, submit.began_ns) == (number, "demo", 7, 3)
    found = BlockReader({0: os.getpid()}).tensors(submit.block)
    assert [bytes(tensor.data) for tensor in found] == [b"abc", b"k"]
    scene.answer(number, b"xyz")
    assert scene.ended == [RequestResult(Outcome.SERVED, {"y": bytes_tensor(b"xyz")})]
    assert len(scene.sent) == 1, "there is nothing to release"
    assert scene.sink.open_requests == 0


def test_a_large_answer_is_released_when_its_last_view_is_gone(scene: Scene) -> None:
    block = scene.answer(scene.submit(b"abc"), bytes(50_000))
    view = memoryview(scene.ended.pop().outputs["y"].data)[10:20]
    gc.collect()
    assert len(scene.sent) == 1
    floats = np.frombuffer(view, np.uint8)
    del view
    assert len(scene.sent) == 1, "an array of it is left"
    del floats
    assert scene.sent[1:] == [Release(block)]  # type: ignore[arg-type]  # an address


def test_the_answer_to_a_cancelled_request_is_released(scene: Scene) -> None:
    number = scene.submit(b"abc")
    scene.sink.cancel(number)  # type: ignore[arg-type]  # a number of its own
    scene.sink.cancel(number)  # type: ignore[arg-type]
    block = scene.answer(number, bytes(50_000))
    assert scene.sent[1:] == [Cancel(number), Release(block)]  # type: ignore[arg-type]
    assert not scene.ended


def test_a_full_arena_refuses_and_freed_blocks_are_used_again(scene: Scene) -> None:
    numbers = [scene.submit(bytes(400_000)) for _ in range(2)]
    with pytest.raises(Refusal, match="shared memory") as caught:
        scene.submit(bytes(400_000))
    assert caught.value.status == 503
    submit = scene.sent[0]
    assert isinstance(submit, Submit)
    assert isinstance(submit.block, Address)
    scene.sink.on_free(Free(submit.block))
    scene.submit(bytes(400_000))
    assert len(numbers) == 2


def test_stored_tensors_that_are_not_submitted_are_freed(scene: Scene) -> None:
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(bytes(400_000))}
    for _ in range(5):
        stored = at_once(scene.sink.store(tensors, "demo"))
        assert scene.arena.held_bytes > 400_000
        del stored
        assert scene.arena.held_bytes == 0
    stored = at_once(scene.sink.store(tensors, "demo"))
    scene.sink.withdraw("demo")
    with pytest.raises(KeyError):
        scene.sink.submit(stored, application="demo", on_end=scene.ended.append)
    del stored
    gc.collect()
    assert (scene.arena.held_bytes, scene.sent) == (0, [])


def test_stored_tensors_that_are_submitted_stay_until_they_are_freed(scene: Scene) -> None:
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(bytes(400_000))}
    scene.sink.submit(at_once(scene.sink.store(tensors, "demo")), application="demo", on_end=scene.ended.append)
    (submit,) = scene.sent
    assert isinstance(submit, Submit)
    assert isinstance(submit.block, Address)
    assert scene.arena.held_bytes > 400_000
    scene.sink.on_free(Free(submit.block))
    assert scene.arena.held_bytes == 0


def test_questions_are_answered_when_the_answer_comes(scene: Scene) -> None:
    pages: list[bytes] = []
    scene.sink.ask(AskReady(), pages.append)
    (ask,) = scene.sent
    assert isinstance(ask, Ask)
    assert not pages
    scene.sink.on_page(Page(ask.number, b"soon"))
    scene.sink.on_page(Page(ask.number, b"again"))
    assert pages == [b"soon"]


def test_a_request_ends_without_outputs_if_it_failed_or_its_model_was_withdrawn(scene: Scene) -> None:
    first, second = scene.submit(b"a"), scene.submit(b"b")
    scene.sink.withdraw("demo")
    scene.sink.on_end(RequestEnded(first, Outcome.REJECTED, "1", [], "full", 9))
    scene.answer(second, b"y")
    assert scene.ended == [
        RequestResult(Outcome.REJECTED, {}, "full", 9),
        RequestResult(Outcome.SERVED, {"y": bytes_tensor(b"y")}),
    ]
