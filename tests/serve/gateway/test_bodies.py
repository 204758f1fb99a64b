"""Room for bodies: each one, all together, and the way back of every byte."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.gateway import bodies as module
from sloop.serve.gateway.bodies import Bodies, Hold
from sloop.serve.gateway.http import Listener
from sloop.serve.gateway.messages import SERVICE, message_class
from sloop.serve.gateway.refusal import Refusal
from sloop.serve.gateway.rest import Rest
from sloop.serve.gateway.rpc import Rpc
from sloop.serve.submission import Ended
from sloop.vocabulary import Outcome
from tests.serve.gateway.fakes import FakeDriver, Gateway, LoopThread, make_service


class Parts:
    """A body that comes in parts."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self.parts = list(parts)

    async def __call__(self) -> bytes:
        taken, self.parts = b"".join(self.parts), []
        return taken

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self.parts:
            yield self.parts.pop(0)


def read(bodies: Bodies, parts: Parts, declared: int | None) -> bytes | int:
    """The body, or the status it was refused with; whatever it is, the room is as it was before."""

    async def main() -> bytes | int:
        with Hold(bodies) as hold:
            try:
                body = await hold.read(parts, declared)
            except Refusal as refusal:
                return refusal.status
            assert hold.size == len(body)
            return body

    before = bodies.held_bytes
    found = asyncio.run(main())
    assert bodies.held_bytes == before
    return found


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(st.integers(0, 40), max_size=6),
    each=st.integers(1, 120),
    others=st.integers(0, 100),
    whole=st.sampled_from([0, 20, 1000]),
    is_declared=st.booleans(),
)
def test_a_body_is_read_whole_or_refused_by_the_bound_it_breaks(
    parts: list[int], each: int, others: int, whole: int, is_declared: bool
) -> None:
    bodies = Bodies(each, each + 50)
    bodies.held_bytes = min(others, each + 50)
    size, room = sum(parts), bodies.all_bytes_max - bodies.held_bytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WHOLE_BYTES_MAX", whole)
        found = read(bodies, Parts([b"x" * part for part in parts]), size if is_declared else None)
    if size <= min(each, room):
        assert found == b"x" * size
        assert not bodies.refused
    else:
        allowed = {413} if size <= room else {503} if size <= each else {413, 503}
        assert found in allowed
        assert bodies.refused.total() == 1


def test_what_is_announced_but_does_not_come_takes_no_room() -> None:
    bodies = Bodies(module.WHOLE_BYTES_MAX * 4)
    with Hold(bodies) as hold:
        reading = hold.read(Parts([]), module.WHOLE_BYTES_MAX + 1)
        assert asyncio.run(reading) == b""
        assert bodies.held_bytes == 0


def test_a_full_server_refuses_in_both_protocols_and_serves_again_when_there_is_room(loop_thread: LoopThread) -> None:
    driver, bodies = FakeDriver(), Bodies(2000, 2000)
    service = make_service(Gateway(driver))
    listener = Listener(Rest(service).answer, bodies=bodies, requests_max=8)
    rpc = Rpc(service, bodies=bodies, requests_max=8)
    port, grpc_port = loop_thread.call(listener.start("127.0.0.1", 0)), loop_thread.call(rpc.start("127.0.0.1", 0))
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
        {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]},
    ]
    body = json.dumps({"inputs": inputs, "id": "i" * 1200})

    def send() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("POST", "/v2/models/demo/infer", body)
        return connection

    def ask() -> tuple[int, str | None, str]:
        with closing(send()) as connection:
            answer = connection.getresponse()
            return answer.status, answer.getheader("retry-after"), json.loads(answer.read())["error"]

    async def emptied() -> None:
        async with asyncio.timeout(5):
            while bodies.held_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0)

    driver.respond = lambda _: None  # it waits
    first = send()
    loop_thread.call(asyncio.wait_for(driver.heard.wait(), 5))
    assert bodies.held_bytes == len(body)
    status, after, told = ask()
    assert (status, after) == (503, "1")
    assert told.startswith(f"rejected: the server holds {len(body)} bytes of requests, and 2000 is all it may"), told
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        infer = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=message_class("ModelInferRequest").SerializeToString,
            response_deserializer=message_class("ModelInferResponse").FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            infer(message_class("ModelInferRequest")(model_name="demo", id="i" * 1200), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        trailing: Any = caught.value.trailing_metadata()
        assert dict(trailing)["retry-after"] == "1"
    assert dict(bodies.refused) == {"all": 2}
    [held, refusals] = bodies.collect()
    assert held.samples[0].value == len(body)
    assert {sample.labels["bound"]: sample.value for sample in refusals.samples} == {"each": 0, "all": 2}
    first.close()  # the client goes: so does what it sent
    loop_thread.call(asyncio.wait_for(driver.gone.wait(), 5))
    driver.respond = lambda _: Ended(Outcome.FAILED, why="told to")
    assert ask()[0] == 500
    loop_thread.call(emptied())
    loop_thread.call(rpc.close(0.5))
    loop_thread.call(listener.close())
