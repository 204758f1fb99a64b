"""The Open Inference Protocol v2 over REST: routes, headers and status codes of an `InferenceService`.

Every request is answered, and every answer that is not a success is `{"error": …}`. Source: Open Inference Protocol v2,
"HTTP/REST"; docs/serving.md lists the status codes and headers.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final
from urllib.parse import parse_qs

import msgspec

from sloop.serve.gateway import service as offered
from sloop.serve.gateway.http import Exchange
from sloop.serve.gateway.inputs import ELAPSED, HEADER_LENGTH, SLO, ParsedRequest, budget_ns, read, write
from sloop.serve.gateway.openapi import describe
from sloop.serve.gateway.refusal import Refusal, bad, refusal_of
from sloop.serve.gateway.service import InferenceService
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port
from sloop.text import quoted
from sloop.vocabulary import Outcome

MET: Final = ("x-slo-met", "true")
NOT_MET: Final = ("x-slo-met", "false")
EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
OCTETS: Final = "application/octet-stream"
DECISIONS: Final = 100
DECISIONS_MAX: Final = 10_000

_log = logging.getLogger(__name__)

Answer = Callable[[Exchange], None]


class Rest:
    """Answers HTTP requests; the HTTP server calls `answer`."""

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self._openapi = msgspec.json.encode(describe(service))
        self._routes = self._route()

    def answer(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later. Never raises."""
        try:
            if self.service.api_key and not exchange.path.startswith("/v2/health/"):
                self._authorise(exchange)
            verbs = self._routes.get(exchange.path)
            if verbs is None:
                raise self._unknown_path(exchange.path)
            answer = verbs.get(exchange.method)
            if answer is None:
                allowed = ", ".join(verbs)
                refusal = Refusal(405, f"{exchange.path} does not support {exchange.method}", f"use {allowed}")
                exchange.reply_error(405, refusal.what, refusal.fix, headers=(("allow", allowed),))
                return
            answer(exchange)
        except Refusal as refusal:
            exchange.refuse(refusal)
        except Exception as error:
            self._break(exchange, error)

    def _route(self) -> Mapping[str, Mapping[str, Answer]]:
        model = f"/v2/models/{self.service.model}"
        gets: dict[str, Answer] = {
            "/v2": self._server,
            "/v2/": self._server,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/metrics": self._metrics,
            "/openapi.json": self._description,
            "/v2/sloop/openapi": self._description,
            "/v2/sloop/state": self._state,
            "/v2/sloop/decisions": self._decisions,
        }
        posts: dict[str, Answer] = {}
        for path in (model, f"{model}/versions/{offered.MODEL_VERSION}"):
            gets[path] = self._model
            gets[f"{path}/ready"] = self._model_ready
            posts[f"{path}/infer"] = self._infer
        return {path: {"GET": answer, "HEAD": answer} for path, answer in gets.items()} | {
            path: {"POST": answer} for path, answer in posts.items()
        }

    def _unknown_path(self, path: str) -> Refusal:
        parts = path.split("/")
        if path.startswith("/v2/models/") and len(parts) > 3:
            try:
                self.service.check_model(parts[3], parts[5] if len(parts) > 5 and parts[4] == "versions" else "")
            except Refusal as refusal:
                return refusal
        return Refusal(404, f"unknown path {quoted(path)}", "/openapi.json lists all paths")

    def _authorise(self, exchange: Exchange) -> None:
        self.service.authorise(exchange.headers.get("authorization"), exchange.headers.get("x-api-key"))

    def _infer(self, exchange: Exchange) -> None:
        headers = exchange.headers
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding != "identity":
            raise Refusal(415, f"content-encoding: {quoted(encoding)} is not supported", "send the body uncompressed")
        wanted = read(exchange.body, headers.get(HEADER_LENGTH), self.service.validator)
        exchange.body = b""
        slo_ns, elapsed_ns = budget_ns(
            headers.get(SLO, wanted.parameters.get(SLO)),
            headers.get(ELAPSED, wanted.parameters.get(ELAPSED)),
        )
        submitter = self.service.submitter
        on_end = partial(self._end, exchange, wanted)
        request = submitter.submit(
            wanted.tensors, slo_ns=slo_ns, elapsed_ns=elapsed_ns, began_ns=exchange.began_ns, on_end=on_end
        )
        if exchange.is_open:
            exchange.on_gone = partial(submitter.cancel, request)

    def _end(self, exchange: Exchange, wanted: ParsedRequest, ended: RequestResult) -> None:
        """Answer an inference; if that fails, answer an error, because the client would otherwise wait for ever."""
        if not exchange.is_open:
            return
        try:
            outcome = ended.outcome
            if outcome is not Outcome.SERVED and outcome is not Outcome.LATE:
                raise refusal_of(ended)
            body, json_bytes = write(self.service.model, offered.MODEL_VERSION, wanted, ended.outputs)
            met = MET if outcome is Outcome.SERVED else NOT_MET
            if json_bytes is None:
                exchange.reply(200, body, headers=(met,))
            else:
                exchange.reply(200, body, content_type=OCTETS, headers=(met, (HEADER_LENGTH, str(json_bytes))))
        except Refusal as refusal:
            exchange.refuse(refusal)
        except Exception as error:
            self._break(exchange, error)

    def _break(self, exchange: Exchange, error: Exception) -> None:
        """Answer after an unexpected exception, which is a bug."""
        _log.error("the gateway failed on a request to %s", exchange.path, exc_info=error)
        exchange.reply_error(500, "failed: internal error of the gateway", "see the server's log, and report it")

    def _server(self, exchange: Exchange) -> None:
        say(exchange, {"name": offered.SERVER, "version": offered.SERVER_VERSION, "extensions": offered.EXTENSIONS})

    def _live(self, exchange: Exchange) -> None:
        say(exchange, {"live": True})

    def _ready(self, exchange: Exchange) -> None:
        self._say_ready(exchange, {})

    def _model_ready(self, exchange: Exchange) -> None:
        self._say_ready(exchange, {"name": self.service.model})

    def _say_ready(self, exchange: Exchange, names: Mapping[str, object]) -> None:
        why = self.service.unready()
        if why:
            body = {**names, "ready": False, "error": f"not ready: {why}; help: ask again in a moment"}
            exchange.reply(503, msgspec.json.encode(body), headers=(("retry-after", "1"),))
        else:
            say(exchange, {**names, "ready": True})

    def _model(self, exchange: Exchange) -> None:
        signature = self.service.validator.signature
        body = {
            "name": self.service.model,
            "versions": [offered.MODEL_VERSION],
            "platform": offered.PLATFORM,
            "inputs": list(map(of_port, signature.inputs)),
            "outputs": list(map(of_port, signature.outputs)),
        }
        say(exchange, body)

    def _metrics(self, exchange: Exchange) -> None:
        exchange.reply(200, self.service.metrics(), content_type=EXPOSITION)

    def _description(self, exchange: Exchange) -> None:
        exchange.reply(200, self._openapi)

    def _state(self, exchange: Exchange) -> None:
        exchange.reply(200, self.service.state())

    def _decisions(self, exchange: Exchange) -> None:
        text = parse_qs(exchange.query_string, keep_blank_values=True).get("limit", [str(DECISIONS)])[-1]
        if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= DECISIONS_MAX):
            raise bad("limit", f"{quoted(text)} is not a number of decisions", f"ask for 1 to {DECISIONS_MAX}")
        exchange.reply(200, self.service.decisions(int(text)))


def say(exchange: Exchange, body: Mapping[str, object]) -> None:
    """Answer 200 with a JSON object."""
    exchange.reply(200, msgspec.json.encode(body))


def of_port(port: Port) -> dict[str, object]:
    """`$metadata_tensor`."""
    return {"name": port.name, "datatype": port.datatype, "shape": port.shape}
