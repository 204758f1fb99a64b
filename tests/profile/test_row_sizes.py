"""Sizes of rows: how they are given, which are typical, and the shapes of inputs that have them."""

from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs

from sloop.errors import InputError
from sloop.profile.examine import ExaminedModel
from sloop.profile.model import OpenDimension
from sloop.profile.profile import Profile, Quadratic, SizeLatency
from sloop.profile.row_sizes import (
    curved_share,
    law_of,
    lengths_in,
    lengths_in_file,
    lengths_of,
    shapes_at,
    size_of,
    typical,
)
from sloop.tensor import Port, Signature


def known(*inputs: Port, dimensions: tuple[OpenDimension, ...] = ()) -> ExaminedModel:
    outputs = (Port("y", "FP32", (-1, 4)),)
    return ExaminedModel(Signature.of(inputs, outputs), "", "m.onnx", dimensions=dimensions)


TEXTS = known(
    Port("ids", "INT64", (-1, -1)),
    Port("mask", "INT64", (-1, -1)),
    dimensions=(OpenDimension("sequence", (("ids", 0), ("mask", 0)), 128),),
)
IMAGES = known(
    Port("image", "FP32", (-1, 3, -1, -1)),
    dimensions=(OpenDimension("height", (("image", 1),), 224), OpenDimension("width", (("image", 2),), 224)),
)
UNNAMED = known(Port("ids", "INT64", (-1, -1)), Port("mask", "INT64", (-1, -1)))
WITH_STATE = known(
    Port("sound", "FP32", (-1, -1)),
    Port("state", "FP32", (2, -1, 8)),
    dimensions=(OpenDimension("samples", (("sound", 0),), 16_000), OpenDimension("beams", (("state", 1),), 1)),
)


@pytest.mark.parametrize(("text", "lengths"), [("128", (128,)), (" 224x224 ", (224, 224)), ("3x4x5", (3, 4, 5))])
def test_a_size_is_one_length_or_several(text: str, lengths: tuple[int, ...]) -> None:
    assert lengths_in(text) == lengths


@pytest.mark.parametrize("text", ["", "a", "1.5", "-3", "3x", "x3", "3,4", "0", "2x0", "1000000000"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        lengths_in(text)


def test_sizes_of_a_file_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "sizes.txt"
    path.write_text("16\n128\n\n16\n")
    assert lengths_in_file(path) == {(16,): 2, (128,): 1}
    for content, says in (("16\nlong\n", "sizes.txt:2: 'long' is not a size"), ("\n", "it has no sizes")):
        path.write_text(content)
        with pytest.raises(InputError, match=says):
            lengths_in_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="cannot read sizes"):
        lengths_in_file(path)


def test_a_few_typical_sizes_stand_for_many() -> None:
    assert typical(Counter({(length,): 1 for length in range(1, 101)})) == [(5,), (50,), (95,), (100,)]
    assert typical({(8,): 10_000, (512,): 1}) == [(8,), (512,)]
    assert typical({(224, 224): 4, (100, 300): 90, (640, 480): 6}) == [(100, 300), (640, 480)]


def test_inputs_have_the_shapes_of_a_size() -> None:
    assert shapes_at(TEXTS, (16,), {}, "m") == {"ids": (16,), "mask": (16,)}
    assert shapes_at(UNNAMED, (16,), {}, "m") == {"ids": (16,), "mask": (16,)}
    assert shapes_at(UNNAMED, (16, 8), {}, "m") == {"ids": (16,), "mask": (8,)}
    assert shapes_at(IMAGES, (64, 48), {}, "m") == {"image": (3, 64, 48)}
    assert shapes_at(WITH_STATE, (500,), {"state": (2, 1, 8)}, "m") == {"sound": (500,), "state": (2, 1, 8)}


@pytest.mark.parametrize(
    ("model", "lengths", "says"),
    [
        (TEXTS, (16, 16), "the size 16x16 has 2 numbers, and its rows have 1 open dimension: sequence"),
        (IMAGES, (64,), "the size 64 has 1 number, and its rows have 2 open dimensions: height and width"),
        (known(Port("x", "FP32", (-1, 8))), (16,), "its rows have no open dimensions"),
    ],
)
def test_a_size_that_the_model_cannot_have_is_refused(
    model: ExaminedModel, lengths: tuple[int, ...], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        shapes_at(model, lengths, {}, "m.onnx")


def test_sizes_are_counted_as_edges_count_them() -> None:
    assert size_of(TEXTS.signature, {"ids": (16,), "mask": (16,)}) == 16
    assert size_of(IMAGES.signature, {"image": (3, 64, 48)}) == 64 * 48
    assert size_of(IMAGES.signature, {"image": (1, 3, 64, 48)}) == 64 * 48, "with the row"
    assert size_of(UNNAMED.signature, {"ids": (16,), "mask": (8,)}) == 16
    assert size_of(IMAGES.signature, {}) == 0
    assert size_of(known(Port("x", "FP32", (-1, 8))).signature, {}) == 0


def test_requests_tell_lengths() -> None:
    assert lengths_of(TEXTS, 16, ()) == (16,)
    assert lengths_of(UNNAMED, 16, ()) == (16, 16)
    assert lengths_of(UNNAMED, 16, (16, 8)) == (16, 8)
    assert lengths_of(IMAGES, 64 * 48, (64, 48)) == (64, 48)
    with pytest.raises(ValueError, match="of 2"):
        lengths_of(IMAGES, 4, (1, 2, 3))


def test_attention_shows_in_the_law() -> None:
    def profile(*sizes: int) -> Profile:
        latencies = tuple(SizeLatency(size, Quadratic(0, 0.1 * size + 0.001 * size * size, 2)) for size in sizes)
        return Profile(latency_ms=latencies[0].latency_ms, max_batch=8, max_cores=1, sizes=latencies)

    law = law_of(profile(16, 64, 256))
    assert law is not None
    assert law.max_error < 1e-6
    assert curved_share(law, 256) == pytest.approx(8 * 0.001 * 256**2 / (2 + 8 * (25.6 + 0.001 * 256**2)))
    assert law_of(profile(16, 64)) is None
    straight = structs.replace(profile(1), sizes=tuple(SizeLatency(n, Quadratic(0, n, 2)) for n in (1, 2, 5)))
    law = law_of(straight)
    assert law is not None
    assert curved_share(law, 5) == pytest.approx(0, abs=1e-6)
