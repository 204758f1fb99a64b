"""Measuring: a small model for a few milliseconds in a real process, and everything that may go wrong."""

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from sloop.errors import InputError, MachineError
from sloop.profile.fit import fit_all
from sloop.profile.measure import (
    CELL_RUNS,
    CELLS_S,
    RUNS_FEW,
    RUNS_MIN,
    CellRuns,
    TimedBatch,
    Timing,
    by_affinity,
    check_sizes,
    default_cores,
    measure,
    measure_briefly,
    measure_on,
    measure_sizes,
    measuring_s,
    measuring_sizes_s,
    timed_process,
)
from sloop.profile.profile import LatencyTable, Pass, Profile, Sample, load_profile, sample_of, save_profile, scaled
from sloop.profile.service_load import ServiceLoad
from sloop.profile.timed_process import (
    DONE,
    LAST,
    RUN,
    STOP,
    BatchReady,
    LoadReport,
    TimingOrder,
    receive_into,
    run_all,
)

onnx = pytest.importorskip("onnx")
CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = x · w, with an open batch and an open width that only 16 fits."""
    ports = [onnx.helper.make_tensor_value_info(name, 1, ["n", width]) for name, width in (("x", "k"), ("y", 8))]
    weights = onnx.numpy_helper.from_array(np.ones((16, 8), dtype=np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:], [weights])
    opset = onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), str(tmp_path / "m.onnx"))
    return tmp_path / "m.onnx"


@pytest.mark.live
def test_measures_batches_and_cores(model: Path, tmp_path: Path) -> None:
    confined: list[float] = []
    seen: list[tuple[float, Sample]] = []

    @contextlib.contextmanager
    def limit(pid: int, cores: float) -> Iterator[None]:
        assert pid != os.getpid()
        confined.append(cores)
        yield

    profile = measure(
        model,
        batches=(4, 1, 2),
        cores=(0.5, 1),
        seconds=0.01,
        passes=1,
        alone=True,
        shapes={"x": (16,)},
        limit=limit,
        progress=lambda left_s, sample: seen.append((left_s, sample)),
    )

    assert confined == [1.0, 0.5]
    assert [(sample.batch, sample.cores) for sample in profile.samples] == [(b, c) for c in (0.5, 1) for b in (1, 2, 4)]
    assert [(sample.cores, sample.batch) for _, sample in seen] == [(c, b) for c in (1, 0.5) for b in (1, 2, 4)]
    assert seen[0][0] > seen[-1][0] == 0
    assert all(0 < sample.p50_ms <= sample.p99_ms and sample.n >= RUNS_MIN for sample in profile.samples)
    assert (profile.origin, profile.max_batch, profile.max_cores) == ("measured", 4, 1.0)
    assert profile.load_s > 0
    assert set(profile.fits) == {"table", "amdahl", "quadratic"}
    assert not profile.is_extrapolated(4, 0.5)
    assert profile.is_extrapolated(8, 0.5)
    assert "ONNX Runtime" in profile.software
    assert len(profile.model_digest) == 64
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


@pytest.mark.live
def test_affinity_confines_to_whole_cores(model: Path) -> None:
    profile = measure(
        model, batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True, shapes={"x": (16,)}, percentile="p50"
    )
    assert profile.latency_ms.latency_ms(1, 1) == pytest.approx(profile.samples[0].p50_ms)
    assert set(profile.fits) == {"table"}


@pytest.mark.live
def test_every_pass_is_kept_and_what_service_shows_replaces_its_cells(model: Path) -> None:
    seen: list[list[int]] = []

    def in_service(samples: Sequence[Sample]) -> Pass:
        seen.append([sample.batch for sample in samples])
        served = sample_of(1, 1.0, [7_000_000] * 30)
        return Pass(date="2026-11-22T10:00:00", in_service=True, beside="a server", samples=(served,))

    profile = measure(
        model,
        batches=(1, 2),
        cores=(1,),
        seconds=0.01,
        passes=2,
        shapes={"x": (16,)},
        in_service=in_service,
    )
    assert seen == [[1, 2], [1, 2]]
    assert [one.in_service for one in profile.passes] == [False, True, False, True]
    assert "stand-in for edge and clients" in profile.passes[0].beside
    one, two = profile.samples
    assert (one.mean_ms, one.n, one.scaled) == (7.0, 60, 1.0)
    assert two.scaled > 1
    assert profile.latency_ms.latency_ms(1, 1) <= 7.001  # less if two rows happened to be faster than one in service
    assert profile.startup is not None
    assert profile.load_s == pytest.approx(
        profile.startup.process_s + profile.startup.weights_s + profile.startup.first_batch_s
    )


@pytest.mark.live
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what a process has loaded")
def test_the_process_has_its_libraries_before_a_model_is_loaded() -> None:
    """As a spare worker has, so that the start of the process is what a spare worker saves."""
    with timed_process("m.onnx", 1) as (process, _, _):
        assert "onnxruntime" in Path(f"/proc/{process.pid}/maps").read_text()


LARGE = """
import numpy as np

class Model:
    inputs = {"x": ("FP32", (1, 1))}
    outputs = {"x": ("FP32", (1, 1))}

    def __init__(self, threads): self.weights = np.ones(10_000_000)  # 80 MB

    def run(self, x): return x
"""


@pytest.mark.live
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is resident")
@pytest.mark.parametrize(("prepared", "objects"), [(0, 1), (2, 2), (4, 2)])
def test_memory_counts_the_process_with_all_that_a_worker_keeps(prepared: int, objects: int, tmp_path: Path) -> None:
    """A worker keeps a large model for two numbers of threads."""
    (tmp_path / "large.py").write_text(LARGE, encoding="utf-8")
    order = TimingOrder(str(tmp_path / "large.py"), 1, 1.0, (1,), {}, prepared=prepared)
    *_, report = measure_on(order, 0.01, by_affinity)
    assert isinstance(report, LoadReport)
    assert objects * 80e6 < report.memory_bytes < objects * 80e6 + 80e6
    assert (report.resize_bytes > 70e6) == (objects > 1)


@pytest.mark.live
def test_a_batch_the_model_refuses_is_reported(model: Path) -> None:
    with pytest.raises(InputError, match="a batch of 1 fails"):
        measure(model, batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True, shapes={"x": (15,)})


@pytest.mark.live
def test_a_process_that_dies_is_reported(model: Path) -> None:
    @contextlib.contextmanager
    def limit(pid: int, cores: float) -> Iterator[None]:
        os.kill(pid, 9)
        yield

    with pytest.raises(MachineError, match=r"on 1 cores \(exit status -9\)"):
        measure(model, batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True, shapes={"x": (16,)}, limit=limit)


@pytest.mark.live
def test_processes_that_a_model_has_started_do_not_hide_its_end(tmp_path: Path) -> None:
    stage, waits = tmp_path / "m.py", f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)"
    start = f"subprocess.Popen([sys.executable, '-c', \"import os, time\\n{waits}\"])"
    stage.write_text(f"import os, subprocess, sys\n{start}\nos._exit(9)")
    try:
        with pytest.raises(MachineError, match="exit status 9"):
            list(measure_on(TimingOrder(str(stage), 1, 1.0, (1,), {}), 0.01, by_affinity))
    finally:
        (tmp_path / "end").touch()


@pytest.mark.parametrize(
    ("choice", "what"),
    [
        ({"batches": ()}, "at least 1"),
        ({"batches": (0, 1)}, "at least 1"),
        ({"cores": (0.0,)}, "must be positive"),
        ({"cores": (CORES + 1.0,)}, f"this process may use {CORES}"),
        ({"shapes": {}}, "open dimensions"),
    ],
)
def test_refuses_choices_before_it_starts(choice: dict[str, object], what: str, model: Path) -> None:
    options: dict[str, object] = {"shapes": {"x": (16,)}, **choice}
    with pytest.raises(InputError, match=what):
        measure(model, **options)  # type: ignore[arg-type]


def test_affinity_does_not_do_fractions() -> None:
    with pytest.raises(InputError, match=r"0\.5 cores need a CPU quota"), by_affinity(0, 0.5):
        pass


def test_affinity_of_a_process_that_is_gone() -> None:
    with pytest.raises(MachineError, match="cannot confine process"), by_affinity(2**22 + 1, 1):
        pass


def test_default_cores_double_up_to_all() -> None:
    cores = default_cores()
    assert cores[0] == 1.0
    assert cores[-1] == CORES
    assert sorted(set(cores)) == list(cores)


def test_counters_of_memory_may_fall(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel adds up resident pages now and then, so that a later peak may be smaller than an earlier one."""
    peaks = iter([50_000_000, 49_000_000])
    monkeypatch.setattr("sloop.profile.timed_process.peak_bytes", lambda: next(peaks))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(STOP)
        *_, end = run_all(TimingOrder(str(model), 1, 1.0, (1,), {"x": (16,)}), theirs)
    assert isinstance(end, LoadReport)
    assert (end.memory_bytes, end.resize_bytes) == (50_000_000, 0)


def test_the_measured_process_answers_what_it_is_given(model: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        x = np.arange(32, dtype=np.float32).reshape(2, 16)
        ours.sendall(RUN + x[:1].tobytes() + STOP + RUN + x.tobytes() + STOP)
        first, second, end = run_all(TimingOrder(str(model), 1, 1.0, (1, 2), {"x": (16,)}), theirs)
        ready = [BatchReady(rows, (rows * 16 * 4,), rows * 8 * 4 + len(DONE)) for rows in (1, 2)]
        assert [first, second] == ready
        assert isinstance(end, LoadReport)
        assert (end.cores, end.weights_ms > 0, end.first_batch_ms > 0) == (1.0, True, True)
        sums = []
        for rows in (1, 2):
            made, answers = np.zeros((rows, 16), np.float32), np.zeros((rows, 8), np.float32)
            for array in (made, answers):
                receive_into(ours, array.reshape(-1).view(np.uint8).data)
            assert made.any()
            assert ours.recv(1) == DONE
            sums += answers[:, 0].tolist()
        assert sums == [x[0].sum(), x[0].sum(), x[1].sum()]  # the weights are ones


def test_runs_at_least_a_few_times_whatever_the_budget() -> None:
    ours, theirs = socket.socketpair()
    runs = []

    def answer() -> None:
        while theirs.recv(1) == RUN:
            runs.append(theirs.recv(4))
            theirs.sendall(b"done!")

    with ours, theirs:
        thread = threading.Thread(target=answer)
        thread.start()
        theirs.sendall(b"data")
        timing = Timing(ours, None, budget_ns=0, runs_min=20)
        assert len(timing.runs(TimedBatch(ours, None, BatchReady(1, (4,), 5)))) == 20
        timing.end(STOP)
        thread.join()
    assert runs == [b"data"] * 21  # one to warm up


class SilentLoad(ServiceLoad):
    """No traffic beside the runs; keeps the pauses between them."""

    def __init__(self) -> None:
        self.pauses_ns: list[int] = []

    def set_rate(self, rate_rps: float, body_bytes: int) -> float:
        return rate_rps

    def cpu_ns(self) -> int:
        return 0

    def wait_for(self, sock: socket.socket, timeout_s: float) -> None:
        pass

    def serve_until(self, end_ns: int) -> None:
        self.pauses_ns.append(end_ns - perf_counter_ns())


@pytest.mark.live
@pytest.mark.parametrize(("cores", "pauses"), [(1.0, True), (0.25, False), (1.75, False)])
def test_a_process_with_a_fraction_of_a_core_gets_no_pauses(cores: float, pauses: bool, model: Path) -> None:
    order, load = TimingOrder(str(model), 1, cores, (1,), {"x": (16,)}), SilentLoad()

    found = list(measure_on(order, 0.0, lambda _pid, _cores: contextlib.nullcontext(), load=load))

    assert len(load.pauses_ns) == len(found[0].runs_ns)  # type: ignore[union-attr]  # the first are the runs
    assert any(pause > 0 for pause in load.pauses_ns) is pauses


def test_the_measured_process_can_be_told_to_leave_out_larger_batches(model: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(LAST)
        order = TimingOrder(str(model), 1, 1.0, (1, 2, 4), {"x": (16,)})
        first, end = run_all(order, theirs)
        assert isinstance(first, BatchReady)
        assert isinstance(end, LoadReport)


@pytest.mark.live
def test_a_short_measurement_has_few_cells_and_says_so(model: Path) -> None:
    shares: list[float] = []
    profile = measure_briefly(
        model, shapes={"x": (16,)}, seconds=60, progress=lambda share, sample: shares.append(share)
    )
    measured = {(sample.batch, sample.cores) for sample in profile.samples}
    assert {(1, 1.0), (1, float(CORES))} <= measured
    assert profile.max_batch > 1
    assert shares == sorted(shares)
    assert profile.source.startswith(f"a short measurement: {len(profile.samples)} cells in ")
    assert (profile.origin, len(profile.passes), profile.load_s > 0) == ("measured", 1, True)
    assert profile.shapes == {"x": (16,)}, "what it was measured with is remembered"


@pytest.mark.live
def test_text_and_empty_outputs_are_measured(tmp_path: Path) -> None:
    """They have no bytes that show that a run has ended."""
    shapes = {"text": (onnx.TensorProto.STRING, ["n", 1]), "x": (onnx.TensorProto.FLOAT, ["n", 20_000])}
    ports = [onnx.helper.make_tensor_value_info(name, *given) for name, given in shapes.items()]
    outputs = [
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, ["n", 1]),
        onnx.helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, ["n", 0]),
    ]
    ends = [onnx.numpy_helper.from_array(np.array([value]), name) for name, value in (("one", 1), ("none", 0))]
    nodes = [
        onnx.helper.make_node("Identity", ["text"], ["y"]),
        onnx.helper.make_node("Slice", ["x", "none", "none", "one"], ["z"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", ports, outputs, ends)
    opset = onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), str(tmp_path / "m.onnx"))
    profile = measure(tmp_path / "m.onnx", batches=(1, 4), cores=(1,), seconds=0.01, passes=1, alone=True)
    assert [sample.batch for sample in profile.samples] == [1, 4]


@pytest.mark.live
def test_a_short_measurement_of_a_slow_model_is_one_cell(tmp_path: Path) -> None:
    """It begins no cell that would end too late; one row is measured in any case."""
    stage = tmp_path / "slow.py"
    ports = "inputs = outputs = {'x': ('FP32', (-1, 2))}"
    run = "def run(self, x):\n        import time\n        time.sleep(0.2)\n        return x"
    stage.write_text(f"class Model:\n    {ports}\n    def __init__(self, threads): pass\n    {run}\n")
    profile = measure_briefly(stage, seconds=0.5)
    assert [(sample.batch, sample.cores, sample.n) for sample in profile.samples] == [(1, float(CORES), 3)]
    profile = measure_briefly(stage, batches=(1,), seconds=60)
    assert {sample.batch for sample in profile.samples} == {1}
    assert {sample.cores for sample in profile.samples} == {1.0, float(CORES)}


@pytest.mark.live
def test_a_pass_that_takes_too_long_is_reported(tmp_path: Path) -> None:
    stage = tmp_path / "stuck.py"
    ports = "inputs = outputs = {'x': ('FP32', (-1, 2))}"
    run = "def run(self, x):\n        import time\n        time.sleep(60)"
    stage.write_text(f"class Model:\n    {ports}\n    def __init__(self, threads): pass\n    {run}\n")
    order = TimingOrder(str(stage), 1, 1.0, (1,), {})
    with pytest.raises(
        MachineError, match=r"stuck\.py: loading it, or one pass, has taken more than 1\.5 s on 1 cores"
    ):
        list(measure_on(order, 0.01, by_affinity, silence_s=1.5))


def test_a_process_that_hangs_up_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"data")
        batch = TimedBatch(ours, None, BatchReady(1, (4,), 5))
        theirs.close()
        with pytest.raises(OSError, match=r"closed|pipe|reset"):
            Timing(ours, None, budget_ns=0, runs_min=20).runs(batch)


def test_fits_only_what_the_points_suffice_for() -> None:
    row = [Sample(batch, 2.0, 3.0 * batch + 1, 3.0 * batch + 1, 0) for batch in (1, 2, 4)]
    more = [Sample(batch, 1.0, 9.0 * batch, 9.0 * batch, 0) for batch in (1, 2, 4)]
    assert set(fit_all(row[:2], "p99")) == {"table"}
    assert set(fit_all(row, "p50")) == {"table", "quadratic"}
    assert set(fit_all([*row, *more], "p99")) == {
        "table",
        "quadratic",
        "amdahl",
    }


FakeModel = Callable[[int, float], float]
"""The milliseconds that a batch of so many rows takes on so many cores."""


def cells_of(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    takes_ms: FakeModel,
    *,
    cores: tuple[float, ...] = (1.0,),
    largest: int = 1 << 20,
    **options: Any,  # those of `measure`
) -> list[dict[float, list[int]]]:
    """For each pass, the sizes that are measured on each core count. Batches above `largest` end the process."""

    def times(
        order: TimingOrder, seconds: float, limit: object, *, enough: Callable[[CellRuns], bool], **_: object
    ) -> Generator[CellRuns | LoadReport, None, None]:
        assert not order.tried or order.batches == (1, 2, 4, 8), "a start does not warm up what is only tried"
        for batch in (*order.batches, *order.tried):
            if batch > largest:
                raise MachineError("out of memory")
            found = CellRuns(batch, order.cores, [round(takes_ms(batch, order.cores) * 1e6)] * 30)
            stops = enough(found)
            yield found
            if stops:
                break
        yield LoadReport(order.cores, 1.0, 1.0, 1 << 20)

    monkeypatch.setattr("sloop.profile.measure.measure_on", times)
    monkeypatch.setattr("sloop.profile.measure.checked_cores", tuple)
    profile = measure(model, **{"batches": None, "cores": cores, "alone": True, "shapes": {"x": (16,)}, **options})
    return [
        {
            c: [cell.batch for cell in one.samples if cell.cores == c]
            for c in dict.fromkeys(s.cores for s in one.samples)
        }
        for one in profile.passes
    ]


@pytest.mark.parametrize(
    ("rates", "largest", "chosen"),
    [
        ([100, 100, 900, 900], 64, [1, 2, 4, 8, 16]),
        ([100, 150, 160, 900], 64, [1, 2, 4, 8, 16, 32]),
        ([100, 200, 300, 400], 64, [1, 2, 4, 8, 16, 32, 64]),
        ([100, 200, 300, 400], 16, [1, 2, 4, 8, 16]),
        ([100, 200, 300, 400], 8, [1, 2, 4, 8]),
    ],
)
def test_batches_double_while_that_brings_a_tenth_more_and_they_fit(
    monkeypatch: pytest.MonkeyPatch, model: Path, rates: list[float], largest: int, chosen: list[int]
) -> None:
    """`rates` are those of batches of 8, 16, 32 and 64, in thousands of rows per second."""

    def takes_ms(batch: int, cores: float) -> float:
        return batch / rates[batch.bit_length() - 4] / cores if batch >= 8 else 0.1 / cores

    found = cells_of(monkeypatch, model, takes_ms, cores=(1.0, 2.0), largest=largest)
    assert found == [{1.0: chosen, 2.0: chosen}]


def test_a_batch_that_must_be_measured_and_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    with pytest.raises(MachineError, match="out of memory"):
        cells_of(monkeypatch, model, lambda batch, cores: 1.0, largest=4)
    with pytest.raises(MachineError, match="out of memory"):
        cells_of(monkeypatch, model, lambda batch, cores: 1.0, largest=8, batches=(8, 16))


@pytest.mark.parametrize("row_ms", [0.1, 10.0, 50.0, 200.0, 1000.0])
@pytest.mark.parametrize("cores", [(1.0,), (1.0, 2.0), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)])
def test_a_model_of_any_speed_is_measured_in_the_announced_time(
    monkeypatch: pytest.MonkeyPatch, model: Path, row_ms: float, cores: tuple[float, ...]
) -> None:
    """What takes long is left out; one row on the largest core count is measured in any case."""
    takes: list[float] = []

    def takes_ms(batch: int, cores: float) -> float:
        took_ms = row_ms * batch / cores
        takes.append(took_ms / 1e3 * (RUNS_FEW + CELL_RUNS))
        return took_ms

    (found,) = cells_of(monkeypatch, model, takes_ms, cores=cores)
    assert found[cores[-1]][0] == 1
    assert sum(takes[1:]) <= CELLS_S
    assert row_ms > 1 or all(sizes[:4] == [1, 2, 4, 8] for sizes in found.values())
    assert row_ms < 100 or sum(map(len, found.values())) < 4 * len(cores)


def test_what_the_user_names_is_measured_however_slow_it_is(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    for seconds in (None, 0.2):
        found = cells_of(
            monkeypatch, model, lambda batch, _: 9000.0 * batch, cores=(1.0, 2.0), batches=(1, 8), seconds=seconds
        )
        assert found == [{1.0: [1, 8], 2.0: [1, 8]}]


def test_later_passes_have_the_cells_of_the_first(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    slower = iter([1.0] * 8 + [50.0] * 100)
    one, two, three = cells_of(monkeypatch, model, lambda batch, cores: 5.0 * next(slower), cores=(1.0, 2.0), passes=3)
    assert one == two == three


def test_the_time_that_is_left_falls_to_zero(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    left: list[float] = []
    for batches, passes in ((None, 1), (None, 3), ((1, 2, 4), 2)):
        left.clear()
        cells_of(
            monkeypatch,
            model,
            lambda batch, cores: 20.0 * batch / cores,
            cores=(1.0, 2.0),
            batches=batches,
            passes=passes,
            progress=lambda left_s, sample: left.append(left_s),
        )
        assert left[-1] == 0
        assert all(later <= 1.25 * earlier for earlier, later in pairwise(left)), left
        assert left[0] < measuring_s(batches, (1.0, 2.0), None, passes)


def sizes_of(monkeypatch: pytest.MonkeyPatch, model: Path, **options: Any) -> Profile:  # those of `measure_sizes`
    """Rows of 16 elements, measured, and of others, that take a millisecond for each element."""
    bytes_of_size = {16: 100, 4: 50, 64: 900}

    def times(
        order: TimingOrder, seconds: float, limit: object, *, enough: Callable[[CellRuns], bool], **_: object
    ) -> Generator[CellRuns | LoadReport, None, None]:
        (size,) = order.shapes["x"]
        for batch in (*order.batches, *order.tried):
            if batch * size > 512:
                raise MachineError("out of memory")
            found = CellRuns(batch, order.cores, [round((2 + batch * size) * 1e6 / order.cores)] * 30)
            stops = enough(found)
            yield found
            if stops:
                break
        yield LoadReport(order.cores, 1.0, 1.0, bytes_of_size[size], resize_bytes=7 if order.prepared > 1 else 0)

    monkeypatch.setattr("sloop.profile.measure.measure_on", times)
    monkeypatch.setattr("sloop.profile.measure.checked_cores", tuple)
    made = measure(model, batches=(1, 2, 8, 32), cores=(1.0, 2.0), alone=True, shapes={"x": (16,)}, size=16)
    return measure_sizes(made, model, {4: {"x": (4,)}, 64: {"x": (64,)}}, alone=True, **options)


def test_rows_of_other_sizes_are_measured_with_few_batches(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    left: list[float] = []
    made = sizes_of(monkeypatch, model, progress=lambda left_s, sample: left.append(left_s))
    assert [each.size for each in made.sizes] == [4, 16, 64]
    tables = [each.latency_ms for each in made.sizes]
    assert tables[1] == made.latency_ms
    assert [sorted(table.table) for table in tables if isinstance(table, LatencyTable)] == [
        [1, 6, 32],
        [1, 2, 8, 32],
        [1, 6],  # 32 rows of 64 are too much for the machine
    ]
    for each in made.sizes:
        for batch, cores in ((1, 1.0), (6, 2.0)):
            assert each.latency_ms.latency_ms(batch, cores) == pytest.approx((2 + batch * each.size) / cores)
    assert made.memory_bytes == 907, "of the largest rows, and of the sessions for other numbers of threads"
    assert left[-1] == 0
    assert left[0] < measuring_sizes_s(2, (1.0, 2.0), None, 1)
    assert made.with_fit("quadratic").sizes[1].latency_ms == made.fits["quadratic"].params


def test_other_sizes_are_as_much_slower_in_service_as_typical_rows(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """The median of the typical rows twofold, and their P99 threefold."""
    made = sizes_of(monkeypatch, model)
    cells = tuple(Sample(cell.batch, cell.cores, 2 * cell.p50_ms, 3 * cell.p99_ms, 300) for cell in made.samples)
    served = structs.replace(
        made,
        latency_ms=scaled(made.latency_ms, 3),
        samples=cells,
        passes=(*made.passes, Pass(date="", in_service=True, samples=cells)),
        sizes=(),
    )
    again = measure_sizes(served, model, {4: {"x": (4,)}}, alone=True)
    assert again.sizes[0].latency_ms.latency_ms(6, 2.0) == pytest.approx(3 * (2 + 24) / 2)


@pytest.mark.live
def test_a_size_that_the_model_refuses_is_named(model: Path) -> None:
    check_sizes(model, {16: {"x": (16,)}})
    with pytest.raises(InputError, match=r"rows of size 17: a batch of 1 fails"):
        check_sizes(model, {16: {"x": (16,)}, 17: {"x": (17,)}})
