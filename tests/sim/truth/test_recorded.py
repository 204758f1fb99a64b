from collections.abc import Iterable, Sequence

import pytest
from msgspec import structs

from sloop.actions import StartBatch, StartWorker
from sloop.events import Finished, WorkerResized
from sloop.profile.profile import Profile, Quadratic, Sample
from sloop.runlog import Record
from sloop.runlog.durations import BATCHES_MIN, Durations
from sloop.sim.truth.recorded import recorded_run
from sloop.sim.truth.service import ServiceSampler, with_recorded
from sloop.units import ms
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Request, RequestId, Slot

A = ("only", "a", "slow")
R0 = ReplicaId(0)
PROFILE = Profile(latency_ms=Quadratic(0, 10, 5), max_batch=2, max_cores=2)


def durations_of(records: Iterable[tuple[int, Record]]) -> Durations:
    return recorded_run(records).durations_ns[0]


def log_of(took_ms: Sequence[float], *, batch: int = 1, cores: float = 1.0) -> list[tuple[int, Record]]:
    """One batch after the other on one replica; `service_ns`, without transport, is always 1 ms."""
    records: list[tuple[int, Record]] = [(0, StartWorker(R0, ReplicaSpec("only", "a", Slot(cores, "slow"))))]
    now_ns = 0
    for number, duration_ms in enumerate(took_ms):
        requests = tuple(RequestId(number * batch + place) for place in range(batch))
        records.append((now_ns, StartBatch(BatchId(number), R0, "only", requests)))
        now_ns += ms(duration_ms)
        records.append((now_ns, Finished(BatchId(number), R0, ms(1))))
    return records


def test_a_batch_took_from_its_order_to_its_answer() -> None:
    took_ms = [7, 9] * BATCHES_MIN
    assert durations_of(log_of(took_ms, batch=2, cores=0.5)) == {A: {(2, 0.5): list(map(ms, took_ms))}}
    assert durations_of(log_of([40.0] * (BATCHES_MIN - 1))) == {A: {}}, "too few to say anything"


def test_what_a_resize_interrupted_counts_for_no_core_count() -> None:
    records = log_of([4.0] * BATCHES_MIN)
    at_ns = records[-1][0]
    more = StartBatch(BatchId(BATCHES_MIN), R0, "only", (RequestId(BATCHES_MIN),))
    records += [
        (at_ns, more),
        (at_ns + ms(3), WorkerResized(R0, 2.0)),
        (at_ns + ms(8), Finished(more.batch, R0, ms(8))),
    ]
    records += [(now_ns + at_ns + ms(9), later(record)) for now_ns, record in log_of([2.0] * BATCHES_MIN)[1:]]
    assert durations_of(records) == {A: {(1, 1.0): [ms(4)] * BATCHES_MIN, (1, 2.0): [ms(2)] * BATCHES_MIN}}


def later(record: Record) -> Record:
    """The same batch with another number."""
    if isinstance(record, StartBatch | Finished):
        return structs.replace(record, batch=BatchId(record.batch + 1000))
    return record


def test_what_was_recorded_comes_back_in_its_order_and_the_rest_is_as_measured() -> None:
    measured = Profile(
        latency_ms=Quadratic(0, 10, 5),
        max_batch=2,
        max_cores=1,
        origin="measured",
        samples=(Sample(1, 1.0, 15, 15, 9, (15.0, 15.0)), Sample(2, 1.0, 25, 25, 9, (20.0, 30.0))),
    )
    took_ms = [8.0, 8.0, 12.0, 12.0] * BATCHES_MIN
    runs = durations_of(log_of(took_ms))
    speed = ServiceSampler(1, {A: measured}, recorded={0: runs}).speed("only", "a", Slot(1.0, "slow"))
    assert speed.means_ns == pytest.approx([0.0, 10e6, 25e6])
    assert [next(speed.noises[1]) * speed.means_ns[1] for _ in range(6)] == pytest.approx(
        [8e6, 8e6, 12e6, 12e6, 8e6, 8e6]
    )
    assert {round(next(speed.noises[2]) * 25) for _ in range(100)} == {20, 30}


def test_between_recorded_cells_a_profile_of_promises_follows_them() -> None:
    runs = {A: {(1, 1.0): [ms(40)] * BATCHES_MIN, (1, 2.0): [ms(20)] * BATCHES_MIN}}
    speed = ServiceSampler(1, {A: PROFILE}, recorded={0: runs}).speed("only", "a", Slot(4 / 3, "slow"))
    assert speed.means_ns[1] == pytest.approx(30e6)


def test_nothing_recorded_changes_nothing() -> None:
    assert with_recorded(PROFILE, {}) is PROFILE


def test_requests_and_parts_went_where_the_log_says() -> None:
    def visits(batch: int, stage: str, *ids: int, parts: tuple[int, ...] = ()) -> StartBatch:
        return StartBatch(BatchId(batch), R0, stage, tuple(map(RequestId, ids)), parts)

    def done(batch: int, *edge_counts: tuple[int, ...]) -> Finished:
        return Finished(BatchId(batch), R0, ms(1), edge_counts)

    records: list[Record] = [
        StartWorker(R0, ReplicaSpec("only", "a", Slot(1.0, "slow"))),
        visits(0, "find", 4, 7),
        done(0, (3, 1), (0, 1)),
        done(0, (9, 9), (9, 9)),
        visits(1, "read", 4, 4, parts=(0, 2)),
        done(1, (1,), (0,)),
        visits(2, "tell", 4),
        done(2),
        visits(3, "find", 8),
    ]
    assert recorded_run((0, record) for record in records).branches == {
        "find": {(4, 0): (3, 1), (7, 0): (0, 1)},
        "read": {(4, 0): (1,), (4, 2): (0,)},
    }


def test_requests_are_as_late_as_the_log_says_in_order_of_sending() -> None:
    log: list[tuple[int, Record]] = [
        (ms(20), Request(RequestId(0), ms(9), ms(19), ms(99))),
        (ms(21), Request(RequestId(1), ms(7), ms(21), ms(97))),
    ]
    assert recorded_run(log).delays == {"": ((ms(14), ms(14)), (ms(10), ms(11)))}
    assert recorded_run(log, ("only one",)).delays.keys() == {"only one"}


def test_requests_of_several_applications_are_numbered_for_each_in_the_order_of_their_ids() -> None:
    def arrives(id: int, application: str) -> Request:
        return Request(RequestId(id), ms(id), ms(id) + id, ms(99), (), application)

    records: list[tuple[int, Record]] = [
        *((ms(90), arrives(id, name)) for id, name in [(9, "b"), (5, "a"), (7, "a"), (2, "b")]),
        (ms(90), StartBatch(BatchId(0), R0, "a/find", (RequestId(7), RequestId(5)))),
        (ms(91), Finished(BatchId(0), R0, ms(1), ((1,), (2,)))),
        (ms(91), StartBatch(BatchId(1), R0, "b/find", (RequestId(9),))),
        (ms(92), Finished(BatchId(1), R0, ms(1), ((3,),))),
    ]
    run = recorded_run(records, ("a", "b"))
    assert run.branches == {"a/find": {(1, 0): (1,), (0, 0): (2,)}, "b/find": {(1, 0): (3,)}}
    assert run.delays == {
        "a": ((5, ms(85)), (7, ms(83))),
        "b": ((2, ms(88)), (9, ms(81))),
    }
