"""The log gives back what it was given, and says where a file is damaged."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop import __version__, runlog
from sloop.actions import (
    AcquireNode,
    Action,
    Assigned,
    CancelTransfer,
    Decided,
    End,
    Evict,
    ReleaseNode,
    RequestPlan,
    RequestSimulation,
    ResizeWorker,
    Rollout,
    StartBatch,
    StartWorker,
    StopWorker,
    Transfer,
    VersionState,
)
from sloop.errors import InputError, MachineError
from sloop.events import (
    WOKE,
    BatchFailed,
    BatchLost,
    BatchSilent,
    Cancelled,
    Deployed,
    Draining,
    Event,
    Finished,
    NodeLost,
    NodeReady,
    NodeReleased,
    Planned,
    Promoted,
    Removed,
    Simulated,
    SystemChanged,
    TransferFailed,
    Transferred,
    WorkerCompleted,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.vocabulary import (
    ALONE,
    BatchId,
    Canary,
    Device,
    Group,
    LayerSet,
    ModelWeights,
    Node,
    Outcome,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    SimulatedSystem,
    Simulation,
    Slot,
    StagePlan,
    TransferId,
    Worker,
    parts_at,
)

NS = st.integers(min_value=0, max_value=2**62)
CORES = st.floats(min_value=0.125, max_value=64)
REQUEST = st.builds(RequestId, st.integers(0, 2**40))
BATCH = st.builds(BatchId, st.integers(0, 2**40))
REPLICA = st.builds(ReplicaId, st.integers(0, 10_000))
WORDS = st.text(max_size=12)
TRANSFER = st.builds(TransferId, st.integers(0, 10_000))
LAYERS = st.builds(
    lambda first, count, is_complement: LayerSet(first, first + count, is_complement),
    st.integers(0, 9),
    st.integers(1, 9),
    st.booleans(),
)
WEIGHTS = st.builds(ModelWeights, name=WORDS, size_bytes=NS, layers=st.none() | LAYERS)
SHADOW = st.builds(Worker, cores=CORES, layers=st.lists(st.integers(0, 99), max_size=3).map(tuple))
SPEC = st.builds(
    ReplicaSpec,
    stage=WORDS,
    variant=WORDS,
    slot=st.builds(Slot, cores=CORES, hardware=WORDS, accelerator=WORDS, share=st.floats(0, 1)),
    node=st.none() | WORDS,
    device=st.none() | WORDS,
    shape=st.sampled_from((ALONE, parts_at((0, 1, 3)))) | st.tuples(SHADOW),
)
PLAN = st.builds(
    Plan,
    stages=st.lists(
        st.builds(
            StagePlan,
            stage=WORDS,
            groups=st.lists(
                st.builds(Group, SPEC, st.integers(0, 9), st.integers(0, 64), st.floats(0, 1e4)), max_size=2
            ).map(tuple),
            batch_max=st.integers(1, 64),
        ),
        max_size=2,
    ).map(tuple),
    why=WORDS,
    feasible=st.booleans(),
    saturated=st.lists(WORDS, max_size=2).map(tuple),
)
NODE = st.builds(
    Node,
    name=WORDS,
    hardware=WORDS,
    cores=CORES,
    memory_bytes=NS,
    devices=st.lists(st.builds(Device, WORDS, WORDS, NS, st.integers(1, 48)), max_size=2).map(tuple),
    usd_per_h=st.floats(0, 100),
    on_demand=st.booleans(),
)
COUNTS = st.lists(st.lists(st.integers(0, 3), max_size=2).map(tuple), max_size=3).map(tuple)
RECORD: st.SearchStrategy[Event | Action] = st.one_of(
    st.builds(
        Request,
        id=REQUEST,
        sent_ns=NS,
        arrived_ns=NS,
        deadline_ns=NS,
        enters=st.lists(WORDS, max_size=2).map(tuple),
        application=WORDS,
        version=WORDS,
    ),
    st.builds(
        Finished,
        batch=BATCH,
        replica=REPLICA,
        service_ns=NS,
        edge_counts=COUNTS,
        faults=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    ),
    st.builds(BatchFailed, batch=BATCH, replica=REPLICA, error=WORDS),
    st.builds(WorkerProgressed, worker=REPLICA, step=WORDS),
    st.builds(WorkerReady, worker=REPLICA),
    st.builds(WorkerCompleted, worker=REPLICA),
    st.builds(BatchLost, batch=BATCH, replica=REPLICA, error=WORDS),
    st.builds(BatchSilent, batch=BATCH, replica=REPLICA, silent_ns=NS),
    st.builds(WorkerLost, worker=REPLICA, error=WORDS),
    st.builds(WorkerStopped, worker=REPLICA),
    st.builds(WorkerResized, worker=REPLICA, cores=CORES),
    st.builds(Transferred, transfer=TRANSFER, node=WORDS),
    st.builds(TransferFailed, transfer=TRANSFER, node=WORDS, error=WORDS),
    st.builds(NodeReady, node=NODE),
    st.builds(NodeLost, node=WORDS, error=WORDS),
    st.builds(NodeReleased, node=WORDS),
    st.builds(
        Planned,
        number=NS,
        plans=st.dictionaries(WORDS, PLAN, max_size=2),
        errors=st.dictionaries(WORDS, WORDS, max_size=2),
        restarted=st.booleans(),
    ),
    st.builds(
        Deployed,
        application=WORDS,
        version=WORDS,
        definition=st.dictionaries(WORDS, WORDS | st.lists(NS, max_size=2), max_size=2),
        canary=st.none() | st.builds(Canary, share=st.floats(0.125, 0.5), promote_after_s=st.floats(0, 9)),
    ),
    st.builds(Promoted, application=WORDS, version=WORDS),
    st.builds(SystemChanged, application=WORDS, version=WORDS, definition=st.just({"system": {"name": "hpa"}})),
    st.builds(Removed, application=WORDS, version=WORDS),
    st.builds(Cancelled, request=REQUEST),
    st.just(Draining()),
    st.just(WOKE),
    st.builds(StartBatch, batch=BATCH, replica=REPLICA, stage=WORDS, requests=st.lists(REQUEST, max_size=5).map(tuple)),
    st.builds(End, request=REQUEST, outcome=st.sampled_from(Outcome), why=WORDS, retry_after_ns=NS),
    st.builds(StartWorker, worker=REPLICA, spec=SPEC, replica=st.none() | REPLICA),
    st.builds(StartWorker, worker=REPLICA, spec=SPEC, transfer=TRANSFER, pipeline=REPLICA, place=st.integers(0, 9)),
    st.builds(
        Transfer,
        transfer=TRANSFER,
        weights=WEIGHTS,
        source=WORDS,
        receivers=st.lists(WORDS, max_size=3).map(tuple),
        is_kept=st.booleans(),
        completes=st.lists(REPLICA, max_size=2).map(tuple),
    ),
    st.builds(CancelTransfer, transfer=TRANSFER, node=WORDS),
    st.builds(Evict, node=WORDS, weights=WEIGHTS),
    st.builds(StopWorker, worker=REPLICA, why=WORDS),
    st.builds(ResizeWorker, worker=REPLICA, cores=CORES),
    st.builds(AcquireNode, node=WORDS),
    st.builds(ReleaseNode, node=WORDS),
    st.builds(RequestPlan, number=NS),
    st.builds(RequestSimulation, number=NS, application=WORDS, asks=st.just(Simulation(60.0, ("hpa",), 3.0))),
    st.builds(Simulated, number=NS, systems=st.just((SimulatedSystem(0.9, 0.8, 1.0), SimulatedSystem(error="no")))),
    st.builds(Assigned, request=REQUEST, application=WORDS),
    st.builds(
        Rollout, application=WORDS, version=WORDS, state=st.sampled_from(VersionState), share=st.floats(0, 1), why=WORDS
    ),
    st.builds(
        Decided,
        kind=WORDS,
        why=WORDS,
        stage=WORDS,
        replica=st.none() | REPLICA,
        plan=st.none() | PLAN,
        application=WORDS,
    ),
)
RECORDS = st.lists(st.tuples(NS, RECORD), max_size=30).map(lambda rows: sorted(rows, key=lambda row: row[0]))

HEADER = runlog.Header(
    origin="sim",
    name="demo",
    system="elastic",
    definitions={"demo": {"name": "demo", "slo_ms": 200}},
    cluster=(Node("n0", "local", 4, 0, (Device("cuda:0", "T4", 1),)),),
    seed=7,
    software={"sloop": "0.1.0"},
    date="2026-01-01T00:00:00Z",
)


def written(path: Path, rows: list[tuple[int, Event | Action]]) -> Path:
    with runlog.FileLog(path, HEADER) as sink:
        for now_ns, record in rows:
            sink.append(now_ns, record)
    return path


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RECORDS)
def test_written_records_are_read_back(tmp_path: Path, rows: list[tuple[int, Event | Action]]) -> None:
    recorded = runlog.read_log(written(tmp_path / "run.jsonl", rows))
    assert recorded.header == HEADER
    assert list(recorded) == rows
    assert list(recorded) == rows  # a second time
    assert recorded.cut == ""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(RECORDS.filter(bool), st.data())
def test_a_crash_costs_only_what_was_cut(
    tmp_path: Path, rows: list[tuple[int, Event | Action]], data: st.DataObject
) -> None:
    path = written(tmp_path / "run.jsonl", rows)
    whole = path.read_bytes()
    cut = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
    path.write_bytes(whole[:cut])
    recorded = runlog.read_log(path)
    got = list(recorded)
    assert got == rows[: len(got)]
    complete = whole[:cut].count(b"\n") - 1
    assert len(got) in {complete, complete + 1}  # a record that lacks only its line's end is complete
    assert bool(recorded.cut) == (not whole[:cut].endswith(b"\n") and len(got) == complete)
    if recorded.cut:
        assert f"{path}:{complete + 2}" in recorded.cut


def test_every_kind_of_record_is_known() -> None:
    assert len(runlog.EVENTS) == 25
    assert len(runlog.ACTIONS) == 16


def test_records_are_held_back_within_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    sink = runlog.FileLog(path, HEADER)
    for now_ns in range(runlog.RECORDS_PER_WRITE - 1):
        sink.append(now_ns, WOKE)
    assert len(list(runlog.read_log(path))) == 0
    sink.append(runlog.RECORDS_PER_WRITE, WOKE)
    assert len(list(runlog.read_log(path))) == runlog.RECORDS_PER_WRITE
    sink.append(runlog.RECORDS_PER_WRITE, WOKE)
    sink.close()
    sink.close()
    assert len(list(runlog.read_log(path))) == runlog.RECORDS_PER_WRITE + 1


def test_memory_log() -> None:
    log = runlog.MemoryLog()
    log.append(5, WOKE)
    assert list(log) == [(5, WOKE)]
    assert len(log) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "header is missing or cut off"),
        (b'{"sloop_log": 5', "header is missing or cut off"),
        (b"name: demo\n", "not an event log"),
        (b"[1, 2]\n", "not an event log"),
        (b"\xff\xfe\n", "not an event log"),
        (b'{"sloop_log": 99}\n', "format version 99; this sloop reads versions 5 and 6"),
        (b'{"sloop_log": "x"}\n', "format version 'x'"),
        (b'{"sloop_log": 5, "origin": "sim"}\n', "header is damaged"),
    ],
)
def test_files_that_are_no_log(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as caught:
        runlog.read_log(path)
    assert f"{path}:1" in str(caught.value)
    assert caught.value.help


@pytest.mark.parametrize("version", [1, 3, 4])
def test_a_log_of_an_older_version_is_refused_with_what_to_do(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.jsonl"
    header = {"sloop_log": version, "origin": "sim", "system": "static", "software": {"sloop": "0.0.9"}}
    path.write_bytes(json.dumps(header).encode() + b'\n[0,{"type":"woke"}]\n')
    with pytest.raises(
        InputError, match=f"event log of format version {version}; this sloop reads versions 5 and 6"
    ) as caught:
        runlog.read_log(path)
    assert "record the run again" in caught.value.help
    assert "or read this log with sloop 0.0.9" in caught.value.help
    path.write_bytes(b'{"sloop_log":7}\n')
    with pytest.raises(InputError) as caught:
        runlog.read_log(path)
    assert "upgrade sloop" in caught.value.help


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [(1, WOKE), (2, WOKE), (3, WOKE)])
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in (b'[2, {"type": "unheard_of"}]\n', b"\x00\x00\xff\n", b"\n", b'["2", {"type": "woke"}]\n'):
        path.write_bytes(b"".join([*lines[:2], damage, *lines[3:]]))
        with pytest.raises(InputError, match="not a record") as caught:
            list(runlog.read_log(path))
        assert caught.value.where == f"{path}:3"


def test_time_never_goes_back(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [(2, WOKE), (1, WOKE)])
    with pytest.raises(InputError, match="time goes back"):
        list(runlog.read_log(path))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        runlog.read_log(tmp_path / "none.jsonl")
    with pytest.raises(MachineError, match="cannot be written"):
        runlog.FileLog(tmp_path / "none" / "run.jsonl", HEADER)


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this machine")
    with pytest.raises(MachineError, match="cannot be written"):
        runlog.FileLog(Path("/dev/full"), HEADER)


def test_nothing_is_appended_to_a_closed_log(tmp_path: Path) -> None:
    sink = runlog.FileLog(tmp_path / "run.jsonl", HEADER)
    sink.close()
    sink.append(0, WOKE)
    with pytest.raises(MachineError, match="is closed"):
        sink.flush()


def test_the_release_that_reads_an_older_log_is_named(tmp_path: Path) -> None:
    assert runlog.older_log(tmp_path / "none") == runlog.older_log(tmp_path) == ""
    (tmp_path / "events-20250101T000000000Z-000003.jsonl").write_bytes(
        b'{"sloop_log":4,"software":{"sloop":"0.0.9"}}\n'
    )
    assert runlog.older_log(tmp_path) == (
        "events-20250101T000000000Z-000003.jsonl and what is before it are logs of format 4, which sloop 0.0.9 reads"
    )
    (tmp_path / "events-20250101T000000000Z-000003.jsonl").write_bytes(
        b'{"sloop_log":4,"software":{"sloop":"%b"}}\n' % __version__.encode()
    )
    assert runlog.older_log(tmp_path).endswith(f"of format 4, which an earlier build of sloop {__version__} reads")
    (tmp_path / "events-20260101T000000000Z-000001.jsonl").write_bytes(runlog.header_line(HEADER))
    assert runlog.older_log(tmp_path) == ""


@pytest.mark.parametrize("damage", ["cut off", "no gzip", "broken", "empty", "gone"])
def test_a_damaged_log_does_not_keep_a_server_from_its_own(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b'{"sloop_log":4}\n')
    content = {"cut off": whole[:20], "no gzip": b"no gzip", "broken": whole[:10] + b"\xff" * 9, "empty": b""}
    last = tmp_path / "events-20250101T000000000Z-000003.jsonl.gz"
    if damage == "gone":
        last.symlink_to(tmp_path / "away")
    else:
        last.write_bytes(content[damage])
    assert runlog.older_log(tmp_path) == ""
