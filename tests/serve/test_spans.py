"""OpenTelemetry spans of requests, as a receiver of OTLP over HTTP gets them."""

import gzip
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sloop.actions import End, StartBatch
from sloop.errors import InputError
from sloop.events import BatchFailed, Finished
from sloop.runlog.segments import segments_in
from sloop.serve.archive import archive
from sloop.serve.spans import RequestSpans, SpanProcess, SpanSettings, is_wanted, records_of
from sloop.units import ms
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId
from tests.serve.test_journal import SMALL, Server

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ZERO_NS = 1_700_000_000_000_000_000


class Receiver:
    """An OTLP receiver that keeps what it gets."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.take(self.path, self.rfile.read(int(self.headers["content-length"])), self.headers)
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def take(self, path: str, body: bytes, headers: Any) -> None:
        message = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2").ExportTraceServiceRequest
        body = gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body
        self.paths.add(path)
        for resource in message.FromString(body).resource_spans:
            self.resources.append({each.key: each.value.string_value for each in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    pytest.importorskip("opentelemetry.proto")
    made = Receiver()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@pytest.mark.live
def test_a_receiver_gets_the_spans_of_requests_through_all_segments(tmp_path: Path, receiver: Receiver) -> None:
    server = Server(tmp_path, SMALL)
    settings = SpanSettings(receiver.url, ratio=0.0)
    settings.check()
    spans = SpanProcess(settings)
    spans.start(tmp_path, server.journal.run, "demo", ZERO_NS)
    server.serve(1, name="mine", trace=f"{TRACE}-{SPAN}-01")
    server.serve(1, trace=f"{TRACE}-{SPAN}-00")
    server.run_to_segment(3)
    server.serve(1, late=True, trace=f"{TRACE}-{SPAN}-01")
    server.journal.close()
    spans.close(within_s=30)
    roots = [span for span in receiver.spans if span.name == "infer"]
    assert receiver.paths == {"/v1/traces"}
    assert receiver.resources[0]["sloop.deployment"] == "demo"
    assert [attributes(span)["sloop.outcome"] for span in roots] == ["served", "late"]
    assert [attributes(span).get("sloop.client_id") for span in roots] == ["mine", None]
    for root in roots:
        assert root.trace_id.hex() == TRACE
        assert root.parent_span_id.hex() == SPAN
        assert root.kind == 2, "a server's span"
        children = [span for span in receiver.spans if span.parent_span_id == root.span_id]
        assert [span.name for span in children] == ["queue", "batch"]
        (service,) = [span for span in receiver.spans if span.parent_span_id == children[1].span_id]
        assert service.name == "service"
        assert service.end_time_unix_nano - service.start_time_unix_nano == ms(1)
        assert root.start_time_unix_nano == children[0].start_time_unix_nano - ms(1)
        assert root.end_time_unix_nano == children[1].end_time_unix_nano
        assert children[0].end_time_unix_nano == children[1].start_time_unix_nano
        assert attributes(children[1])["sloop.batch_size"] == 1
    assert roots[0].start_time_unix_nano >= ZERO_NS
    assert len(receiver.spans) == 8


@pytest.mark.live
def test_a_receiver_that_is_away_holds_nobody(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto")
    server = Server(tmp_path)
    spans = SpanProcess(SpanSettings("http://127.0.0.1:9"))
    spans.start(tmp_path, server.journal.run, "demo", ZERO_NS)
    server.serve(3)
    server.journal.close()
    spans.close(within_s=30)
    assert spans.has_ended


def test_intervals_of_a_request_through_two_stages() -> None:
    fold = RequestSpans()
    rows: list[tuple[int, Any]] = [
        (2, Request(RequestId(1), 0, 1, 100)),
        (5, StartBatch(BatchId(0), ReplicaId(0), "a", (RequestId(1), RequestId(9)))),
        (9, BatchFailed(BatchId(0), ReplicaId(0), "it raised")),
        (10, StartBatch(BatchId(1), ReplicaId(0), "a", (RequestId(1),))),
        (20, Finished(BatchId(1), ReplicaId(0), 4)),
        (30, StartBatch(BatchId(2), ReplicaId(1), "b", (RequestId(1), RequestId(1)), (0, 1))),
        (50, Finished(BatchId(2), ReplicaId(1), 99)),
    ]
    assert [fold.append(*row) for row in rows] == [None] * len(rows)
    ended = fold.append(60, End(RequestId(1), Outcome.DROPPED, "too late"))
    assert ended is not None
    assert [(each.name, each.begin_ns, each.end_ns) for each in ended.spent] == [
        ("queue", 2, 5),
        ("batch", 5, 9),
        ("queue", 9, 10),
        ("batch", 10, 20),
        ("queue", 20, 30),
        ("batch", 30, 50),
        ("queue", 50, 60),
    ]
    assert ended.spent[1].attributes["sloop.error"] == "it raised"
    assert [each.children[0][1:3] for each in ended.spent if each.children] == [(16, 20), (30, 50)]


def test_the_client_decides_what_is_sampled_and_chance_for_the_others() -> None:
    def request(trace: str) -> Request:
        return Request(RequestId(1), 0, 0, 1, trace=trace)

    assert is_wanted(request(f"{TRACE}-{SPAN}-01"), 0.0, 0.9)
    assert not is_wanted(request(f"{TRACE}-{SPAN}-00"), 1.0, 0.1)
    assert is_wanted(request(f"{TRACE}-{SPAN}-03"), 0.0, 0.9)
    assert is_wanted(request(""), 0.5, 0.4)
    assert not is_wanted(request(""), 0.5, 0.6)


def test_what_cannot_be_exported_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="'localhost:4318' is not the URL of a receiver"):
        SpanSettings("localhost:4318").check()
    monkeypatch.setattr("sloop.serve.spans.find_spec", lambda _: None)
    with pytest.raises(InputError, match="not installed") as caught:
        SpanSettings("http://localhost:4318").check()
    assert caught.value.help.startswith("pip install opentelemetry-sdk ")


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otel/v1/traces", "https://a/otel/v1/traces"),
    ],
)
def test_the_path_of_a_receiver_is_added_if_there_is_none(endpoint: str, url: str) -> None:
    assert SpanSettings(endpoint).url == url


def test_segments_that_are_compressed_already_are_read_to_the_end(tmp_path: Path) -> None:
    server = Server(tmp_path, SMALL)
    server.run_to_segment(4)
    server.journal.close()
    archive(tmp_path, segments_in(tmp_path)[-1].path, 2**30, 0, time.time())
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        records = [entry for entry in records_of(tmp_path, server.journal.run, theirs) if entry is not None]
    assert len(records) == len(server.records)
