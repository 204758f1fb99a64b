"""Stages in Python: what a class must say, how what it says is held against what it does, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sloop.authored import module_in
from sloop.errors import InputError, MachineError
from sloop.profile.examine import check_rows, examine, examine_here
from sloop.profile.measure import measure
from sloop.profile.script import ScriptSession
from sloop.profile.session import feed_for, open_model, zeros
from sloop.tensor import Port, Signature

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


def test_rows_that_mix_are_found_out_unless_its_author_knows(tmp_path: Path) -> None:
    mixing = one(body="return x - x.mean()")
    assert "'y' of two rows" in examine_here(write(tmp_path, mixing), {})[1]
    module_in.cache_clear()
    known = one(body="return x - x.mean()", more="joins_rows = True")
    assert examine_here(write(tmp_path, known), {})[1] == ""
    module_in.cache_clear()
    apart = one(more="joins_rows = False")
    assert "not to be joined" in examine_here(write(tmp_path, apart), {})[1]


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
    session = ScriptSession(path, 1)
    assert feed_for(session, 1, {}, where="")["x"].shape == (1, 4, 5, 3)
    assert feed_for(session, 1, {"x": (2, 2, 3)}, where="")["x"].shape == (1, 2, 2, 3)
    assert examine(path)[1] == "the first dimension of 'x' [1, -1, -1, 3] is not open"
    with pytest.raises(InputError, match="'example' of 2 rows gives 1 of input 'x'"):
        session.example(2)
    with pytest.raises(InputError, match=r"fails on its own example: ValueError: 'run' gives 'y' as uint64\[1\]"):
        examine(write(tmp_path, one(inputs, "return x.sum(axis=(1, 2, 3))", example)))


def test_the_one_that_the_documentation_shows_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "applications.md").read_text(encoding="utf-8")
    path = write(tmp_path, text.partition("```python\n")[2].partition("```")[0])
    assert examine_here(path, {})[1] == ""
    assert ScriptSession(path, 1).run({"image": np.full((2, 4, 5, 3), 255, np.uint8)})[0].min() == 1


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no class 'Model'"),
        ("Model = 3", "no class 'Model'"),
        ("def f(:", r"stage\.py:1: it cannot be imported: SyntaxError"),
        ("x = 1\nimport nothing_like_it", r"stage\.py:2: it cannot be imported: ModuleNotFoundError"),
        ("import sys\nsys.exit(3)", r"stage\.py:2: it cannot be imported: SystemExit: 3"),
        ("class Model: pass", "says no 'inputs'"),
        (one("[1]"), "'inputs' of class 'Model' is no mapping"),
        (one('{"x": "FP32"}'), "'x' of 'inputs' is 'FP32', not a datatype and a shape"),
        (one('{"x": ("FP32", (-2,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP32", (True,))}'), "not a datatype and a shape"),
        (one('{"x": ("FP31", (-1,))}'), "'x' is of type FP31, which cannot be served"),
        (one('{"x": ("BYTES", (-1,))}'), "texts travel as UINT8"),
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
def test_what_is_no_stage_is_refused_with_the_reason(text: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=what) as caught:
        examine_here(write(tmp_path, text), {})
    assert caught.value.help


def test_the_reason_comes_out_of_the_other_process(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"stage\.py:2: it cannot be imported: ValueError: oh"):
        examine(write(tmp_path, "\nraise ValueError('oh')"))
    with pytest.raises(InputError, match="there is no such file"):
        examine(tmp_path / "none.py")


def test_a_file_that_kills_the_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="ended with exit status 9"):
        examine(write(tmp_path, "import os\nos._exit(9)"))


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("return x, x", "'run' gives 2 arrays; 1 are declared"),
        ("return {'z': x}", r"'run' gives \['z'\]; \['y'\] are declared"),
        ("return [1.0]", "'run' gives 'y' as float, not as a NumPy array"),
        ("return x.astype('f8')", r"'run' gives 'y' as float64\[2\], declared as FP32\[-1\]"),
        ("return x[:, None]", r"'run' gives 'y' as float32\[2, 1\]"),
    ],
)
def test_outputs_that_were_not_declared_are_an_error(body: str, what: str, tmp_path: Path) -> None:
    session = ScriptSession(write(tmp_path, one(body=body)), 1)
    with pytest.raises((TypeError, ValueError), match=what):
        session.run({"x": np.zeros(2, np.float32)})


@pytest.mark.live
def test_is_measured_as_it_will_run(tmp_path: Path) -> None:
    profile = measure(write(tmp_path, GOOD), batches=(1, 2), cores=(1,), seconds=0.01)
    assert [sample.batch for sample in profile.samples] == [1, 2]
    assert profile.software.startswith("NumPy, Python 3")
    with pytest.raises(InputError, match=r"stage\.py: 'outputs' .*|.*says no 'outputs'"):
        measure(write(tmp_path, GOOD.replace("    outputs", "    others")), batches=(1,), cores=(1,), seconds=0.01)
    failing = GOOD.replace("return", "raise ValueError('not today')\n        return")
    with pytest.raises(InputError, match="a batch of 1 fails: not today"):
        measure(write(tmp_path, failing), batches=(1,), cores=(1,), seconds=0.01)
