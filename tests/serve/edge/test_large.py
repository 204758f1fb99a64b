"""Large JSON in a process of its own: a body is the same request as in the edge, or is refused in the same words."""

import asyncio
import json
import os
import signal
import weakref
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.limits import Limits
from sloop.serve.edge import inputs, v1
from sloop.serve.edge.inputs import AnswerForm, InputValidator, ParsedRequest
from sloop.serve.edge.intake import LARGE_BYTES
from sloop.serve.edge.large import LargeJson, must_be_written_apart
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.service import Model
from sloop.serve.edge.triton import classified
from sloop.tensor import ITEM_BYTES, Port, Signature, Tensor, join_strings
from tests.serve.edge.fakes import LoopThread

DATATYPES = ("FP32", "FP64", "INT8", "INT64", "UINT64", "BOOL", "BYTES", "FP16")
OPTIONAL = tuple(Port(f"x{rank}{kind}", kind, (-1,) * rank, has_rows=False) for kind in DATATYPES for rank in (1, 2, 3))
ANY = InputValidator(Signature((), (), optional=OPTIONAL))
"""Takes requests with some of the inputs."""
Content = dict[str, tuple[str, tuple[int, ...], bytes]]


class Apart:
    """The process, asked from another thread."""

    def __init__(self) -> None:
        self.thread, self.large = LoopThread(), LargeJson()

    def read(self, body: bytes, validator: InputValidator, length: str | None = None) -> tuple[Content, object, object]:
        """The tensors of a request of V2, its parameters and the form of its answer."""
        found = self.thread.call(self.large.read(body, length, model_of(validator)))
        return contents_of(found.tensors), found.parameters, found.form

    def close(self) -> None:
        self.thread.loop.call_soon_threadsafe(self.large.close)
        self.thread.close()


@pytest.fixture(scope="module")
def apart() -> Iterator[Apart]:
    found = Apart()
    yield found
    found.close()


def model_of(validator: InputValidator, **labels: tuple[str, ...]) -> Model:
    return Model("m", 10**9, validator, Limits(), labels)


def contents_of(tensors: Any) -> Content:
    return {name: (each.datatype, each.shape, bytes(each.data)) for name, each in tensors.items()}


def or_refusal(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Refusal as refusal:
        return refusal.fields


def read_here(body: bytes, validator: InputValidator) -> tuple[Content, object, object]:
    found = inputs.read(body, None, validator)
    return contents_of(found.tensors), found.parameters, found.form


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
def test_a_body_is_the_same_request_or_is_refused_as_well(apart: Apart, body: bytes) -> None:
    assert or_refusal(lambda: apart.read(body, ANY)) == or_refusal(lambda: read_here(body, ANY))


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
@given(given=st.data(), asked=predictions())
def test_a_body_of_v1_is_the_same_request_or_is_refused_as_well(
    apart: Apart, given: st.DataObject, asked: tuple[InputValidator, dict[str, Any]]
) -> None:
    validator, request = asked
    body = given.draw(bodies(st.just(request)))

    def result(read: Callable[[], ParsedRequest]) -> Any:
        found = or_refusal(read)
        return (contents_of(found.tensors), found.form) if isinstance(found, ParsedRequest) else found

    there = result(lambda: apart.thread.call(apart.large.read(body, None, model_of(validator), is_v1=True)))
    assert there == result(lambda: v1.read(body, validator))


HALF = '"\\ud800"'
"""Half a character: Python's parser takes it, which is asked where NaN is a word."""
X = '"name":"x1FP32","datatype":"FP32","shape":[1],"data":'


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
def test_half_characters_and_deep_lists_are_refused(apart: Apart, body: str) -> None:
    assert or_refusal(lambda: apart.read(body.encode(), ANY))[0] == 400


def test_numbers_of_parameters_may_be_of_any_size(apart: Apart) -> None:
    body = json.dumps({"inputs": [], "parameters": {"timeout": 10**30}}).encode()
    assert or_refusal(lambda: apart.read(body, ANY)) == or_refusal(lambda: read_here(body, ANY))


def test_megabytes_are_read_and_rows_are_views_of_them(apart: Apart) -> None:
    values = np.arange(200_000, dtype="<f4").reshape(2, 100_000)
    body = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 100_000], "data": values.tolist()}]})
    content, _, _ = apart.read(body.encode(), ONE)
    assert content == {"x": ("FP32", (2, 100_000), values.tobytes())}


def test_binary_tensors_are_read_in_the_edge_unless_they_are_text() -> None:
    large = LargeJson()

    def pid_after(validator: InputValidator, name: str, datatype: str, data: bytes, shape: list[int]) -> int:
        size = {"binary_data_size": len(data)}
        head = json.dumps({"inputs": [{"name": name, "datatype": datatype, "shape": shape, "parameters": size}]})

        async def main() -> int:
            found = await large.read(head.encode() + data, str(len(head)), model_of(validator))
            assert bytes(found.tensors[name].data) == data
            return large.pid

        return asyncio.run(main())

    assert pid_after(ONE, "x", "FP32", bytes(400_000), [1, 100_000]) == 0
    try:
        assert pid_after(TEXT, "text", "BYTES", join_strings([b"a" * 50_000, b"b"]), [2]) > 0
    finally:
        large.close()
    assert large.pid == 0


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


def body_of(parts: Any) -> bytes:
    return bytes(parts) if isinstance(parts, bytes | memoryview) else b"".join(parts)


@settings(max_examples=150)
@given(outputs=st.dictionaries(st.text(max_size=3), outputs(), min_size=1, max_size=3), binary=st.booleans())
def test_an_answer_is_the_same(apart: Apart, outputs: dict[str, Tensor], binary: bool) -> None:
    form = AnswerForm({name: binary and not place for place, name in enumerate(outputs)}, {}, "id")

    def written(parts: Any, json_bytes: int | None) -> tuple[bytes, int | None]:
        return body_of(parts), json_bytes

    there = or_refusal(lambda: written(*apart.thread.call(apart.large.write(model_of(ANY), "1", form, outputs))))
    assert there == or_refusal(lambda: written(*inputs.write("m", "1", form, outputs)))


@settings(max_examples=150)
@given(outputs=st.dictionaries(st.text(max_size=3), outputs(), min_size=1, max_size=3), by_row=st.booleans())
def test_an_answer_of_v1_is_the_same(apart: Apart, outputs: dict[str, Tensor], by_row: bool) -> None:
    if by_row:
        outputs = {name: each for name, each in outputs.items() if each.shape} or outputs
    shape = next(iter(outputs.values())).shape
    rows = shape[0] if by_row and shape else None
    form = AnswerForm({}, {}, is_v1=True, rows=rows)
    there = or_refusal(lambda: body_of(apart.thread.call(apart.large.write(model_of(ANY), "1", form, outputs))[0]))
    assert there == or_refusal(lambda: v1.write(rows, outputs))


def test_classes_are_sorted_and_named_there_too(apart: Apart) -> None:
    port = Port("y", "FP32", (-1, 5000))
    model = model_of(InputValidator(Signature((), (port,))), y=("zero", "one"))
    outputs = {"y": Tensor("FP32", (1, 5000), np.arange(5000, dtype="<f4")[::-1].tobytes())}
    form = AnswerForm({"y": False}, {"y": 3}, "id")
    here = classified(outputs, form.classes, (port,), model.labels)
    body, _ = apart.thread.call(apart.large.write(model, "1", form, outputs))
    assert bytes(body) == inputs.write("m", "1", form, here)[0]
    assert json.loads(bytes(body))["outputs"][0]["data"] == ["4999.000000:0:zero", "4998.000000:1:one", "4997.000000:2"]


LIST, RAW = {"y": False}, {"y": True}


@pytest.mark.parametrize(
    ("form", "tensor", "is_apart"),
    [
        (AnswerForm(LIST, {}), Tensor("UINT8", (LARGE_BYTES,), bytes(LARGE_BYTES)), False),
        (AnswerForm(LIST, {}), Tensor("UINT8", (LARGE_BYTES + 1,), bytes(LARGE_BYTES + 1)), True),
        (AnswerForm(RAW, {}), Tensor("UINT8", (2**20,), bytes(2**20)), False),
        (AnswerForm({}, {}), Tensor("UINT8", (2**20,), bytes(2**20)), False),
        (AnswerForm(LIST, {"y": 5}), Tensor("FP32", (1, 1000), bytes(4000)), False),
        (AnswerForm(LIST, {"y": 5}), Tensor("FP32", (8, 1000), bytes(32000)), True),
        (AnswerForm(LIST, {}, is_v1=True), Tensor("FP32", (1, 5000, 0, 3), b""), True),
        (AnswerForm(LIST, {}, is_v1=True), Tensor("FP32", (0, 5000), b""), False),
        (AnswerForm(LIST, {}), Tensor("FP32", (1, 5000, 0, 3), b""), False),
    ],
)
def test_what_takes_long_to_write_is_written_apart(form: AnswerForm, tensor: Tensor, is_apart: bool) -> None:
    assert must_be_written_apart(form, {"y": tensor}) == is_apart


def test_lists_of_nothing_have_a_bound() -> None:
    with pytest.raises(Refusal, match="no elements in 1048577 lists"):
        v1.write(None, {"y": Tensor("FP32", (2**20 + 1, 0), b"")})


# How it ends

SMALL = b'{"inputs":[]}'


async def test_a_process_that_dies_refuses_what_it_had_and_another_starts() -> None:
    large, model = LargeJson(), model_of(ANY)
    await large.read(SMALL, None, model)
    first = large.pid
    os.kill(first, signal.SIGSTOP)  # so that it has the request when it dies
    waiting = asyncio.create_task(large.read(SMALL, None, model))
    await asyncio.sleep(0)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(Refusal, match="the process that reads and writes large JSON has ended") as caught:
        await waiting
    assert (caught.value.status, caught.value.retry_after_s, large.pid) == (503, 1, 0)
    assert (await large.read(SMALL, None, model)).parameters == {}
    assert large.pid not in (0, first)
    second = large.pid
    large.close()
    large.close()
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_client_that_leaves_changes_nothing_for_others() -> None:
    large, model = LargeJson(), model_of(ANY)
    tasks = [asyncio.create_task(large.read(SMALL, None, model)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    found: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(each).__name__ for each in found] == ["ParsedRequest", "CancelledError", "ParsedRequest"]
    large.close()


class Body(bytearray):
    """A body of which one can see whether it is still kept."""


async def test_bodies_of_clients_that_have_left_are_neither_kept_nor_read() -> None:
    large, model = LargeJson(), model_of(ANY)
    await large.read(SMALL, None, model)
    os.kill(large.pid, signal.SIGSTOP)
    bodies = [Body(SMALL + b" " * 2**23) for _ in range(4)]
    kept = [weakref.ref(body) for body in bodies]
    tasks = [asyncio.create_task(large.read(body, None, model)) for body in bodies]
    del bodies
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    del tasks, task
    await asyncio.sleep(0.01)
    assert [ref() is not None for ref in kept] == [True, False, False, False], "the process is sent the first"
    os.kill(large.pid, signal.SIGCONT)
    assert (await large.read(SMALL, None, model)).parameters == {}
    assert kept[0]() is None
    large.close()


async def test_a_process_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    large, model = LargeJson(), model_of(ANY)
    await large.read(SMALL, None, model)
    first = large.pid
    os.kill(first, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr("sloop.serve.edge.large.WORK_S_MAX", 0.05)
        with pytest.raises(Refusal, match=r"it took more than 0\.05 s"):
            await large.read(SMALL, None, model)
    assert (await large.read(SMALL, None, model)).parameters == {}
    assert large.pid != first
    large.close()


async def test_while_megabytes_are_read_the_loop_turns() -> None:
    body = b'{"inputs":[{"name":"x1FP32","datatype":"FP32","shape":[1000000],"data":[' + b"0.5," * 999_999 + b"0.5]}]}"

    async def turns_during(work: Awaitable[object]) -> int:
        task, turns = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
        assert task.result()
        return turns

    large = LargeJson()
    assert await turns_during(large.read(body, None, model_of(ANY))) > 20, "one for each part that is sent"
    large.close()
