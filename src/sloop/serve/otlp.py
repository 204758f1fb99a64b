"""The process that sends spans by OTLP over HTTP (`sloop.serve.spans`). It needs the OpenTelemetry packages."""

import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sloop import __version__
from sloop.serve.archive import NICE
from sloop.serve.spans import RequestSpans, SpannedRequest, Spent, is_wanted, records_of
from sloop.serve.stderr import log_directly
from sloop.vocabulary import Outcome

SPANS_MAX: Final = 512
"""In one export."""
EXPORT_S_MAX: Final = 5.0


class SpanExporter:
    """Turns requests into spans and sends them. `zero_unix_ns` is the Unix time of the log's instant 0."""

    def __init__(self, name: str, zero_unix_ns: int, url: str, ratio: float) -> None:
        self._zero_ns, self._ratio = zero_unix_ns, ratio
        service = os.environ.get("OTEL_SERVICE_NAME", "sloop")
        self._resource = Resource.create(
            {"service.name": service, "service.version": __version__, "sloop.deployment": name}
        )
        self._scope = InstrumentationScope("sloop", __version__)
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_S_MAX)
        self._random = random.SystemRandom()
        self._waiting: list[ReadableSpan] = []

    def add(self, ended: SpannedRequest) -> None:
        """Send the spans of a request, soon."""
        request, end = ended.request, ended.end
        if not is_wanted(request, self._ratio, self._random.random()):
            return
        trace, span, flags = request.trace.split("-") if request.trace else ("", "", "01")
        trace_id = int(trace, 16) if trace else self._random.getrandbits(128) or 1
        mark = TraceFlags(int(flags, 16))

        def context() -> SpanContext:
            return SpanContext(trace_id, self._random.getrandbits(64) or 1, is_remote=False, trace_flags=mark)

        parent = SpanContext(trace_id, int(span, 16), is_remote=True, trace_flags=mark) if span else None
        said = {
            "sloop.application": request.application,
            "sloop.version": request.version,
            "sloop.client_id": request.client_id,
            "sloop.why": end.why,
        }
        whole = Spent(
            "infer",
            request.arrived_ns,
            ended.end_ns,
            {
                "sloop.request": request.id,
                "sloop.outcome": end.outcome.value,
                "sloop.deadline_ms": request.slo_ns / 1e6,
                **{key: value for key, value in said.items() if value},
            },
        )
        is_answered = end.outcome in (Outcome.SERVED, Outcome.LATE)
        status = Status() if is_answered else Status(StatusCode.ERROR, end.why or end.outcome.value)
        root = context()
        self._waiting.append(self._span(whole, root, parent, SpanKind.SERVER, status))
        self._add_children(ended.spent, root, context)
        if len(self._waiting) >= SPANS_MAX:
            self.flush()

    def _add_children(self, spent: Sequence[Spent], parent: SpanContext, context: Callable[[], SpanContext]) -> None:
        for each in spent:
            own = context()
            self._waiting.append(self._span(each, own, parent, SpanKind.INTERNAL, Status()))
            self._add_children(each.children, own, context)

    def _span(
        self, spent: Spent, own: SpanContext, parent: SpanContext | None, kind: SpanKind, status: Status
    ) -> ReadableSpan:
        return ReadableSpan(
            name=spent.name,
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=spent.attributes,
            kind=kind,
            status=status,
            start_time=self._zero_ns + spent.begin_ns,
            end_time=self._zero_ns + spent.end_ns,
            instrumentation_scope=self._scope,
        )

    def flush(self) -> None:
        """Send what waits. What the receiver does not take is lost; the exporter says so on stderr."""
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._exporter.export(waiting)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: socket, folder, run, deployment, Unix time of instant 0, URL, ratio."""
    fd, folder, run, name, zero_unix_ns, url, ratio = arguments
    log_directly(logging.WARNING)
    os.nice(NICE)
    exporter, fold = SpanExporter(name, int(zero_unix_ns), url, float(ratio)), RequestSpans()
    with socket.socket(fileno=int(fd)) as stop:
        for entry in records_of(Path(folder), run, stop):
            if entry is None:
                exporter.flush()
            elif (ended := fold.append(*entry)) is not None:
                exporter.add(ended)
    exporter.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
