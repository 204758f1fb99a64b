"""What attacks on the server's ports do to authorised traffic beside them, and to memory.

    python -m benchmarks.attacks [--seconds 15] [--rest 60] [--only NAME …]

A server with a small model and a key gets authorised requests at half of what it can take, half of them over HTTP and
half over gRPC. Beside them, each attack runs in a process of its own that gets only the CPU time that others
leave (SCHED_IDLE), because server, clients and attacker share the machine; on a machine that has other work too, it
would get none, and `--eager` lets it take its part. All attacks stop by themselves. Memory is
that of the server with all its processes (PSS). Turns are pieces of work of the deciding process.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import os
import resource
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import grpc
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME,
    FRAME_BYTES_MAX,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    encode,
    frame,
    text,
)
from benchmarks.models import perceptron
from benchmarks.notebook import arguments, children, publish, say, server_pid, table, workspace
from benchmarks.peers.load import closed_at_sloop
from sloop.demo.live import ServerReport, serving
from sloop.demo.run import dump_yaml
from sloop.load import Encoding, LoadPlan, LoadResult, run_load
from sloop.serve.edge.grpc.schema import SERVICE, message_class
from sloop.serve.processes import set_priority, stay_aside
from sloop.workload import trace_from

KEY: Final = "an-attacker-does-not-know-this"
SLO_MS: Final = 100.0
WIDTH: Final = 64
ROWS: Final = 230
"""Of large messages: so many rows are just within the window that a client has at first."""
LOAD: Final = 0.5
CONNECTIONS: Final = 2000
"""That a port takes."""
MEMORY_BYTES_MAX: Final = 256 * 2**20
ATTAINMENT_MIN: Final = 0.99
CALLERS: Final = 4
"""Threads that call over gRPC beside an attack."""
CALLS_EACH: Final = 4
"""After so many calls they go on with a new connection."""
SAMPLE_S: Final = 0.2
EAGER: Final = "SLOOP_EAGER_ATTACKER"
APART: Final = "SLOOP_ATTACKER_APART"


class Target(Struct, frozen=True):
    """Where an attack goes, and for how long."""

    model: str
    http_port: int
    grpc_port: int
    until_s: float
    """In `time.monotonic`."""

    @property
    def is_on(self) -> bool:
        """Whether the attack goes on."""
        return time.monotonic() < self.until_s


Attack = Callable[[Target], Awaitable[None]]
ATTACKS: Final[dict[str, tuple[str, Attack]]] = {}
"""By name, what an attack does, and itself."""


def attack(name: str, what: str) -> Callable[[Attack], Attack]:
    """Register an attack."""

    def register(function: Attack) -> Attack:
        ATTACKS[name] = what, function
        return function

    return register


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, which is aborted at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=own_address())
    try:
        yield reader, writer
    finally:
        await aborted(writer)


def own_address() -> tuple[str, int] | None:
    """Where an attacker connects from: the address of the clients (None), or another one."""
    return ("127.0.0.2", 0) if os.environ.get(APART) else None


async def aborted(writer: asyncio.StreamWriter) -> None:
    """End a connection at once."""
    writer.transport.abort()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def many(target: Target, count: int, one: Callable[[int], Awaitable[None]]) -> None:
    """Run `one` so many times at once, each again and again (at most five times a second) until the attack ends."""

    async def repeat(number: int) -> None:
        while target.is_on:
            with contextlib.suppress(OSError, EOFError, asyncio.IncompleteReadError):
                await one(number)
            await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(repeat(number)) for number in range(count)]
    await asyncio.sleep(max(0.0, target.until_s - time.monotonic()))
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def drained(reader: asyncio.StreamReader) -> None:
    """Read until the server closes."""
    while await reader.read(2**16):
        pass


def post(target: Target, *headers: str, length: int | str = "") -> bytes:
    """The head of an inference request."""
    lines = [f"POST /v2/models/{target.model}/infer HTTP/1.1", "host: x", *headers]
    if length != "":
        lines.append(f"content-length: {length}")
    return "\r\n".join([*lines, "", ""]).encode()


def with_key() -> str:
    """The header with the key, for attacks by somebody who has one."""
    return f"x-api-key: {KEY}"


# Over HTTP


@attack("announced bodies", "1,030 connections without a key announce 1 MiB each and send nothing")
async def announced(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            writer.write(post(target, length=2**20))
            await drained(reader)

    await many(target, 1030, one)


@attack("half bodies", "65 connections with a key send half of 1 MiB and stop")
async def halves(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            writer.write(post(target, with_key(), length=2**20) + bytes(2**19))
            await drained(reader)

    await many(target, 65, one)


@attack("slow heads", "500 connections send their head byte by byte")
async def slow_heads(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (_reader, writer):
            for byte in post(target, length=10):
                writer.write(bytes((byte,)))
                await asyncio.sleep(0.5)

    await many(target, 500, one)


@attack("full port", "3,000 connections of three addresses send the beginning of a head, and come again")
async def full_port(target: Target) -> None:
    async def one(number: int) -> None:
        address = f"127.0.0.{2 + number % 3}"
        reader, writer = await asyncio.open_connection("127.0.0.1", target.http_port, local_addr=(address, 0))
        try:
            writer.write(b"POST /v2/mo")
            await drained(reader)
        finally:
            await aborted(writer)

    await many(target, 3000, one)


@attack("probes", "20 connections without a key ask 1,000 times whether the server is ready, again and again")
async def probes(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            writer.write(b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
            writer.write_eof()
            await drained(reader)

    await many(target, 20, one)


@attack("idle connections", "4,000 connections to each port that send nothing")
async def idle(target: Target) -> None:
    await idle_at(target, 8000, b"")


@attack("large heads", "50 connections send heads of a megabyte, and numbers of 5,000 digits")
async def large_heads(target: Target) -> None:
    async def one(number: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            if number % 2:
                writer.write(post(target, *(f"x-{place}: {'v' * 1000}" for place in range(1000))))
            else:
                writer.write(post(target, with_key(), f"x-slo-ms: {'9' * 5000}", length="9" * 5000))
            await drained(reader)

    await many(target, 50, one)


@attack("refused requests", "20 connections send 1,000 requests without a key at once, again and again")
async def refused(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            writer.write((post(target, length=2) + b"{}") * 1000)
            await drained(reader)

    await many(target, 20, one)


@attack("broken framing", "50 connections send truncated, chunked and smuggled bodies")
async def broken(target: Target) -> None:
    chunked = post(target, with_key(), "transfer-encoding: chunked")
    sent = (
        post(target, with_key(), length=2_000_000) + b"x" * 75,
        chunked + b"5\r\n{abcd\r\n",
        chunked + b"ZZZZ\r\n{}\r\n0\r\n\r\n",
        post(target, with_key(), "content-length: 3", length=2) + b"{}",
        bytes(range(256)) * 100,
    )

    async def one(number: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            writer.write(sent[number % len(sent)])
            writer.write_eof()
            await drained(reader)

    await many(target, 50, one)


@attack("large JSON", "a valid JSON body of 64 MiB with a key, one after the other")
async def large_json(target: Target) -> None:
    await many(target, 1, lambda _: send_json(target, 64))


@attack("JSON at its bound", "a valid JSON body of 8 MiB with a key, one a second")
async def bounded_json(target: Target) -> None:
    while target.is_on:
        with contextlib.suppress(OSError):
            await send_json(target, 8)
        await asyncio.sleep(1)


async def send_json(target: Target, mebibytes: int) -> None:
    numbers = b"0.5," * (mebibytes * 2**18 - 100)
    begin = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[' % WIDTH
    body = begin + numbers[:-1] + b"]}]}"
    async with connection(target.http_port) as (reader, writer):
        writer.write(post(target, with_key(), "connection: close", length=len(body)))
        for at in range(0, len(body), 2**18):
            writer.write(body[at : at + 2**18])
            await writer.drain()
        await drained(reader)


@attack("unread answers", "50 connections with a key ask for the metrics 1,000 times and read nothing")
async def unread(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.http_port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # of the connection
            ask = f"GET /metrics HTTP/1.1\r\nhost: x\r\n{with_key()}\r\n\r\n".encode()
            writer.write(ask * 1000)
            await asyncio.sleep(60)

    await many(target, 50, one)


@attack("resets", "50 connections with a key ask, and reset the connection before the answer")
async def resets(target: Target) -> None:
    body = infer_json()

    async def one(_: int) -> None:
        for _ in range(20):
            async with connection(target.http_port) as (_reader, writer):
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.write(post(target, with_key(), length=len(body)) + body)
                await asyncio.sleep(0)

    await many(target, 50, one)


def infer_json() -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "data": [0.5] * WIDTH}
    return json.dumps({"inputs": [tensor]}).encode()


# Over gRPC


def begun(number: int, method: str, *more: tuple[str, str], is_authorised: bool = False) -> bytes:
    """The head of a call."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", f"/{SERVICE}/{method}"), (":authority", "x")]
    fields += [("content-type", "application/grpc"), ("te", "trailers"), *more]
    fields += [("x-api-key", KEY)] if is_authorised else []
    return frame(HEADERS, END_HEADERS, number, encode(*fields))


def prefixed(message: bytes, *, is_compressed: bool = False) -> bytes:
    return bytes((is_compressed,)) + len(message).to_bytes(4, "big") + message


async def sent_message(target: Target, method: str, message: bytes, *more: tuple[str, str], keyed: bool) -> None:
    """Send one call on a connection of its own, as fast as the server lets us, and read its answer."""
    async with connection(target.grpc_port) as (reader, writer):
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun(1, method, *more, is_authorised=keyed))
        allowed = {0: 65_535, 1: 65_535}
        is_over = asyncio.Event()

        async def read() -> None:
            with contextlib.suppress(asyncio.IncompleteReadError, OSError):
                while True:
                    high, low, kind, flags, number = FRAME.unpack(await reader.readexactly(FRAME.size))
                    payload = await reader.readexactly((high << 16) + low)
                    if kind == WINDOW_UPDATE and number in allowed:
                        allowed[number] += int.from_bytes(payload, "big")
                    elif kind == HEADERS and flags & END_STREAM:
                        break
            is_over.set()

        reading = asyncio.create_task(read())
        at = 0
        while at < len(message) and not is_over.is_set():
            size = min(FRAME_BYTES_MAX, len(message) - at, *allowed.values())
            if size <= 0:
                await asyncio.sleep(0.001)
                continue
            at += size
            allowed = {number: left - size for number, left in allowed.items()}
            writer.write(frame(DATA, END_STREAM if at == len(message) else 0, 1, message[at - size : at]))
            await writer.drain()
        await reading


@attack(
    "empty tensors", "32 MB of empty tensors to ServerLive without a key, and to ModelInfer with one, ten at a time"
)
async def empty_tensors(target: Target) -> None:
    message = prefixed(b"\x2a\x00" * 16_000_000)
    methods = ("ServerLive", "ModelInfer")
    await many(target, 10, lambda n: sent_message(target, methods[n % 2], message, keyed=bool(n % 2)))


@attack("gzip bombs", "32 calls at a time with a key, whose 64 KiB become 64 MiB")
async def bombs(target: Target) -> None:
    message = prefixed(gzip.compress(bytes(2**26), 9), is_compressed=True)
    encoding = ("grpc-encoding", "gzip")
    await many(target, 32, lambda _: sent_message(target, "ModelInfer", message, encoding, keyed=True))


@attack("gzip at its bound", "4 calls at a time with a key, which become 8 MiB")
async def packed(target: Target) -> None:
    message = prefixed(gzip.compress(b"\x3a\xff\xff\xff\x03" + bytes(8_388_607), 9)[:-8] + bytes(8), is_compressed=True)
    encoding = ("grpc-encoding", "gzip")
    await many(target, 4, lambda _: sent_message(target, "ModelInfer", message, encoding, keyed=True))


def flood(make: Callable[[int], bytes], connections: int = 10) -> Attack:
    """An attack that sends the frames of `make` for each call's number, as fast as the server reads them."""

    async def run(target: Target) -> None:
        async def one(_: int) -> None:
            async with connection(target.grpc_port) as (reader, writer):
                writer.write(PREFACE + frame(SETTINGS, 0, 0))
                reading = asyncio.create_task(drained(reader))
                try:
                    for number in range(1, 1_000_001, 200):
                        writer.write(b"".join(make(each) for each in range(number, number + 200, 2)))
                        await writer.drain()
                        if reading.done():
                            break
                    await reading
                finally:
                    reading.cancel()

        await many(target, connections, one)

    return run


REGISTERED_FLOODS: Final[dict[str, tuple[str, Callable[[int], bytes]]]] = {
    "rapid resets": (
        "10 connections begin and reset calls without a key",
        lambda number: begun(number, "ModelInfer") + frame(RST_STREAM, 0, number, bytes(4)),
    ),
    "rapid resets with a key": (
        "the same with a key",
        lambda number: begun(number, "ModelInfer", is_authorised=True) + frame(RST_STREAM, 0, number, bytes(4)),
    ),
    "pings": ("10 connections send pings", lambda _: frame(PING, 0, 0, bytes(8))),
    "settings": ("10 connections send settings", lambda _: frame(SETTINGS, 0, 0, struct.pack(">HL", 4, 65_535))),
    "open calls": (
        "10 connections begin calls with a key, and send no message",
        lambda number: begun(number, "ModelInfer", is_authorised=True),
    ),
    "endless heads": (
        "10 connections send a head that does not end",
        lambda number: frame(HEADERS, 0, 1) if number == 1 else frame(CONTINUATION, 0, 1, b"\0\1a\1b"),
    ),
    "wrong keys": (
        "10 connections try keys",
        lambda number: begun(number, "ModelInfer", ("x-api-key", str(number))) + frame(DATA, END_STREAM, number),
    ),
}
for _name, (_what, _make) in REGISTERED_FLOODS.items():
    ATTACKS[_name] = _what, flood(_make)


@attack("unfinished calls", "17 connections without a key begin 1,000 calls each, and 600 a second after that")
async def unfinished(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            writer.write(b"".join(begun(number, "ServerLive") for number in range(1, 2000, 2)))
            reading = asyncio.create_task(drained(reader))
            number = 2001
            while not reading.done():
                writer.write(begun(number, "ServerLive"))
                number += 2
                await asyncio.sleep(17 / 600)

    await many(target, 17, one)


@attack("full port of gRPC", "3,000 connections begin a call without a key each, and do not finish it")
async def full_of_calls(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun(1, "ServerLive"))
            await drained(reader)

    await many(target, 3000, one)


@attack("Huffman heads", "80 connections a second send heads of 15 kB without a key, in Huffman's code")
async def huffman(target: Target) -> None:
    field = b"\0\1x" + text(bytes(15_000 * 5 // 8), is_compressed=True)  # the code of "0" is five bits that are 0

    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            for number in range(1, 21, 2):
                writer.write(frame(HEADERS, END_HEADERS, number, begun(number, "ServerLive")[FRAME.size :] + field))
            await drained(reader)

    await many(target, 16, one)


@attack("heads that unpack", "16 connections send heads without a key that refer 10,000 times to a field of 3 kB")
async def unpacking(target: Target) -> None:
    kept = b"\x40" + text(b"x") + text(bytes(3000))
    head = begun(1, "ServerLive")[FRAME.size :] + kept + b"\xbe" * 10_000

    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0))
            for number in range(1, 21, 2):
                writer.write(frame(HEADERS, END_HEADERS, number, head))
            await drained(reader)

    await many(target, 16, one)


@attack("ten thousand unfinished calls", "10,000 connections begin a call without a key each, and do not finish it")
async def ten_thousand(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun(1, "ServerLive"))
            await drained(reader)

    await many(target, 10_000, one)


def large_call(target: Target, number: int) -> bytes:
    """A call with a key whose message and answer have 60 kB, which is within the first window."""
    request = message_class("ModelInferRequest")(model_name=target.model)
    request.inputs.add(name="x", datatype="FP32", shape=[ROWS, WIDTH])
    request.raw_input_contents.append(bytes(ROWS * WIDTH * 4))
    message = prefixed(request.SerializeToString())
    parts = [message[at : at + FRAME_BYTES_MAX] for at in range(0, len(message), FRAME_BYTES_MAX)]
    frames = [frame(DATA, END_STREAM * (part is parts[-1]), number, part) for part in parts]
    return b"".join([begun(number, "ModelInfer", is_authorised=True), *frames])


@attack("slow readers", "50 connections with a key ask for 50 answers of 60 kB each, and read nothing")
async def slow_readers(target: Target) -> None:
    async def one(_: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            reader._transport.pause_reading()  # type: ignore[attr-defined]  # of the connection
            open_wide = struct.pack(">HL", INITIAL_WINDOW_SIZE, 2**31 - 1)
            grown = frame(WINDOW_UPDATE, 0, 0, struct.pack(">L", 2**30))
            writer.write(PREFACE + frame(SETTINGS, 0, 0, open_wide) + grown)
            for number in range(1, 101, 2):
                writer.write(large_call(target, number))
                await asyncio.sleep(0.2)  # the server gives the window of the connection back
            await asyncio.sleep(60)

    await many(target, 50, one)


@attack("window games", "20 connections with a key ask for 10 answers of 60 kB each, and accept a byte at a time")
async def window_games(target: Target) -> None:
    closed = frame(SETTINGS, 0, 0, struct.pack(">HL", INITIAL_WINDOW_SIZE, 0))
    byte = b"".join(frame(WINDOW_UPDATE, 0, number, struct.pack(">L", 1)) for number in range(1, 21, 2))
    opened = b"".join(frame(SETTINGS, 0, 0, struct.pack(">HL", INITIAL_WINDOW_SIZE, size)) for size in (65_535, 0))

    async def one(place: int) -> None:
        async with connection(target.grpc_port) as (reader, writer):
            writer.write(PREFACE + closed)
            reading = asyncio.create_task(drained(reader))
            for number in range(1, 21, 2):
                writer.write(large_call(target, number))
                await asyncio.sleep(0.05)
            try:
                while not reading.done():
                    writer.write((opened if place % 2 else byte) * 10)
                    await writer.drain()
                    await asyncio.sleep(0.001)
            finally:
                reading.cancel()

    await many(target, 20, one)


# With TLS


def with_tls(name: str, what: str) -> Callable[[Attack], Attack]:
    """Register an attack on a server whose ports have TLS."""
    TLS_ATTACKS.append(name)
    return attack(name, what)


TLS_ATTACKS: Final[list[str]] = []


@with_tls("silence", "2,000 connections to each port that send nothing, and come again")
async def silence(target: Target) -> None:
    await idle_at(target, 4000, b"")


@with_tls("half a first message", "2,000 connections to each port that send half of the first message of TLS")
async def half_hellos(target: Target) -> None:
    await idle_at(target, 4000, hello()[:250])


@with_tls("first messages", "600 connections to each port that send the first message of TLS and stop")
async def hellos(target: Target) -> None:
    await idle_at(target, 1200, hello())


@with_tls("handshakes", "50 connections to each port finish their handshake, end, and come again at once")
async def handshakes(target: Target) -> None:
    context = unchecked()

    async def one(number: int) -> None:
        port = (target.http_port, target.grpc_port)[number % 2]
        while target.is_on:
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, local_addr=own_address())
            await aborted(writer)

    await many(target, 100, one)


async def idle_at(target: Target, count: int, sent: bytes) -> None:
    """Connections to both ports that send this and wait."""

    async def one(number: int) -> None:
        async with connection((target.http_port, target.grpc_port)[number % 2]) as (reader, writer):
            writer.write(sent)
            await drained(reader)

    await many(target, count, one)


def unchecked() -> ssl.SSLContext:
    """Of a client that trusts any server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def hello() -> bytes:
    """The first message of a client of TLS."""
    sent = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        unchecked().wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


def be_attacker(name: str, target: Target) -> None:
    """Run an attack in this process."""
    if not os.environ.get(EAGER):
        set_priority(0, humble=True)
        stay_aside()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(ATTACKS[name][1](target))  # type: ignore[arg-type]  # a coroutine


@contextmanager
def attacked(name: str, target: Target) -> Iterator[None]:
    """The attack beside the block; it ends by itself soon after `target.until_s`."""
    if not name:
        yield
        return
    numbers = [str(target.http_port), str(target.grpc_port), str(target.until_s)]
    command = [sys.executable, "-m", "benchmarks.attacks", "--attacker", name, target.model, *numbers]
    process = subprocess.Popen(command, start_new_session=True)  # the lowest priority counts for a session (autogroup)
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    finally:
        process.kill()
        process.wait()


# What is measured


def memory_bytes(pid: int) -> int:
    """The memory of a process and all below it; what they share counts once."""
    return own_memory_bytes(pid) + sum(memory_bytes(child) for child, _ in children(pid))


def own_memory_bytes(pid: int) -> int:
    """The memory of a process, with its share of what it has in common with others."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class Watch:
    """Calls over gRPC at a rate (as fast as they are answered if it is 0), and samples of memory, in threads of their
    own until the block ends."""

    def __init__(self, target: Target, pid: int, rate_rps: float, *, has_tls: bool) -> None:
        self._target, self._pid, self._rate_rps, self._has_tls = target, pid, rate_rps, has_tls
        self._over = threading.Event()
        callers = [threading.Thread(target=self._call, args=(place,)) for place in range(CALLERS)]
        self._threads = [*callers, threading.Thread(target=self._sample)]
        self._lock = threading.Lock()
        self.calls = self.answered = 0
        self.memory_bytes = 0
        """The most so far."""

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.memory_bytes = max(self.memory_bytes, memory_bytes(self._pid))

    def _call(self, place: int) -> None:
        request = message_class("ModelInferRequest")(model_name=self._target.model)
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, WIDTH])
        tensor.contents.fp32_contents.extend([0.5] * WIDTH)
        message, calls = request.SerializeToString(), 0
        gap_s = CALLERS / self._rate_rps if self._rate_rps else 0.0
        due_s = time.monotonic() + gap_s * place / CALLERS
        channel = self._channel()
        while not self._over.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + gap_s, time.monotonic() - 1)  # calls that are late are made, unless a second's worth is
            if calls and not calls % CALLS_EACH:
                channel.close()
                channel = self._channel()
            calls += 1
            is_answered = True
            try:
                invoke = channel.unary_unary(f"/{SERVICE}/ModelInfer", bytes, bytes)
                invoke(message, timeout=SLO_MS / 1e3, metadata=(("x-api-key", KEY),))
            except grpc.RpcError:
                is_answered = False
            with self._lock:
                self.calls += 1
                self.answered += is_answered
        channel.close()

    def _channel(self) -> grpc.Channel:
        """A connection of its own, which comes again at once if it is closed."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100)]
        options += [("grpc.min_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
        address = f"127.0.0.1:{self._target.grpc_port}"
        if not self._has_tls:
            return grpc.insecure_channel(address, options)
        trusted = grpc.ssl_channel_credentials(Path(os.environ["SSL_CERT_FILE"]).read_bytes())
        return grpc.secure_channel(address, trusted, options)


def turns(where: ServerReport) -> tuple[float, float]:
    """How many pieces of work the deciding process has done, and how many of them took more than a millisecond."""
    ask = urllib.request.Request(f"{where.http}/metrics", headers={"x-api-key": KEY})
    with urllib.request.urlopen(ask, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {
        sample.labels["le"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "sloop_turn_seconds_bucket"
    }
    return found["+Inf"], found["+Inf"] - found["0.001"]


class Row(Struct, frozen=True):
    """An attack, and what it did."""

    name: str
    what: str
    attainment: float
    p99_ms: float | None
    calls: float
    """The share of calls over gRPC that were answered in time."""
    before_bytes: int
    most_bytes: int
    after_bytes: int
    long_turns: float
    """The share of turns that took more than a millisecond."""

    @property
    def is_good(self) -> bool:
        """Whether the numbers of the goal are reached."""
        grown = max(self.most_bytes, self.after_bytes + MEMORY_BYTES_MAX * 3 // 4) - self.before_bytes
        return min(self.attainment, self.calls) >= ATTAINMENT_MIN and grown <= MEMORY_BYTES_MAX

    def cells(self) -> tuple[object, ...]:
        """The row of the table."""
        mebibytes = (round(size / 2**20) for size in (self.before_bytes, self.most_bytes, self.after_bytes))
        return (
            self.name,
            self.what,
            f"{100 * self.attainment:.2f}",
            self.p99_ms,
            f"{100 * self.calls:.1f}",
            *mebibytes,
            f"{100 * self.long_turns:.3f}",
            self.is_good,
        )


def target_of(where: ServerReport, seconds: float) -> Target:
    """The server, for so many seconds from now on."""
    http_port, grpc_port = (int(address.rpartition(":")[2]) for address in (where.http, where.grpc))
    return Target(where.application, http_port, grpc_port, time.monotonic() + seconds)


def calls_rps(where: ServerReport, given: Namespace) -> float:
    """How many calls over gRPC are made a second beside the attacks."""
    if given.calls:
        return float(given.calls)
    seconds, has_tls = min(given.seconds, 5.0), where.http.startswith("https")
    with Watch(target_of(where, seconds), server_pid(), 0.0, has_tls=has_tls) as watch:
        time.sleep(seconds)
    say(f"{watch.answered / seconds:.0f} calls/s in a closed loop")
    return float(given.load / 2 * watch.answered / seconds)


def run(name: str, where: ServerReport, given: Namespace, rate_rps: float, called_rps: float) -> Row:
    """One attack beside authorised traffic."""
    say(name or "no attack")
    pid, before = server_pid(), memory_bytes(server_pid())
    turns_before, long_before = turns(where)
    target = target_of(where, given.seconds + 1)
    has_tls = where.http.startswith("https")
    with attacked(name, target), Watch(target, pid, called_rps, has_tls=has_tls) as watch:
        time.sleep(0.5)  # the attack begins first
        result = load(where, rate_rps, given)
    turns_after, long_after = turns(where)
    time.sleep(given.rest if name else 0)
    return Row(
        name=name or "none",
        what=ATTACKS[name][0] if name else "",
        attainment=result.attainment or 0.0,
        p99_ms=result.p99_ms,
        calls=watch.answered / max(1, watch.calls),
        before_bytes=before,
        most_bytes=watch.memory_bytes,
        after_bytes=memory_bytes(pid),
        long_turns=(long_after - long_before) / (turns_after - turns_before),
    )


def load(where: ServerReport, rate_rps: float, given: Namespace) -> LoadResult:
    """Authorised requests at a rate."""
    declared = {"kind": "poisson", "rate": rate_rps}
    arrivals = trace_from(declared, seed=given.seed, duration_s=given.seconds, folder=Path())
    return run_load(
        LoadPlan(
            url=where.http,
            model=where.application,
            arrivals=arrivals,
            slo_ms=SLO_MS,
            encoding=Encoding.JSON,
            timeout_s=5.0,
            connections_max=256,
            api_key=KEY,
        )
    )


def capacity_rps(where: ServerReport, given: Namespace) -> float:
    """The highest rate of an open loop that the server answers in time. A closed loop, from which the search begins,
    finds more: requests that come at the same time share what a turn of each process costs."""
    seconds = min(given.seconds, 4.0)
    closed_rps = closed_at_sloop(where.http, where.application, 32, seconds, slo_ms=SLO_MS, api_key=KEY).goodput_rps
    say(f"{closed_rps:.0f} requests/s in a closed loop")
    for tenths in range(10, 1, -1):
        rate_rps = closed_rps * tenths / 10
        if (load(where, rate_rps, given).attainment or 0.0) >= ATTAINMENT_MIN:
            return rate_rps
    raise SystemExit(f"the server does not even answer {rate_rps:.0f} requests/s in time")


def certified(folder: Path) -> tuple[str, ...]:
    """The options of a server with TLS, whose certificate clients of this process trust."""
    cert, key = folder / "server.pem", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    os.environ["SSL_CERT_FILE"] = str(cert)
    return "--tls-cert", str(cert), "--tls-key", str(key)


def main() -> None:
    if sys.argv[1:2] == ["--attacker"]:
        name, application, http_port, grpc_port, until_s = sys.argv[2:]
        be_attacker(name, Target(application, int(http_port), int(grpc_port), float(until_s)))
        return
    parser = arguments(__doc__, seconds=15, quick=4)
    parser.add_argument("--rest", type=float, default=60.0, help="seconds between the end and the last look at memory")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), help="these attacks (default: all)")
    parser.add_argument(
        "--load",
        type=float,
        default=LOAD,
        help="authorised load, as a share of what fits: half of it over HTTP, half over gRPC",
    )
    parser.add_argument("--rate", type=float, default=0.0, help="the same in requests/s, instead of --load")
    parser.add_argument("--calls", type=float, default=0.0, help="calls over gRPC per second, instead of --load")
    parser.add_argument("--eager", action="store_true", help="attackers compete with the server for CPU time")
    parser.add_argument("--apart", action="store_true", help="attackers have another address than the clients")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    given = parser.parse_args()
    os.environ["SLOOP_API_KEY"] = KEY
    os.environ[EAGER], os.environ[APART] = ("yes" if each else "" for each in (given.eager, given.apart))
    with workspace(given.keep) as folder:
        model = perceptron(folder, width=WIDTH, layers=2)
        app = folder / "app.yaml"
        dump_yaml(
            app,
            {
                "name": "attacked",
                "slo_ms": SLO_MS,
                "stages": [{"name": "infer", "model": model.name}],
                "system": {"name": "static", "replicas": 1, "cores": 0.5},
            },
        )
        names = given.only or list(ATTACKS)
        plain, secured = (["", *(name for name in names if (name in TLS_ATTACKS) is has)] for has in (False, True))
        rows, told = [], []
        for state, run_names, options in (("state", plain, ()), ("secured", secured, certified(folder))):
            if len(run_names) > 1:
                with serving(app, folder / state, "--limits", f"{{connections: {CONNECTIONS}}}", *options) as where:
                    rate_rps = given.rate or given.load / 2 * capacity_rps(where, given)
                    called_rps = calls_rps(where, given)
                    both = f"{rate_rps:,.0f} requests/s and {called_rps:,.0f} calls/s over gRPC"
                    told.append(f"{both}{' with TLS' * bool(options)}")
                    say(told[-1])
                    rows += [run(name, where, given, rate_rps, called_rps) for name in run_names]
    good = sum(row.is_good for row in rows)
    half = f"{50 * given.load:g} % of what the server answers in time without an attack"
    share = "as asked" if given.rate else f"each {half} if it has only those"
    columns = ("attack", "what it does", "attainment, %", "p99, ms", "gRPC calls in time, %")
    text = "\n\n".join(
        [
            f"Two dense layers of {WIDTH}, deadline {SLO_MS:g} ms, a key. Beside each attack {' and '.join(told)} are "
            f"sent for {given.seconds:g} s (JSON, Poisson; {share}); every {CALLS_EACH}th call over gRPC is on a new "
            "connection, and must be answered within the deadline, as its client measures it. Rows after the second "
            f"`none` are of a server with TLS. Memory is in MiB: before the attack, at most, {given.rest:g} s after "
            f"it. Good: at least {100 * ATTAINMENT_MIN:g} % in time of both, at most {MEMORY_BYTES_MAX >> 20} MiB more "
            f"memory, and at most a quarter of it left. {good} of {len(rows)} rows are good. A turn is a piece of work "
            "of the deciding process, from beginning to end, with the time in which other processes had its CPU.",
            table((*columns, "before", "most", "after", "turns over 1 ms, %", "good"), [row.cells() for row in rows]),
        ]
    )
    publish("attacks", "Attacks beside authorised traffic", text, write=not given.no_write)


if __name__ == "__main__":
    main()
