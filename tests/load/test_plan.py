"""What a load run sends: plan, bodies, metadata of the server."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.load.plan import (
    VARIANTS,
    Encoding,
    LoadPlan,
    ModelMetadata,
    encoded,
    fetch_metadata,
    from_array,
    from_json,
    made_up,
    model_path,
    only_model,
    preferred_encoding,
    split_url,
)
from sloop.tensor import NUMPY_TYPES, Port
from sloop.units import s
from sloop.workload import KINDS, Work, generated
from sloop.workload.generate import Poisson

TRACE = generated(Poisson(10.0), seed=0, duration_ns=s(1))


def test_a_plan_needs_little() -> None:
    assert "poisson" in KINDS
    assert LoadPlan("http://localhost:8000", "m", TRACE, 100.0).seed == 0
    assert LoadPlan("https://h/base", "m", TRACE, 100.0, connections_max=4, warm_connections=0).cpus == ()


@pytest.mark.parametrize("inside", ["/v2", "/v2/models/m", "/v2/models/m/infer"])
def test_the_url_of_a_model_is_answered_with_that_of_its_server(inside: str) -> None:
    with pytest.raises(InputError, match="must not contain a path below /v2") as caught:
        split_url(f"http://host:8000/prefix{inside}")
    assert caught.value.help == "write http://host:8000/prefix, and pass the model with --model"
    assert split_url("http://host/v2x").path == "/v2x"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h?x=1",
        "http://h/\u00e4",
        "http://h/a b",
    ],
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(InputError, match="URL"):
        split_url(url)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"model": ""}, "model"),
        ({"slo_ms": 0.0}, "slo_ms"),
        ({"slo_ms": float("nan")}, "slo_ms"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"connections_max": 0}, "connections_max"),
        ({"connections_max": 4, "warm_connections": 5}, "warm_connections"),
        ({"payload_bytes": -1}, "payload_bytes"),
        ({"arrivals": generated(Poisson(1.0), seed=0, duration_ns=s(1e8))}, "duration_s"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], where: str) -> None:
    plan: dict[str, object] = {"url": "http://h", "model": "m", "arrivals": TRACE, "slo_ms": 1.0, **options}
    with pytest.raises(InputError) as caught:
        LoadPlan(**plan)  # type: ignore[arg-type]
    assert caught.value.where == where


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


TEXT = ModelMetadata((Port("ids", "INT64", (-1, -1)), Port("mask", "INT64", (-1, -1)), Port("limit", "FP32", (1,))))
IMAGE = ModelMetadata((Port("image", "FP32", (-1, 3, -1, -1)),))


@pytest.mark.parametrize(
    ("model", "shapes", "work", "expected"),
    [
        (TEXT, {}, Work(), [(1, 1), (1, 1), (1,)]),
        (TEXT, {}, Work(4, 17), [(4, 17), (4, 17), (1,)]),
        (TEXT, {"mask": (-1, 9)}, Work(2, 17), [(2, 17), (2, 9), (1,)]),
        (IMAGE, {}, Work(2, 640 * 640), [(2, 3, 640, 640)]),
        (IMAGE, {}, Work(1, 200_000, (400, 500)), [(1, 3, 400, 500)]),
        (IMAGE, {"image": (1, 3, 8, 8)}, Work(), [(1, 3, 8, 8)]),
        (IMAGE, {"image": (-1, 3, 80, -1)}, Work(2, 6400), [(2, 3, 80, 80)]),
        (IMAGE, {"image": (-1, 3, 80, -1)}, Work(1, 4000, (400, 10)), [(1, 3, 80, 10)]),
    ],
)
def test_inputs_have_the_rows_and_sizes_that_a_request_brings(
    model: ModelMetadata, shapes: dict[str, tuple[int, ...]], work: Work, expected: list[tuple[int, ...]]
) -> None:
    made = list(made_up(model, shapes, [work], seed=1, where="m"))
    assert len(made) == VARIANTS
    assert [[tensor.shape for tensor in tensors] for tensors in made] == [expected] * VARIANTS


def test_of_many_sizes_each_has_one_body() -> None:
    works = [Work(1, size) for size in range(1, 100)]
    made = list(made_up(TEXT, {}, works, seed=1, where="m"))
    assert [tensors[0].shape for tensors in made] == [(1, size) for size in range(1, 100)]


def test_sizes_are_those_of_the_first_dimension_where_a_shape_says_so() -> None:
    """As of a sound, whose model has no batch: its metadata do not say that the frames are no rows."""
    sound = ModelMetadata(inputs=(Port("frames", "FP32", (-1, 4)), Port("state", "FP32", (1, 1, 8))))
    made = list(made_up(sound, {"frames": (-1, 4)}, [Work(1, 31), Work(1, 156)], seed=1, where="m"))
    assert {tensors[0].shape for tensors in made} == {(31, 4), (156, 4)}
    assert {tensors[1].shape for tensors in made} == {(1, 1, 8)}


@pytest.mark.parametrize(
    ("shapes", "work", "message"),
    [
        ({"x": (2, 4)}, Work(3), "no input of the model has an open number of rows"),
        ({}, Work(3, 7), "all rows of the model's inputs are equally large"),
    ],
)
def test_what_no_input_can_bring_is_refused(shapes: dict[str, tuple[int, ...]], work: Work, message: str) -> None:
    fixed = ModelMetadata((Port("x", "FP32", (-1, 4)),))
    with pytest.raises(InputError, match=message):
        list(made_up(fixed, shapes, [work], seed=1, where="m"))


@pytest.mark.parametrize(
    ("model", "shapes", "message"),
    [
        (ModelMetadata(), {}, "metadata lists no inputs"),
        (MODEL, {"y": (1,)}, "unknown input 'y'"),
        (MODEL, {"x": (0, 4)}, "cannot have the shape [0, 4]"),
        (MODEL, {"x": (2**20, 2**20)}, "cannot have the shape"),
        (ModelMetadata((Port("x", "FP8", (1,)),)), {}, "has the datatype 'FP8'"),
    ],
)
def test_impossible_inputs(model: ModelMetadata, shapes: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(InputError) as caught:
        list(made_up(model, shapes, seed=0, where="m"))
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


pytestmark = pytest.mark.live


def test_reads_what_the_server_says(stub: Any) -> None:
    url = split_url(stub.url)
    assert fetch_metadata(url, "m", timeout_s=5).inputs == (Port("x", "FP32", (-1, 3)),)
    assert preferred_encoding(url, timeout_s=5) == Encoding.BINARY
    stub.server = b'{"name": "plain"}'
    assert preferred_encoding(url, timeout_s=5) == Encoding.JSON
    stub.server = b"hello"
    assert preferred_encoding(url, timeout_s=5) == Encoding.JSON


def test_a_sloop_server_names_its_models(stub: Any) -> None:
    url = split_url(stub.url)
    stub.server = b'{"models": [{"name": "demo", "ready": true}]}'
    assert only_model(url, timeout_s=5) == "demo"
    for said in (b"hello", b'{"name": "triton"}', b'{"models": []}'):
        stub.server = said
        with pytest.raises(InputError, match="does not report its models"):
            only_model(url, timeout_s=5)
    stub.server = json.dumps({"models": [{"name": f"m{number}"} for number in range(200)]}).encode()
    with pytest.raises(InputError, match=r"has 200 models: m0, m1, m2, m3, m4, m5, m6, m7, …") as caught:
        only_model(url, timeout_s=5)
    assert caught.value.help == "name one with --model"


@pytest.mark.parametrize("said", [b"hello", b"[]", b'{"inputs": 3}', b'{"inputs": [{"name": "x"}]}'])
def test_other_servers_are_recognised(stub: Any, said: bytes) -> None:
    stub.metadata = said
    with pytest.raises(InputError, match="does not follow the protocol"):
        fetch_metadata(split_url(stub.url), "m", timeout_s=5)


def test_no_server() -> None:
    with pytest.raises(MachineError, match=r"no server answers at http://127\.0\.0\.1:1"):
        fetch_metadata(split_url("http://127.0.0.1:1"), "m", timeout_s=5)


def test_names_are_quoted() -> None:
    url = split_url("http://h/base/")
    assert model_path(url, "a/b c") == "/base/v2/models/a%2Fb%20c"
    assert model_path(url, "a", "1/2") == "/base/v2/models/a/versions/1%2F2"


def test_a_version_that_the_server_does_not_have_is_refused(stub: Any) -> None:
    url = split_url(stub.url)
    assert fetch_metadata(url, "m", timeout_s=5, version="7").versions == (), "this server names none"
    stub.metadata = b'{"name": "m", "inputs": [], "versions": ["1", "2"]}'
    assert fetch_metadata(url, "m", timeout_s=5, version="2").versions == ("1", "2")
    with pytest.raises(InputError, match="no version '7' of 'm'\nhelp: it serves 1, 2"):
        fetch_metadata(url, "m", timeout_s=5, version="7")


@pytest.mark.parametrize("key", ["a\r\nx: y", "schlüssel"])
def test_a_key_that_would_break_the_head_is_refused(key: str) -> None:
    with pytest.raises(InputError, match="characters that no header can have") as caught:
        LoadPlan("http://h", "m", TRACE, 100.0, api_key=key)
    assert key not in str(caught.value)
