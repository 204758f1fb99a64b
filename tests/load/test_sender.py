"""The sending process: orders, timers, the open loop."""

import asyncio
import re
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from sloop.load.connections import RequestHead, Server
from sloop.load.plan import Body
from sloop.load.results import Ending, RecordWriter, read_records
from sloop.load.sender import (
    RECORDS,
    SENDS_MAX,
    Alarm,
    Orders,
    ProgressReport,
    Target,
    allowed_connections,
    carry_out,
    main,
    open_schedule,
    read_orders,
    send_open,
    write_orders,
)
from sloop.units import NS_PER_MS, NS_PER_S, ms

pytestmark = pytest.mark.live

BODIES = (b'{"a": 1}', b'{"bc": 2}')


def target(port: int, **options: Any) -> Target:
    heads = [
        RequestHead(path="/v2/models/m/infer", host="h", slo_ms=100, content_bytes=len(body), json_bytes=len(body))
        for body in BODIES
    ]
    settings: dict[str, Any] = {"connections_max": 50, "warm_connections": 2, "timeout_ns": 5 * NS_PER_S, **options}
    return Target(Server("127.0.0.1", port), heads, BODIES, **settings)


def replay(folder: Path, port: int, schedule: list[tuple[int, int]], **options: int) -> NDArray[Any]:
    times = [value for pair in schedule for value in pair]
    with (folder / "records").open("wb") as file:
        records = RecordWriter(file)
        asyncio.run(send_open(target(port, **options), times, records, lambda progress: None))
        records.flush()
    return np.sort(read_records(folder / "records"), order="number")


def test_sends_what_is_due_when_it_is_due(tmp_path: Path, stub: Any) -> None:
    schedule = [(ms(2 * place), ms(place)) for place in range(30)]
    records = replay(tmp_path, stub.port, schedule)
    assert records["number"].tolist() == list(range(30))
    assert set(records["ending"]) == {Ending.ANSWERED}
    assert set(records["slo_met"]) == {-1}
    assert all(sent >= due for sent, (due, _) in zip(records["sent_ns"].tolist(), schedule, strict=True))
    assert all(records["done_ns"] > records["sent_ns"])
    assert sorted(stub.bodies) == sorted(BODIES * 15)
    elapsed = sorted(float(found[1]) for head in stub.heads if (found := re.search(r"x-elapsed-ms: ([\d.]+)", head)))
    assert elapsed == [float(place) for place in range(1, 30)]


def test_never_waits_for_answers(tmp_path: Path, stub: Any) -> None:
    """All 20 are due within 20 ms and each takes a second: a generator that waited would need 20 to send them."""
    stub.script = lambda number: stub.Step(delay_s=1.0)
    records = replay(tmp_path, stub.port, [(ms(place), 0) for place in range(20)])
    assert records["sent_ns"].max() < records["done_ns"].min()


def test_a_burst_larger_than_one_go_is_sent_whole(tmp_path: Path, stub: Any) -> None:
    records = replay(tmp_path, stub.port, [(0, 0)] * (2 * SENDS_MAX + 1), connections_max=500)
    assert len(records) == 2 * SENDS_MAX + 1
    assert set(records["ending"]) == {Ending.ANSWERED}


def test_timeouts_end_a_run(tmp_path: Path, stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=60)
    records = replay(tmp_path, stub.port, [(0, 0), (ms(5), 0)], timeout_ns=ms(100))
    assert records["ending"].tolist() == [Ending.TIMEOUT, Ending.TIMEOUT]
    assert records["status"].tolist() == [0, 0]


def test_the_server_s_verdict_is_kept(tmp_path: Path, stub: Any) -> None:
    contents = [stub.response(200, b'{"outputs": []}', f"x-slo-met: {said}") for said in ("true", "false")]
    stub.script = lambda number: stub.Step(contents[number % 2])
    records = replay(tmp_path, stub.port, [(0, 0), (ms(1), 0)], warm_connections=1)
    assert sorted(records["slo_met"].tolist()) == [0, 1]


def test_answers_are_kept_for_who_asks(tmp_path: Path, stub: Any) -> None:
    kept: dict[int, bytes] = {}
    stub.script = lambda number: stub.Step(stub.response(504)) if number == 1 else stub.Step()
    with (tmp_path / "records").open("wb") as file:
        wanted = replace(target(stub.port), keep=kept.__setitem__)
        asyncio.run(send_open(wanted, [0, 0, ms(200), 0, ms(400), 0], RecordWriter(file), lambda progress: None))
    assert sorted(kept) == [0, 2]
    assert all(b'"outputs"' in body for body in kept.values())


def test_an_empty_schedule_is_done_at_once(tmp_path: Path) -> None:
    assert len(replay(tmp_path, 1, [])) == 0


ORDERS = Orders("h", 80, False, "/v2/models/m/infer", "h:80", 100.0, (2, 1), 4, 2, 10**9, (0,))


def test_what_is_ordered_is_read(tmp_path: Path) -> None:
    schedule = np.array([[1, 2], [3, 4]], dtype=np.int64)
    write_orders(tmp_path, ORDERS, [Body(b"{}", 2), Body(b"abc", 1)], schedule)
    assert read_orders(tmp_path) == (ORDERS, [b"{}", b"abc"])
    with open_schedule(tmp_path) as times:
        assert list(times) == [1, 2, 3, 4]


def test_an_empty_schedule(tmp_path: Path) -> None:
    write_orders(tmp_path, ORDERS, [], np.zeros((0, 2), dtype=np.int64))
    assert len(open_schedule(tmp_path)) == 0


def test_rings_once_and_never_early() -> None:
    async def ring_twice() -> list[int]:
        early_ns: list[int] = []
        rung = asyncio.Event()
        bell = Alarm(asyncio.get_running_loop(), rung.set)
        for after_ns in (2 * NS_PER_MS, -NS_PER_MS):
            at_ns = time.monotonic_ns() + after_ns
            bell.set(at_ns + 60 * 10**9)
            bell.set(at_ns)
            await asyncio.wait_for(rung.wait(), 5)
            early_ns.append(at_ns - time.monotonic_ns())
            rung.clear()
        await asyncio.sleep(0.005)
        assert not rung.is_set()
        bell.set(time.monotonic_ns() + NS_PER_MS)
        bell.close()
        await asyncio.sleep(0.005)
        assert not rung.is_set()
        return early_ns

    # asyncio itself may call a resolution of its clock early, which is a nanosecond on Linux.
    assert all(early_ns <= NS_PER_MS // 100 for early_ns in asyncio.run(ring_twice()))


ORDERS_child = Orders("127.0.0.1", 1, False, "/v2/models/m/infer", "h", 100.0, (2,), 4, 2, NS_PER_S, ())


def test_carries_out_its_orders(tmp_path: Path, stub: Any, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    orders = msgspec.structs.replace(ORDERS_child, port=stub.port)
    write_orders(tmp_path, orders, [Body(b"{}", 2)], np.array([[0, 0], [ms(2), 0]], dtype=np.int64))
    carry_out(tmp_path)
    told = [msgspec.json.decode(line, type=ProgressReport) for line in capfdbinary.readouterr().out.splitlines()]
    last = told[-1]
    assert last == ProgressReport(last.at_s, finished=True, sent=2, ended=2, connections=2, cpu_s=last.cpu_s)
    assert last.cpu_s > 0
    assert sorted(read_records(tmp_path / RECORDS)["status"].tolist()) == [200, 200]


def test_cpus_that_are_not_there(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    orders = msgspec.structs.replace(ORDERS_child, cpus=(100_000,))
    write_orders(tmp_path, orders, [Body(b"{}", 2)], np.zeros((0, 2), dtype=np.int64))
    main(tmp_path)
    assert msgspec.json.decode(capfdbinary.readouterr().out, type=ProgressReport).error.startswith(
        "cannot run on the CPUs [100000]"
    )


def test_connections_stay_within_the_system_s_limit() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert allowed_connections(10) == 10
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
        assert allowed_connections(100) == 100
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 164
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
