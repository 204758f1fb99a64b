from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]

from sloop.serve.runtimes import THREAD_COUNTS_MAX, open_runtime
from sloop.serve.runtimes.files import FileRuntime


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
    for threads in range(5, 5 + THREAD_COUNTS_MAX):
        runtime.load(threads)
    assert runtime.run([x], 1)[1] == 5
