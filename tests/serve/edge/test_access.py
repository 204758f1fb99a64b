"""The access log: a line for each answer, which never holds the server."""

import asyncio
import http.client
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from sloop.app.limits import ServerLimits
from sloop.errors import MachineError
from sloop.serve.edge import access
from sloop.serve.edge.access import AccessLog
from sloop.serve.edge.grpc.schema import SERVICE
from tests.serve.edge.fakes import Gateway, LoopThread, make_service, rpc_server, web_server


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def add(log: AccessLog, path: str = "/v2") -> None:
    log.add("http", "127.0.0.1", "GET", path, 200, began_ns=0, request_id="a-1")


async def test_lines_are_written_together_a_moment_later(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "access.jsonl"))
    add(log)
    add(log, "/" + "x" * 1000)
    assert (tmp_path / "access.jsonl").read_bytes() == b""
    await asyncio.sleep(2 * access.FLUSH_S)
    assert len(lines_in(tmp_path / "access.jsonl")) == 2
    add(log)
    log.close()
    log.close()
    first, second, _ = lines_in(tmp_path / "access.jsonl")
    assert first.keys() == {"time", "client", "protocol", "method", "path", "status", "ms", "request_id"}
    assert len(second["path"]) == access.PATH_CHARS_MAX


def test_on_stdout_it_waits_for_nobody_and_others_with_this_stdout_do(tmp_path: Path) -> None:
    script = tmp_path / "prints.py"
    script.write_text(
        "import asyncio, sys\nfrom sloop.serve.edge.access import AccessLog\n"
        "async def main():\n"
        "    log = AccessLog('-')\n"
        "    for _ in range(5000):\n"
        "        log.add('http', '', 'GET', '/v2', 200, began_ns=0)\n"
        "    log.close()\n"
        "    print(log.dropped, file=sys.stderr)\n"
        "asyncio.run(main())\n"
    )
    reading, writing = os.pipe()
    with open(reading, "rb") as lines, open(writing, "wb") as end:
        done = subprocess.run([sys.executable, script], stdout=end, stderr=subprocess.PIPE, check=True, timeout=60)
        assert os.get_blocking(end.fileno())
        end.close()
        assert json.loads(lines.readline())["path"] == "/v2"
    assert int(done.stderr) == 0, "a block that was written in part is not dropped"


async def test_a_reader_that_does_not_read_costs_lines_that_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log = AccessLog(str(path))
    for _ in range(50):
        for _ in range(100):
            add(log)
        log.flush()
    dropped = log.dropped
    assert 0 < dropped < 5_000
    found = b""
    for _ in range(3):
        while True:
            try:
                part = os.read(reading, 1 << 20)
            except BlockingIOError:
                break
            if not part:
                break
            found += part
        add(log)
        log.flush()
    log.close()
    found += os.read(reading, 1 << 20)
    os.close(reading)
    rows = [json.loads(line) for line in found.splitlines()]
    assert sum(row.get("dropped", 0) for row in rows) == dropped == log.dropped
    assert sum("path" in row for row in rows) == 5_003 - dropped


async def test_no_more_lines_wait_than_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "LINES_MAX", 2)
    log = AccessLog(str(tmp_path / "access.jsonl"))
    for _ in range(5):
        add(log)
    log.close()
    assert [row.get("dropped") for row in lines_in(tmp_path / "access.jsonl")] == [3, None, None]


def paths_in(file: Path) -> list[str]:
    return [row.get("path", "dropped") for row in lines_in(file)]


async def test_it_goes_on_in_a_new_file_when_the_present_one_was_moved_or_emptied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, moved = tmp_path / "logs" / "access.jsonl", tmp_path / "moved"
    file.parent.mkdir()
    log = AccessLog(str(file))
    add(log, "/waits")
    file.rename(moved)
    log.reopen()
    add(log, "/new")
    log.reopen()  # nothing was moved
    assert (paths_in(moved), paths_in(file)) == (["/waits"], ["/new"])
    os.truncate(file, 0)
    add(log, "/emptied")
    log.flush()
    assert paths_in(file) == ["/emptied"]
    file.rename(moved)
    file.parent.rmdir()
    log.reopen()
    add(log, "/nowhere")
    log.close()
    assert paths_in(moved) == ["/emptied", "/nowhere"]
    assert "goes on in the old file: No such file" in caplog.text


def test_stdout_goes_on_in_a_new_file_if_its_own_was_moved(tmp_path: Path) -> None:
    file, moved, script = tmp_path / "out", tmp_path / "moved", tmp_path / "script.py"
    script.write_text(
        "import asyncio, os\nfrom sloop.serve.edge.access import AccessLog\n"
        "def add(path): log.add('http', '1.2.3.4', 'GET', path, 200, began_ns=0)\n"
        "async def main():\n"
        "    add('/before')\n"
        "    log.flush()\n"
        f"    os.rename({str(file)!r}, {str(moved)!r})\n"
        "    log.reopen()\n"
        "    add('/after')\n"
        "    log.close()\n"
        "log = AccessLog('-')\nasyncio.run(main())\n"
    )
    with file.open("wb") as stdout:
        subprocess.run([sys.executable, script], stdout=stdout, check=True, timeout=60)
    assert (paths_in(moved), paths_in(file)) == (["/before"], ["/after"])


def test_a_link_may_lead_to_a_file_that_is_not_there(tmp_path: Path) -> None:
    link = tmp_path / "access.jsonl"
    link.symlink_to(tmp_path / "today")
    AccessLog(str(link)).close()
    assert stat.S_IMODE((tmp_path / "today").stat().st_mode) == 0o600


async def test_no_line_is_divided_between_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk may take a part of a line."""
    file, write = tmp_path / "access.jsonl", os.write
    log = AccessLog(str(file))
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: len(data) - 100]))
    add(log, "/one")
    add(log, "/two")
    log.flush()
    assert file.read_bytes().count(b"\n") == 1
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    file.rename(tmp_path / "moved")
    log.reopen()
    monkeypatch.undo()
    add(log, "/three")
    log.close()
    assert (paths_in(file), log.dropped) == (["dropped", "/three"], 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this machine")
async def test_a_full_disk_costs_lines_only() -> None:
    log = AccessLog("/dev/full")
    add(log)
    log.flush()
    add(log)
    log.close()
    assert log.dropped == 2


def test_a_file_that_cannot_be_written_is_an_error_with_help(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="access log cannot be written") as caught:
        AccessLog(str(tmp_path / "none" / "access.jsonl"))
    assert "--access-log" in caught.value.help


@pytest.mark.live
def test_answers_and_refusals_are_noted(gateway: Gateway, loop_thread: LoopThread, tmp_path: Path) -> None:
    path = tmp_path / "access.jsonl"
    web, rpc = web_server(make_service(gateway)), rpc_server(make_service(gateway), limits=ServerLimits(requests=8))
    web.access = rpc.access = log = AccessLog(str(path))
    connection = http.client.HTTPConnection("127.0.0.1", loop_thread.serve(web), timeout=10)
    connection.request("GET", "/v2/health/live", headers={"x-request-id": "a-1"})
    size = len(connection.getresponse().read())
    connection.request("POST", "/v2/models/demo/infer", b"{}")
    connection.getresponse().read()
    connection.close()
    with grpc.insecure_channel(f"127.0.0.1:{loop_thread.serve(rpc)}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ServerLive", bytes, bytes)
        assert call(b"", metadata=(("x-request-id", "a-2"),), timeout=10)

    async def end() -> None:
        log.close()
        await web.close(1)
        await rpc.close(1)

    loop_thread.call(end())
    live, infer, called = lines_in(path)
    assert (live["path"], live["status"], live["request_id"], live["bytes_out"]) == (
        "/v2/health/live",
        200,
        "a-1",
        size,
    )
    assert (infer["method"], infer["status"], infer["bytes_in"]) == ("POST", 400, 2)
    assert (called["protocol"], called["path"]) == ("grpc", f"/{SERVICE}/ServerLive")
    assert (called["status"], called["request_id"]) == (0, "a-2")
    assert {row["client"] for row in (live, infer, called)} == {"127.0.0.1"}
