"""Model files: what they say of themselves, and how unusable ones are refused."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.app.load import load_deployment
from sloop.errors import InputError, MachineError
from sloop.profile.examine import examine, examine_here
from sloop.profile.measure import measure
from sloop.profile.model import (
    OnnxSession,
    PythonSession,
    fault_of_inputs,
    feed_for,
    input_shapes,
    open_dimensions,
    open_model,
    open_session,
    read_signature,
    row_shapes,
    synthesise,
    zeros,
)
from sloop.profile.warming import DECLARED_PROFILE
from sloop.tensor import Port, Signature, array_of, bfloats_of, elements_of, floats_of, join_strings
from sloop.user_code import WrongOutputsError, failure_of

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
    (tmp_path / "pointer.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(InputError, match="only a pointer of Git LFS") as caught:
        read_signature(tmp_path / "pointer.onnx")
    assert caught.value.help == "fetch it with `git lfs pull`"
    with pytest.raises(InputError, match="an operator that ONNX Runtime"):
        read_signature(save(operator="Teleport"))
    with pytest.raises(InputError, match=r"tensor\(complex64\)"):
        read_signature(save(operator="Identity", kind=onnx.TensorProto.COMPLEX64))
    (tmp_path / "empty.onnx").write_bytes(b"")
    with pytest.raises(InputError, match=r"empty\.onnx: it is empty"):
        read_signature(tmp_path / "empty.onnx")


def test_says_which_version_of_the_format_is_too_new(tmp_path: Path) -> None:
    make = onnx.helper.make_tensor_value_info
    node, ports = onnx.helper.make_node("Relu", ["x"], ["y"]), [make(name, 1, ["n"]) for name in "xy"]
    graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:])
    for opset, version, kind in ((999, 8, "opset"), (13, 999, "IR version")):
        opsets = [onnx.helper.make_opsetid("", opset)]
        onnx.save(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=version), str(tmp_path / "new.onnx"))
        with pytest.raises(InputError, match=rf"its {kind} is 999, and ONNX Runtime [\d.]+ reads up to \d+") as caught:
            read_signature(tmp_path / "new.onnx")
        assert caught.value.help.startswith(f"export it with {kind} ")


def test_says_which_file_of_weights_is_missing(tmp_path: Path) -> None:
    weights = onnx.numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"])
    ports = [onnx.helper.make_tensor_value_info(name, 1, ["n", 4]) for name in "xy"]
    made = onnx.helper.make_graph([node], "g", ports[:1], ports[1:], [weights])
    model = onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    beside = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    onnx.save(model, str(tmp_path / "m.onnx"), **beside)
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(InputError, match=r"its weights are in \S+/weights\.bin, which is missing") as caught:
        read_signature(tmp_path / "m.onnx")
    assert caught.value.help == "copy that file with the model"


@pytest.mark.parametrize(
    ("kind", "node", "help"),
    [
        (
            onnx.helper.make_sequence_type_proto(onnx.helper.make_tensor_type_proto(1, ["n"])),
            onnx.helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0),
            "requests and answers hold tensors: make each element an input or output of its own",
        ),
        (
            onnx.helper.make_optional_type_proto(onnx.helper.make_tensor_type_proto(1, ["n"])),
            onnx.helper.make_node("OptionalGetElement", ["x"], ["y"]),
            "requests and answers hold tensors: export it without Optional",
        ),
        (
            onnx.helper.make_tensor_type_proto(onnx.TensorProto.FLOAT8E4M3FN, ["n"]),
            onnx.helper.make_node("Cast", ["x"], ["y"], to=1),
            "let the graph Cast it from or to one of tensor(bool), ",
        ),
    ],
)
def test_says_what_to_do_about_inputs_that_are_no_tensors(kind: Any, node: Any, help: str, tmp_path: Path) -> None:
    output = onnx.helper.make_tensor_value_info("y", 1, None)
    graph = onnx.helper.make_graph([node], "g", [onnx.helper.make_value_info("x", kind)], [output])
    opset = onnx.helper.make_opsetid("", 19)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9), str(tmp_path / "m.onnx"))
    with pytest.raises(InputError, match="'x' is of type ") as caught:
        read_signature(tmp_path / "m.onnx")
    assert caught.value.help.startswith(help)


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


def test_inputs_without_rows_keep_their_whole_shape() -> None:
    """A dimension that is called like the batch has its size, wherever it is."""
    inputs = Port("x", "FP32", (-1, 512)), Port("state", "FP32", (2, -1, 128)), Port("sr", "INT64", ())
    signature = Signature.of([*inputs, Port("edges", "INT64", (2, -1))], [])
    names = {("x", 0): "N", ("state", 1): "N", ("edges", 1): "E"}
    shapes = input_shapes(signature, 3, {"edges": (2, 7)}, names, where="m")
    assert shapes == {"x": (3, 512), "state": (2, 3, 128), "sr": (), "edges": (2, 7)}
    with pytest.raises(InputError, match=r"input 'edges' has open dimensions \(2, \?\)"):
        input_shapes(signature, 3, {}, names, where="m")
    assert input_shapes(signature, 3, {"edges": (7,)}, names, where="m") == shapes, "its first size is known"
    made = synthesise(signature, shapes)
    assert not made["edges"].any(), "0 is an index of any row"
    assert made["sr"] == 16_000, "a sample rate"


def test_a_shape_may_have_the_batch_if_it_is_that_of_the_batch() -> None:
    """A model for which the user declares that it has no batch is measured with whole shapes."""
    signature = Signature((Port("x", "FP32", (-1, 80)),), ())
    assert input_shapes(signature, 1, {"x": (200, 80)}, where="m") == {"x": (200, 80)}
    assert input_shapes(signature, 4, {"x": (4, 80)}, where="m") == {"x": (4, 80)}
    with pytest.raises(InputError, match=r"the shape \(200, 80\) does not fit"):
        input_shapes(signature, 4, {"x": (200, 80)}, where="m")


def test_open_dimensions_of_inputs_without_rows_are_asked_for(tmp_path: Path) -> None:
    ports: list[tuple[str, list[object]]] = [("x", ["N", 4]), ("state", [2, "N", 4]), ("edges", [2, "E"])]
    make = onnx.helper.make_tensor_value_info
    inputs, outputs = ([make(name + end, 1, shape) for name, shape in ports] for end in ("", "_out"))
    nodes = [onnx.helper.make_node("Identity", [name], [f"{name}_out"]) for name, _ in ports]
    graph, opset = onnx.helper.make_graph(nodes, "side", inputs, outputs), onnx.helper.make_opsetid("", 13)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), str(tmp_path / "side.onnx"))
    session = open_model(tmp_path / "side.onnx", 1)
    (edges,) = open_dimensions(session)
    assert (edges.name, edges.ports, edges.proposal) == ("E", (("edges", 1),), 1)
    assert row_shapes(session.signature, [edges], [9]) == {"edges": (2, 9)}
    feed = feed_for(session, 5, {"edges": (2, 9)}, where="m")
    assert [made.shape for made in session.run(feed)] == [(5, 4), (2, 5, 4), (2, 9)]


def test_synthesises_inputs_that_run(save: Save) -> None:
    made = synthesise(SIGNATURE, {"x": (2, 3, 4), "m": (2,), "k": ()})
    assert made["x"].dtype == np.float32
    assert made["m"].dtype == np.int64
    assert made["k"].item() == b"a"
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


TOKENS = """
import numpy as np

class Model:
    inputs = {"text": ("BYTES", (-1,))}
    outputs = {"words": ("BYTES", (-1, 2)), "length": ("INT64", (-1,))}

    def __init__(self, threads): pass
    def run(self, text):
        words = [each.decode().partition(" ")[::2] for each in text]
        return np.array(words, dtype=object).reshape(-1, 2), np.array([len(each) for each in text])
"""


def test_text_goes_into_python_models_as_bytes_and_comes_out_as_either(tmp_path: Path) -> None:
    path = write(tmp_path, TOKENS)
    session = open_model(path, 1)
    words, length = session.run({"text": array_of("BYTES", (2,), join_strings(["a bé", b"c"]))})
    assert (words.tolist(), length.tolist()) == ([["a", "bé"], ["c", ""]], [5, 1])
    assert elements_of(words) == join_strings(["a", "bé", "c", ""])
    path.write_text(path.read_text().replace("class Model:\n", "class Model:\n    joins_rows = True\n"))
    assert examine(path).obstacle == ""
    assert zeros(session.signature) is None


@pytest.mark.parametrize("made", ["['a', 'b']", "[b'a', b'b']", "['a', b'b'], dtype=object"])
def test_text_may_be_of_any_type_of_strings(made: str, tmp_path: Path) -> None:
    text = one(body=f"import numpy as np; return np.array({made})").replace('"y": ("FP32"', '"y": ("BYTES"')
    (found,) = open_model(write(tmp_path, text), 1).run({"x": np.zeros(2, np.float32)})
    assert elements_of(found) == join_strings(["a", "b"])


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    text = one(body="import numpy as np; return np.array(['a', 1], dtype=object)")
    session = open_model(write(tmp_path, text.replace('"y": ("FP32"', '"y": ("BYTES"')), 1)
    with pytest.raises(WrongOutputsError, match=r"'y' as object of int\[2\], declared as BYTES\[-1\]"):
        session.run({"x": np.zeros(2, np.float32)})


def test_text_goes_through_onnx_models(save: Save) -> None:
    session = open_model(save(operator="Identity", kind=onnx.TensorProto.STRING, shape=("n", 1)), 1)
    (found,) = session.run({"x": array_of("BYTES", (2, 1), join_strings(["zwölf", ""]))})
    assert elements_of(found) == join_strings(["zwölf", ""])
    with pytest.raises(ValueError, match="input 'x' is not UTF-8 text"):
        session.run({"x": array_of("BYTES", (1, 1), join_strings([b"\xff"]))})


def doubling_bfloats(path: Path, *, returns: bool = True, text: bool = False) -> Path:
    """An ONNX model with BF16 inputs and outputs, which computes in FP32, and perhaps a text that it passes on."""
    helper, kinds = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Cast", ["x"], ["wide"], to=kinds.FLOAT),
        helper.make_node("Add", ["wide", "wide"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["y"], to=kinds.BFLOAT16),
        helper.make_node("Identity", ["t"], ["u"]),
    ][: None if text else 3]
    tensors = [
        [helper.make_tensor_value_info(name, kind, ["n", 2]) for name, kind in names]
        for names in (
            [("x", kinds.BFLOAT16), ("t", kinds.STRING)][: 1 + text],
            [("y", kinds.BFLOAT16)][:returns] + [("sum", kinds.FLOAT), ("u", kinds.STRING)][: 1 + text],
        )
    ]
    graph = helper.make_graph(nodes, "g", *tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def test_bfloats_are_16_bits_for_onnx_models(tmp_path: Path) -> None:
    path = doubling_bfloats(tmp_path / "model.onnx")
    session = open_model(path, 1)
    assert [port.datatype for port in session.signature.outputs] == ["BF16", "FP32"]
    given = bfloats_of(np.array([[1, -2.5], [0, np.inf]], np.float32))
    y, wide = session.run({"x": given})
    assert (floats_of(y).tolist(), wide.tolist()) == ([[2, -5], [0, np.inf]], [[2, -5], [0, np.inf]])
    empty, _ = session.run({"x": given[:0]})
    assert (empty.shape, str(empty.dtype)) == ((0, 2), "uint16")
    assert examine(path).obstacle == ""


def test_bfloats_and_text_go_in_together_but_not_out(tmp_path: Path) -> None:
    session = open_model(doubling_bfloats(tmp_path / "in.onnx", returns=False, text=True), 1)
    given = bfloats_of(np.array([[1, -2.5]], np.float32))
    wide, text = session.run({"x": given, "t": np.full((1, 2), b"a", dtype=object)})
    assert (wide.tolist(), text.tolist()) == ([[2, -5]], [["a", "a"]])
    with pytest.raises(InputError, match="text as an input and BF16 as an output"):
        open_model(doubling_bfloats(tmp_path / "out.onnx", text=True), 1)


def test_bfloats_are_16_bits_for_python_models(tmp_path: Path) -> None:
    text = one('{"x": ("BF16", (-1,))}', more="joins_rows = True").replace('"y": ("FP32"', '"y": ("BF16"')
    path = write(tmp_path, text)
    given = np.array([0x3F80], np.uint16)
    assert open_model(path, 1).run({"x": given})[0].tolist() == [0x3F80]
    assert examine(path).obstacle == ""


def test_is_looked_at_in_another_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    known = examine(write(tmp_path, GOOD))
    assert [port.name for port in known.signature.inputs] == ["x", "by"]
    assert "does not say that rows may be joined" in known.obstacle
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "a library says hello\n")


def test_rows_are_joined_only_if_the_class_says_so_and_trials_agree(tmp_path: Path) -> None:
    assert "does not say" in examine_here(write(tmp_path, one()), {}).obstacle
    assert examine_here(write(tmp_path, one(more="joins_rows = True")), {}).obstacle == ""
    mixing = one(body="return x - x.mean()", more="joins_rows = True")
    assert "differs from that of the row alone" in examine_here(write(tmp_path, mixing), {}).obstacle
    apart = one(more="joins_rows = False")
    assert "cannot be joined" in examine_here(write(tmp_path, apart), {}).obstacle


def test_its_neighbours_can_be_imported_and_its_name_may_be_a_librarys(tmp_path: Path) -> None:
    (tmp_path / "beside_the_stage.py").write_text("FACTOR = 7", encoding="utf-8")
    path = tmp_path / "numpy.py"
    path.write_text(
        "import numpy\nfrom beside_the_stage import FACTOR\n"
        + one(body="return x * numpy.float32(FACTOR)", more="joins_rows = True")
    )
    assert examine(path).obstacle == ""


def test_an_example_stands_in_for_shapes_and_must_run(tmp_path: Path) -> None:
    inputs = '{"x": ("UINT8", (1, -1, -1, 3))}'
    example = "def example(self, rows): import numpy; return numpy.zeros((1, 4, 5, 3), 'u1')"
    path = write(tmp_path, one(inputs, "return x.sum(axis=(1, 2, 3)).astype('f4')", example))
    session = PythonSession(path, 1)
    assert feed_for(session, 1, {}, where="")["x"].shape == (1, 4, 5, 3)
    assert feed_for(session, 1, {"x": (2, 2, 3)}, where="")["x"].shape == (1, 2, 2, 3)
    assert examine(path).obstacle == "the first dimension of 'x' [1, -1, -1, 3] is not open"
    with pytest.raises(InputError, match="'example' of 2 rows returns 1 rows of input 'x'"):
        session.example(2)
    fault = examine(write(tmp_path, one(inputs, "return x.sum(axis=(1, 2, 3))", example))).fault
    assert fault is not None
    assert "it fails on its own example: 'run' returns 'y' as uint64[1]" in fault.what


@pytest.mark.parametrize("init", ["self, threads", "self", "self, threads=1", "self, *given"])
def test_it_is_made_with_the_number_of_threads_if_it_takes_that(tmp_path: Path, init: str) -> None:
    path = write(tmp_path, one().replace("def __init__(self, threads)", f"def __init__({init})"))
    assert PythonSession(path, 1).signature.inputs


def test_it_needs_no_constructor(tmp_path: Path) -> None:
    path = write(tmp_path, one().replace("def __init__", "def prepare"))
    assert PythonSession(path, 1).signature.inputs


def test_the_one_that_the_documentation_shows_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "applications.md").read_text(encoding="utf-8")
    path = write(tmp_path, text.partition("```python\n")[2].partition("```")[0])
    assert examine_here(path, {}).obstacle == ""
    assert PythonSession(path, 1).run({"image": np.full((2, 4, 5, 3), 255, np.uint8)})[0].min() == 1


def test_the_tokenizer_that_the_documentation_shows_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "triton-and-kserve.md").read_text(encoding="utf-8")
    path = write(tmp_path, text.partition("```python\n")[2].partition("```")[0])
    assert examine_here(path, {}).obstacle == ""
    (tokens,) = PythonSession(path, 1).run({"text": array_of("BYTES", (2,), join_strings(["the a x", ""]))})
    assert tokens[:, :4].tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no class 'Model'"),
        ("Model = 3", "no class 'Model'"),
        (one().replace("class Model", "class Scale"), "its class is called 'Scale', not 'Model'"),
        ("def f(:", r"stage\.py:1: it cannot be imported: SyntaxError"),
        ("x = 1\nimport nothing_like_it", r"stage\.py:2: it cannot be imported: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)", r"stage\.py:2: it cannot be imported: SystemExit: 3"),
        ("class Model: pass", "declares no 'inputs'"),
        (one("[1]"), "'inputs' of class 'Model' is not a mapping"),
        (one('{"x": "FP32"}'), "'x' of 'inputs' is 'FP32', not a datatype and a shape"),
        (one('{"x": ("FP32", (-2,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP32", (True,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP31", (-1,))}'), "'x' is of type FP31, which cannot be served"),
        (one('{"x": ("STRING", (-1,))}'), "use one of BOOL, .*, BF16, BYTES"),
        (one(more="joins_rows = 'yes'"), "'joins_rows' is 'yes'"),
        (one('{"x": ("FP32", (1,))}', more="joins_rows = True"), "the first dimension of 'x' is not open"),
        (one().replace("def run", "def walk"), "no method 'run'"),
        (
            one().replace("threads): pass", "threads): raise OSError('no weights')"),
            r"cannot be made: OSError: no weights",
        ),
        (one().replace("threads): pass", "path, threads): pass"), r"cannot be made: TypeError"),
        (
            one(more="def example(self, rows): return 5"),
            r"stage\.py: its 'example' fails: 'example' returns 'x' as int",
        ),
    ],
)
def test_invalid_python_models_are_refused_with_the_reason(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=what) as caught:
        examine_here(write(tmp_path, text), {})
    assert caught.value.help


@pytest.mark.parametrize("how", ["", "async "])
def test_inputs_are_given_in_the_order_of_their_declaration(how: str, tmp_path: Path) -> None:
    inputs = '{"a": ("FP32", (-1,)), "b": ("FP32", (-1,))}'
    for parameters in ("a, b", "first, second", "a, second", "*both", "a, b, c=None"):
        right = one(inputs).replace("def run(self, x)", f"{how}def run(self, {parameters})")
        assert PythonSession(write(tmp_path, right), 1).signature.inputs[0].name == "a"
    with pytest.raises(InputError) as caught:
        PythonSession(write(tmp_path, right.replace("a, b, c", "b, a, c")), 1)
    assert caught.value.what.endswith("run(self, b, a) gets its inputs in the order of `inputs`: a, b")
    assert caught.value.help == "write `def run(self, a, b)`"


def test_the_reason_comes_out_of_the_other_process(tmp_path: Path) -> None:
    path = write(tmp_path, "\nraise ValueError('oh')")
    with pytest.raises(InputError) as caught:
        examine(path)
    assert caught.value.what == f"{path}:2: it cannot be imported: ValueError: oh", "the place once"
    with pytest.raises(InputError, match="there is no such file"):
        examine(tmp_path / "none.py")


def test_a_file_that_ends_the_process_is_at_fault_unless_it_was_killed(tmp_path: Path) -> None:
    path = write(tmp_path, "import os\nos._exit(9)")
    with pytest.raises(InputError, match=f"{path}: the process that examined it ended with exit status 9"):
        examine(path)
    with pytest.raises(InputError, match="exit status -11"):
        examine(write(tmp_path, "import os\nos.kill(os.getpid(), 11)"))
    with pytest.raises(MachineError, match="exit status -9") as caught:
        examine(write(tmp_path, "import os\nos.kill(os.getpid(), 9)"))
    assert "out of memory" in caught.value.help


def test_processes_that_a_file_starts_do_not_hold_up_its_examination(tmp_path: Path) -> None:
    waits = f"while not os.path.exists({str(tmp_path / 'end')!r}): time.sleep(0.01)"
    text = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', \"import os, time\\n{waits}\"])\n"
    try:
        assert examine(write(tmp_path, text + one())).fault is None
    finally:
        (tmp_path / "end").touch()


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return x, x", "'run' returns 2 arrays; 1 are declared"),
        ("return {'z': x}", r"'run' returns \['z'\]; \['y'\] are declared"),
        ("return [1.0]", "'run' returns 'y' as float, not as a NumPy array"),
        ("return x.astype('f8')", r"'run' returns 'y' as float64\[2\], declared as FP32\[-1\]"),
        ("return x[:, None]", r"'run' returns 'y' as float32\[2, 1\]"),
        ("pass", "'run' returns 'y' as NoneType, not as a NumPy array"),
        ("return x[:1]", "'run' returns 1 row of 'y' for 2 rows of input"),
    ],
)
def test_outputs_that_were_not_declared_are_an_error(body: str, what: str, tmp_path: Path) -> None:
    session = PythonSession(write(tmp_path, one(body=body, more="joins_rows = True")), 1)
    with pytest.raises(WrongOutputsError, match=what):
        session.run({"x": np.zeros(2, np.float32)})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("x / ones(3)", r"stage\.py:9: it fails on its own example: NameError: name 'ones' is not defined"),
        ("import sys; sys.exit(3)", r"stage\.py:9: it fails on its own example: SystemExit: 3"),
    ],
)
def test_a_run_that_raises_names_its_line(line: str, what: str, tmp_path: Path) -> None:
    example = "def example(self, rows): import numpy; return numpy.zeros(rows, 'f4')"
    fault = examine(write(tmp_path, one(body=line, more=example))).fault
    assert fault is not None
    assert re.search(what, str(fault.error))


@pytest.mark.live
def test_a_run_that_raises_while_it_is_measured_names_its_line(tmp_path: Path) -> None:
    counts = "self.n = getattr(self, 'n', 0) + 1\n        assert self.n < 3, 'worn out'\n        return"
    path = write(tmp_path, GOOD.replace("return", counts, 1))
    with pytest.raises(MachineError, match=r"AssertionError: worn out \(stage\.py:\d+\)"):
        measure(path, batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)


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
    with pytest.raises(InputError, match=r"stage\.py:14: a batch of 1 fails: ValueError: not today"):
        measure(write(tmp_path, failing), batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)


# What users ask of a stage in Python


def test_a_coroutine_is_awaited_always_on_one_loop(tmp_path: Path) -> None:
    body = "import asyncio\n        await asyncio.sleep(0)\n        self.loops = getattr(self, 'loops', set())"
    body += "\n        self.loops.add(id(asyncio.get_running_loop()))\n        return x * len(self.loops)"
    example = "async def example(self, rows): import numpy; return numpy.ones(rows, 'f4')"
    text = one(body=body, more=example).replace("def run", "async def run")
    session = PythonSession(write(tmp_path, text), 1)
    example_of_two = session.example(2)
    assert example_of_two is not None
    for _ in range(3):
        np.testing.assert_array_equal(session.run(example_of_two)[0], np.ones(2, np.float32))


class TensorLike:
    """What other frameworks return."""

    def detach(self) -> "TensorLike":
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.ones(2)


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (None, "it needs a `return`"),
        (TensorLike(), r"return y\.detach\(\)\.cpu\(\)\.numpy\(\)"),
        (np.ones(2), r"return y\.astype\(np\.float32\)"),
        (3.0, r"return np\.asarray\(y, np\.float32\)"),
        ([1.0, 2.0], r"a list of 2, not NumPy arrays; \['y'\] are declared: return np\.asarray\(…, np\.float32\)"),
        (np.ones((2, 1), np.float32), "return that shape, or declare the other one"),
    ],
)
def test_what_was_not_declared_comes_with_a_remedy_and_its_place(made: object, remedy: str, tmp_path: Path) -> None:
    session = PythonSession(write(tmp_path, one(body="return self.made")), 1)
    session._model.made = made
    with pytest.raises(WrongOutputsError, match=remedy + r" \(stage\.py:\d+\)$"):
        session.run({"x": np.zeros(2, np.float32)})


def test_random_texts_that_a_stage_refuses_ask_for_an_example(tmp_path: Path) -> None:
    inputs = '{"x": ("BYTES", (-1,))}'
    known = examine(write(tmp_path, one(inputs, "import json; return [json.loads(each) for each in x]")))
    assert known.fault is None
    assert "it has text inputs, for which sloop writes only 'a', and no `example(rows)`: write one" in known.notes[0]


@pytest.mark.live
def test_random_texts_that_fail_while_they_are_measured_ask_for_an_example_too(tmp_path: Path) -> None:
    path = write(tmp_path, one('{"x": ("BYTES", (-1,))}', "import json; return [json.loads(each) for each in x]"))
    with pytest.raises(InputError, match=r"no `example\(rows\)`: write one") as refused:
        measure(path, batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)
    assert "a batch of 1 fails: JSONDecodeError" in refused.value.what


# Requests that are one unit


@pytest.mark.parametrize("given", [(5, 2), (3, 5, 2)])
def test_a_batch_of_one_has_all_rows_of_a_fixed_first_dimension(given: tuple[int, ...]) -> None:
    signature = Signature.of([Port("x", "FP32", (3, -1, 2))], [])
    assert input_shapes(signature, 1, {"x": given}, where="m") == {"x": (3, 5, 2)}
    with pytest.raises(InputError, match="fixed to 3; a batch of 2"):
        input_shapes(signature, 2, {"x": given}, where="m")


def test_a_shape_may_begin_with_one_row() -> None:
    signature = Signature.of([Port("x", "FP32", (-1, 3, -1))], [])
    assert input_shapes(signature, 4, {"x": (1, 3, 5)}, where="m") == {"x": (4, 3, 5)}


@pytest.mark.live
def test_a_model_whose_first_dimension_is_closed_is_measured_with_one_request(save: Save, tmp_path: Path) -> None:
    profile = measure(save(shape=(3, 2)), batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)
    assert [sample.batch for sample in profile.samples] == [1]
    text = one('{"x": ("FP32", (4, 2))}', "return x[:, 0]", "def example(self, rows): return np.ones((rows, 2), 'f4')")
    text = "import numpy as np\n" + text.replace('{"y": ("FP32", (-1,))}', '{"y": ("FP32", (4,))}')
    profile = measure(write(tmp_path, text), batches=(1,), cores=(1,), seconds=0.01, passes=1, alone=True)
    assert [sample.batch for sample in profile.samples] == [1]


# What ONNX Runtime says of inputs


def refusal_of(session: OnnxSession, **feed: Any) -> str:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # ONNX Runtime's exceptions share no base class
        session.run({name: np.asarray(value) for name, value in feed.items()})
    return fault_of_inputs(raised.value)


def graph(tmp_path: Path, nodes: list[Any], inputs: list[Any], output: Any, constants: list[Any]) -> OnnxSession:
    values = [onnx.helper.make_tensor_value_info(*port) for port in inputs]
    made = onnx.helper.make_graph(nodes, "g", values, [onnx.helper.make_tensor_value_info(*output)], constants)
    opset = onnx.helper.make_opsetid("", 17)
    onnx.save(onnx.helper.make_model(made, opset_imports=[opset], ir_version=9), str(tmp_path / "m.onnx"))
    return OnnxSession(tmp_path / "m.onnx", 1)


def test_an_index_out_of_range_is_the_clients_fault(tmp_path: Path) -> None:
    table = onnx.numpy_helper.from_array(np.arange(6, dtype=np.float32).reshape(3, 2), "table")
    node = onnx.helper.make_node("Gather", ["table", "ids"], ["y"], name="/model/secret/Gather")
    session = graph(tmp_path, [node], [("ids", 7, ["n"])], ("y", 1, ["n", 2]), [table])
    said = refusal_of(session, ids=np.array([1, 7]))
    assert said == (
        "the model cannot run on these inputs: Gather: indices element out of data bounds, idx=7 must be within the "
        "inclusive range [-3,2]"
    )


def test_sizes_that_do_not_fit_are_the_clients_fault(tmp_path: Path) -> None:
    shape = onnx.numpy_helper.from_array(np.array([-1, 4]), "shape")
    nodes = [onnx.helper.make_node("Reshape", ["x", "shape"], ["y"])]
    said = refusal_of(
        graph(tmp_path, nodes, [("x", 1, ["n", "k"])], ("y", 1, ["m", 4]), [shape]), x=np.ones((1, 5), "f4")
    )
    assert said.startswith("the model cannot run on these inputs: Reshape: ")
    assert "cannot be reshaped to the requested shape. Input shape:{1,5}" in said
    assert ".h:" not in said, "places in ONNX Runtime's source are no matter of clients"
    node = onnx.helper.make_node("Add", ["a", "b"], ["y"])
    session = graph(tmp_path, [node], [("a", 1, ["n"]), ("b", 1, ["m"])], ("y", 1, ["k"]), [])
    assert refusal_of(session, a=np.ones(2, "f4"), b=np.ones(3, "f4")).startswith(
        "the model cannot run on these inputs: Add"
    )


@pytest.mark.parametrize(
    ("operator", "second", "said"),
    [
        ("Div", 0, "Div: Integer division by zero"),
        ("Mod", 0, "Mod: Integer modulo by zero"),
        ("GatherElements", 9, "GatherElements: GatherElements op: Out of range value in index tensor"),
    ],
)
def test_values_that_an_operator_cannot_take_are_the_clients_fault(
    operator: str, second: int, said: str, tmp_path: Path
) -> None:
    node = onnx.helper.make_node(operator, ["a", "b"], ["y"])
    session = graph(tmp_path, [node], [("a", 7, ["n"]), ("b", 7, ["n"])], ("y", 7, ["n"]), [])
    assert refusal_of(session, a=[4], b=[second]) == f"the model cannot run on these inputs: {said}"


def test_the_innermost_node_says_what_is_wrong(tmp_path: Path) -> None:
    """A node of a branch fails inside an If, which says no more than that."""
    make, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    cut, keep = make("Reshape", ["x", "shape"], ["cut"], name="cut"), make("Identity", ["x"], ["kept"])
    branches = {
        branch: onnx.helper.make_graph([node], branch, [], [value(node.output[0], 1, None)])
        for branch, node in (("then_branch", cut), ("else_branch", keep))
    }
    shape = onnx.numpy_helper.from_array(np.array([-1, 4]), "shape")
    node = make("If", ["is_cut"], ["y"], **branches)
    session = graph(tmp_path, [node], [("x", 1, ["n", "k"]), ("is_cut", 9, [])], ("y", 1, ["m", "l"]), [shape])
    feed = {"x": np.ones((1, 5), "f4"), "is_cut": np.array(True)}
    said = refusal_of(session, **feed)
    assert said.startswith("the model cannot run on these inputs: Reshape: ")
    assert "cannot be reshaped to the requested shape" in said
    with pytest.raises(Exception, match="Reshape") as raised:
        session.run(feed)
    detail = failure_of(raised.value).detail
    assert "Reshape 'cut': " in detail
    assert ("ONNXRuntimeError" in detail, "Non-zero status" in detail) == (False, False)


@pytest.mark.parametrize("kind", [1, 7])
def test_text_that_is_no_number_is_the_clients_fault(kind: int, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Cast", ["s"], ["y"], to=kind)
    session = graph(tmp_path, [node], [("s", 8, ["n"])], ("y", kind, ["n"]), [])
    said = refusal_of(session, s=np.array([b"four"], object))
    assert said == "the model cannot run on these inputs: Cast: invalid number in a text"


def test_a_model_that_refuses_the_values_that_were_made_up_is_served(tmp_path: Path) -> None:
    node = onnx.helper.make_node("Div", ["a", "b"], ["y"])
    graph(tmp_path, [node], [("a", 7, ["n", 2]), ("b", 7, ["n", 2])], ("y", 7, ["n", 2]), [])
    found = examine(tmp_path / "m.onnx")
    assert found.fault is None
    assert "Integer division by zero" in found.notes[0]
    assert "nothing could be tried" in found.obstacle
    assert "if it needs other values of 'a' and 'b' than 0 and 1, which sloop makes up, write" in found.notes[0]
    assert f"`{DECLARED_PROFILE}`" in found.notes[0]
    app = tmp_path / "app.yaml"
    stage = f"{{name: s, model: m.onnx, {DECLARED_PROFILE.replace('MS', '5')}}}"
    app.write_text(f"name: app\nslo_ms: 90\nstages: [{stage}]\n")
    assert load_deployment(app).without_profile == (), "with it nothing is measured"


def test_text_that_is_not_utf8_is_the_clients_fault(save: Save) -> None:
    session = OnnxSession(save(operator="Identity", shape=("n",), kind=onnx.TensorProto.STRING), 1)
    assert refusal_of(session, x=np.array([b"\xff"], object)) == "input 'x' is not UTF-8 text (invalid start byte)"


def test_too_little_memory_is_not(tmp_path: Path) -> None:
    node = onnx.helper.make_node("ConstantOfShape", ["s"], ["y"])
    session = graph(tmp_path, [node], [("s", 7, [2])], ("y", 1, ["a", "b"]), [])
    assert refusal_of(session, s=np.array([1 << 22, 1 << 22])) == ""
    assert fault_of_inputs(ValueError("shape mismatch")) == "", "no error of ONNX Runtime"


def test_a_locale_that_text_operators_need_is_named_with_what_makes_it(tmp_path: Path) -> None:
    ports = [onnx.helper.make_tensor_value_info(port, onnx.TensorProto.STRING, [None]) for port in "xy"]
    node = onnx.helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="xx_YY.UTF-8")
    graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:])
    onnx.save(
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8),
        str(tmp_path / "text.onnx"),
    )
    with pytest.raises(InputError, match=r"need the locale xx_YY\.UTF-8, which this machine does not have") as caught:
        read_signature(tmp_path / "text.onnx")
    assert "`localedef -i xx_YY -f UTF-8 xx_YY.UTF-8`" in caught.value.help
