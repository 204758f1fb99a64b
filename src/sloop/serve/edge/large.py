"""Large JSON is read and written in a process of its own, one request after the other. Those that wait for it stay in
the edge, so that nothing is kept or done for a client that has left meanwhile.

Each is decoded at once, which takes some 10 ms a megabyte; in the edge, all other requests would wait for that. The
process is forked from the edge when it is first needed, so that it starts in milliseconds and shares the edge's memory
(copy on write). It ends with the edge. If it dies or hangs, the request that it had is refused, and the next one forks
it again. Where the JSON beside binary tensors is short and no tensor is text, the edge reads a large body itself: that
takes no time that depends on its size.
"""

import asyncio
import gc
import os
import signal
import socket
import traceback
from asyncio import Future, TimerHandle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Final, NoReturn

import msgspec
from msgspec import Struct, structs

from sloop.serve.blocks import block_parts, tensors_in
from sloop.serve.edge import inputs, v1
from sloop.serve.edge.inputs import AnswerForm, Buffer, InputValidator, ParsedRequest
from sloop.serve.edge.intake import LARGE_BYTES
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import Model
from sloop.serve.edge.triton import classified
from sloop.serve.processes import begin_forked, fork, set_name
from sloop.serve.transport import Frame, FrameKind, ProcessChannel, ProcessLink, socket_pair
from sloop.tensor import Port, Signature, Tensor

NAME: Final = "sloop json"
CLASSIFIED_BYTES_MAX: Final = 4 * 1024
"""Outputs of this size are sorted into classes in the edge: a row of 1,000 numbers."""
LISTS_MAX: Final = 1024
"""So many empty lists are written in the edge."""
VALIDATORS_MAX: Final = 256
WORK_S_MAX: Final = 60.0
"""How long the process may take for a request, which has at most some seconds of work for it."""


class Read(Struct, frozen=True, tag=True):
    """Work: read a request, whose body follows."""

    signature: Signature
    header_length: str | None = None
    """The value of Inference-Header-Content-Length."""
    is_v1: bool = False


class Write(Struct, frozen=True, tag=True):
    """Work: write an answer. The block of its outputs follows."""

    model: str
    version: str
    names: tuple[str, ...]
    """Of the outputs in the block."""
    form: AnswerForm
    ports: tuple[Port, ...] = ()
    labels: Mapping[str, tuple[str, ...]] = {}
    """The model's outputs and the names of their classes, if classes are asked for."""


DONE, REFUSED, BROKEN = 0, 1, 2
"""The value of a frame from the process: the result follows, the fields of a refusal, or the text of an exception."""

_ENCODE: Final = msgspec.json.Encoder().encode
_WORK: Final = msgspec.json.Decoder(Read | Write)
_PARSED: Final = msgspec.json.Decoder(tuple[dict[str, Any], AnswerForm])
"""The parameters of a request that was read, and the form of its answer. The block of its inputs follows, in the order
of the signature."""
_JSON_BYTES: Final = msgspec.json.Decoder(int | None)
_REFUSAL: Final = msgspec.json.Decoder(tuple[int, str, str, int])
HEAD_BYTES: Final = 4
"""A payload is the length of its head, the head, and what follows."""


class LargeJson:
    """The edge's side."""

    def __init__(self) -> None:
        self._link: ProcessLink | None = None
        self._pid = 0
        self._turn = asyncio.Lock()
        """Held from when the process gets work until it answers, even if nobody waits for that any more."""
        self._answer: Future[Frame] | None = None
        """Of the work that the process has."""
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The id of the process; 0 if there is none."""
        return self._pid

    async def read(
        self, body: bytes | bytearray, header_length: str | None, model: Model, *, is_v1: bool = False
    ) -> ParsedRequest:
        """See `read` of `sloop.serve.edge.inputs`, and of `v1`. Raises a 503 if the process dies."""
        validator = model.validator
        if is_binary(body, header_length, validator):
            return inputs.read(body, header_length, validator)
        head, block = await self._ask(Read(validator.signature, header_length, is_v1), (body,))
        return ParsedRequest(dict(zip(validator.ports, tensors_in(block), strict=True)), *_PARSED.decode(head))

    async def write(
        self, model: Model, version: str, form: AnswerForm, outputs: Mapping[str, Tensor]
    ) -> tuple[Buffer, int | None]:
        """A large answer: see `write` of `sloop.serve.edge.inputs`, and of `v1`. Raises a 503 likewise."""
        work = Write(model.name, version, tuple(outputs), form)
        if form.classes:
            work = structs.replace(work, ports=model.validator.signature.outputs, labels=model.labels)
        head, body = await self._ask(work, block_parts(list(outputs.values())))
        return body, _JSON_BYTES.decode(head)

    def close(self) -> None:
        """End the process, and start no other. May be called repeatedly."""
        self._is_closed = True
        if self._link is not None:
            self._end("the server stops")

    async def _ask(self, work: Read | Write, follows: Sequence[Buffer]) -> tuple[memoryview, memoryview]:
        """Let the process do this work when it is its turn. The head of the result, and what follows it."""
        await self._turn.acquire()
        loop = asyncio.get_running_loop()
        self._answer = answer = loop.create_future()
        timer = loop.call_later(WORK_S_MAX, self._end, f"it took more than {WORK_S_MAX:g} s")
        answer.add_done_callback(partial(self._end_turn, timer))
        try:
            self._send(work, follows)
        except Exception as error:
            answer.set_exception(error)
        await asyncio.wait((answer,))  # which it outlives if this task is cancelled
        frame = answer.result()
        head, rest = _split_head(frame.payload)
        if frame.value == REFUSED:
            raise Refusal.of(_REFUSAL.decode(head))
        if frame.value == BROKEN:
            raise RuntimeError(str(head, "utf-8"))
        return head, rest

    def _send(self, work: Read | Write, follows: Sequence[Buffer]) -> None:
        if self._is_closed:
            raise ended("the server stops")
        if self._link is None:
            self._start()
        assert self._link is not None
        self._link.send(FrameKind.BYTES, payload=_with_head(_ENCODE(work), follows))

    def _end_turn(self, timer: TimerHandle, answer: Future[Frame]) -> None:
        timer.cancel()
        answer.exception()  # nobody may wait for it any more
        self._turn.release()

    def _start(self) -> None:
        ours, theirs = socket_pair()
        edge = os.getpid()
        with theirs:
            try:
                self._pid = fork()
            except OSError:
                ours.close()
                raise
            if not self._pid:
                _live(theirs, edge)
        self._link = ProcessLink(asyncio.get_running_loop(), ours)
        self._link.attach(self._on_frame, self._end)

    def _on_frame(self, frame: Frame) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(frame)

    def _end(self, why: str) -> None:
        assert self._link is not None
        self._link.close()
        pid, self._pid, self._link = self._pid, 0, None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ended(why))


def ended(why: str) -> Refusal:
    """The 503 for large JSON without a process that reads or writes it."""
    what = f"failed: the process that reads and writes large JSON has ended ({why})"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, "try again, or send binary tensors", retry_after_s=1)


def is_binary(body: Buffer, header_length: str | None, validator: InputValidator) -> bool:
    """Whether the edge reads a body itself, in a time that does not depend on its size. Raises a 400 if its JSON has
    another length than the header says."""
    if header_length is None or validator.has_text:
        return False
    head, _ = inputs.split(body, header_length)
    return len(head) <= LARGE_BYTES


def must_be_written_apart(form: AnswerForm, outputs: Mapping[str, Tensor]) -> bool:
    """Whether an answer is so large that `LargeJson` writes it. Binary tensors cost nothing."""
    size, size_max = 0, CLASSIFIED_BYTES_MAX if form.classes else LARGE_BYTES
    for name, tensor in outputs.items():  # a comprehension would cost each request a call
        if not form.outputs.get(name, True):
            size += len(tensor.data)
            if not tensor.data and form.is_v1 and v1.empty_lists_in(tensor.shape) > LISTS_MAX:
                return True
    return size > size_max


def _with_head(head: bytes, follows: Sequence[Buffer]) -> Sequence[Buffer]:
    return (len(head).to_bytes(HEAD_BYTES, "little"), head, *follows)


def _split_head(payload: memoryview) -> tuple[memoryview, memoryview]:
    end = HEAD_BYTES + int.from_bytes(payload[:HEAD_BYTES], "little")
    return payload[HEAD_BYTES:end], payload[end:]


# The process


def _live(sock: socket.socket, edge: int) -> NoReturn:
    """The whole life of the process. It keeps no file of the edge: others must see when the edge closes them."""
    try:
        begin_forked(edge, sock.fileno())
        set_name(NAME)
        gc.disable()  # a million lists would be looked through again and again, and none is garbage before the end
        gc.freeze()  # what is the edge's need not be looked through after each request
        channel = ProcessChannel(sock)
        while (frame := channel.receive()) is not None:
            value, head, follows = _done(frame.payload)
            channel.send(FrameKind.BYTES, value=value, payload=_with_head(head, follows))
            del frame, head, follows
            gc.collect()
    finally:
        os._exit(0)


def _done(payload: memoryview) -> tuple[int, bytes, Sequence[Buffer]]:
    """What comes of some work."""
    head, follows = _split_head(payload)
    try:
        work = _WORK.decode(head)
        return DONE, *(_read(work, follows) if isinstance(work, Read) else _write(work, follows))
    except Refusal as refusal:
        return REFUSED, _ENCODE(refusal.fields), ()
    except Exception:
        return BROKEN, traceback.format_exc().encode("utf-8", "backslashreplace"), ()


def _read(work: Read, body: memoryview) -> tuple[bytes, Sequence[Buffer]]:
    validator = _validator_of(work.signature)
    found = v1.read(body, validator) if work.is_v1 else inputs.read(body, work.header_length, validator)
    return _ENCODE((found.parameters, found.form)), block_parts([found.tensors[name] for name in validator.ports])


_validator_of: Final = lru_cache(VALIDATORS_MAX)(InputValidator)


def _write(work: Write, block: memoryview) -> tuple[bytes, Sequence[Buffer]]:
    outputs: Mapping[str, Tensor] = dict(zip(work.names, tensors_in(block), strict=True))
    form = work.form
    if form.is_v1:
        return _ENCODE(None), (v1.write(form.rows, outputs),)
    if form.classes:
        outputs = classified(outputs, form.classes, work.ports, work.labels)
    body, json_bytes = inputs.write(work.model, work.version, form, outputs)
    return _ENCODE(json_bytes), (body,) if isinstance(body, bytes) else body
