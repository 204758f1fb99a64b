"""Where one HTTP message ends and the next begins (RFC 9112): truncated, ambiguous and smuggled messages, and the forms
of heads that clients and proxies send."""

import gzip
import http.client
import json
import random
import socket
import zlib
from collections.abc import Iterator

import pytest

from sloop.app.limits import ServerLimits
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.http import HttpServer
from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, web_server
from tests.serve.edge.raw import Answer, answers_to, converse, one_answer

pytestmark = pytest.mark.live

HEAD = b"POST /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\n"
BODY = json.dumps(
    {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]},
            {"name": "k", "datatype": "INT64", "shape": [1, 1], "data": [2]},
        ]
    }
).encode()
LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n"
SMUGGLED = b"GET /v2/models/smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def shared_web(loop_thread: LoopThread) -> Iterator[Gateway]:
    """A server without gRPC; `gateway` hands it out with a clean driver."""
    gateway = Gateway(FakeDriver())
    gateway.service = make_service(gateway)
    server = web_server(gateway.service)
    gateway.port = loop_thread.serve(server)
    yield gateway
    loop_thread.call(server.close(1.0))


@pytest.fixture
def gateway(shared_web: Gateway) -> Gateway:
    shared_web.driver.seen.clear()
    return shared_web


def post(body: bytes, *fields: bytes) -> bytes:
    """A whole request with a length."""
    return HEAD + b"".join(field + b"\r\n" for field in (b"content-length: %d" % len(body), *fields)) + b"\r\n" + body


TRUNCATED = {
    "a short body": HEAD + b"content-length: 20000\r\n\r\n" + BODY,
    "chunks without the last": HEAD + CHUNKED + b"%x\r\n%b\r\n" % (len(BODY), BODY),
    "half a chunk": HEAD + CHUNKED + b"ffff\r\n" + BODY,
    "a chunk without its end": HEAD + CHUNKED + b"%x\r\n%b" % (len(BODY), BODY),
    "no end of the trailer": HEAD + CHUNKED + b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY),
    "half a head": HEAD,
    "half a line": b"GET /v2/hea",
}


@pytest.mark.parametrize("sent", TRUNCATED.values(), ids=TRUNCATED)
def test_a_truncated_request_is_refused(gateway: Gateway, sent: bytes) -> None:
    found = converse(gateway, sent, ends=True)
    assert [answer.status for answer in found] == [400]
    assert "ends before it is complete" in found[0].error
    assert not gateway.driver.seen


SMUGGLING = {
    "length and chunks": HEAD + b"content-length: 6\r\n" + CHUNKED + b"0\r\n\r\n" + SMUGGLED,
    "chunks and length": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": HEAD + b"content-length: 0\r\ncontent-length: 44\r\n\r\n" + SMUGGLED,
    "two equal lengths": HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}" + SMUGGLED,
    "a list of lengths": HEAD + b"content-length: 2, 2\r\n\r\n{}" + SMUGGLED,
    "a negative length": HEAD + b"content-length: -1\r\n\r\n" + SMUGGLED,
    "a length with a plus": HEAD + b"content-length: +2\r\n\r\n{}" + SMUGGLED,
    "a hexadecimal length": HEAD + b"content-length: 0x2\r\n\r\n{}" + SMUGGLED,
    "an empty length": HEAD + b"content-length:\r\n\r\n" + SMUGGLED,
    "two words of length": HEAD + b"content-length: 1 2\r\n\r\n{}" + SMUGGLED,
    "a length of 5000 digits": HEAD + b"content-length: " + b"9" * 5000 + b"\r\n\r\n" + SMUGGLED,
    "a length beyond 64 bits": HEAD + b"content-length: 18446744073709551617\r\n\r\n{" + SMUGGLED,
    "a length before a bare LF": HEAD + b"content-length: 0\nx: y\r\n\r\n" + SMUGGLED,
    "no size of a chunk": HEAD + CHUNKED + b"ZZZZ\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a negative chunk": HEAD + CHUNKED + b"-1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk with a plus": HEAD + CHUNKED + b"+2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk with 0x": HEAD + CHUNKED + b"0x2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk and a space": HEAD + CHUNKED + b"2 \r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk beyond 64 bits": HEAD + CHUNKED + b"10000000000000002\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "a chunk longer than it says": HEAD + CHUNKED + b"1\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
    "chunks with bare LF": HEAD + CHUNKED + b"2\n{}\n0\n\n" + SMUGGLED,
    "a length in the trailer": HEAD + CHUNKED + b"2\r\n{}\r\n0\r\ncontent-length: 44\r\n\r\n" + SMUGGLED,
    "chunked twice": HEAD + b"transfer-encoding: chunked\r\n" + CHUNKED + b"0\r\n\r\n" + SMUGGLED,
    "chunked, then something": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "nearly chunked": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "a tab before chunked": HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "identity": HEAD + b"transfer-encoding: identity\r\ncontent-length: 0\r\n\r\n" + SMUGGLED,
    "a space before the colon": HEAD + b"content-length : 44\r\n\r\n" + SMUGGLED,
    "a folded line": HEAD + b"x: y\r\n content-length: 44\r\n\r\n" + SMUGGLED,
    "a folded first line": b"POST /v2 HTTP/1.1\r\n host: x\r\n\r\n" + SMUGGLED,
    "a bare LF": b"GET /v2 HTTP/1.1\nhost: x\n\n" + SMUGGLED,
    "a bare CR": b"GET /v2 HTTP/1.1\r\nhost: x\rx: y\r\n\r\n" + SMUGGLED,
    "NUL in a value": b"GET /v2 HTTP/1.1\r\nhost: x\r\nx: a\0b\r\n\r\n" + SMUGGLED,
    "NUL in a name": b"GET /v2 HTTP/1.1\r\nhost: x\r\nx\0: a\r\n\r\n" + SMUGGLED,
    "NUL in the target": b"GET /v2\0 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "no colon": b"GET /v2 HTTP/1.1\r\nhost: x\r\nnothing\r\n\r\n" + SMUGGLED,
    "an empty name": b"GET /v2 HTTP/1.1\r\nhost: x\r\n: y\r\n\r\n" + SMUGGLED,
    "two hosts": b"GET /v2 HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n" + SMUGGLED,
    "no host": b"GET /v2 HTTP/1.1\r\n\r\n" + SMUGGLED,
    "a space in the target": b"GET /v2 /v2 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "UTF-8 in the target": "GET /v2/é HTTP/1.1\r\nhost: x\r\n\r\n".encode() + SMUGGLED,
    "a fragment": b"GET /v2#x HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "no path": b"GET v2 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "a proxy's tunnel": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "a method in lower case": b"get /v2 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED,
    "HTTP/2's preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SMUGGLED,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n" + SMUGGLED,
    "chunks in HTTP/1.0": b"POST /v2 HTTP/1.0\r\nhost: x\r\n" + CHUNKED + b"0\r\n\r\n" + SMUGGLED,
    "what follows a close": b"GET /v2 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + SMUGGLED,
}
OTHER_STATUS = {"chunks, compressed": 501, "what follows a close": 200, "HTTP/2": 505, "HTTP/0.9": 505}
SMUGGLING |= {
    "chunks, compressed": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "HTTP/2": b"GET /v2 HTTP/2.0\r\nhost: x\r\n\r\n" + SMUGGLED,
    "HTTP/0.9": b"GET /v2\r\n\r\n" + SMUGGLED,
}


@pytest.mark.parametrize("name", SMUGGLING)
@pytest.mark.parametrize("cut", [0, 1, 7])
def test_an_ambiguous_message_is_refused_and_ends_the_connection(gateway: Gateway, name: str, cut: int) -> None:
    """Nothing that follows it is a request, in however small pieces it arrives."""
    found = converse(gateway, SMUGGLING[name], cut=cut)
    assert [answer.status for answer in found] == [OTHER_STATUS.get(name, 400)]
    assert found[0].headers["connection"] == "close"
    assert not gateway.driver.seen


def test_a_request_before_an_invalid_one_is_answered(gateway: Gateway) -> None:
    found = converse(gateway, post(BODY) + LIVE + b"HELLO\r\n\r\n" + SMUGGLED)
    assert [answer.status for answer in found] == [200, 200, 400]


@pytest.mark.parametrize("size", [8 * 1024 + 1, 60_000])
def test_a_long_target_is_refused(gateway: Gateway, size: int) -> None:
    found = converse(gateway, b"GET /" + b"a" * size + b" HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED)
    assert [answer.status for answer in found] == [414]


@pytest.mark.parametrize(
    "fields", [b"x: " + b"a" * 70_000 + b"\r\n", b"x: " + b"a" * 700_000, b"x: a\r\n" * 8000, b"x: a\r\n" * 70_000]
)
def test_a_large_head_is_refused(gateway: Gateway, fields: bytes) -> None:
    found = converse(gateway, b"GET /v2 HTTP/1.1\r\nhost: x\r\n" + fields + b"\r\n" + SMUGGLED)
    assert [answer.status for answer in found] == [431]


def test_a_long_trailer_is_refused(gateway: Gateway) -> None:
    trailer = b"".join(b"x-%d: %b\r\n" % (place, b"a" * 1000) for place in range(100))
    found = converse(gateway, HEAD + CHUNKED + b"2\r\n{}\r\n0\r\n" + trailer + b"\r\n" + SMUGGLED)
    assert found[-1].status == 431


def test_a_trailer_changes_nothing(loop_thread: LoopThread) -> None:
    gateway = Gateway(FakeDriver())
    server = web_server(make_service(gateway, api_key="secret"))
    gateway.port = loop_thread.serve(server)
    chunks = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    found = converse(gateway, HEAD + CHUNKED + chunks + b"x-api-key: secret\r\n\r\n")
    assert [answer.status for answer in found] == [401]
    loop_thread.call(server.close(1.0))


GOOD_HEADS = {
    "a percent-encoded path": b"GET /v2/%68ealth/live HTTP/1.1\r\nhost: x\r\n\r\n",
    "a whole URL": b"GET http://x:80/v2/health/live?a=b HTTP/1.1\r\nhost: x\r\n\r\n",
    "another scheme": b"GET HTTPS://x/v2/health/live HTTP/1.1\r\nhost: y\r\n\r\n",
    "a query": b"GET /v2/health/live?a=%20&b=? HTTP/1.1\r\nhost: x\r\n\r\n",
    "empty lines before": b"\r\n\r\n" + LIVE,
    "no host in HTTP/1.0": b"GET /v2/health/live HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    "a wish for HTTP/2": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
    "a wish and a length": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"content-length: 2\r\n\r\n{}",
    "a wish and chunks": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n"
    + UPGRADE
    + CHUNKED
    + b"2\r\n{}\r\n0\r\na: b\r\n\r\n",
    "a wish and no body": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"content-length: 0\r\n\r\n",
    "an empty value": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\naccept:\r\n\r\n",
    "UTF-8 in a value": "GET /v2/health/live HTTP/1.1\r\nhost: x\r\nx: é\r\n\r\n".encode(),
    "a body with GET": b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
    "chunks with extensions": HEAD.replace(b"POST /v2/models/demo/infer", b"GET /v2/health/live")
    + CHUNKED
    + b"2;a=b\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", GOOD_HEADS)
@pytest.mark.parametrize("cut", [0, 1])
def test_whatever_http_allows_is_read(gateway: Gateway, name: str, cut: int) -> None:
    found = converse(gateway, GOOD_HEADS[name] + LIVE, cut=cut)
    assert [(answer.status, answer.body) for answer in found] == [(200, b'{"live":true}')] * 2


@pytest.mark.parametrize("cut", [0, 1, 1000])
@pytest.mark.parametrize("form", ["length", "chunks", "gzip", "gzipped chunks"])
def test_a_body_after_a_wish_for_another_protocol_is_a_body(gateway: Gateway, form: str, cut: int) -> None:
    """As Java's client sends it; what stands in the body is no request."""
    body = BODY[:-1] + b', "parameters": {"a": "' + b"\\r\\n".join([b"GET /v2/models/smuggled HTTP/1.1"] * 200) + b'"}}'
    sent, fields = body, UPGRADE
    if "gzip" in form:
        sent, fields = gzip.compress(body, mtime=0), UPGRADE + b"content-encoding: gzip\r\n"
    if "chunks" in form:
        pieces = [sent[at : at + 100] for at in range(0, len(sent), 100)]
        whole = (
            HEAD + fields + CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
        )
    else:
        whole = HEAD + fields + b"content-length: %d\r\n\r\n%b" % (len(sent), sent)
    found = converse(gateway, (whole + LIVE) * 2, cut=cut)
    assert [answer.status for answer in found] == [200] * 4
    assert len(gateway.driver.seen) == 2


@pytest.mark.parametrize(
    ("framing", "statuses"),
    [
        (b"content-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED, [200]),
        (CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED), [200]),
        (b"content-length: 1000\r\n\r\n" + SMUGGLED, [400]),
        (CHUNKED + b"ZZ\r\n" + SMUGGLED, [400]),
        (b"content-length: 99999999\r\n\r\n" + SMUGGLED, [413]),
        (b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SMUGGLED, [501]),
        (b"content-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}", [400]),
        (b"expect: wonders\r\ncontent-length: 2\r\n\r\n{}" + SMUGGLED, [417]),
    ],
)
@pytest.mark.parametrize("cut", [0, 1])
def test_a_wish_for_another_protocol_smuggles_nothing(
    gateway: Gateway, framing: bytes, statuses: list[int], cut: int
) -> None:
    head = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n" + UPGRADE
    # Nobody waits for what is inflated, or computed, if the client has ended its side before.
    found = converse(gateway, head + framing, cut=cut, ends=b"content-encoding" not in framing)
    assert [answer.status for answer in found] == statuses


def test_head_is_answered_like_get_without_a_body(gateway: Gateway) -> None:
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as wire:
        wire.sendall(LIVE.replace(b"GET", b"HEAD") + LIVE)
        received = wire.makefile("rb")
        first, second = one_answer(received, has_body=False), one_answer(received)
    assert (first.status, first.headers["content-length"]) == (200, "13")
    assert second.body == b'{"live":true}'


@pytest.mark.parametrize(
    ("target", "status", "allowed"),
    [
        ("*", 204, "OPTIONS"),
        ("/v2/models", 204, "GET, HEAD, OPTIONS"),
        ("/v2/models/demo/infer", 204, "POST, OPTIONS"),
        ("/nothing", 404, None),
    ],
)
def test_options_says_what_a_path_allows(gateway: Gateway, target: str, status: int, allowed: str | None) -> None:
    (found,) = converse(gateway, f"OPTIONS {target} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert (found.status, found.headers.get("allow")) == (status, allowed)
    assert "content-length" in found.headers or status == 204


def test_http_1_0_closes_unless_asked_to_stay(gateway: Gateway) -> None:
    found = converse(gateway, LIVE.replace(b"1.1", b"1.0") + SMUGGLED)
    assert [answer.status for answer in found] == [200]
    kept = converse(gateway, b"GET /v2 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n" * 2, ends=True)
    assert [answer.headers.get("connection") for answer in kept] == ["keep-alive"] * 2


def test_answers_tell_how_long_their_connection_stays(gateway: Gateway) -> None:
    """For clients that would otherwise send a request on a connection that the server closes at this moment."""
    stays, last = converse(gateway, LIVE + LIVE.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
    assert stays.headers["connection"] == "keep-alive"
    assert stays.headers["keep-alive"] == f"timeout={ServerLimits().idle_s:g}"
    assert last.headers["connection"] == "close"
    assert "keep-alive" not in last.headers


def test_expect_is_answered_before_the_body(gateway: Gateway) -> None:
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as wire:
        wire.sendall(HEAD + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert wire.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        wire.sendall(b"{}")
        assert one_answer(wire.makefile("rb")).status == 400
    other = HEAD + b"content-length: 2\r\nexpect: wonders\r\n\r\n{}" + SMUGGLED
    assert [answer.status for answer in converse(gateway, other)] == [417]
    old = HEAD.replace(b"1.1", b"1.0") + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n{}"
    assert [answer.status for answer in converse(gateway, old)] == [400], "HTTP/1.0 knows no provisional answers"


@pytest.mark.parametrize(
    "before", [LIVE, post(BODY), post(BODY) + LIVE * 200, b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n"]
)
def test_expect_behind_other_requests_is_answered_after_them(gateway: Gateway, before: bytes) -> None:
    with socket.create_connection((gateway.host, gateway.port), timeout=10) as wire:
        wire.sendall(before + HEAD + b"content-length: 2\r\nexpect: 100-continue\r\n\r\n")
        received = wire.makefile("rb")
        for _ in range(before.count(b"HTTP/1.1")):
            assert one_answer(received).status in (200, 404)
        assert [received.readline(), received.readline()] == [b"HTTP/1.1 100 Continue\r\n", b"\r\n"]
        wire.sendall(b"{}" + LIVE)
        assert [one_answer(received).status for _ in range(2)] == [400, 200]


def test_who_does_not_wait_for_an_answer_to_expect_gets_none(gateway: Gateway) -> None:
    """Only the answers, however much of the body is here: `one_answer` would read a second 100 as one."""
    expecting = post(BODY, b"expect: 100-continue")
    found = converse(gateway, expecting + LIVE + expecting + LIVE)
    assert [answer.status for answer in found] == [200] * 4


def test_expect_of_a_refused_request_ends_the_connection(gateway: Gateway) -> None:
    """Nobody knows whether the client sends the body then, so what follows could be a body or a request."""
    found = converse(gateway, HEAD + b"content-length: 999999999999\r\nexpect: 100-continue\r\n\r\n" + SMUGGLED)
    assert [answer.status for answer in found] == [413]
    assert "999999999999 bytes; the limit is 100000" in found[0].error


@pytest.mark.parametrize("fields", [b"x-slo-ms: \xc2\xa0200", b"x-slo-ms: \xd9\xa1", b"x-slo-ms: 200\r\nx-slo-ms: 300"])
def test_a_deadline_that_is_not_plain_is_refused(gateway: Gateway, fields: bytes) -> None:
    (found,) = converse(gateway, post(BODY, fields))
    assert found.status == 400
    assert "x-slo-ms" in found.error


@pytest.mark.parametrize("length", ["9" * 5000, "-1", "²", "1e3", ""])
def test_a_length_of_json_that_is_none_is_refused(gateway: Gateway, length: str) -> None:
    field = f"inference-header-content-length: {length}".encode()
    (found,) = converse(gateway, post(BODY, field))
    assert found.status == 400


@pytest.mark.parametrize("cut", [0, 1, 1000])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_compressed_body_is_inflated(gateway: Gateway, coding: str, cut: int) -> None:
    pressed = gzip.compress(BODY) if coding == "gzip" else zlib.compress(BODY)
    field = b"content-encoding: " + coding.encode()
    found = converse(gateway, post(pressed, field) + LIVE, cut=cut)
    assert [answer.status for answer in found] == [200, 200]
    assert len(gateway.driver.seen) == 1


@pytest.mark.parametrize(
    "pressed", [gzip.compress(BODY, mtime=0)[:-4], gzip.compress(BODY, mtime=0) * 2, b"no gzip at all", b""]
)
def test_a_compressed_body_that_is_broken_is_refused(gateway: Gateway, pressed: bytes) -> None:
    (found,) = converse(gateway, post(pressed, b"content-encoding: gzip"))
    assert found.status == 400
    assert not gateway.driver.seen


def test_a_large_answer_is_compressed_if_the_client_asks_for_it(gateway: Gateway) -> None:
    connection = http.client.HTTPConnection(gateway.host, gateway.port, timeout=10)
    plain: dict[str, bytes] = {}
    for accepted in ("identity", "gzip;q=0", "br, gzip;q=0.5"):
        connection.request("GET", "/openapi.json", headers={"accept-encoding": accepted})
        answer = connection.getresponse()
        body = answer.read()
        if answer.getheader("content-encoding") == "gzip":
            assert len(body) < 10_000
            body = gzip.decompress(body)
            assert accepted == "br, gzip;q=0.5"
        plain[accepted] = body
    connection.close()
    assert len(set(plain.values())) == 1
    assert len(plain["identity"]) > 16 * 1024


@pytest.mark.parametrize(("size", "is_compressed"), [(2**14, False), (2**18, True), (2**18 + 1, False)])
def test_answers_that_would_take_long_to_compress_are_not(
    loop_thread: LoopThread, size: int, is_compressed: bool
) -> None:
    gateway, body = Gateway(FakeDriver()), b"1" * size
    server = HttpServer(
        lambda exchange: exchange.reply(200, body), bodies=BodyMemory(1000), limits=ServerLimits(requests=8)
    )
    gateway.port = loop_thread.serve(server)
    (answer,) = converse(gateway, LIVE[:-2] + b"accept-encoding: gzip\r\n\r\n")
    assert ("content-encoding" in answer.headers) == is_compressed
    assert (gzip.decompress(answer.body) if is_compressed else answer.body) == body
    loop_thread.call(server.close(1.0))


@pytest.fixture
def for_browsers(loop_thread: LoopThread) -> Iterator[Gateway]:
    gateway = Gateway(FakeDriver())
    server = web_server(make_service(gateway, api_key="secret"), cors_origin="https://app.example")
    gateway.port = loop_thread.serve(server)
    yield gateway
    loop_thread.call(server.close(1.0))


def test_a_browser_may_use_it_if_told_so(for_browsers: Gateway, gateway: Gateway) -> None:
    preflight = (
        b"OPTIONS /v2/models/demo/infer HTTP/1.1\r\nhost: x\r\norigin: https://app.example\r\n"
        b"access-control-request-method: POST\r\naccess-control-request-headers: x-api-key\r\n\r\n"
    )
    asked, served, refused = converse(for_browsers, preflight + post(BODY, b"x-api-key: secret") + post(BODY))
    assert [asked.status, served.status, refused.status] == [204, 200, 401]
    assert "x-api-key" in asked.headers["access-control-allow-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    for each in (asked, refused, served):
        assert each.headers["access-control-allow-origin"] == "https://app.example"
        assert each.headers["vary"] == "origin"
    assert "x-slo-met" in served.headers["access-control-expose-headers"]
    long = preflight[:-2] + UPGRADE + b"content-length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED
    assert [each.status for each in converse(for_browsers, long, ends=True)] == [413], "its body is no request"
    (without,) = converse(gateway, preflight, ends=True)
    assert without.status == 204
    assert "access-control-allow-origin" not in without.headers


def test_random_bytes_and_mutations_get_no_success_but_the_right_one(gateway: Gateway) -> None:
    """Requests with bytes replaced, inserted or removed: each is answered or closed, and the server serves on."""
    chance = random.Random(7)
    whole = post(BODY)
    for _ in range(300):
        mutated = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(mutated))
            mutated[at : at + chance.choice([0, 1, 3])] = chance.choice(
                [b"\r\n", b"\n", b"\0", b" ", b":", b"chunked", b"0", b"\xff", b""]
            )
        found = answers_to(gateway, bytes(mutated), ends=True)
        assert all(isinstance(answer, Answer) for answer in found)
        assert {answer.status for answer in found} <= {200, 400, 404, 405, 408, 413, 414, 415, 431, 501, 505}
    assert converse(gateway, LIVE, ends=True)[0].status == 200
