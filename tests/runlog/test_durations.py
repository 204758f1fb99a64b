"""Durations of batches by variant, kind of hardware and cell."""

from sloop.actions import StartBatch, StartWorker
from sloop.events import Finished, WorkerResized
from sloop.runlog.durations import BATCHES_MIN, BatchFold, batch_durations
from sloop.units import ms
from sloop.vocabulary import BatchId, Node, ReplicaId, ReplicaSpec, RequestId, Slot
from tests.runlog.story import Rows

CORES = (1.0, 1.5, 0.3)
SLOTS = [Slot(2.0, "fast"), Slot(2.0, "slow"), Slot(4.0, "gpu", "T4"), Slot(4.0, "gpu", "T4", 0.5)]


def batches(replica: int, count: int, took_ms: float, first: int = 0) -> Rows:
    """Batches of one, one after another, on one replica."""
    rows: Rows = []
    for number in range(first, first + count):
        batch, at_ns = BatchId(100 * replica + number), ms(1000 * number)
        rows.append((at_ns, StartBatch(batch, ReplicaId(replica), f"m{replica}/s", (RequestId(number),))))
        rows.append((at_ns + ms(took_ms), Finished(batch, ReplicaId(replica), 1)))
    return rows


def test_cells_are_kept_apart_by_hardware_and_only_those_of_whole_accelerators_with_enough_batches() -> None:
    rows: Rows = [(0, StartWorker(ReplicaId(n), ReplicaSpec(f"m{n}/s", "v", slot))) for n, slot in enumerate(SLOTS)]
    for number in range(len(SLOTS)):
        rows += batches(number, BATCHES_MIN, 10 * (number + 1))
    rows.append((ms(30_000), WorkerResized(ReplicaId(0), 1.0)))
    rows += batches(0, BATCHES_MIN - 1, 99, first=40)
    found = batch_durations(sorted(rows, key=lambda row: row[0]))
    assert {key: {cell: list(runs) for cell, runs in cells.items()} for key, cells in found.items()} == {
        ("m0/s", "v", "fast"): {(1, 2.0): [ms(10)] * BATCHES_MIN},
        ("m1/s", "v", "slow"): {(1, 2.0): [ms(20)] * BATCHES_MIN},
        ("m2/s", "v", "gpu"): {(1, 4.0): [ms(30)] * BATCHES_MIN},
    }


def test_on_a_fraction_of_a_core_only_the_batches_of_a_busy_replica_count() -> None:
    """What a replica takes after a pause depends on how often it pauses; on whole cores that makes no difference."""
    busy, idle = ms(40), ms(30)
    rows: Rows = []
    for replica, cores in enumerate(CORES):
        rows.append((0, StartWorker(ReplicaId(replica), ReplicaSpec("m/s", "v", Slot(cores)))))
        for number in range(BATCHES_MIN):
            at_ns = ms(1000 * number)
            first, second = (BatchId(1000 * replica + 2 * number + place) for place in (0, 1))
            rows.append((at_ns, StartBatch(first, ReplicaId(replica), "m/s", (RequestId(number),))))
            rows.append((at_ns + idle, Finished(first, ReplicaId(replica), 1)))
            rows.append((at_ns + idle, StartBatch(second, ReplicaId(replica), "m/s", (RequestId(number),))))
            rows.append((at_ns + idle + busy, Finished(second, ReplicaId(replica), 1)))
    (found,) = batch_durations(sorted(rows, key=lambda row: row[0])).values()
    assert {cell: sorted(runs) for cell, runs in found.items()} == {
        (1, 1.0): [idle] * BATCHES_MIN + [busy] * BATCHES_MIN,
        (1, 1.5): [busy] * BATCHES_MIN,
        (1, 0.3): [busy] * BATCHES_MIN,
    }


def test_batches_on_reserved_cores_count_for_the_whole_node_unless_others_ran_there() -> None:
    """Two replicas reserve 0.5 and 1 core of a node of 4; a third has its cores to itself."""
    slots = [Slot(0.5, "k", is_capped=False), Slot(1.0, "k", is_capped=False), Slot(2.0, "k")]
    rows: Rows = [
        (0, StartWorker(ReplicaId(n), ReplicaSpec("m/s", "v", slot, node="k-0"))) for n, slot in enumerate(slots)
    ]
    half = BATCHES_MIN // 2
    rows += batches(0, half, 10) + batches(1, half, 10, first=half)  # together enough for a cell
    beside = 2 * BATCHES_MIN
    rows += batches(0, BATCHES_MIN, 30, first=beside)  # while these run, so do those of the third
    rows += [(at_ns + 1, record) for at_ns, record in batches(2, BATCHES_MIN, 20, first=beside)]
    rows.sort(key=lambda row: row[0])
    node = Node("k-0", "k", 4.0, 0)
    (found,) = batch_durations(rows, [node]).values()
    assert found == {(1, 4.0): [ms(10)] * BATCHES_MIN, (1, 2.0): [ms(20)] * BATCHES_MIN}
    fold = BatchFold([node])
    for row in rows:
        fold.append(*row)
    assert fold.shared == {("m/s", "v", "k"): BATCHES_MIN}
    (found,) = batch_durations(rows, [node, Node("k-1", "k", 8.0, 0)]).values()
    assert found.keys() == {(1, 2.0)}, "the nodes of this kind differ, so that nothing says how many cores they used"
