"""What clients call their requests: in headers, in the body, and in the answers."""

import http.client
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop.serve.edge.identity import ID_CHARS_MAX, NAMELESS, Identity, identity_of, named
from tests.serve.edge.fakes import Gateway

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@given(st.text() | st.none(), st.text() | st.none(), st.text() | st.integers() | st.none())
def test_whatever_comes_a_name_is_short_and_visible(header: str | None, parent: str | None, own: object) -> None:
    found = identity_of(header, parent, own)
    assert len(found.request_id) <= ID_CHARS_MAX
    assert found.request_id.isascii()
    assert all(char.isprintable() and char != " " for char in found.request_id)
    assert found.trace == ""


@pytest.mark.parametrize(
    ("header", "parent", "own", "found"),
    [
        (None, None, "", NAMELESS),
        ("a-1", None, "own", Identity("a-1")),
        (None, None, "own", Identity("own")),
        (None, PARENT, "own", Identity("own", f"{TRACE}-{SPAN}-01")),
        (None, PARENT, "", Identity(TRACE, f"{TRACE}-{SPAN}-01")),
        ("x" * (ID_CHARS_MAX + 1), None, "", NAMELESS),
        ("a\tb", None, "ü", NAMELESS),
        (None, f"cc-{TRACE}-{SPAN}-00-later", "", Identity(TRACE, f"{TRACE}-{SPAN}-00")),
        (None, f"ff-{TRACE}-{SPAN}-00", "", NAMELESS),
        (None, f"00-{TRACE}-{'0' * 16}-01", "", NAMELESS),
        (None, f"00-{'0' * 32}-{SPAN}-01", "", NAMELESS),
        (None, f"00-{TRACE.upper()}-{SPAN}-01", "", NAMELESS),
        (None, "x" * 10_000, "", NAMELESS),
    ],
)
def test_the_name_of_a_request(header: str | None, parent: str | None, own: str, found: Identity) -> None:
    assert identity_of(header, parent, own) == found


def test_only_text_is_a_name() -> None:
    assert named(7) == named(None) == named(b"x") == ""


# Over a socket


def asked(gateway: Gateway, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, str | None, dict[str, Any]]:
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)
    try:
        connection.request("POST", "/v2/models/demo/infer", json.dumps(body).encode(), headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("x-request-id"), json.loads(answer.read())
    finally:
        connection.close()


BODY = {
    "inputs": [
        {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2.5, 3, 4]},
        {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]},
    ]
}


@pytest.mark.live
def test_the_name_reaches_the_log_and_comes_back(gateway: Gateway) -> None:
    assert asked(gateway, BODY, {"x-request-id": "a-1", "traceparent": PARENT})[:2] == (200, "a-1")
    status, echoed, answer = asked(gateway, BODY | {"id": "own"}, {})
    assert (status, echoed, answer["id"]) == (200, None, "own")
    assert asked(gateway, BODY, {})[1] is None
    assert gateway.driver.names[-3:] == [("a-1", f"{TRACE}-{SPAN}-01"), ("own", ""), ("", "")]


@pytest.mark.live
def test_errors_have_the_name_of_the_request(gateway: Gateway) -> None:
    status, echoed, answer = asked(gateway, {"inputs": []}, {"x-request-id": "a-2"})
    assert (status, echoed) == (400, "a-2")
    assert "(request a-2); help:" in answer["error"]
    status, echoed, answer = asked(gateway, {"inputs": []}, {"x-request-id": "x" * 200})
    assert (status, echoed) == (400, None)
    assert "(request" not in answer["error"]
