"""An edge's way to the deciding process, which is a list of records here."""

import asyncio
import gc
import os
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import cast

import numpy as np
import pytest
from msgspec import structs

from sloop.app.limits import Limits
from sloop.serve.blocks import BlockReader, write_block
from sloop.serve.dataflow import Assembly, Need, Source
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.sink import READY_S, EdgeSink
from sloop.serve.messages import (
    Ask,
    Cancel,
    Free,
    FromEdge,
    Holders,
    OfferModel,
    Page,
    RequestEnded,
    Submit,
    Topic,
)
from sloop.serve.network import BlockLost
from sloop.serve.protocols import RequestResult
from sloop.shared_memory import Address, Arena, Arenas
from sloop.tensor import MISSING, Port, Signature, Tensor
from sloop.vocabulary import Outcome

SIGNATURE = Signature((Port("x", "UINT8", (-1,)), Port("k", "UINT8", (-1,))), (Port("y", "UINT8", (-1,)),))
ANSWERS = {"1": Assembly(((Source("only", 0),),), (Need("only", "whole"),))}
OFFER = OfferModel("demo", 1000, SIGNATURE, Limits(), {}, ("1",), ANSWERS)


def bytes_tensor(data: bytes) -> Tensor:
    return Tensor("UINT8", (len(data),), data)


NO_ARENA = cast(Arena, None)
"""Small tensors need none."""


class Scene:
    """A sink, what it has sent, and an arena of a worker."""

    def __init__(self, arenas: Arenas, size: int) -> None:
        self.sent: list[FromEdge] = []
        own, workers = arenas.make(size, lambda _: None), arenas.make(1 << 20, lambda _: None)
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
    assert not scene.sink._waiting


def test_a_request_says_which_outputs_it_wants_if_not_all(scene: Scene) -> None:
    outputs = tuple(Port(name, "UINT8", (-1,)) for name in "abc")
    scene.sink.offer(structs.replace(OFFER, signature=structs.replace(SIGNATURE, outputs=outputs)))
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(b"abc")}
    for names in ((), ("a", "b", "c"), ("c", "a"), ("b",)):
        scene.sink.submit(tensors, application="demo", outputs=names, on_end=scene.ended.append)
    assert [each.outputs for each in scene.sent if isinstance(each, Submit)] == [(), (), (0, 2), (1,)]


def test_a_request_says_its_rows_and_how_large_each_is(scene: Scene) -> None:
    ids, mask = Port("ids", "UINT8", (-1, -1)), Port("mask", "UINT8", (-1, -1))
    image, whole = Port("image", "UINT8", (-1, 3, -1, -1)), Port("edges", "UINT8", (2, -1), has_rows=False)

    def said(ports: list[Port], *shapes: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        signature = structs.replace(SIGNATURE, inputs=tuple(ports))
        scene.sink.offer(structs.replace(OFFER, signature=signature))
        tensors = {
            port.name: Tensor("UINT8", shape, bytes(prod(shape))) for port, shape in zip(ports, shapes, strict=True)
        }
        scene.sink.submit(tensors, application="demo", on_end=scene.ended.append)
        submit = scene.sent.pop()
        assert isinstance(submit, Submit)
        return submit.rows, submit.size, submit.shape

    assert said([Port("x", "UINT8", (-1, 4))], (3, 4)) == (3, 0, ())
    assert said([ids, mask], (2, 7), (2, 7)) == (2, 7, ())
    assert said([ids, mask], (2, 7), (2, 5)) == (2, 7, (7, 5))
    assert said([ids], (1, 0)) == (1, 1, (0,)), "an empty text is no model without open dimensions"
    assert said([image], (2, 3, 10, 20)) == (2, 200, (10, 20))
    assert said([image, ids], (1, 3, 1, 2), (1, 9)) == (1, 9, (1, 2, 9))
    assert said([whole], (2, 6)) == (1, 6, ())


def test_a_request_that_gives_optional_inputs_says_that_its_rows_may_meet(scene: Scene) -> None:
    optional = (Port("scale", "UINT8", (1,), has_rows=False),)
    scene.sink.offer(structs.replace(OFFER, signature=structs.replace(SIGNATURE, optional=optional)))
    for given in (MISSING, bytes_tensor(b"s")):
        tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(b"abc"), "scale": given}
        scene.sink.submit(tensors, application="demo", on_end=scene.ended.append)
    assert [each.is_whole for each in scene.sent if isinstance(each, Submit)] == [False, True]


def test_a_large_answer_is_released_when_its_last_view_is_gone(scene: Scene) -> None:
    block = scene.answer(scene.submit(b"abc"), bytes(50_000))
    view = memoryview(scene.ended.pop().outputs["y"].data)[10:20]
    gc.collect()
    assert len(scene.sent) == 1
    floats = np.frombuffer(view, np.uint8)
    del view
    assert len(scene.sent) == 1, "an array of it is left"
    del floats
    assert scene.sent[1:] == [Free(block)]  # type: ignore[arg-type]  # an address


def test_the_answer_to_a_cancelled_request_is_released(scene: Scene) -> None:
    number = scene.submit(b"abc")
    scene.sink.cancel(number)  # type: ignore[arg-type]  # a number of its own
    scene.sink.cancel(number)  # type: ignore[arg-type]
    block = scene.answer(number, bytes(50_000))
    assert scene.sent[1:] == [Cancel(number), Free(block)]  # type: ignore[arg-type]
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


def test_stored_tensors_that_are_not_submitted_are_freed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.serve.edge.sink.COPIED_BYTES", 100_000)
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(bytes(400_000))}
    for _ in range(5):
        stored = asyncio.run(scene.sink.store(tensors, "demo"))
        assert scene.arena.held_bytes > 400_000
        del stored
        assert scene.arena.held_bytes == 0
    stored = asyncio.run(scene.sink.store(tensors, "demo"))
    scene.sink.withdraw("demo")
    with pytest.raises(KeyError):
        scene.sink.submit(stored, application="demo", on_end=scene.ended.append)
    del stored
    gc.collect()
    assert (scene.arena.held_bytes, scene.sent) == (0, [])


def test_stored_tensors_that_are_submitted_stay_until_they_are_freed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sloop.serve.edge.sink.COPIED_BYTES", 100_000)
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(bytes(400_000))}
    scene.sink.submit(asyncio.run(scene.sink.store(tensors, "demo")), application="demo", on_end=scene.ended.append)
    (submit,) = scene.sent
    assert isinstance(submit, Submit)
    assert isinstance(submit.block, Address)
    assert scene.arena.held_bytes > 400_000
    scene.sink.on_free(Free(submit.block))
    assert scene.arena.held_bytes == 0


def test_questions_are_answered_when_the_answer_comes(scene: Scene) -> None:
    pages: list[bytes] = []
    scene.sink.ask(Ask(Topic.READY), pages.append)
    (ask,) = scene.sent
    assert isinstance(ask, Ask)
    assert not pages
    scene.sink.on_page(Page(ask.number, b"soon"))
    scene.sink.on_page(Page(ask.number, b"again"))
    assert pages == [b"soon"]


def test_however_many_ask_whether_the_server_is_ready_the_deciding_process_is_asked_once_in_a_while(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 5.0
    monkeypatch.setattr("sloop.serve.edge.sink.time.monotonic", lambda: now_s)
    told: list[bytes] = []
    for _ in range(1000):
        scene.sink.ask(Ask(Topic.READY), told.append)
    (first,) = scene.sent
    assert isinstance(first, Ask)
    scene.sink.on_page(Page(first.number, b"not yet"))
    now_s += 0.9 * READY_S
    scene.sink.ask(Ask(Topic.READY), told.append)
    assert told == [b"not yet"] * 1001
    assert len(scene.sent) == 1
    now_s += 0.2 * READY_S
    scene.sink.ask(Ask(Topic.READY), told.append)
    second = scene.sent[1]
    assert isinstance(second, Ask)
    scene.sink.on_page(Page(second.number, b"now"))
    assert told[1001:] == [b"now"]


def test_a_request_ends_without_outputs_if_it_failed_or_its_model_was_withdrawn(scene: Scene) -> None:
    first, second = scene.submit(b"a"), scene.submit(b"b")
    scene.sink.withdraw("demo")
    scene.sink.on_end(RequestEnded(first, Outcome.REJECTED, "1", [], "full", 9))
    scene.answer(second, b"y")
    assert scene.ended == [
        RequestResult(Outcome.REJECTED, {}, "full", 9),
        RequestResult(Outcome.SERVED, {"y": bytes_tensor(b"y")}),
    ]


def test_a_broken_answer_fails_its_request_alone(scene: Scene) -> None:
    """An agent of this machine that has died, or is broken, must not end the edge."""
    far_number = 9 << 48
    for number, blocks in (
        (scene.submit(b"a"), [Address(7, 0, 100)]),
        (scene.submit(b"b"), [Address(far_number, 0, 100)]),
        (scene.submit(b"c"), [b"no table"]),
        (scene.submit(b"d"), [write_block([], None)]),
    ):
        scene.sink.on_end(RequestEnded(number, Outcome.SERVED, "1", list(blocks)))
    gc.collect()
    assert [(each.outcome, bool(each.outputs)) for each in scene.ended] == [(Outcome.FAILED, False)] * 4
    assert all("was lost with the node that had it" in each.why for each in scene.ended)
    released = [each.block for each in scene.sent if isinstance(each, Free)]
    assert released == [Address(7, 0, 100), Address(far_number, 0, 100)]
    broken, memory = scene.worker.allocate(1 << 15)
    memory[:] = b"\xff" * (1 << 15)
    scene.sink.on_end(RequestEnded(scene.submit(b"e"), Outcome.SERVED, "1", [broken]))
    gc.collect()
    assert scene.sent[-1] == Free(broken), "once"
    scene.answer(scene.submit(b"f"), b"y" * 9000)
    assert [each.outcome for each in scene.ended[4:]] == [Outcome.FAILED, Outcome.SERVED]


def test_the_answer_of_an_agent_is_the_edges_own_copy(scene: Scene) -> None:
    """An agent that ends gives its memory back, while a slow client has not yet received the answer."""
    agent = Arenas(holder=5)
    made = agent.make(1 << 20, lambda _: None)
    assert made is not None
    scene.sink.set_holders(Holders({5: os.getpid()}, {}))
    blocks = [write_block([bytes_tensor(b"y" * 50_000)], Arena(made.number, made.fd))]
    scene.sink.on_end(RequestEnded(scene.submit(b"abc"), Outcome.SERVED, "1", list(blocks)))
    assert scene.sent[1:] == [Free(block) for block in blocks if isinstance(block, Address)], "at once"
    agent.close()
    assert bytes(scene.ended[0].outputs["y"].data) == b"y" * 50_000


async def test_answers_of_other_machines_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they come, are lost, or their client has gone meanwhile: each block is released once."""
    holder = 9 << 48
    contents: dict[int, bytes] = {}
    for place in (1, 2, 3):
        content = write_block([bytes_tensor(bytes([place]) * 100)], None)
        assert isinstance(content, bytes)
        contents[place] = content
    blocks = {place: Address(holder, place << 32, len(content)) for place, content in contents.items()}
    held = asyncio.Event()

    async def fetch(block: Address, memory: memoryview) -> None:
        if block == blocks[3]:
            raise BlockLost("its machine has gone")
        await held.wait()
        memory[:] = contents[block.offset >> 32]

    sent: list[FromEdge] = []
    sink = EdgeSink(sent.append, NO_ARENA, os.getpid(), b"token of the deployment")
    monkeypatch.setattr(sink._elsewhere, "fetch", fetch)
    sink.offer(OFFER)
    ended: dict[int, RequestResult] = {}
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(b"x")}
    for place in (1, 2, 3):
        number = sink.submit(tensors, application="demo", on_end=partial(ended.__setitem__, place))
        sink.on_end(RequestEnded(number, Outcome.SERVED, "1", [blocks[place]]))
        if place == 2:
            sink.cancel(number)
    assert len(sink._waiting) == 2
    for _ in range(5):
        await asyncio.sleep(0)
    held.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert {place: each.outcome for place, each in ended.items()} == {1: Outcome.SERVED, 3: Outcome.FAILED}
    assert bytes(ended[1].outputs["y"].data) == b"\x01" * 100
    assert "its machine has gone" in ended[3].why
    released = [each.block for each in sent if isinstance(each, Free)]
    assert sorted(released, key=lambda block: block.offset) == list(blocks.values())
    assert not sink._waiting


async def test_an_answer_that_needs_more_memory_than_there_is_fails() -> None:
    sent: list[FromEdge] = []
    sink = EdgeSink(sent.append, NO_ARENA, os.getpid(), b"token of the deployment")
    sink.offer(OFFER)
    ended: list[RequestResult] = []
    tensors = {"k": bytes_tensor(b"k"), "x": bytes_tensor(b"x")}
    number = sink.submit(tensors, application="demo", on_end=ended.append)
    sink.on_end(RequestEnded(number, Outcome.SERVED, "1", [Address(9 << 48, 0, 1 << 60)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert [each.outcome for each in ended] == [Outcome.FAILED]
    assert "no memory" in ended[0].why
