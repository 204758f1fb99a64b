"""Model files: what they say of themselves, and how unusable ones are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.profile.inputs import input_shapes, synthesise
from sloop.profile.model import open_session, read_signature
from sloop.tensor import Port, Signature

onnx = pytest.importorskip("onnx")
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Write a model of one node, `y = op(x)`."""

    def write(operator: str = "Relu", shape: tuple[Any, ...] = ("n", 3), kind: int = 1, name: str = "m.onnx") -> Path:
        ports = [onnx.helper.make_tensor_value_info(port, kind, shape) for port in "xy"]
        node = onnx.helper.make_node(operator, ["x"], ["y"])
        graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:])
        opset = onnx.helper.make_opsetid("", 13)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), str(tmp_path / name))
        return tmp_path / name

    return write


def test_reads_a_signature(save: Save) -> None:
    signature = read_signature(save(shape=("n", 3, "w")))
    assert signature == Signature((Port("x", "FP32", (-1, 3, -1)),), (Port("y", "FP32", (-1, 3, -1)),))
    assert signature.fixed_batch is None
    assert read_signature(save(shape=(4, 3))).fixed_batch == 4
    assert read_signature(save(operator="Identity", kind=onnx.TensorProto.STRING)).inputs[0].datatype == "BYTES"
    assert read_signature(save(operator="Identity", kind=onnx.TensorProto.INT64)).inputs[0].datatype == "INT64"


def test_refuses_files_it_cannot_serve(save: Save, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_signature(tmp_path / "none.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with pytest.raises(InputError, match="not an ONNX model"):
        read_signature(tmp_path / "bad.onnx")
    whole = save().read_bytes()
    (tmp_path / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"cut\.onnx"):
        read_signature(tmp_path / "cut.onnx")
    with pytest.raises(InputError, match="an operator that ONNX Runtime"):
        read_signature(save(operator="Teleport"))
    with pytest.raises(InputError, match=r"tensor\(bfloat16\)"):
        read_signature(save(operator="Identity", kind=onnx.TensorProto.BFLOAT16))
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.onnx"):
        read_signature(tmp_path / "empty.onnx")


SIGNATURE = Signature((Port("x", "FP32", (-1, 3, -1)), Port("m", "INT64", (-1,)), Port("k", "BYTES", ())), ())


def test_shapes_inputs_for_a_batch() -> None:
    assert input_shapes(SIGNATURE, 5, {"x": (3, 8)}, where="m") == {"x": (5, 3, 8), "m": (5,), "k": ()}


@pytest.mark.parametrize(
    ("shapes", "what"),
    [
        ({}, r"'x' has open dimensions \(3, \?\)\n.*--shape x=3,224"),
        ({"x": (4, 8)}, r"\(4, 8\) does not fit"),
        ({"x": (3,)}, "does not fit"),
        ({"x": (3, 0)}, "does not fit"),
        ({"z": (3, 8)}, "no input 'z'\nhelp: its inputs: x, m, k"),
    ],
)
def test_refuses_shapes_that_do_not_fit(shapes: dict[str, tuple[int, ...]], what: str) -> None:
    with pytest.raises(InputError, match=what):
        input_shapes(SIGNATURE, 5, shapes, where="m")


def test_refuses_a_batch_other_than_the_fixed_one() -> None:
    fixed = Signature((Port("x", "FP32", (1, 3)),), ())
    assert input_shapes(fixed, 1, {}, where="m") == {"x": (1, 3)}
    with pytest.raises(InputError, match="fixed to 1; a batch of 2"):
        input_shapes(fixed, 2, {}, where="m")


def test_synthesises_inputs_that_run(save: Save) -> None:
    made = synthesise(SIGNATURE, {"x": (2, 3, 4), "m": (2,), "k": ()})
    assert made["x"].dtype == np.float32
    assert made["m"].dtype == np.int64
    assert made["k"].item() == "a"
    assert set(made["m"].tolist()) <= {0, 1}
    path = save()
    session = open_session(path, 1)
    inputs = synthesise(read_signature(path), {"x": (6, 3)})
    assert session.run(None, inputs)[0].shape == (6, 3)
