"""Lines go to stderr without waiting for who reads it, and floods of them are bounded."""

import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from sloop.serve import stderr as module
from sloop.serve.processes import spawn
from sloop.serve.stderr import (
    KINDS_MAX,
    LAST_BYTES,
    PRINTED_BYTES_MAX,
    PRINTED_LINES_MAX,
    REPEATS_MAX,
    REPEATS_S,
    TRACES_MAX,
    WAITING_BYTES_MAX,
    Output,
    StderrLog,
    StderrWriter,
    _Printed,
    never_waiting,
)

LINE = b"%07d " + 1015 * b"x" + b"\n"


class Reader:
    """Reads a pipe to its end, once it has begun."""

    def __init__(self, fd: int) -> None:
        self._fd, self._found = fd, bytearray()
        self._thread = threading.Thread(target=self._read)

    def begin(self) -> None:
        self._thread.start()

    def lines(self) -> list[bytes]:
        self._thread.join()
        os.close(self._fd)
        return bytes(self._found).splitlines()

    def _read(self) -> None:
        while part := os.read(self._fd, 2**16):
            self._found += part


@pytest.fixture
def pipe() -> tuple[Reader, int]:
    """Who reads it, and its writing end."""
    reading, writing = os.pipe()
    return Reader(reading), writing


def test_nobody_waits_for_a_pipe_that_is_not_read_and_what_is_missing_is_said(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    writer = StderrWriter(fd)
    for number in range(5_000):  # 5 MiB: a pipe takes 64 KiB
        writer.write(LINE % number)
    assert writer.dropped > 0
    reader.begin()
    writer.flush(60)
    writer.write(b"and so on\n")
    writer.close()
    os.close(fd)
    *lines, last = reader.lines()
    assert last == b"and so on"
    expected = 0
    for line in lines:
        if notice := re.search(rb"WARNING (\d+) lines were dropped here", line):
            expected += int(notice[1])
        else:
            assert int(line[:7]) == expected, "the gap is where it is said to be"
            expected += 1
    assert expected == 5_000
    assert len([line for line in lines if b"WARNING" not in line]) + writer.dropped == 5_000
    assert 5_000 - writer.dropped >= WAITING_BYTES_MAX // len(LINE % 0)


def test_a_pipe_that_another_program_has_made_non_blocking(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    os.set_blocking(fd, False)
    writer = StderrWriter(fd)
    for number in range(200):
        writer.write(LINE % number)
    reader.begin()
    writer.close()
    os.close(fd)
    assert len(reader.lines()) == 200
    assert writer.dropped == 0


def test_a_reader_that_has_gone_costs_lines_only() -> None:
    reading, fd = os.pipe()
    os.close(reading)
    writer = StderrWriter(fd)
    writer.write(b"one\ntwo\n")
    writer.flush()
    writer.write(b"three\n")
    writer.close()
    os.close(fd)
    assert writer.dropped == 3


PRINTER = """
import os, sys
for number in range(2_000):
    print(f"{number:07d}", 1015 * "x")
os.write(2, b"and a part of a line")
"""


def test_what_processes_print_stops_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: tuple[Reader, int]
) -> None:
    reader, fd = pipe
    (tmp_path / "printer.py").write_text(PRINTER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "PRINTED_LINES_MAX", 10_000)
    monkeypatch.setattr(module, "PRINTED_BYTES_MAX", 2**30)
    with never_waiting() as writer:
        monkeypatch.setattr(writer, "_fd", fd)
        children = [spawn("printer", []) for _ in range(2)]
        assert [child.wait(60) for child in children] == [0, 0]
        reader.begin()
        writer.flush(60)
    os.close(fd)
    lines = reader.lines()
    assert {len(line) for line in lines} <= {1023, len(b"and a part of a line")} | {
        len(line) for line in lines if b"dropped" in line
    }, "no line is torn"
    assert len([line for line in lines if b"dropped" not in line]) + writer.dropped == 2 * 2_001


def test_what_a_process_prints_is_bounded_and_counted_and_its_last_words_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipe: tuple[Reader, int]
) -> None:
    reader, fd = pipe
    talk = f"for number in range({PRINTED_LINES_MAX + 500}): print(number)\nraise ValueError('the reason')\n"
    (tmp_path / "talker.py").write_text(talk)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with never_waiting() as writer:
        monkeypatch.setattr(writer, "_fd", fd)
        reader.begin()
        assert spawn("talker", []).wait(60) == 1
        writer.flush(60)
    os.close(fd)
    lines = reader.lines()
    assert lines[:PRINTED_LINES_MAX] == [b"%d" % number for number in range(PRINTED_LINES_MAX)]
    (notice,) = (line for line in lines if b"WARNING" in line)
    found = re.search(rb" (\d+) more lines that a process printed were left out", notice)
    assert found is not None
    assert int(found[1]) > 500, "the traceback too"
    assert lines[-1] == b"ValueError: the reason"


def test_a_process_may_print_again_after_a_while() -> None:
    printed = _Printed()
    line = b"x\n"
    assert printed.bounded(line * (PRINTED_LINES_MAX + 3), 100.0) == line * PRINTED_LINES_MAX
    assert printed.bounded(line, 100.0 + REPEATS_S / 2) == b""
    found = printed.bounded(line, 100.0 + REPEATS_S)
    assert b" 4 more lines" in found
    assert found.endswith(b"\nx\n")
    assert printed.end() == b"", "all is said"
    long = (PRINTED_BYTES_MAX // 2) * b"y" + b"\n"
    assert printed.bounded(2 * long, 200.0) == long
    assert b" 1 more lines" in printed.end()
    assert len(printed.end()) <= LAST_BYTES


class Lines:
    """A log whose lines are kept, and whose clock stands."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.written: list[str] = []
        self.stderr = StderrLog(lambda line: self.written.append(line.decode()), lambda: self.now_s)

    def log(self, text: str, *values: object, error: BaseException | None = None, name: str = "sloop.x") -> None:
        info = None if error is None else (type(error), error, None)
        self.stderr.handle(logging.LogRecord(name, logging.ERROR, __file__, 1, text, values, info))

    def take(self) -> list[str]:
        found, self.written = self.written, []
        return [line.partition(" sloop.")[2].rstrip("\n") for line in found]


def test_a_file_that_was_moved_away_gets_a_successor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    file, moved = folder / "server.log", tmp_path / "moved"
    with file.open("ab", buffering=0) as opened:
        file.chmod(0o640)
        output = Output(opened.fileno())
        opened.write(b"one\n")
        output.reopen()
        file.rename(moved)
        output.reopen()
        opened.write(b"two\n")
        assert (moved.read_bytes(), file.read_bytes()) == (b"one\n", b"two\n")
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.rename(moved)
        folder.rmdir()
        output.reopen()
        opened.write(b"three\n")
    assert moved.read_bytes() == b"two\nthree\n"
    assert "goes on in the old file: No such file" in caplog.text


def test_a_pipe_has_no_successor(pipe: tuple[Reader, int]) -> None:
    reader, fd = pipe
    Output(fd).reopen()
    os.write(fd, b"one\n")
    reader.begin()
    os.close(fd)
    assert reader.lines() == [b"one"]


def test_lines_of_one_kind_are_bounded_and_counted() -> None:
    log = Lines()
    for number in range(REPEATS_MAX + 7):
        log.log("client %d is wrong", number)
    log.log("something else")
    found = log.take()
    assert found[0] == "x ERROR client 0 is wrong"
    assert found[-1] == "x ERROR something else"
    assert len(found) == REPEATS_MAX + 1
    log.now_s = REPEATS_S
    log.log("something else")
    assert log.take() == [
        f"stderr WARNING 7 more lines were left out, such as: client {REPEATS_MAX} is wrong",
        "x ERROR something else",
    ]
    log.log("client %d is wrong", 1)
    assert log.take() == ["x ERROR client 1 is wrong"], "its time begins anew"


def test_tracebacks_are_bounded_more_tightly_and_the_end_says_what_is_missing() -> None:
    log = Lines()
    for _ in range(TRACES_MAX + 2):
        log.log("it broke", error=ValueError("no"))
    assert log.take() == TRACES_MAX * ["x ERROR it broke\nValueError: no"]
    log.stderr.flush()
    assert log.take() == ["stderr WARNING 2 more lines were left out, such as: it broke"]


def test_kinds_without_number_count_as_one() -> None:
    log = Lines()
    for number in range(3 * KINDS_MAX):
        log.log(f"client {number} is wrong")
    assert len(log.take()) == KINDS_MAX + REPEATS_MAX
    log.now_s = REPEATS_S
    log.log("something new")
    assert [line.partition(" more")[0] for line in log.take()] == [
        f"stderr WARNING {2 * KINDS_MAX - REPEATS_MAX}",
        "x ERROR something new",
    ]


TALKER = """
class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"x": ("FP32", (-1, 4))}
    joins_rows = True

    def __init__(self, threads): pass
    def run(self, x):
        print(16 * 1024 * "x")
        if x[0, 0] < 0:
            raise ValueError(10_000 * "y")
        return x
"""
SERVED = """\
name: talker
slo_ms: 20000
stages:
  - name: only
    model: talker.py
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}, max_batch: 4, max_cores: 1}
system: {name: static, cores: 1}
cluster: {nodes: [{hardware: local, count: 1}]}
"""


@pytest.mark.live
def test_a_server_whose_stderr_nobody_reads_goes_on(tmp_path: Path) -> None:
    (tmp_path / "talker.py").write_text(TALKER)
    (tmp_path / "talker.yaml").write_text(SERVED)
    command = [sys.executable, "-m", "sloop", "serve", "talker.yaml", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["http"]
            answers = [infer(url, -1.0 if number % 2 else 1.0) for number in range(40)]  # 640 KiB: a pipe takes 64
            assert answers == 20 * [200, 500]
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            server.kill()


def infer(url: str, value: float) -> int:
    """The status of a request."""
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": 4 * [value]}
    request = Request(f"{url}/v2/models/talker/infer", json.dumps({"inputs": [tensor]}).encode())
    try:
        with urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code
