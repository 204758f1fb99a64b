"""Requests that make the model raise, die or hang, beside innocent ones: core, driver and real workers together."""

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
import uvloop

from sloop.actions import Decided, End, StartBatch
from sloop.app.load import load_application
from sloop.events import BatchSilent, WorkerLost, WorkerReady
from sloop.serve.protocols import RequestResult, Servable
from sloop.systems.replay import replay_log
from sloop.systems.setup import Setup, set_up
from sloop.tensor import Port, Signature
from sloop.units import s
from sloop.vocabulary import Outcome
from tests.serve.test_live import TWO_CORES, Live, check_each_ended_once, serving, text

pytestmark = pytest.mark.live

STAGE = """
import os, sys, time
import numpy as np

def check(word):
    if word == "bad":
        raise ValueError("the word is 'bad'")
    if word == "exit":
        sys.exit(3)
    if word == "break":
        raise KeyboardInterrupt
    if word == "deep":
        check(word)
    if word == "full":
        np.empty(1 << 60, np.uint8)
    if word == "die":
        os._exit(7)
    if word == "hang":
        time.sleep(3600)
    if word == "dog":
        from sloop import Refused
        raise Refused(" only  cats")

class Model:
    inputs = {"x": ("UINT8", (-1, 8))}
    outputs = {"x": ("UINT8", (-1, 8))}
    joins_rows = True

    def __init__(self, threads): pass
    def run(self, x):
        words = [bytes(row).decode().strip() for row in x]
        for word in words:
            check(word)
        if "none" in words:
            return None
        if "few" in words:
            return x[:-1]
        if "wide" in words:
            return x.astype("f8")
        if "thing" in words:
            return x.astype(object)
        return x
"""
ECHO = Signature((Port("x", "UINT8", (-1, 8)),), (Port("x", "UINT8", (-1, 8)),))


@pytest.fixture
def model(tmp_path: Path) -> Servable:
    path = tmp_path / "stage.py"
    path.write_text(STAGE)
    return Servable(str(path), ECHO)


def setup_of(*, replicas: int = 1, slo_ms: float = 20_000, **stage: object) -> Setup:
    profile = {"latency_ms": {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 1}}
    bounds = {"max_batch": 8, "max_cores": 2, "load_s": 1, "memory_bytes": 1_000_000}
    named: Mapping[str, object] = {
        "name": "live",
        "slo_ms": slo_ms,
        "stages": [{"name": "only", "variants": [{"name": "v", "profile": profile | bounds}], **stage}],
        "system": {"name": "static", "replicas": replicas, "cores": 1},
        "cluster": TWO_CORES,
    }
    return set_up(load_application(named))


def ask(live: Live, *words: str) -> None:
    """Ask for all in one turn of the event loop, so that they share batches."""
    for word in words:
        live.ask(text(word.ljust(8).encode()))


def results(live: Live) -> list[RequestResult]:
    return [ended for [ended] in live.answers.values()]


def check_replay(live: Live, setup: Setup) -> None:
    """The core, told the same again, decides the same."""
    assert replay_log(list(live.log), set_up(setup.application).core()).difference is None


@pytest.mark.parametrize(
    ("word", "why", "logged"),
    [
        ("bad", "the model raised ValueError", "ValueError: the word is 'bad' (stage.py:7)"),
        ("exit", "the model raised SystemExit", "SystemExit: 3 (stage.py:9)"),
        ("break", "the model raised KeyboardInterrupt", "KeyboardInterrupt (stage.py:11)"),
        ("deep", "the model raised RecursionError", "RecursionError: maximum recursion depth exceeded"),
        ("none", "the model's outputs are not those that it declares", "'x' as NoneType, not as a NumPy array"),
        ("few", "the model's outputs are not those that it declares", "rows of 'x' for"),
        ("wide", "the model's outputs are not those that it declares", "'x' as float64["),
        ("thing", "the model's outputs are not those that it declares", "'x' as object["),
    ],
)
async def test_a_bad_request_fails_alone_and_the_worker_goes_on(
    word: str, why: str, logged: str, model: Servable, caplog: pytest.LogCaptureFixture
) -> None:
    setup = setup_of()
    async with serving(setup, model) as live:
        await live.until(WorkerReady)
        [pid] = live.pids()
        ask(live, *["fine"] * 11, word, *["fine"] * 8)
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 19, Outcome.FAILED: 1}
        [failed] = [ended for ended in results(live) if ended.outcome is Outcome.FAILED]
        assert why in failed.why
        assert failed.why.endswith("request id 12")
        assert "stage.py" not in failed.why
        assert live.pids() == [pid], "the worker lives"
        tries = [batch for _, batch in live.log if isinstance(batch, StartBatch) and 12 in batch.requests]
        assert [len(batch.requests) for batch in tries] == [8, 4, 2, 1]
        check_replay(live, setup)
    assert any("request 12 failed at stage 'only'" in record.getMessage() for record in caplog.records)
    assert any(logged in record.getMessage() for record in caplog.records)


def refused_among_others(model: Servable, word: str) -> RequestResult:
    """How a request ended that was refused among others that were served, by the worker that served them."""
    setup, found = setup_of(), list[RequestResult]()

    async def main() -> None:
        async with serving(setup, model) as live:
            await live.until(WorkerReady)
            [pid] = live.pids()
            ask(live, *["fine"] * 11, word, *["fine"] * 8)
            await live.all_answered()
            assert check_each_ended_once(live) == {Outcome.SERVED: 19, Outcome.REJECTED: 1}
            found.extend(ended for ended in results(live) if ended.outcome is Outcome.REJECTED)
            assert live.pids() == [pid], "the worker lives"
            check_replay(live, setup)

    uvloop.run(main())
    return found[0]


def test_a_request_that_needs_more_memory_than_its_worker_may_take_is_refused(model: Servable) -> None:
    refused = refused_among_others(model, "full")
    assert refused.is_refused
    assert "memory" in refused.why


def test_a_stage_refuses_a_request_and_has_not_failed(model: Servable, caplog: pytest.LogCaptureFixture) -> None:
    refused = refused_among_others(model, "dog")
    assert (refused.why, refused.is_refused) == ("only cats", True)
    assert not caplog.records, "what clients do wrong does not fill the log"


async def test_a_traceback_is_in_the_log_once_and_every_failed_request_on_a_line(
    model: Servable, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(setup_of(), model) as live:
        await live.until(WorkerReady)
        ask(live, *["fine", "bad"] * 4)
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 4, Outcome.FAILED: 4}
    lines = [record.getMessage() for record in caplog.records if "failed at stage" in record.getMessage()]
    assert sum("Traceback" in line for line in lines) == 1
    assert 'raise ValueError("the word is' in "".join(lines), "the line of the user's file"
    assert [id for id in range(1, 9) if any(line.startswith(f"request {id} failed") for line in lines)] == [2, 4, 6, 8]


async def test_a_request_that_kills_workers_is_found_out_and_the_others_are_served(model: Servable) -> None:
    setup = setup_of()
    async with serving(setup, model) as live:
        await live.until(WorkerReady)
        ask(live, "fine", "fine", "die", "fine", "die", "fine")
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 4, Outcome.FAILED: 2}
        for failed in (ended for ended in results(live) if ended.outcome is Outcome.FAILED):
            assert "2 replicas were lost while they ran it, the last one with nothing else" in failed.why
            assert "its process exited with 7" in failed.why
        assert sum(isinstance(record, WorkerLost) for _, record in live.log) == 3
        notes = [record.why for _, record in live.log if isinstance(record, Decided) and record.kind == "lost"]
        assert all(note.endswith("a replacement starts at once") for note in notes), "nobody waits for a back-off"
        check_replay(live, setup)


async def test_a_request_in_a_hanging_worker_ends_at_its_deadline_and_those_behind_it_go_elsewhere(
    model: Servable,
) -> None:
    setup = setup_of(replicas=2, slo_ms=1_200)
    async with serving(setup, model) as live:
        await live.until(WorkerReady, 2)
        ask(live, "hang")
        await asyncio.sleep(0.05)
        ask(live, *["fine"] * 20)
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 20, Outcome.DROPPED: 1}
        assert "its batch has run for" in results(live)[0].why
        [(ended_ns, _)] = [(at_ns, end) for at_ns, end in live.log if isinstance(end, End) and end.request == 1]
        [(began_ns, _)] = [
            (at_ns, each) for at_ns, each in live.log if isinstance(each, StartBatch) and 1 in each.requests
        ]
        assert ended_ns - began_ns < 5e9, "not after the response timeout, which is 30 s"
        check_replay(live, setup)


async def test_a_worker_that_stops_later_is_replaced_long_before_the_default_of_the_response_timeout(
    model: Servable,
) -> None:
    setup = setup_of(slo_ms=60_000)
    async with serving(setup, model) as live:
        await live.until(WorkerReady)
        for _ in range(2):
            ask(live, "fine")
            await live.all_answered()
        os.kill(live.pids()[0], signal.SIGSTOP)
        ask(live, "fine", "fine")
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 4}
        (note,) = [record.why for _, record in live.log if isinstance(record, Decided) and record.kind == "lost"]
        assert note.startswith("it hangs: its batch has run for ")
        silences = [record.silent_ns for _, record in live.log if isinstance(record, BatchSilent)]
        assert silences[-1] < s(30)
        check_replay(live, setup)


async def test_a_stopped_worker_is_replaced_after_the_response_timeout_and_its_request_served(model: Servable) -> None:
    setup = setup_of(response_timeout_s=1)
    async with serving(setup, model) as live:
        await live.until(WorkerReady)
        os.kill(live.pids()[0], signal.SIGSTOP)
        ask(live, "fine", "fine")
        await live.all_answered()
        assert check_each_ended_once(live) == {Outcome.SERVED: 2}
        check_replay(live, setup)
