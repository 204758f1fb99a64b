import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.load import wire
from sloop.load.wire import Answer, AnswerReader, BrokenAnswer, RequestHead

BODIES = st.binary(max_size=40)


def read(pieces: Sequence[bytes]) -> Answer | None:
    reader = AnswerReader()
    for piece in pieces[:-1]:
        assert reader.feed(piece) is None, "an answer before its end"
    return reader.feed(pieces[-1])


def cut(content: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(content), *(place % len(content) for place in places)})
    return [content[first:after] for first, after in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(BODIES, st.integers(200, 599).filter(lambda status: status != 304), st.lists(st.integers(0, 500), max_size=6))
def test_an_answer_is_the_same_however_it_is_cut(body: bytes, status: int, places: list[int]) -> None:
    if status == 204:
        body = b""
    head = b"HTTP/1.1 %d Some Reason\r\nContent-LENGTH:  %d \r\nX-Slo-Met: False\r\n\r\n" % (status, len(body))
    assert read(cut(head + body, places)) == Answer(status, body, False, False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=20), max_size=5), st.booleans(), st.lists(st.integers(0, 500), max_size=6)
)
def test_chunks_are_joined(chunks: list[bytes], has_trailer: bool, places: list[int]) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    framed = b"".join(b"%x;name=1\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    content = head + framed + (b"0\r\nx-check: 1\r\n\r\n" if has_trailer else b"0\r\n\r\n")
    assert read(cut(content, places)) == Answer(200, b"".join(chunks), True, None)


def test_answers_follow_one_another() -> None:
    reader = AnswerReader()
    for body in (b"one", b"", b"three"):
        answer = reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        assert answer is not None
        assert answer.body == body


def test_provisional_answers_are_passed_over() -> None:
    provisional = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"
    content = provisional + b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"
    for place in range(1, len(content)):
        assert read([content[:place], content[place:]]) == Answer(200, b"x", False, None)


def test_a_body_without_length_ends_with_the_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\nx-slo-met: true\r\n\r\nhalf") is None
    assert reader.feed(b" and half") is None
    assert reader.close() == Answer(200, b"half and half", True, True)
    assert AnswerReader().close() is None


@pytest.mark.parametrize(
    ("head", "is_last"),
    [
        (b"HTTP/1.1 200 OK\r\n", False),
        (b"HTTP/1.1 200 OK\r\nConnection: TE, Close\r\n", True),
        (b"HTTP/1.0 200 OK\r\n", True),
        (b"HTTP/1.0 200 OK\r\nconnection: Keep-Alive\r\n", False),
    ],
)
def test_which_connections_go_on(head: bytes, is_last: bool) -> None:
    answer = AnswerReader().feed(head + b"content-length: 0\r\n\r\n")
    assert answer is not None
    assert answer.is_last == is_last


def test_a_cut_off_answer_is_none() -> None:
    reader = AnswerReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf")
    assert reader.close() is None


@pytest.mark.parametrize(
    "content",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nfffffffff\r\n",
        b"HTTP/1.1 " + b"x" * 70_000,
    ],
)
def test_what_is_no_answer_is_refused(content: bytes) -> None:
    with pytest.raises(BrokenAnswer):
        AnswerReader().feed(content)


def test_bodies_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BODY_BYTES_MAX", 10)
    reader = AnswerReader()
    with pytest.raises(BrokenAnswer, match="a body of over 10 bytes"):
        reader.feed(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 11)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.binary(max_size=30)
        | st.sampled_from(
            [
                b"HTTP/1.1 200 OK\r\n",
                b"\r\n",
                b"\r\n\r\n",
                b"a",
                b"0\r\n",
                b"content-length: 3\r\n",
                b"transfer-encoding: chunked\r\n",
                b"HTTP/1.1 100 Go\r\n\r\n",
            ]
        ),
        max_size=12,
    )
)
def test_only_broken_answers_escape(pieces: list[bytes]) -> None:
    reader = AnswerReader()
    try:
        for piece in pieces:
            reader.feed(piece)
        reader.close()
    except BrokenAnswer:
        pass


def test_heads_say_what_follows() -> None:
    head = RequestHead(path="/v2/models/m/infer", host="h:1", slo_ms=200.0, content_bytes=30, json_bytes=20)
    assert head.render(0).decode() == (
        "POST /v2/models/m/infer HTTP/1.1\r\nhost: h:1\r\nuser-agent: sloop-load\r\n"
        "content-type: application/octet-stream\r\ncontent-length: 30\r\ninference-header-content-length: 20\r\n"
        "x-slo-ms: 200\r\n\r\n"
    )
    assert head.render(1_234_567).endswith(b"\r\nx-slo-ms: 200\r\nx-elapsed-ms: 1.235\r\n\r\n")
    plain = RequestHead(path="/", host="h", slo_ms=0.5, content_bytes=2, json_bytes=2).render(0)
    assert b"content-type: application/json\r\n" in plain
    assert b"inference-header" not in plain
