from typing import Any

import pytest

from sloop.errors import InputError, MachineError
from sloop.load.metadata import fetch_metadata, model_path, preferred_encoding, served_application
from sloop.load.plan import Encoding, split_url
from sloop.tensor import Port

pytestmark = pytest.mark.live


def test_reads_what_the_server_says(stub: Any) -> None:
    url = split_url(stub.url)
    assert fetch_metadata(url, "m", timeout_s=5).inputs == (Port("x", "FP32", (-1, 3)),)
    assert preferred_encoding(url, timeout_s=5) == Encoding.BINARY
    stub.server = b'{"name": "plain"}'
    assert preferred_encoding(url, timeout_s=5) == Encoding.JSON
    stub.server = b"hello"
    assert preferred_encoding(url, timeout_s=5) == Encoding.JSON


def test_a_sloop_server_names_its_application(stub: Any) -> None:
    url = split_url(stub.url)
    stub.server = b'{"application": "demo"}'
    assert served_application(url, timeout_s=5) == "demo"
    for said in (b"hello", b'{"name": "triton"}', b'{"application": ""}'):
        stub.server = said
        with pytest.raises(InputError, match="does not say what it serves"):
            served_application(url, timeout_s=5)


@pytest.mark.parametrize("said", [b"hello", b"[]", b'{"inputs": 3}', b'{"inputs": [{"name": "x"}]}'])
def test_other_servers_are_recognised(stub: Any, said: bytes) -> None:
    stub.metadata = said
    with pytest.raises(InputError, match="is not the protocol's"):
        fetch_metadata(split_url(stub.url), "m", timeout_s=5)


def test_no_server() -> None:
    with pytest.raises(MachineError, match=r"no server answers at http://127\.0\.0\.1:1"):
        fetch_metadata(split_url("http://127.0.0.1:1"), "m", timeout_s=5)


def test_names_are_quoted() -> None:
    assert model_path(split_url("http://h/base/"), "a/b c") == "/base/v2/models/a%2Fb%20c"
