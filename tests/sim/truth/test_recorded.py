"""What a run's batches took, cell by cell, as truth for another run."""

from statistics import fmean

import pytest

from sloop.actions import StartBatch, StartReplica
from sloop.events import Finished, Resized
from sloop.log import Record
from sloop.profile import Profile, Quadratic, Sample
from sloop.sim.truth.recorded import RUNS_MIN, as_recorded, runs_of
from sloop.sim.truth.service import Service
from sloop.units import ms
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, RequestId

A = ("only", "a")
R0 = ReplicaId(0)
PROFILE = Profile(latency_ms=Quadratic(0, 10, 5), max_batch=2, max_cores=2)


def log_of(took_ms: list[float], *, batch: int = 1, cores: float = 1.0) -> list[tuple[int, Record]]:
    """One batch after the other on one replica; `service_ns`, without transport, is always 1 ms."""
    records: list[tuple[int, Record]] = [(0, StartReplica(R0, ReplicaSpec("only", "a", cores)))]
    now_ns = 0
    for number, duration_ms in enumerate(took_ms):
        requests = tuple(RequestId(number * batch + place) for place in range(batch))
        records.append((now_ns, StartBatch(BatchId(number), R0, "only", requests)))
        now_ns += ms(duration_ms)
        records.append((now_ns, Finished(BatchId(number), R0, ms(1))))
    return records


def test_a_batch_took_from_its_order_to_its_answer() -> None:
    assert runs_of(log_of([7, 9], batch=2, cores=0.5)) == {A: {(2, 0.5): [ms(7), ms(9)]}}


def test_what_a_resize_interrupted_counts_for_no_core_count() -> None:
    start = (0, StartReplica(R0, ReplicaSpec("only", "a", 1.0)))
    batch = StartBatch(BatchId(0), R0, "only", (RequestId(0),))
    after = StartBatch(BatchId(1), R0, "only", (RequestId(1),))
    records: list[tuple[int, Record]] = [
        start,
        (0, batch),
        (ms(3), Resized(R0, 2.0)),
        (ms(8), Finished(BatchId(0), R0, ms(8))),
        (ms(9), after),
        (ms(13), Finished(BatchId(1), R0, ms(4))),
    ]
    assert runs_of(records) == {A: {(1, 2.0): [ms(4)]}}


def test_a_cell_with_enough_batches_is_drawn_as_recorded_and_the_rest_stays() -> None:
    measured = Profile(
        latency_ms=Quadratic(0, 10, 5),
        max_batch=2,
        max_cores=1,
        origin="measured",
        samples=(Sample(1, 1.0, 15, 15, 9, (15.0, 15.0)), Sample(2, 1.0, 25, 25, 9, (20.0, 30.0))),
    )
    runs = runs_of(log_of([8.0, 12.0] * RUNS_MIN))
    runs[A][2, 1.0] = [ms(99)] * (RUNS_MIN - 1)
    assert len(as_recorded({A: measured}, runs)[A].samples) == 2
    # Cells of different grain: what a stopwatch kept in two parts beside what a run gives in sixty-four.
    speed = Service(1, as_recorded({A: measured}, runs)).speed(*A, 1.0)
    assert speed.means_ns == pytest.approx([0.0, 10e6, 25e6])
    drawn_ms = [next(speed.noises[1]) * speed.means_ns[1] / 1e6 for _ in range(1000)]
    assert {round(value) for value in drawn_ms} == {8, 12}
    assert fmean(drawn_ms) == pytest.approx(10, rel=0.05)


def test_a_promise_gives_way_to_what_was_recorded() -> None:
    speed = Service(1, as_recorded({A: PROFILE}, runs_of(log_of([40.0] * RUNS_MIN)))).speed(*A, 1.0)
    assert speed.means_ns[1] == pytest.approx(ms(40))


def test_too_little_changes_nothing() -> None:
    assert as_recorded({A: PROFILE}, runs_of(log_of([40.0] * (RUNS_MIN - 1)))) == {A: PROFILE}
    assert as_recorded({A: PROFILE}, {}) == {A: PROFILE}
