"""The REST surface fuzzed from its own OpenAPI description, and the payload reader from mutated requests."""

import http.client
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.serve.edge.inputs import InputValidator, read
from sloop.serve.edge.refusal import Refusal
from tests.serve.edge.fakes import SIGNATURE, Gateway

INTAKE = InputValidator(SIGNATURE)
BODY = json.dumps(
    {
        "id": "1",
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}},
            {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [[2]]},
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
).encode()


# That `data` has as many elements as `shape` says cannot be put in a schema, so not all it allows is accepted.
ACCEPTANCE = "positive_data_acceptance"
# The coverage phase calls a header nobody has described a violation; HTTP says to ignore it.
REJECTION = "negative_data_rejection"


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.parametrize(
    ("phases", "excluded"), [("examples,coverage", f"{ACCEPTANCE},{REJECTION}"), ("fuzzing", ACCEPTANCE)]
)
def test_the_description_keeps_its_word(gateway: Gateway, tmp_path: Path, phases: str, excluded: str) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", f"{gateway.url}/openapi.json"),
        *("--exclude-checks", excluded, "--phases", phases),
        *("--max-examples", "40", "--seed", "1", "--generation-database", "none", "--no-color"),
    ]
    fuzzed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path)
    assert fuzzed.returncode == 0, fuzzed.stdout + fuzzed.stderr
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)
    connection.request("GET", "/openapi.json")
    description = json.loads(connection.getresponse().read())
    content = description["paths"]["/v2/models/demo/infer"]["post"]["requestBody"]["content"]
    connection.request("POST", "/v2/models/demo/infer", json.dumps(content["application/json"]["example"]))
    assert connection.getresponse().status == 200
    connection.close()


@settings(max_examples=300)
@given(data=st.data())
def test_a_mutated_body_is_read_or_refused(data: st.DataObject) -> None:
    whole = BODY + bytes(16)
    start = data.draw(st.integers(0, len(whole)))
    piece = data.draw(st.one_of(st.binary(max_size=6), st.sampled_from([b"[", b"{", b'"', b"null", b"-1", b"1e999"])))
    mutated = whole[:start] + piece + whole[start + data.draw(st.integers(0, 8)) :]
    length = data.draw(st.sampled_from([str(len(BODY)), "", "0", "-1", "99999", "1e3", "²", None]))
    try:
        wanted = read(mutated, length, INTAKE)
    except Refusal as refusal:
        assert refusal.status == 400  # noqa: PT017  # both ways are right
    else:
        assert set(wanted.tensors) == {"x", "k"}


def test_the_unmutated_body_is_read() -> None:
    wanted = read(BODY + bytes(16), str(len(BODY)), INTAKE)
    assert wanted.form.outputs == {"y": True}
