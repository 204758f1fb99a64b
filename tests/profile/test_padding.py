"""Rows of different lengths in one forward pass: what may be padded, and whether answers stay the same."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.profile.examine import Declared, examine
from sloop.tensor import Cut, Padding, PadValue, fill, pad_element
from tests.profile.test_joining import graph

MASKED = """g (int64[N, L] ids, int64[N, L] mask) => (float[N, L, 2] y, float[N, 2] mean)
    <float[9, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, int64[1] last = {-1},
    int64[1] axes = {1}> {
    y = Gather(table, ids)  f = Cast<to = 1>(mask)  u = Unsqueeze(f, last)  p = Mul(y, u)
    s = ReduceSum<keepdims = 0>(p, axes)  c = ReduceSum<keepdims = 0>(u, axes)  mean = Div(s, c) }"""
MEAN = """g (int64[N, L] ids) => (float[N, 2] y) <float[9, 2] table = {1, 2, 3, 4, 5, 6, 7, 8, 9, 8, 7, 6, 5, 4, 3, 2,
    1, 0}, int64[1] axes = {1}> { e = Gather(table, ids)  y = ReduceMean<axes = [1], keepdims = 0>(e) }"""
IMAGE = "g (float[N, 1, H, W] x) => (float[N, 1, W, H] y) { y = Transpose<perm = [0, 1, 3, 2]>(x) }"
HALVED = """g (float[N, 1, T] x) => (float[N, 1, U] y) <float[1, 1, 2] w = {1, 1}> { y = Conv<strides = [2]>(x, w) }"""


def padding(folder: Path, text: str, pad: Mapping[str, PadValue]) -> Padding | None:
    return examine(graph(folder, text), declared=Declared(pad=tuple(pad.items()))).padding


def test_a_model_with_its_mask_is_padded_and_outputs_are_cut_where_they_follow(tmp_path: Path) -> None:
    assert padding(tmp_path, MASKED, {"ids": 0, "mask": 0}) == Padding((0, 0), (Cut(0, 1, 0, 1),))


SUMS = """g (float[N, L] x, float[N, L] z) => (float[N] y) <int64[1] axes = {1}> {
    a = ReduceSum<keepdims = 0>(x, axes)  b = ReduceSum<keepdims = 0>(z, axes)  y = Add(a, b) }"""
WIDTHS = """g (float[N, L, M] x, float[N, L, M] z) => (float[N] y) <int64[1] last = {2}, int64[1] axes = {1}> {
    a = ReduceSum<keepdims = 0>(x, last)  b = ReduceSum<keepdims = 0>(z, last)
    c = Mul(a, b)  y = ReduceSum<keepdims = 0>(c, axes) }"""
"""Lengths must be equal, widths need not."""


@pytest.mark.parametrize(
    ("text", "pad", "equal"),
    [
        (MASKED, {"ids": 0, "mask": 0}, ((("ids", 1), ("mask", 1)),)),
        (SUMS, {"x": 0, "z": 0}, ()),
        (WIDTHS, {"x": 0, "z": 0}, ((("x", 1), ("z", 1)),)),
    ],
)
def test_lengths_of_one_name_are_equal_if_the_model_fails_on_others(
    tmp_path: Path, text: str, pad: Mapping[str, PadValue], equal: object
) -> None:
    assert examine(graph(tmp_path, text), declared=Declared(pad=tuple(pad.items()))).signature.equal == equal


def test_sides_of_images_are_told_apart(tmp_path: Path) -> None:
    assert padding(tmp_path, IMAGE, {"x": 0.5}) == Padding((0.5,), (Cut(0, 2, 0, 3), Cut(0, 3, 0, 2)))


@pytest.mark.parametrize(
    ("text", "pad", "why"),
    [
        (MEAN, {"ids": 0}, "`pad: {ids: 0}` changes the answers: output 'y' of a row"),
        (MASKED, {"ids": 0, "mask": 1}, "changes the answers: output 'mean' of a row differs from that without"),
        (MASKED, {"ids": 100, "mask": 0}, "makes it fail: "),
        (HALVED, {"x": 0}, "has 25 entries without padding, 50 with it, and cannot be cut back"),
        (MASKED, {"ids": 0, "masks": 0}, "names the input 'masks', which the model does not have"),
        (MASKED, {"ids": 0}, r"has no value for input 'mask' INT64\[-1, -1\], which has an open dimension"),
        (MASKED, {"ids": 0.5, "mask": 0}, "has 0.5 for input 'ids', which takes INT64 values"),
        (MASKED, {"ids": False, "mask": 0}, "has false for input 'ids', which takes INT64 values"),
        (MASKED, {"ids": 2**63, "mask": 0}, "which is out of INT64's range"),
        (
            "g (float[N, 3] x) => (float[N, 3] y) { y = Relu(x) }",
            {"x": 0},
            "names the input 'x', which has no open dimension besides its rows",
        ),
        (
            "g (string[N, L] x) => (string[N, L] y) { y = Identity(x) }",
            {"x": 0},
            "names the input 'x', whose elements are texts",
        ),
        (
            "g (bool[N, L] x) => (bool[N, L] y) { y = Not(x) }",
            {"x": 0},
            "has 0 for input 'x', which takes true or false",
        ),
    ],
)
def test_what_cannot_be_padded_is_refused_with_the_reason(
    tmp_path: Path, text: str, pad: Mapping[str, PadValue], why: str
) -> None:
    with pytest.raises(InputError, match=why):
        padding(tmp_path, text, pad)


def test_a_model_whose_requests_run_alone_is_not_padded_and_says_so(tmp_path: Path) -> None:
    text = "g (float[N, L] x) => (float[N, L] y) { m = ReduceMax<axes = [0]>(x)  y = Sub(x, m) }"
    found = examine(graph(tmp_path, text), declared=Declared(pad=(("x", 0),)))
    assert (found.padding, found.notes) == (
        None,
        ("m.onnx: `pad` is not used, because each request runs alone: ReduceMax 'm' reduces over the rows",),
    )


STAGE = """
import numpy as np
class Model:
    inputs = {"x": ("FP32", (-1, -1))}; outputs = {"y": ("FP32", (-1,))}
    joins_rows = True
    def __init__(self, threads): pass
    def run(self, x):
        if x.shape[1] %% 3: raise ValueError("not so long")
        return x.%s(axis=1)
    %s
"""
EXAMPLE = "def example(self, rows): return np.full((rows, 6), -1, np.float32)"
NAMED = """
class Model:
    inputs = {"ids": ("INT64", (-1, "length")), "mask": ("INT64", (-1, "length"))}; outputs = {"y": ("INT64", (-1,))}
    joins_rows = True
    def run(self, ids, mask):
        return (ids * mask).sum(axis=1)
"""


@pytest.mark.parametrize(("pad", "padding"), [((), None), ((("ids", 0), ("mask", 0)), Padding((0, 0), ()))])
@pytest.mark.parametrize("run", ["(ids * mask).sum(axis=1)", "ids.sum(axis=1) + mask.sum(axis=1)"])
def test_dimensions_of_a_python_model_with_one_name_are_equally_long(
    tmp_path: Path, run: str, pad: tuple[tuple[str, int], ...], padding: Padding | None
) -> None:
    """Also if the model would take others."""
    path = tmp_path / "m.py"
    path.write_text(NAMED.replace("(ids * mask).sum(axis=1)", run))
    found = examine(path, declared=Declared(pad=pad, joins_rows=True))
    assert (found.padding, found.signature.equal) == (padding, ((("ids", 1), ("mask", 1)),))


def test_a_python_model_is_tried_on_its_example(tmp_path: Path) -> None:
    declared, path = Declared(pad=(("x", 0),), joins_rows=True), tmp_path / "m.py"
    path.write_text(STAGE % ("sum", EXAMPLE))
    assert examine(path, {"x": (12,)}, declared=declared).padding == Padding((0,), ())
    path.write_text(STAGE % ("max", EXAMPLE))
    with pytest.raises(InputError, match="changes the answers: output 'y' of a row"):
        examine(path, {"x": (12,)}, declared=declared)


def test_what_could_not_be_tried_is_not_padded(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(STAGE % ("sum", ""))
    with pytest.raises(InputError, match=r"could not be tried.*not so long"):
        examine(path, declared=Declared(pad=(("x", 0),), joins_rows=True))


def test_rows_are_filled_up_to_the_longest() -> None:
    made = np.empty((3, 2, 3), np.float32)
    fill(made, pad_element("FP32", -1), [np.ones((2, 1, 3), np.float32), np.full((1, 2, 1), 2, np.float32)])
    long = [[1, 1, 1], [-1, -1, -1]]
    assert made.tolist() == [long, long, [[2, -1, -1], [2, -1, -1]]]
    assert pad_element("BF16", 1.0) == 0x3F80
    with pytest.raises(OverflowError):
        pad_element("FP16", 1e6)
