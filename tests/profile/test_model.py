"""Model files: what they say of themselves, and how unusable ones are refused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.profile.examine import check_rows, examine, examine_here
from sloop.profile.measure import measure
from sloop.profile.model import (
    PythonSession,
    feed_for,
    input_shapes,
    open_model,
    open_session,
    read_signature,
    synthesise,
    zeros,
)
from sloop.tensor import Port, Signature
from sloop.user_code import module_in

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


GOOD = """
import numpy as np
print("a library says hello")

class Model:
    inputs = {"x": ("FP32", (-1, 2)), "by": ("INT64", (-1,))}
    outputs = {"y": ("FP32", (-1, 2)), "n": ("INT64", (-1,))}
    software = "NumPy"

    def __init__(self, threads):
        self.threads = threads

    def run(self, x, by):
        return {"n": by + self.threads, "y": x * by[:, None].astype(np.float32)}
"""


@pytest.fixture(autouse=True)
def every_file_is_new() -> Iterator[None]:
    module_in.cache_clear()
    yield
    module_in.cache_clear()


def write(folder: Path, text: str) -> Path:
    path = folder / "stage.py"
    path.write_text(text, encoding="utf-8")
    return path


def one(inputs: str = '{"x": ("FP32", (-1,))}', body: str = "return x", more: str = "") -> str:
    return f"""
class Model:
    inputs = {inputs}
    outputs = {{"y": ("FP32", (-1,))}}
    {more}

    def __init__(self, threads): pass
    def run(self, x):
        {body}
"""


def test_says_what_it_takes_and_gives_and_runs(tmp_path: Path) -> None:
    session = open_model(write(tmp_path, GOOD), 3)
    assert session.signature == Signature(
        (Port("x", "FP32", (-1, 2)), Port("by", "INT64", (-1,))),
        (Port("y", "FP32", (-1, 2)), Port("n", "INT64", (-1,))),
    )
    assert (session.joins_rows, session.software, session.example(1)) == (None, "NumPy", None)
    y, n = session.run({"by": np.array([2, 5]), "x": np.ones((2, 2), np.float32)})
    assert (y.tolist(), n.tolist()) == ([[2, 2], [5, 5]], [5, 8])
    feed = zeros(session.signature)
    assert feed is not None
    assert session.run(feed)[0].shape == (1, 2)


def test_is_looked_at_in_another_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    signature, obstacle = examine(write(tmp_path, GOOD))
    assert ([port.name for port in signature.inputs], obstacle) == (["x", "by"], "")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "a library says hello\n")
    check_rows(tmp_path / "stage.py")


def test_models_that_mix_rows_are_detected_unless_declared(tmp_path: Path) -> None:
    mixing = one(body="return x - x.mean()")
    assert "'y' of two rows" in examine_here(write(tmp_path, mixing), {})[1]
    module_in.cache_clear()
    known = one(body="return x - x.mean()", more="joins_rows = True")
    assert examine_here(write(tmp_path, known), {})[1] == ""
    module_in.cache_clear()
    apart = one(more="joins_rows = False")
    assert "cannot be joined" in examine_here(write(tmp_path, apart), {})[1]


def test_its_neighbours_can_be_imported_and_its_name_may_be_a_librarys(tmp_path: Path) -> None:
    (tmp_path / "beside_the_stage.py").write_text("FACTOR = 7", encoding="utf-8")
    path = tmp_path / "numpy.py"
    path.write_text(
        "import numpy\nfrom beside_the_stage import FACTOR\n" + one(body="return x * numpy.float32(FACTOR)")
    )
    assert examine(path)[1] == ""


def test_an_example_stands_in_for_shapes_and_must_run(tmp_path: Path) -> None:
    inputs = '{"x": ("UINT8", (1, -1, -1, 3))}'
    example = "def example(self, rows): import numpy; return numpy.zeros((1, 4, 5, 3), 'u1')"
    path = write(tmp_path, one(inputs, "return x.sum(axis=(1, 2, 3)).astype('f4')", example))
    session = PythonSession(path, 1)
    assert feed_for(session, 1, {}, where="")["x"].shape == (1, 4, 5, 3)
    assert feed_for(session, 1, {"x": (2, 2, 3)}, where="")["x"].shape == (1, 2, 2, 3)
    assert examine(path)[1] == "the first dimension of 'x' [1, -1, -1, 3] is not open"
    with pytest.raises(InputError, match="'example' of 2 rows returns 1 rows of input 'x'"):
        session.example(2)
    with pytest.raises(InputError, match=r"fails on its own example: ValueError: 'run' returns 'y' as uint64\[1\]"):
        examine(write(tmp_path, one(inputs, "return x.sum(axis=(1, 2, 3))", example)))


def test_the_one_that_the_documentation_shows_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "applications.md").read_text(encoding="utf-8")
    path = write(tmp_path, text.partition("```python\n")[2].partition("```")[0])
    assert examine_here(path, {})[1] == ""
    assert PythonSession(path, 1).run({"image": np.full((2, 4, 5, 3), 255, np.uint8)})[0].min() == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no class 'Model'"),
        ("Model = 3", "no class 'Model'"),
        ("def f(:", r"stage\.py:1: it cannot be imported: SyntaxError"),
        ("x = 1\nimport nothing_like_it", r"stage\.py:2: it cannot be imported: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)", r"stage\.py:2: it cannot be imported: SystemExit: 3"),
        ("class Model: pass", "declares no 'inputs'"),
        (one("[1]"), "'inputs' of class 'Model' is not a mapping"),
        (one('{"x": "FP32"}'), "'x' of 'inputs' is 'FP32', not a datatype and a shape"),
        (one('{"x": ("FP32", (-2,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP32", (True,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP31", (-1,))}'), "'x' is of type FP31, which cannot be served"),
        (one('{"x": ("BYTES", (-1,))}'), "send text as UINT8"),
        (one(more="joins_rows = 'yes'"), "'joins_rows' is 'yes'"),
        (one('{"x": ("FP32", (1,))}', more="joins_rows = True"), "the first dimension of 'x' is not open"),
        (one().replace("def run", "def walk"), "no method 'run'"),
        (
            one().replace("threads): pass", "threads): raise OSError('no weights')"),
            r"cannot be made: OSError: no weights",
        ),
        (one().replace("threads): pass", "): pass"), r"cannot be made: TypeError"),
        (one(more="def example(self, rows): return 5"), r"stage\.py: its 'example' fails: TypeError: .* as int"),
    ],
)
def test_invalid_python_models_are_refused_with_the_reason(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=what) as caught:
        examine_here(write(tmp_path, text), {})
    assert caught.value.help


def test_the_reason_comes_out_of_the_other_process(tmp_path: Path) -> None:
    path = write(tmp_path, "\nraise ValueError('oh')")
    with pytest.raises(InputError) as caught:
        examine(path)
    assert caught.value.what == f"{path}:2: it cannot be imported: ValueError: oh", "the place once"
    with pytest.raises(InputError, match="there is no such file"):
        examine(tmp_path / "none.py")


def test_a_file_that_kills_the_process_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="ended with exit status 9"):
        examine(write(tmp_path, "import os\nos._exit(9)"))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return x, x", "'run' returns 2 arrays; 1 are declared"),
        ("return {'z': x}", r"'run' returns \['z'\]; \['y'\] are declared"),
        ("return [1.0]", "'run' returns 'y' as float, not as a NumPy array"),
        ("return x.astype('f8')", r"'run' returns 'y' as float64\[2\], declared as FP32\[-1\]"),
        ("return x[:, None]", r"'run' returns 'y' as float32\[2, 1\]"),
    ],
)
def test_outputs_that_were_not_declared_are_an_error(body: str, what: str, tmp_path: Path) -> None:
    session = PythonSession(write(tmp_path, one(body=body)), 1)
    with pytest.raises((TypeError, ValueError), match=what):
        session.run({"x": np.zeros(2, np.float32)})


@pytest.mark.live
def test_is_measured_as_it_will_run(tmp_path: Path) -> None:
    profile = measure(write(tmp_path, GOOD), batches=(1, 2), cores=(1,), seconds=0.01, passes=1, alone=True)
    assert [sample.batch for sample in profile.samples] == [1, 2]
    assert profile.software.startswith("NumPy, Python 3")
    with pytest.raises(InputError, match=r"stage\.py: 'outputs' .*|.*declares no 'outputs'"):
        measure(
            write(tmp_path, GOOD.replace("    outputs", "    others")),
            batches=(1,),
            cores=(1,),
            seconds=0.01,
            passes=1,
            alone=True,
        )
    failing = GOOD.replace("return", "raise ValueError('not today')\n        return")
    with pytest.raises(InputError, match="a batch of 1 fails: not today"):
        measure(write(tmp_path, failing), batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)
