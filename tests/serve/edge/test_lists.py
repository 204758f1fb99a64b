"""Long lists in JSON: read piece by piece, a body is the same request as read at once, or is refused as well."""

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sloop.serve.edge import inputs, lists, v1
from sloop.serve.edge.inputs import (
    InputValidator,
    ParsedRequest,
    ask_in_steps,
    read,
    read_in_steps,
    write,
    write_in_steps,
)
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.steps import at_once
from sloop.tensor import ITEM_BYTES, Port, Signature, Tensor, join_strings

DATATYPES = ("FP32", "FP64", "INT8", "INT64", "UINT64", "BOOL", "BYTES", "FP16")
TENSORS = InputValidator(
    Signature(
        tuple(Port(f"x{rank}{kind}", kind, (-1,) * rank) for kind in DATATYPES for rank in (1, 2, 3)), (), rows_max=9
    )
)
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


@pytest.fixture(autouse=True)
def tiny_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LARGE_BYTES", 0)
    monkeypatch.setattr(lists, "PIECE_BYTES", 12)
    monkeypatch.setattr(lists, "LIST_BYTES_MIN", 1)
    monkeypatch.setattr(lists, "STRING_BYTES_MIN", 20)


class OneOf(InputValidator):
    """Takes requests with some of the inputs."""

    def complete(self, tensors: Any, field: str = "inputs") -> Any:
        return tensors


ANY = OneOf(TENSORS.signature)


def read_at_once(body: bytes) -> Tensors | int:
    """The tensors of a request of V2, or the status of its refusal."""
    try:
        return contents_of(read(body, None, ANY).tensors)
    except Refusal as refusal:
        return refusal.status


def read_in_pieces(body: bytes) -> Tensors | int:
    try:
        asked = at_once(ask_in_steps(body, None, ANY))
        return contents_of(at_once(read_in_steps(asked, ANY)).tensors)
    except Refusal as refusal:
        return refusal.status


def contents_of(tensors: Any) -> Tensors:
    return {name: (each.datatype, each.shape, bytes(each.data)) for name, each in tensors.items()}


NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.5, 1e300, -0.0, 2**63, 10**25, 1e-320]),
)
WORDS = st.sampled_from(["NaN", "Infinity", "-Infinity", "nan"])
STRINGS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(['"data":[1,2,3]', "\\", '\\\\"', "]", "[[", "}{", ",,", "\\u00e9", "é" * 20, "\U0001f600" * 9]),
)
ELEMENTS: dict[str, st.SearchStrategy[Any]] = {
    "BOOL": st.booleans(),
    "BYTES": STRINGS,
    "INT8": st.integers(-128, 127),
    "INT64": st.integers(-(2**63), 2**63 - 1),
    "UINT64": st.integers(0, 2**64 - 1),
}
ODD = st.one_of(st.none(), WORDS, STRINGS, NUMBERS, st.booleans(), st.just([]), st.just([1]), st.just({"b64": "AAAA"}))


def shaped(shape: tuple[int, ...], elements: list[Any]) -> Any:
    for size in reversed(shape[1:]):
        elements = [elements[at : at + size] for at in range(0, len(elements), size)] if size else elements
    return elements


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    datatype, rank = draw(st.sampled_from(DATATYPES)), draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    count = 1
    for size in shape:
        count *= size
    usual = ELEMENTS.get(datatype, st.one_of(NUMBERS, st.integers(-9, 9), WORDS))
    elements = draw(st.lists(usual, min_size=count, max_size=count))
    if draw(st.integers(0, 5)) == 0:
        elements[draw(st.integers(0, count - 1))] = draw(ODD)
    if draw(st.integers(0, 9)) == 0:
        elements = elements[:-1] if draw(st.booleans()) else [*elements, elements[0]]
    data = shaped(shape, elements) if draw(st.booleans()) else elements
    found = {"name": f"x{rank}{datatype}", "datatype": datatype, "shape": list(shape), "data": data}
    if draw(st.integers(0, 4)) == 0:
        found["parameters"] = {"data": draw(st.one_of(st.lists(NUMBERS, max_size=9), STRINGS))}
    if draw(st.integers(0, 4)) == 0:
        found[draw(st.sampled_from(["note", 'x"data', "data "]))] = draw(st.one_of(st.lists(ODD, max_size=9), STRINGS))
    names = draw(st.permutations(list(found)))
    return {name: found[name] for name in names}


@st.composite
def bodies(draw: st.DrawFn, requests: st.SearchStrategy[Any]) -> bytes:
    request = draw(requests)
    text = json.dumps(
        request,
        ensure_ascii=draw(st.booleans()),
        indent=draw(st.sampled_from([None, 1])),
        separators=draw(st.sampled_from([(",", ":"), (" ,  ", " : "), (", ", ": ")])),
    )
    body = text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        body = body.replace(b'"Infinity"', b"Infinity").replace(b'"NaN"', b"NaN")
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        at = draw(st.integers(0, len(body)))
        more = draw(
            st.sampled_from([b"", b",", b"[", b"]", b'"', b"{", b"}", b" ", b"1", b"\\", b"\xff", b"e", b"\n", b"-"])
        )
        body = body[:at] + more + body[at + draw(st.integers(0, 2)) :]
    return body


V2 = st.fixed_dictionaries(
    {"inputs": st.lists(tensors(), min_size=1, max_size=3)},
    optional={"parameters": st.dictionaries(st.text(max_size=5), st.lists(NUMBERS, max_size=9), max_size=2)},
)


@settings(max_examples=300)
@given(body=bodies(V2))
def test_in_pieces_a_body_is_the_same_request_or_is_refused_as_well(body: bytes) -> None:
    assert read_in_pieces(body) == read_at_once(body)


def predict(body: bytes, *, in_pieces: bool, validator: InputValidator) -> tuple[int | None, Tensors] | int:
    """The rows and the tensors of a request of V1, or the status of its refusal."""
    try:
        found = at_once(v1.read_in_steps(body, validator)) if in_pieces else v1.read(body, validator)
    except Refusal as refusal:
        return refusal.status
    return found.rows, contents_of(found.tensors)


ONE = InputValidator(Signature((Port("x", "FP32", (-1, -1)),), (), rows_max=5))
TWO = InputValidator(Signature((Port("x", "FP32", (-1, -1)), Port("k", "INT64", (-1,))), (), rows_max=5))
TEXT = InputValidator(Signature((Port("text", "BYTES", (-1,)),), (), rows_max=5))
CODED = st.binary(max_size=40).map(lambda data: {"b64": b64encode(data).decode()})


@st.composite
def predictions(draw: st.DrawFn) -> tuple[InputValidator, dict[str, Any]]:
    validator, rows = draw(st.sampled_from([ONE, TWO, TEXT])), draw(st.integers(0, 6))
    columns: dict[str, list[Any]] = {}
    if validator is TEXT:
        columns["text"] = draw(st.lists(st.one_of(STRINGS, CODED, ODD), min_size=rows, max_size=rows))
    else:
        width, number = draw(st.integers(1, 30)), st.one_of(st.integers(-9, 9), NUMBERS)
        columns["x"] = [draw(st.lists(number, min_size=width, max_size=width)) for _ in range(rows)]
        if validator is TWO:
            columns["k"] = draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows))
    named = [{name: column[row] for name, column in columns.items()} for row in range(rows)]
    bare = next(iter(columns.values()))
    forms: list[dict[str, Any]] = [{"instances": named}, {"instances": bare}, {"inputs": columns}, {"inputs": bare}]
    asked = draw(st.sampled_from(forms))
    if rows and draw(st.integers(0, 9)) == 0:
        asked = {"instances": draw(st.permutations([*named, bare[0], draw(ODD)]))}
    if draw(st.integers(0, 3)) == 0:
        asked["signature_name"] = draw(st.sampled_from(["serving_default", "instances", '"instances":[']))
        asked = dict(reversed(asked.items()))
    return validator, asked


@settings(max_examples=200)
@given(given=st.data(), asked=predictions(), rest_max=st.sampled_from([80, 2**16]))
def test_in_pieces_a_body_of_v1_is_the_same_request_or_is_refused_as_well(
    given: st.DataObject, asked: tuple[InputValidator, dict[str, Any]], rest_max: int
) -> None:
    validator, request = asked
    body = given.draw(bodies(st.just(request)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lists, "REST_BYTES_MAX", rest_max)
        found = predict(body, in_pieces=True, validator=validator)
    assume(found != 413)
    assert found == predict(body, in_pieces=False, validator=validator)


@pytest.mark.parametrize("body", [b'{"instances":["",{"text":""}]}', b'{"instances":["",{"text":{"b64":""}}]}'])
def test_rows_without_names_cannot_be_followed_by_rows_with_names(body: bytes) -> None:
    assert predict(body, in_pieces=True, validator=TEXT) == predict(body, in_pieces=False, validator=TEXT) == 400


HALF = '"\\ud800"'
"""Half a character: Python's parser takes it, which is asked where NaN is a word."""
X = '"name":"x1FP32","datatype":"FP32","shape":[1],"data":'


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    "body",
    [
        '{"id":' + HALF + ',"inputs":[{' + X + "[NaN]}]}",
        '{"parameters":{' + HALF + ':1},"inputs":[{' + X + "[NaN]}]}",
        '{"inputs":[{"name":"x1BYTES","datatype":"BYTES","shape":[1],"data":[' + HALF + ']}], "note": NaN}',
        '{"inputs":[{' + X + "[" * 3000 + "1" + "]" * 3000 + "}]}",
        '{"inputs":[{' + X + "[" * 3000 + "NaN" + "]" * 3000 + "}]}",
    ],
)
def test_half_characters_and_deep_lists_are_refused(body: str, in_pieces: bool) -> None:
    assert (read_in_pieces if in_pieces else read_at_once)(body.encode()) == 400


@pytest.mark.parametrize("form", ["instances", "inputs"])
def test_elements_that_are_objects_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    read: list[int] = []
    read_text, steps = v1._text, [0]

    def count(element: Any) -> Any:
        read.append(steps[0])
        return read_text(element)

    monkeypatch.setattr(v1, "_text", count)
    monkeypatch.setattr(lists, "LIST_BYTES_MIN", 128)
    texts = [{"b64": b64encode(b"%d" % number).decode()} for number in range(1000)]
    many = InputValidator(Signature((Port("instances", "BYTES", (-1,)),), (), rows_max=5000))
    given = (
        {"instances": [{"instances": text} for text in texts]}
        if form == "instances"
        else {"inputs": {"instances": texts}}
    )
    reading = v1.read_in_steps(json.dumps(given).encode(), many)

    def counted() -> Any:
        found = yield from reading
        assert contents_of(found.tensors)["instances"][1] == (1000,)

    for _ in counted():
        steps[0] += 1
    assert max(Counter(read).values()) <= v1.ELEMENTS_AT_ONCE + 1


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"instances":[{"text":[' + '{"b64":""},' * 200 + '""]}]}', 413),
        ('{"instances":[{' + "".join(f'"k{number}":1,' for number in range(300)) + '"text":""}]}', 413),
        ('{"instances":[{"text":"","' + "k" * 5000 + '":1}]}', 400),
    ],
)
def test_a_row_that_would_be_decoded_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch, body: str, status: int
) -> None:
    monkeypatch.setattr(lists, "REST_BYTES_MAX", 500)
    assert predict(body.encode(), in_pieces=True, validator=TEXT) == status


# Writing


@st.composite
def outputs(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(["FP32", "INT8", "BOOL", "BYTES", "BF16"]))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if datatype == "BYTES":
        texts = st.one_of(st.text(max_size=9), st.sampled_from(["é" * 60, '"' * 70]), st.binary(max_size=60))
        return Tensor(datatype, shape, join_strings(draw(st.lists(texts, min_size=prod(shape), max_size=prod(shape)))))
    size = prod(shape) * ITEM_BYTES[datatype]
    data = draw(st.binary(min_size=size, max_size=size))
    return Tensor(datatype, shape, bytes(each & 1 for each in data) if datatype == "BOOL" else data)


def answered(write: Callable[[], tuple[Any, Any]]) -> tuple[bytes, int | None] | int:
    """The body of an answer, and the length of its JSON; or the status of the refusal."""
    try:
        body, json_bytes = write()
    except Refusal as refusal:
        return refusal.status
    return (body if isinstance(body, bytes) else b"".join(body)), json_bytes


@settings(max_examples=150)
@given(outputs=st.dictionaries(st.text(max_size=3), outputs(), min_size=1, max_size=3), binary=st.booleans())
def test_in_pieces_an_answer_is_the_same(outputs: dict[str, Tensor], binary: bool) -> None:
    wanted = ParsedRequest({}, "id", {}, {name: binary and not place for place, name in enumerate(outputs)}, {})
    whole = answered(lambda: write("m", "1", wanted, outputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "LISTED_BYTES_MAX", 2)
        patch.setattr(inputs, "LARGE_BYTES", 50)
        patch.setattr(lists, "ELEMENTS_AT_ONCE", 3)
        patch.setattr(lists, "PART_BYTES", 20)
        assert answered(lambda: at_once(write_in_steps("m", "1", wanted, outputs))) == whole


@settings(max_examples=150)
@given(outputs=st.dictionaries(st.text(max_size=3), outputs(), min_size=1, max_size=3), by_row=st.booleans())
def test_in_pieces_an_answer_of_v1_is_the_same(outputs: dict[str, Tensor], by_row: bool) -> None:
    if by_row:
        outputs = {name: each for name, each in outputs.items() if each.shape} or outputs
    shape = next(iter(outputs.values())).shape
    wanted = v1.Prediction({}, shape[0] if by_row and shape else None)
    whole = answered(lambda: (v1.write(wanted, outputs), None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "LARGE_BYTES", 50)
        patch.setattr(v1, "CODED_BYTES", 12)
        patch.setattr(lists, "ELEMENTS_AT_ONCE", 3)
        assert answered(lambda: (at_once(v1.write_in_steps(wanted, outputs)), None)) == whole


def test_many_empty_lists_are_written_in_steps() -> None:
    shape = (1, 5000, 0, 3)
    empty = {"y": Tensor("FP32", shape, b"")}
    assert inputs.are_large(empty)
    assert not inputs.are_large({"y": Tensor("FP32", (0, 5000), b"")})
    steps = v1.write_in_steps(v1.Prediction({}, 1), empty)
    parts: list[bytes] = []

    def write() -> Any:
        parts.extend((yield from steps))

    assert sum(1 for _ in write()) >= 5000 / lists.ELEMENTS_AT_ONCE
    assert json.loads(b"".join(parts)) == {"predictions": [[[]] * 5000]}
