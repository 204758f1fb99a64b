import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sloop.load.connections import Server
from sloop.load.record import Ending, RecordWriter, read_records
from sloop.load.sender import SENDS_MAX, Progress, Target, send_closed, send_open
from sloop.load.wire import RequestHead
from sloop.units import NS_PER_S, ms, s

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


def test_a_closed_loop_keeps_its_width(tmp_path: Path, stub: Any) -> None:
    stub.script = lambda number: stub.Step(delay_s=0.02)
    told: list[int] = []

    async def run(records: RecordWriter) -> None:
        def tell(progress: Progress) -> None:
            told.append(progress.sent)

        await send_closed(target(stub.port), records, tell, connections=4, warmup_ns=ms(100), end_ns=s(1.2))

    with (tmp_path / "records").open("wb") as file:
        writer = RecordWriter(file)
        asyncio.run(run(writer))
        writer.flush()
    records = read_records(tmp_path / "records")
    assert stub.connections == 4
    assert len(records) > 4
    assert records["done_ns"].min() >= ms(100)
    assert records["done_ns"].max() <= s(1.2)
    assert told
    starts, ends = records["sent_ns"], records["done_ns"]
    for at_ns in range(ms(150), s(1), ms(50)):
        assert np.count_nonzero((starts <= at_ns) & (ends > at_ns)) <= 4


def test_a_closed_loop_tries_again_at_leisure_when_the_server_is_gone(tmp_path: Path) -> None:
    with (tmp_path / "records").open("wb") as file:
        records = RecordWriter(file)
        asyncio.run(send_closed(target(1), records, lambda progress: None, connections=2, warmup_ns=0, end_ns=ms(500)))
        assert 2 <= records.written <= 2 * 11
