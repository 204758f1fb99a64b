"""What a request asks for beside its tensors: deadlines, and the parameters that Triton has."""

import pytest

from sloop.serve.edge import parameters
from sloop.serve.edge.inputs import InputValidator, read
from sloop.serve.edge.parameters import (
    COMPARED_MAX,
    MS_MAX,
    NAME_CHARS_MAX,
    OF_OUTPUT,
    OF_REQUEST,
    PARAMETERS_MAX,
    budget_ns,
    check,
)
from sloop.serve.edge.refusal import Refusal
from sloop.tensor import Port, Signature
from sloop.units import ms


@pytest.mark.parametrize(
    ("value", "slo_ns"), [(b"200", ms(200)), ("0.5", ms(0.5)), (200, ms(200)), (1e3, ms(1000)), (MS_MAX, ms(MS_MAX))]
)
def test_reads_milliseconds_however_they_are_sent(value: object, slo_ns: int) -> None:
    assert budget_ns(value, None) == (slo_ns, 0)


def test_leaves_the_budget_to_the_application_unless_asked() -> None:
    assert budget_ns(None, b"12.5") == (None, ms(12.5))


@pytest.mark.parametrize(
    "value", [b"-5", b"0", 0, b"nan", b"inf", 1e300, 10**400, MS_MAX + 1, b"fast", b"", True, [200], b"1_000", b"\xff"]
)
def test_refuses_negative_and_absurd_budgets(value: object) -> None:
    with pytest.raises(Refusal, match="x-slo-ms") as caught:
        budget_ns(value, None)
    assert caught.value.status == 400
    assert caught.value.fix.startswith("send milliseconds from 0.001 to 3600000")


def test_refuses_time_travel() -> None:
    with pytest.raises(Refusal, match="x-elapsed-ms: '-1' is out of range"):
        budget_ns(None, b"-1")
    assert budget_ns(None, b"0") == (None, 0)


@pytest.mark.parametrize("value", ["1\u00a0", "\u0661\u0662", "²", "\u2003200"])
def test_digits_and_spaces_of_other_scripts_are_no_milliseconds(value: str) -> None:
    with pytest.raises(Refusal, match="is not a number"):
        budget_ns(value, None)


@pytest.mark.parametrize(
    ("slo", "elapsed", "timeout", "remaining_ns", "expected"),
    [
        (None, None, None, None, None),
        (None, None, 0, None, None),
        (None, None, 50_000, None, ms(50)),
        (None, None, 300_000, None, None),
        (500, None, 300_000, None, ms(300)),
        (500, None, 600_000, None, ms(500)),
        (500, 250, 300_000, None, ms(500)),
        (None, 20, 50_000, None, ms(70)),
        (500, 20, 50_000, ms(30), ms(50)),
        (500, 20, 50_000, ms(60), ms(70)),
        (None, None, None, ms(199), ms(199)),
    ],
)
def test_the_tightest_deadline_holds_and_only_x_slo_ms_can_extend_it(
    slo: int | None, elapsed: int | None, timeout: int | None, remaining_ns: int | None, expected: int | None
) -> None:
    """Triton's timeout and the gRPC deadline count from the arrival, x-slo-ms from when the client sent the request."""
    found = budget_ns(slo, elapsed, timeout=timeout, own_ns=ms(200), remaining_ns=remaining_ns)
    assert found == (expected, ms(elapsed or 0))


@pytest.mark.parametrize("value", [-1, 1.5, "200", True, [], {}])
def test_a_timeout_is_whole_microseconds(value: object) -> None:
    with pytest.raises(Refusal, match=r"parameters\.timeout: .* is not a time") as caught:
        budget_ns(None, None, timeout=value, own_ns=ms(200))
    assert "microseconds" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("priority", 1, "x-slo-ms"),
        ("sequence_id", 7, "keeps state"),
        ("sequence_id", "a", "keeps state"),
        ("sequence_start", True, "keeps state"),
        ("sequence_end", True, "keeps state"),
        ("shared_memory_region", "r", "shared memory"),
        ("triton_enable_empty_final_response", True, "one answer"),
    ],
)
def test_what_cannot_be_honoured_is_refused_unless_the_default_is_asked_for(name: str, value: object, fix: str) -> None:
    with pytest.raises(Refusal, match=rf"^parameters\.{name}: {value!r} cannot be honoured") as caught:
        check({name: value}, OF_REQUEST, "parameters")
    assert fix in caught.value.fix
    for default in (0, False, "", None):
        check({name: default}, OF_REQUEST, "parameters")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("time_out", "timeout"),
        ("Timeout", "timeout"),
        ("timeout_ms", "timeout"),
        ("x_slo_ms", "x-slo-ms"),
        ("slo_ms", "x-slo-ms"),
        ("binary_data_outputs", "binary_data_output"),
        ("binary_data", "binary_data_output"),
        ("sequence-id", "sequence_id"),
        ("prioriti", "priority"),
    ],
)
def test_a_mistyped_name_is_an_error(name: str, meant: str) -> None:
    with pytest.raises(Refusal, match=rf"^parameters\.{name}: unknown") as caught:
        check({name: 1}, OF_REQUEST, "parameters")
    assert f"did you mean {meant!r}?" in caught.value.fix


def test_parameters_of_ones_own_have_no_effect() -> None:
    own = {"content_type": "np", "temperature": 0.5, "trace": "abc", "headers": {}, "x" * 10_000: 1}
    check(own, OF_REQUEST, "parameters")
    with pytest.raises(Refusal, match=f"^parameters: {PARAMETERS_MAX + 1} parameters"):
        check({str(number): 1 for number in range(PARAMETERS_MAX + 1)}, OF_REQUEST, "parameters")


def test_few_names_are_compared_and_all_that_cannot_be_honoured_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(parameters, "_near", lambda name, known: compared.append(name))
    own: dict[str, object] = {"timeout": 1, "y" * (NAME_CHARS_MAX + 1): 1}
    own |= {f"own_{number}": 1 for number in range(PARAMETERS_MAX - 3)}
    check(own, OF_REQUEST, "parameters")
    assert compared == [f"own_{number}" for number in range(COMPARED_MAX)]
    with pytest.raises(Refusal, match=r"^parameters\.priority: 1 cannot be honoured"):
        check(own | {"priority": 1}, OF_REQUEST, "parameters")


def body(request: str = "", given: str = "", wanted: str = "") -> bytes:
    tensor = f'{{"name": "x", "datatype": "FP32", "shape": [1], "data": [1], "parameters": {{{given}}}}}'
    outputs = f'[{{"name": "y", "parameters": {{{wanted}}}}}, {{"name": "z"}}]'
    return f'{{"inputs": [{tensor}], "outputs": {outputs}, "parameters": {{{request}}}}}'.encode()


VALIDATOR = InputValidator(
    Signature(
        (Port("x", "FP32", (-1,)),), (Port("y", "FP32", (-1, 3)), Port("z", "INT8", (-1,)), Port("t", "BYTES", (-1,)))
    )
)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (body(request='"priority": 1'), r"parameters\.priority: 1 cannot be honoured"),
        (body(given='"shared_memory_region": "a"'), r"inputs\[0\]\.parameters\.shared_memory_region: 'a' cannot"),
        (body(given='"binary_data_sise": 4'), r"inputs\[0\]\.parameters\.binary_data_sise: unknown"),
        (body(wanted='"shared_memory_byte_size": 4'), r"outputs\[0\]\.parameters\.shared_memory_byte_size: 4 cannot"),
        (body(wanted='"classifcation": 4'), r"outputs\[0\]\.parameters\.classifcation: unknown"),
        (body(wanted='"classification": -1'), r"outputs\[0\]\.parameters\.classification: -1 is not a number of cl"),
        (body(wanted='"classification": true'), r"outputs\[0\]\.parameters\.classification: True is not"),
        (body().replace(b'"y", "parameters": {}', b'"t", "parameters": {"classification": 2}'), r"output 't' is BYTES"),
    ],
)
def test_parameters_are_checked_wherever_they_stand(sent: bytes, error: str) -> None:
    with pytest.raises(Refusal, match=f"(?s){error}"):
        read(sent, None, VALIDATOR)


def test_an_output_is_asked_for_once() -> None:
    with pytest.raises(Refusal, match=r"outputs\[1\].name: output 'y' occurs twice"):
        read(body().replace(b'"z"', b'"y"'), None, VALIDATOR)


def test_classes_are_asked_for_output_by_output() -> None:
    form = read(body(wanted='"classification": 2, "binary_data": true'), None, VALIDATOR).form
    assert (form.outputs, form.classes) == ({"y": True, "z": False}, {"y": 2})
    assert not read(body(wanted='"classification": 0'), None, VALIDATOR).form.classes
    check({"classification": 0}, OF_OUTPUT, "parameters")
