"""Runtimes: fake models, ONNX files and Python files."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest

from sloop.actions import ResizeWorker, StartWorker
from sloop.errors import InputError
from sloop.events import BatchFailed, Finished, WorkerLost, WorkerReady, WorkerResized
from sloop.profile.examine import examine
from sloop.profile.model import THREAD_COUNTS
from sloop.profile.threads import VARIABLES
from sloop.serve.protocols import Servable
from sloop.serve.runtimes import Expected, FakeRuntime, FileRuntime, open_runtime, prepare_runtimes
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, Slot
from tests.serve.rig import run_of
from tests.serve.test_local_backend import local_node


def test_burning_takes_the_cpu_time_told_and_echoes() -> None:
    runtime = FakeRuntime.parse("fake:burn:1:0.5")
    rows = np.arange(4.0).reshape(4, 1)
    before_ns = time.thread_time_ns()
    [answer], threads = runtime.run([rows], 3)
    assert time.thread_time_ns() - before_ns >= 3_000_000
    assert answer is rows
    assert threads == 3


@pytest.mark.parametrize("model", ["fake:", "fake:burn:1", "fake:rest:1:1", "fake:burn:x:1", "fake:burn:1:1:oops"])
def test_another_form_is_refused_with_the_right_one(model: str) -> None:
    with pytest.raises(InputError, match="help: write fake:burn"):
        FakeRuntime.parse(model)


def test_answers_are_onnx_runtimes_own(mlp: Path) -> None:
    runtime = open_runtime(str(mlp))
    assert runtime.load(1)
    assert not runtime.load(1)
    runtime.warm(1)
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    [y], _ = runtime.run([x], 1)
    [expected] = ort.InferenceSession(mlp, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_the_nearest_loaded_thread_count_runs_and_few_are_kept(mlp: Path) -> None:
    runtime = FileRuntime(str(mlp))
    x = np.zeros((1, 4), np.float32)
    for threads in (1, 4):
        runtime.load(threads)
    assert [runtime.run([x], threads)[1] for threads in (1, 2, 3, 4, 9)] == [1, 1, 4, 4, 4]
    for threads in range(5, 5 + THREAD_COUNTS[1]):
        runtime.load(threads)
    assert runtime.run([x], 1)[1] == 5


LARGE = """
import weakref
import numpy as np

ALIVE = weakref.WeakSet()

class Model:
    inputs = {"x": ("FP32", (1, 1))}
    outputs = {"seen": ("INT64", (2,))}

    def __init__(self, threads):
        ALIVE.add(self)
        self.seen = np.array([threads, len(ALIVE)])
        self.weights = np.ones(30_000_000)

    def run(self, x): return self.seen
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not say how much memory is resident")
def test_a_large_model_is_kept_for_two_thread_counts_and_never_for_more(tmp_path: Path) -> None:
    path = tmp_path / "large.py"
    path.write_text(LARGE, encoding="utf-8")
    gc.collect()  # what other tests left must not be freed while this process's memory is compared
    runtime = FileRuntime(str(path))
    seen = []
    for threads in (1, 2, 3, 2):
        runtime.load(threads)
        [made], _ = runtime.run([np.zeros((1, 1), np.float32)], threads)
        seen.append(made.tolist())
    assert seen == [[1, 1], [2, 2], [3, 2], [2, 2]]
    assert runtime.thread_counts == 2


pytestmark = pytest.mark.live
A = ReplicaId(1)
SPEC = ReplicaSpec("stage", "text", Slot(1), "here")

CROPS = '''
"""Takes texts apart: one row per word."""
import numpy as np

class Model:
    inputs = {"text": ("UINT8", (1, -1))}
    outputs = {"words": ("UINT8", (-1, -1)), "threads": ("INT64", (1,))}

    def __init__(self, threads):
        self.threads = threads

    def run(self, text):
        words = text.tobytes().split()
        if b"boom" in words:
            raise RuntimeError("no such word")
        rows = np.zeros((len(words), max(map(len, words), default=0)), np.uint8)
        for row, word in zip(rows, words):
            row[:len(word)] = np.frombuffer(word, np.uint8)
        return rows, np.array([self.threads])

    def example(self, rows):
        return np.frombuffer(b"an example", np.uint8)[None]
'''


def crops(folder: Path, text: str = CROPS) -> Path:
    path = folder / "crops.py"
    path.write_text(text, encoding="utf-8")
    return path


def said(text: bytes) -> list[Tensor]:
    return [Tensor("UINT8", (1, len(text)), text)]


def test_is_opened_by_its_ending_and_warmed_with_its_example(tmp_path: Path) -> None:
    runtime = open_runtime(str(crops(tmp_path)))
    assert runtime.load(2)
    assert not runtime.load(2)
    runtime.warm(2)
    [words, threads], ran = runtime.run([np.frombuffer(b"to be", np.uint8)[None]], 1)
    assert (words.tobytes(), threads.tolist(), ran) == (b"tobe", [2], 2)


async def test_workers_answer_with_any_number_of_rows_and_a_failure_is_the_batchs_own(tmp_path: Path) -> None:
    path = crops(tmp_path)
    async with local_node({"text": Servable(str(path), examine(path).signature)}) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        await ear.hear(WorkerReady)
        backend.run(BatchId(1), A, run_of([said(b"to be or"), said(b""), said(b"not")]))
        await ear.hear(Finished)
        assert [(words.shape, bytes(words.data)) for words, _ in ear.outputs[BatchId(1)]] == [
            ((3, 2), b"tobeor"),
            ((0, 0), b""),
            ((1, 3), b"not"),
        ]
        backend.run(BatchId(2), A, run_of([said(b"boom")]))
        failed = await ear.hear(BatchFailed)
        assert isinstance(failed, BatchFailed)
        assert failed.error == "the model raised RuntimeError"
        assert failed.detail.startswith("RuntimeError: no such word (crops.py:")
        backend.order(ResizeWorker(A, 2))
        await ear.hear(WorkerResized)
        for batch in range(3, 50):  # until the object for two threads is made
            backend.run(BatchId(batch), A, run_of([said(b"x")]))
            await ear.hear(Finished, count=batch - 1)
            if bytes(ear.outputs[BatchId(batch)][0][1].data)[0] == 2:
                return
        raise AssertionError("it never had two threads")


async def test_one_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = crops(tmp_path)
    servable = Servable(str(path), (known := examine(path)).signature, known.obstacle)
    crops(tmp_path, CROPS.replace("self.threads = threads", "raise MemoryError('too large')"))
    async with local_node({"text": servable}) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert "crops.py:10: its class 'Model' cannot be made: MemoryError: too large" in lost.error


def test_a_library_that_cannot_be_loaded_ends_no_worker_that_may_not_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "onnxruntime.py").write_text("raise OSError('libiomp5.so: cannot be mapped')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime")
    prepare_runtimes()


@pytest.mark.parametrize(("model", "is_loaded"), [("m.onnx", True), ("m.py", False), ("fake:burn:1:0", False)])
def test_only_models_that_need_the_library_load_it(
    model: str, is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[None] = []
    monkeypatch.setattr("sloop.serve.runtimes.onnx_runtime", lambda: loaded.append(None))
    prepare_runtimes(model)
    assert bool(loaded) is is_loaded


def test_the_library_writes_nothing_for_its_maker(tmp_path: Path) -> None:
    code = "from sloop.serve.runtimes import prepare_runtimes; prepare_runtimes()"
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.iterdir())


# Warming

COUNTS = """
import numpy as np
from pathlib import Path

class Model:
    inputs = {"x": ("FP32", (-1, -1))}
    outputs = {"y": ("FP32", (-1, 1))}
    joins_rows = True

    def __init__(self, threads):
        self.threads = threads

    def run(self, x):
        with (Path(__file__).parent / "passes.txt").open("a") as file:
            file.write(f"{self.threads}: {list(x.shape)}\\n")
        return x[:, :1]
"""


def counted(folder: Path, expected: Expected) -> tuple[FileRuntime, Path]:
    path = folder / "counts.py"
    path.write_text(COUNTS, encoding="utf-8")
    return FileRuntime(str(path), expected=expected), folder / "passes.txt"


def test_batches_are_run_in_the_shapes_of_the_profile(tmp_path: Path) -> None:
    runtime, passes = counted(tmp_path, Expected((1, 2, 4), {"x": (7,)}))
    runtime.load(1)
    runtime.warm(1)
    assert passes.read_text().split("\n")[:-1] == ["1: [1, 7]", *["1: [2, 7]"] * 3, "1: [4, 7]"]


def test_without_shapes_one_row_of_usual_sizes_is_run(tmp_path: Path) -> None:
    runtime, passes = counted(tmp_path, Expected((1, 2, 4)))
    runtime.load(1)
    runtime.warm(1)
    assert passes.read_text() == "1: [1, 16]\n"


def test_a_session_that_is_not_warm_is_not_used_while_another_one_is(tmp_path: Path) -> None:
    runtime, _ = counted(tmp_path, Expected())
    x = np.zeros((1, 7), np.float32)
    runtime.load(1)
    assert runtime.run([x], 1)[1] == 1, "there is no other"
    runtime.warm(1)
    runtime.load(4)
    assert runtime.run([x], 4)[1] == 1
    runtime.warm(4)
    assert runtime.run([x], 4)[1] == 4


def test_a_session_that_fails_for_certain_is_not_used(tmp_path: Path) -> None:
    runtime, _ = counted(tmp_path, Expected((1, 2), {"x": (7,)}))
    runtime.load(1)
    runtime.warm(1)
    (tmp_path / "counts.py").write_text(COUNTS.replace("x[:, :1]", "x[:1, :1]"), encoding="utf-8")
    runtime.load(2)
    with pytest.raises(InputError, match=r"1 row of 'y' for 2 rows of input: return as many"):
        runtime.warm(2)
    assert runtime.run([np.zeros((1, 7), np.float32)], 2)[1] == 1


def test_a_batch_that_fails_otherwise_leaves_the_rest_cold(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runtime, _ = counted(tmp_path, Expected((1, 2, 4), {"x": (7,)}))
    limit = "        if len(x) > 1: raise MemoryError('too many rows')\n        return x"
    (tmp_path / "counts.py").write_text(COUNTS.replace("        return x", limit), encoding="utf-8")
    runtime.load(1)
    runtime.warm(1)
    assert "counts.py is not warm for all batches: MemoryError: too many rows" in capfd.readouterr().err


@pytest.mark.parametrize("raises", ["ValueError('an odd length')", "__import__('sloop').Refused('an odd length')"])
def test_a_stage_may_refuse_sizes_that_were_guessed(tmp_path: Path, raises: str) -> None:
    runtime, _ = counted(tmp_path, Expected((1, 2)))
    refuses = f"        if x.shape[1] != 7: raise {raises}\n        return x"
    (tmp_path / "counts.py").write_text(COUNTS.replace("        return x", refuses), encoding="utf-8")
    runtime.load(1)
    runtime.warm(1)
    assert runtime.run([np.zeros((1, 7), np.float32)], 1)[0][0].shape == (1, 1)


THREADS = """
import os

import numpy as np
from threadpoolctl import threadpool_info

class Model:
    inputs = {"x": ("FP32", (1, 1))}
    outputs = {"threads": ("INT64", (2,))}

    def __init__(self, threads): pass

    def run(self, x):
        pools = [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]
        return np.array([max(pools), int(os.environ["OMP_NUM_THREADS"])])
"""


async def test_blas_in_a_worker_follows_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "threads.py"
    path.write_text(THREADS, encoding="utf-8")
    row = [Tensor("FP32", (1, 1), bytes(4))]
    async with local_node({"text": Servable(str(path), examine(path, {}).signature)}) as (backend, ear):
        backend.order(StartWorker(A, SPEC))
        await ear.hear(WorkerReady)
        for number, cores in enumerate((1, 2, 1), 1):
            if number > 1:
                backend.order(ResizeWorker(A, cores))
                await ear.hear(WorkerResized, count=number - 1)
            backend.run(BatchId(number), A, run_of([row]))
            await ear.hear(Finished, count=number)
            found = np.frombuffer(ear.outputs[BatchId(number)][0][0].data, np.int64)
            assert found.tolist() == [cores, cores]
