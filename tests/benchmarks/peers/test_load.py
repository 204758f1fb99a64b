"""Both loops against a server of a few lines, by `wrk` where it is installed and by the sender of our own."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import load
from benchmarks.peers.bodies import raw
from benchmarks.peers.peer import Launch
from benchmarks.peers.processes import Server, free_port, running

pytestmark = pytest.mark.live

SERVER = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell makes its processes ignore it
async def serve(reader, writer):
    while head := await reader.readuntil(b"\\r\\n\\r\\n"):
        if b"POST" in head:
            length = int(head.lower().split(b"content-length:")[1].split(b"\\r\\n")[0])
            await reader.readexactly(length)
        status = b"503 Busy" if b"/busy" in head else b"200 OK"
        writer.write(b"HTTP/1.1 %b\\r\\ncontent-length: 2\\r\\n\\r\\nok" % status)
async def main():
    async with await asyncio.start_server(serve, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    port = free_port()
    with running(Launch((sys.executable, "-c", SERVER, str(port)), {}, port, "/"), tmp_path / "words.txt") as started:
        yield started


@pytest.mark.parametrize("by", ["wrk", "sender"])
def test_closed_loop_counts_answers_alone(server: Server, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "wrk" and not shutil.which("wrk"):
        pytest.skip("wrk is not installed")
    if by == "sender":
        monkeypatch.setattr("benchmarks.peers.load.shutil.which", lambda name: None)
        assert "not installed" in load.client()
    found = load.closed(server.port, raw("/", b"1234"), 2, 1.0)
    assert found.answers > 100
    assert found.wrong == 0
    assert 0 < found.p50_ms <= found.p99_ms
    refused = load.closed(server.port, raw("/busy", b"1234"), 2, 1.0)
    assert refused.answers == 0
    assert refused.wrong > 100


def test_open_loop_sends_at_the_instants_given(server: Server) -> None:
    due_ns = np.arange(50, dtype=np.int64) * 10_000_000
    found = load.open_loop(server.port, raw("/", b"1234"), due_ns, slo_ms=1000.0, seconds=0.5)
    assert (found.sent, found.ok) == (50, 50)
    assert found.goodput_rps == 100
    refused = load.open_loop(server.port, raw("/busy", b"1234"), due_ns, slo_ms=1000.0, seconds=0.5)
    assert (refused.ok, refused.rejected) == (0, 50)
