"""The fold's numbers, against a run told by hand and against a plain count over random runs."""

import math
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.actions import End, ResizeReplica, StartBatch, StartReplica
from sloop.events import WOKE, BatchFailed, Finished, ReplicaStopped, Resized
from sloop.report.metrics import Metrics, fold
from sloop.runlog import Record
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import BatchId, Node, Outcome, ReplicaId, ReplicaSpec, Request, RequestId

Rows = list[tuple[int, Record]]


class Known:
    """A belief that never learns: 50 ms and 30 ms for each request."""

    batch_max = 4
    cores_max = 16.0
    load_ns = 0
    memory_bytes = 0

    def __init__(self, accuracy: float | None = 0.9) -> None:
        self.accuracy = accuracy

    def latency_ms(self, batch: int, cores: float) -> float:
        return 50.0 + 30.0 * batch

    def costs_ns(self, cores: float) -> Sequence[int]:
        return [0, *(ms(self.latency_ms(batch, cores)) for batch in range(1, self.batch_max + 1))]

    def observe(self, batch: int, cores: float, taken_ns: int) -> None:
        raise AssertionError("a report teaches nobody")


def test_the_story_in_one_row(story: Rows) -> None:
    node = Node("n0", "local", 8, 0, usd_per_h=3.6)
    metrics = fold(story, Metrics(nodes=[node], beliefs={("classify", "small"): Known()}, start_ns=0))
    row = metrics.row(system="static", seed=3, wall_s=0.5, assumed=["cold start"])
    assert msgspec.to_builtins(row) == {
        "system": "static",
        "seed": 3,
        "requests": 6,
        "served": 1,
        "late": 2,
        "dropped": 1,
        "rejected": 1,
        "failed": 1,
        "attainment": 1 / 6,
        "goodput_rps": 1 / 2.5,
        "mean_ms": pytest.approx((120 + 220 + 220) / 3),
        "p50_ms": 220.0,
        "p99_ms": 220.0,
        "core_seconds": pytest.approx(2 * 1.0 + 4 * 0.2 + 2 * 0.8),
        "usd": pytest.approx((2 * 1.0 + 4 * 0.2 + 2 * 0.8) / 8 * 3.6 / 3600),
        "accuracy": pytest.approx(0.9),
        "cold_starts": 2,
        "wall_s": 0.5,
        "assumed": ("cold start",),
        "stages": (),
        "routes": (),
    }
    assert row.violations == pytest.approx(5 / 6)


def test_the_story_by_second(story: Rows) -> None:
    first, second, third = fold(story, Metrics(start_ns=0)).seconds()
    assert (first.arrivals, first.served, first.late, first.rejected) == (4, 1, 2, 1)
    assert (first.cores, first.queue, first.worst_ms) == (2.0, 0, 220.0)
    assert first.violations == pytest.approx(3 / 4)
    assert (second.arrivals, second.dropped, second.failed, second.worst_ms) == (2, 1, 1, 0.0)
    assert second.cores == pytest.approx(4 * 0.2 + 2 * 0.8)
    assert (third.start_s, third.arrivals, third.cores, third.violations) == (2, 0, 0.0, 0.0)


def test_waits_batches_and_beliefs(story: Rows) -> None:
    metrics = fold(story, Metrics(beliefs={("classify", "small"): Known(None)}))
    assert metrics.wait_mean_ms == pytest.approx((0 + 60 + 50 + 0 + 0) / 5)
    assert metrics.wait_max_ms == 60
    assert metrics.batch_sizes == {1: 3, 2: 1}
    assert metrics.batch_mean == pytest.approx(5 / 4)
    assert metrics.accuracy is None
    (error,) = metrics.service_errors()
    assert (error.stage, error.variant, error.batches) == ("classify", "small", 3)
    assert error.believed_ms == pytest.approx((80 + 110 + 80) / 3)
    assert error.actual_ms == pytest.approx((80 + 150 + 100) / 3)
    assert error.mape == pytest.approx((0 / 80 + 40 / 110 + 20 / 80) / 3)
    assert error.bias == pytest.approx(330 / 270 - 1)


def test_nothing_happened() -> None:
    metrics = Metrics()
    assert metrics.seconds() == []
    row = metrics.row(system="none", seed=None)
    assert (row.requests, row.attainment, row.goodput_rps, row.p99_ms, row.mean_ms) == (0, 1.0, 0.0, None, None)
    assert (metrics.wait_mean_ms, metrics.batch_mean, metrics.cores_mean) == (0.0, 0.0, 0.0)


def test_a_live_run_starts_when_its_log_does() -> None:
    metrics = Metrics()
    metrics.append(s(1_000_000), WOKE)
    metrics.append(s(1_000_003), WOKE)
    assert metrics.duration_s == 3.0
    assert len(metrics.seconds()) == 4


def test_growth_counts_from_its_order_and_shrinkage_from_its_effect() -> None:
    metrics, replica = Metrics(start_ns=0), ReplicaId(0)
    metrics.append(0, StartReplica(replica, ReplicaSpec("a", "v", 1.0)))
    metrics.append(s(1), ResizeReplica(replica, 3.0))
    metrics.append(s(2), Resized(replica, 3.0))
    metrics.append(s(3), ResizeReplica(replica, 1.0))
    metrics.append(s(4), Resized(replica, 1.0))
    metrics.append(s(5), ReplicaStopped(replica))
    metrics.append(s(6), Resized(replica, 9.0))
    assert [second.cores for second in metrics.seconds()] == [1, 3, 3, 3, 1, 0, 0]
    assert metrics.core_seconds == 11.0
    assert metrics.cores_mean == pytest.approx(11 / 6)


@pytest.mark.parametrize(
    ("spec", "whole", "usd_per_h"),
    [
        (ReplicaSpec("a", "v", 2.0, "gpu"), False, 1.0),
        (ReplicaSpec("a", "v", 2.0, "gpu", "cuda:0", 0.5), False, 4.0 * 0.25),
        (ReplicaSpec("a", "v", 2.0, "gpu", "cuda:0", 1.0), False, 2.0),
        (ReplicaSpec("a", "v", 2.0, "gpu"), True, 4.0),
        (ReplicaSpec("a", "v", 2.0, "elsewhere"), False, 0.0),
        (ReplicaSpec("a", "v", 2.0, "elsewhere"), True, 0.0),
    ],
)
def test_prices(spec: ReplicaSpec, whole: bool, usd_per_h: float) -> None:
    node = Node("gpu", "a100", 8, 0, devices=("cuda:0", "cuda:1"), usd_per_h=4.0)
    metrics = Metrics(nodes=[node], start_ns=0, whole_nodes=whole)
    metrics.append(0, StartReplica(ReplicaId(0), spec))
    metrics.append(s(3600), ReplicaStopped(ReplicaId(0)))
    assert metrics.usd == pytest.approx(usd_per_h)


def test_a_failed_batch_waits_again() -> None:
    metrics = Metrics(start_ns=0)
    metrics.append(0, Request(RequestId(1), 0, 0, s(1)))
    for number, at_ms in ((1, 10), (2, 30)):
        batch = StartBatch(BatchId(number), ReplicaId(0), "a", (RequestId(1),))
        metrics.append(ms(at_ms), batch)
        metrics.append(ms(at_ms + 15), BatchFailed(batch.batch, ReplicaId(0), "nan"))
        metrics.append(ms(at_ms + 15), BatchFailed(batch.batch, ReplicaId(0), "repeated"))
    assert metrics.wait_mean_ms == pytest.approx((10 + 5) / 2)


def test_ends_of_strangers_count_nothing() -> None:
    metrics = Metrics(start_ns=0)
    metrics.append(0, End(RequestId(5), Outcome.SERVED))
    metrics.append(0, Finished(BatchId(5), ReplicaId(0), 1))
    assert metrics.row(system="x", seed=0).served == 0


def random_run(seed: int) -> Rows:
    """Requests of one stage through random batches; every end there is."""
    chance = random.Random(seed)
    rows: Rows = []
    now_ns, waiting = 0, list[Request]()
    for number in range(chance.randint(1, 60)):
        now_ns += chance.randint(0, ms(400))
        request = Request(RequestId(number), now_ns - chance.randint(0, ms(50)), now_ns, now_ns + ms(200))
        rows.append((now_ns, request))
        waiting.append(request)
        if chance.random() < 0.5:
            batch = StartBatch(BatchId(number), ReplicaId(0), "a", tuple(request.id for request in waiting))
            rows.append((now_ns, batch))
            now_ns += chance.randint(0, ms(300))
            rows.append((now_ns, Finished(batch.batch, batch.replica, 1)))
            rows.extend((now_ns, End(request.id, chance.choice(list(Outcome)))) for request in waiting)
            waiting.clear()
    return rows


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_against_a_plain_count(seed: int) -> None:
    rows = random_run(seed)
    metrics = fold(rows, Metrics(start_ns=0))
    arrived = {record.id: (at_ns, record) for at_ns, record in rows if isinstance(record, Request)}
    ends = {record.request: (at_ns, record.outcome) for at_ns, record in rows if isinstance(record, End)}
    answered = sorted(
        at_ns - arrived[number][1].sent_ns
        for number, (at_ns, outcome) in ends.items()
        if outcome in {Outcome.SERVED, Outcome.LATE}
    )
    row = metrics.row(system="x", seed=seed)
    assert row.requests == len(arrived)
    for outcome in Outcome:
        assert getattr(row, outcome) == sum(end is outcome for _, end in ends.values())
    for second in metrics.seconds():
        here = {number for number, (at_ns, _) in arrived.items() if at_ns // NS_PER_S == second.start_s}
        assert second.arrivals == len(here)
        assert second.late == sum(ends[number][1] is Outcome.LATE for number in here & ends.keys())
    for quantile in (0.01, 0.5, 0.9, 0.99, 1.0):
        if answered:
            rank = max(0, math.ceil(round(quantile * len(answered), 6)) - 1)
            assert metrics.latency_ms([quantile]) == [answered[rank] / 1e6]
    if answered:
        assert row.mean_ms == pytest.approx(sum(answered) / len(answered) / 1e6)
