from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped]
import pytest
from onnx import TensorProto, helper, save

from sloop.errors import InputError
from sloop.serve.runtimes import THREAD_COUNTS_MAX, open_runtime
from sloop.serve.runtimes.onnx import OnnxRuntime, read_signature
from sloop.serve.tensor import Port, Signature


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
    runtime = OnnxRuntime(str(mlp))
    x = np.zeros((1, 4), np.float32)
    for threads in (1, 4):
        runtime.load(threads)
    assert [runtime.run([x], threads)[1] for threads in (1, 2, 3, 4, 9)] == [1, 1, 4, 4, 4]
    for threads in range(5, 5 + THREAD_COUNTS_MAX):
        runtime.load(threads)
    assert runtime.run([x], 1)[1] == 5


def test_the_signature_is_the_models(mlp: Path, mlp_of_one: Path) -> None:
    assert read_signature(mlp) == Signature((Port("x", "FP32", (-1, 4)),), (Port("y", "FP32", (-1, 3)),))
    assert read_signature(mlp_of_one).inputs[0].shape == (1, 4)


def test_unusable_models_are_refused_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.onnx: there is no such file"):
        read_signature(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    with pytest.raises(InputError, match=r"(?s)bad\.onnx: .*help: "):
        read_signature(tmp_path / "bad.onnx")
    port = helper.make_tensor_value_info("words", TensorProto.STRING, [None])
    out = helper.make_tensor_value_info("same", TensorProto.STRING, [None])
    graph = helper.make_graph([helper.make_node("Identity", ["words"], ["same"])], "strings", [port], [out])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "s.onnx")
    with pytest.raises(InputError, match=r"'words' is of type tensor\(string\)"):
        read_signature(tmp_path / "s.onnx")
