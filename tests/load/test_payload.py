import json
from pathlib import Path

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.load.payload import VARIANTS, ModelMetadata, encoded, from_array, from_json, made_up
from sloop.load.plan import Encoding
from sloop.tensor import NUMPY_TYPES, Port

MODEL = ModelMetadata((Port("x", "FP32", (-1, 4)), Port("ids", "INT64", (1, 2)), Port("s", "BYTES", (1,))))


def test_binary_bodies_carry_what_json_ones_say() -> None:
    for tensors in made_up(MODEL, {}, seed=1, where="m"):
        said = json.loads(encoded(tensors, Encoding.JSON, where="m").content)["inputs"]
        body = encoded(tensors, Encoding.BINARY, where="m")
        assert body.is_binary
        head, rest = json.loads(body.content[: body.json_bytes]), body.content[body.json_bytes :]
        assert head["parameters"] == {"binary_data_output": True}
        for entry, listed in zip(head["inputs"], said, strict=True):
            size = entry["parameters"]["binary_data_size"]
            raw, rest = rest[:size], rest[size:]
            assert (entry["name"], entry["shape"], entry["datatype"]) == (
                listed["name"],
                listed["shape"],
                listed["datatype"],
            )
            if entry["datatype"] == "BYTES":
                assert raw == len(listed["data"][0]).to_bytes(4, "little") + listed["data"][0].encode()
            else:
                assert np.frombuffer(raw, NUMPY_TYPES[entry["datatype"]]).tolist() == listed["data"]
        assert rest == b""


def test_made_up_inputs_differ_and_repeat_with_the_seed() -> None:
    bodies = [encoded(tensors, Encoding.JSON, where="m").content for tensors in made_up(MODEL, {}, seed=1, where="m")]
    again = [encoded(tensors, Encoding.JSON, where="m").content for tensors in made_up(MODEL, {}, seed=1, where="m")]
    assert bodies == again
    assert len(set(bodies)) == VARIANTS


@pytest.mark.parametrize("datatype", [*NUMPY_TYPES, "BYTES"])
def test_every_datatype_can_be_sent(datatype: str) -> None:
    model = ModelMetadata((Port("x", datatype, (-1, 3)),))
    (tensors, *_) = made_up(model, {"x": (2, 3)}, seed=0, where="m")
    assert tensors[0].shape == (2, 3)
    assert encoded(tensors, Encoding.BINARY, where="m").json_bytes > 0
    if datatype == "FP16":
        with pytest.raises(InputError, match="use binary encoding"):
            encoded(tensors, Encoding.JSON, where="m")
    else:
        assert len(json.loads(encoded(tensors, Encoding.JSON, where="m").content)["inputs"][0]["data"]) == 6


@pytest.mark.parametrize(
    ("model", "shapes", "message"),
    [
        (ModelMetadata(), {}, "says nothing of its inputs"),
        (MODEL, {"y": (1,)}, "no input 'y'"),
        (MODEL, {"x": (0, 4)}, "cannot have the shape [0, 4]"),
        (MODEL, {"x": (2**20, 2**20)}, "cannot have the shape"),
        (ModelMetadata((Port("x", "FP8", (1,)),)), {}, "has the datatype 'FP8'"),
    ],
)
def test_impossible_inputs(model: ModelMetadata, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError) as caught:
        made_up(model, shapes, seed=0, where="m")
    assert message in str(caught.value)


def test_arrays_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8).reshape(2, 4))
    only = ModelMetadata((Port("x", "FP32", (-1, 4)),))
    (tensor,) = from_array(tmp_path / "x.npy", only, where="m")
    assert (tensor.shape, tensor.datatype) == ((2, 4), "FP32")
    assert encoded([tensor], Encoding.BINARY, where="m").content.endswith(np.arange(8, dtype="<f4").tobytes())
    with pytest.raises(InputError, match="the model has 3 inputs"):
        from_array(tmp_path / "x.npy", MODEL, where="m")
    for name, content in (("none.npy", None), ("text.npy", b"hello"), ("object.npy", b"")):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match="not a usable array"):
            from_array(tmp_path / name, only, where="m")


def test_bodies_from_files(tmp_path: Path) -> None:
    path = tmp_path / "body.json"
    path.write_text('{"id": "7", "inputs": []}')
    assert from_json(path).content == path.read_bytes()
    for text, message in (("[]", "not a request"), ("{}", "no `inputs` in it"), ("{", "not a request")):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            from_json(path)
    with pytest.raises(InputError, match="cannot be read"):
        from_json(tmp_path / "none.json")
