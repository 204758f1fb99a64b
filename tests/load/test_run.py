import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.load import Delivery, Encoding, LoadPlan, ProgressReport, run_load, run_loads
from sloop.load.run import orders_of, prepare_bodies, schedule_of
from sloop.units import ms, s
from sloop.workload import Link, Work, trace_of
from sloop.workload.generate import Poisson, generated
from tests.load.conftest import METADATA

TRACE = generated(Poisson(100.0), seed=1, duration_ns=s(1))
LINK = Link("test", (1_000.0, 100.0), "assumed: a test")


def test_a_link_delays_or_attaches() -> None:
    times = trace_of([0, ms(990), s(1)], name="test", provenance="assumed: a test")
    delayed = schedule_of(times, LINK, 20_000, Delivery.DELAY)
    assert delayed.tolist() == [[ms(20), ms(20), 0], [ms(1_010), ms(20), 1], [ms(1_200), ms(200), 2]]
    attached = schedule_of(times, LINK, 20_000, Delivery.ATTACH)
    assert attached.tolist() == [[0, ms(20), 0], [ms(990), ms(20), 1], [s(1), ms(200), 2]]


def test_delays_may_change_the_order() -> None:
    fading = Link("test", (100.0, 1_000.0), "assumed: a test")
    times = trace_of([ms(999), s(1)], name="test", provenance="assumed: a test")
    scheduled = schedule_of(times, fading, 20_000, Delivery.DELAY)
    assert scheduled.tolist() == [[ms(1_020), ms(20), 1], [ms(1_199), ms(200), 0]]


def test_larger_requests_take_longer_on_a_link() -> None:
    times = trace_of([0, 0], name="test", provenance="assumed: a test")
    scheduled = schedule_of(times, LINK, np.array([20_000, 10_000]), Delivery.DELAY)
    assert scheduled.tolist() == [[ms(10), ms(10), 1], [ms(20), ms(20), 0]]


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InputError, match="the trace has no arrivals"):
        schedule_of(trace_of([], duration_ns=5, name="none", provenance="assumed: a test"), None, 0, Delivery.DELAY)


def test_orders_follow_the_url() -> None:
    plan = LoadPlan("https://host/base", "a b", trace_of([0], name="one", provenance="assumed: a test"), 100.0)
    orders = orders_of(plan, [])
    assert (orders.host, orders.port, orders.tls, orders.authority) == ("host", 443, True, "host")
    assert orders.path == "/base/v2/models/a%20b/infer"


@pytest.mark.live
def test_a_run_from_end_to_end(tmp_path: Path, stub: Any) -> None:
    """Every fifth each: on time, late, dropped, rejected, broken."""
    steps = [
        stub.Step(),
        stub.Step(stub.response(200, b'{"outputs": []}', "x-slo-met: false"), delay_s=1.2),
        stub.Step(stub.response(504, b'{"error": "too late"}')),
        stub.Step(stub.response(503, b'{"error": "full"}', "Retry-After: 1")),
        stub.Step(stub.response(500, b'{"error": "oops"}')),
    ]
    stub.script = lambda number: steps[number % 5]
    told: list[ProgressReport] = []
    plan = LoadPlan(stub.url, "m", TRACE, slo_ms=1_000.0, records=tmp_path / "records.jsonl")
    found = run_load(plan, progress=told.append)
    count = len(list(TRACE.times_ns()))
    assert found.sent == count == len(stub.heads)
    shares = [len(range(place, count, 5)) for place in range(5)]
    assert [found.late, found.dropped, found.rejected, found.errors] == shares[1:]
    assert found.ok == shares[0]
    assert found.late_by_server == shares[1]
    assert found.error_kinds == {"http 500": shares[4]}
    assert found.duration_s == 1.0
    assert told[-1].finished
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(count))
    assert sum(line["outcome"] == "served" for line in lines) == found.ok
    assert all("x-slo-ms: 1000\r\n" in head for head in stub.heads)


@pytest.mark.live
def test_requests_bring_what_the_trace_says(tmp_path: Path, stub: Any) -> None:
    stub.metadata = METADATA.replace(b"[-1, 3]", b"[-1, -1]")
    works = [Work(1 + place % 2, 8 * (1 + place % 3)) for place in range(30)]
    trace = trace_of(range(0, ms(300), ms(10)), name="mixed", provenance="assumed: a test", works=(works * 2).__iter__)
    plan = LoadPlan(stub.url, "m", trace, slo_ms=5_000.0, encoding=Encoding.JSON, records=tmp_path / "records.jsonl")
    found = run_load(plan)
    shapes = Counter(tuple(json.loads(body)["inputs"][0]["shape"]) for body in stub.bodies)
    assert shapes == Counter((work.rows, work.size) for work in works)
    assert (found.sent, found.rows_sent) == (30, 45)
    assert found.goodput_rows_per_s == pytest.approx(1.5 * found.goodput_rps)
    assert [(row.size, row.sent, row.ok) for row in found.sizes] == [(8, 10, 10), (16, 10, 10), (24, 10, 10)]
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [(line["rows"], line["size"]) for line in lines] == [(work.rows, work.size) for work in works]


@pytest.mark.live
def test_what_the_inputs_cannot_bring_is_named(tmp_path: Path, stub: Any) -> None:
    sized = trace_of([0], name="sized", provenance="assumed: a test", works=[Work(1, 8)].__iter__)
    with pytest.raises(InputError, match="all rows of the model's inputs are equally large"):
        run_load(LoadPlan(stub.url, "m", sized, slo_ms=1.0))


@pytest.mark.live
def test_several_loads_start_together(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.load.run.TOGETHER_S", 1.0)
    one, two = (
        trace_of([0], name="one", provenance="assumed: a test"),
        trace_of([ms(200)], name="two", provenance="assumed: a test"),
    )
    begun_s = time.monotonic()
    plans = [LoadPlan(stub.url, name, trace, slo_ms=5_000.0) for name, trace in (("a", two), ("b", one))]
    found = run_loads(plans)
    assert [result.ok for result in found] == [1, 1]
    assert time.monotonic() - begun_s > 1.2
    # Model b's request is due first, although its plan is the second.
    assert [name for head in stub.heads for name in re.findall(r"/models/(\w)/", head)] == ["b", "a"]


@pytest.mark.live
def test_bodies_come_from_metadata_array_or_file(tmp_path: Path, stub: Any) -> None:
    plan = {"url": stub.url, "model": "m", "arrivals": TRACE, "slo_ms": 1.0}
    assert all(body.is_binary for body in prepare_bodies(LoadPlan(**plan)))
    np.save(tmp_path / "x.npy", np.zeros((2, 3)))
    (array_body,) = prepare_bodies(LoadPlan(**plan, input_file=tmp_path / "x.npy", encoding=Encoding.JSON))
    assert json.loads(array_body.content)["inputs"][0]["shape"] == [2, 3]
    (tmp_path / "x.json").write_text('{"inputs": [1]}')
    (file_body,) = prepare_bodies(LoadPlan(**plan, input_file=tmp_path / "x.json"))
    assert file_body.content == b'{"inputs": [1]}'
    with pytest.raises(InputError, match=r"x\.txt is neither a"):
        prepare_bodies(LoadPlan(**plan, input_file=tmp_path / "x.txt"))
    with pytest.raises(InputError, match="rows and sizes of their own"):
        prepare_bodies(LoadPlan(**plan, input_file=tmp_path / "x.npy"), [Work(2)])


def test_no_server_is_said_before_anything_is_sent() -> None:
    with pytest.raises(MachineError, match="no server answers"):
        run_load(LoadPlan("http://127.0.0.1:1", "m", TRACE, slo_ms=1.0))


@pytest.mark.live
def test_a_sender_that_cannot_start_is_explained(stub: Any) -> None:
    with pytest.raises(MachineError, match="cannot run on the CPUs"):
        run_load(LoadPlan(stub.url, "m", TRACE, slo_ms=1.0, cpus=(100_000,)))


@pytest.mark.live
def test_a_sender_that_dies_is_explained(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.load.run.write_orders", lambda folder, *rest: None)
    with pytest.raises(
        MachineError, match=r"the sending process ended with exit code 1: FileNotFoundError.*orders\.json"
    ):
        run_load(LoadPlan(stub.url, "m", TRACE, slo_ms=1.0))


@pytest.mark.live
def test_version_and_key_go_along_with_every_request(stub: Any) -> None:
    plan = LoadPlan(stub.url, "m", TRACE, slo_ms=1_000.0, version="2", api_key="secret")
    assert run_load(plan).ok > 0
    assert all(head.startswith("POST /v2/models/m/versions/2/infer HTTP/1.1") for head in stub.heads)
    assert all("\r\nx-api-key: secret\r\n" in head for head in stub.heads)
    assert "secret" not in repr(plan)
