"""The Open Inference Protocol v2 over REST: paths, headers and status codes of an `InferenceService`.

Every request is answered, and every answer that is not a success is `{"error": …}`. Source: Open Inference Protocol v2,
"HTTP/REST"; docs/serving.md lists the status codes and headers.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import msgspec

from sloop.serve.gateway import service as offered
from sloop.serve.gateway.http import MODELS, Exchange
from sloop.serve.gateway.inputs import ELAPSED, HEADER_LENGTH, SLO, ParsedRequest, budget_ns, read, write
from sloop.serve.gateway.openapi import describe
from sloop.serve.gateway.refusal import Refusal, bad, refusal_of
from sloop.serve.gateway.service import InferenceService, Model
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port
from sloop.text import quoted
from sloop.vocabulary import Outcome

MET: Final = ("x-slo-met", "true")
NOT_MET: Final = ("x-slo-met", "false")
EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
OCTETS: Final = "application/octet-stream"
VERSIONS: Final = "versions/"
DECISIONS: Final = 100
DECISIONS_MAX: Final = 10_000

_log = logging.getLogger(__name__)

Page = Callable[[Exchange], None]
ModelPage = Callable[[Exchange, Model, str], None]
"""Answers a request about a model, or about a version of it; the version is empty if the path has none."""


class Rest:
    """Answers HTTP requests; the HTTP server calls `answer`."""

    def __init__(self, service: InferenceService) -> None:
        self.service = service
        self._openapi: tuple[object, bytes] = (None, b"")
        """The models and versions that the description was last made for, and the description."""
        pages: dict[str, Page] = {
            "/v2": self._server,
            "/v2/": self._server,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/v2/models": self._models,
            "/metrics": self._metrics,
            "/openapi.json": self._description,
            "/v2/sloop/openapi": self._description,
            "/v2/sloop/state": self._state,
            "/v2/sloop/decisions": self._decisions,
        }
        self.pages: Mapping[str, Mapping[str, Page]] = {
            path: {"GET": page, "HEAD": page} for path, page in pages.items()
        }
        """By path and method."""
        self.model_pages: Mapping[str, Mapping[str, ModelPage]] = {
            "": {"GET": self._model, "HEAD": self._model},
            "ready": {"GET": self._model_ready, "HEAD": self._model_ready},
            "infer": {"POST": self._infer},
        }
        """By what follows the name, or the version, of the model, and by method. There is no table of all models: they
        come and go."""

    def answer(self, exchange: Exchange) -> None:
        """Answer a complete request, now or later. Never raises."""
        service = self.service
        try:
            if service.api_key and not exchange.path.startswith("/v2/health/"):
                self._authorise(exchange)
            model = service.infer_paths.get(exchange.path)
            if model is not None and exchange.method == "POST":
                self._infer(exchange, model, "")
            else:
                self._route(exchange)
        except Refusal as refusal:
            exchange.refuse(refusal)
        except Exception as error:
            self._break(exchange, error)

    def _route(self, exchange: Exchange) -> None:
        """Answer any request. Inference without a version does not come here: it has a table of its own."""
        path, method = exchange.path, exchange.method
        if not path.startswith(MODELS):
            verbs = self.pages.get(path)
            if verbs is None:
                raise Refusal(HTTPStatus.NOT_FOUND, f"unknown path {quoted(path)}", "/openapi.json lists all paths")
            if method not in verbs:
                self._refuse_method(exchange, verbs)
            else:
                verbs[method](exchange)
            return
        name, _, rest = path[len(MODELS) :].partition("/")
        version = ""
        if rest.startswith(VERSIONS):
            version, _, rest = rest[len(VERSIONS) :].partition("/")
        model = self.service.model(name)
        pages = self.model_pages.get(rest)
        if pages is None:
            what = f"unknown path {quoted(path)}"
            raise Refusal(HTTPStatus.NOT_FOUND, what, "/openapi.json lists all paths")
        if method not in pages:
            self._refuse_method(exchange, pages)
        else:
            pages[method](exchange, model, version)

    def _refuse_method(self, exchange: Exchange, verbs: Iterable[str]) -> None:
        allowed = ", ".join(verbs)
        what = f"{exchange.path} does not support {exchange.method}"
        exchange.reply_error(HTTPStatus.METHOD_NOT_ALLOWED, what, f"use {allowed}", headers=(("allow", allowed),))

    def _authorise(self, exchange: Exchange) -> None:
        self.service.authorise(exchange.headers.get("authorization"), exchange.headers.get("x-api-key"))

    def _infer(self, exchange: Exchange, model: Model, version: str) -> None:
        sink, headers = self.service.sink, exchange.headers
        if version:
            self.service.model(model.name, version)
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding != "identity":
            raise Refusal(415, f"content-encoding: {quoted(encoding)} is not supported", "send the body uncompressed")
        wanted = read(exchange.body, headers.get(HEADER_LENGTH), model.validator)
        exchange.body = b""
        slo_ns, elapsed_ns = budget_ns(
            headers.get(SLO, wanted.parameters.get(SLO)),
            headers.get(ELAPSED, wanted.parameters.get(ELAPSED)),
        )
        request = sink.submit(
            wanted.tensors,
            application=model.name,
            version=version,
            slo_ns=slo_ns,
            elapsed_ns=elapsed_ns,
            began_ns=exchange.began_ns,
            on_end=partial(self._end, exchange, model.name, wanted),
        )
        if exchange.is_open:
            exchange.on_gone = partial(sink.cancel, request)

    def _end(self, exchange: Exchange, name: str, wanted: ParsedRequest, ended: RequestResult) -> None:
        """Answer an inference; if that fails, answer an error, because the client would otherwise wait for ever."""
        if not exchange.is_open:
            return
        try:
            outcome = ended.outcome
            if outcome is not Outcome.SERVED and outcome is not Outcome.LATE:
                raise refusal_of(ended)
            body, json_bytes = write(name, ended.version, wanted, ended.outputs)
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
        say_ready(exchange, self.service.pages.unready())

    def _model_ready(self, exchange: Exchange, model: Model, version: str) -> None:
        readiness = self.service.readiness(model.name, version)
        named = {"name": model.name, "version": version} if version else {"name": model.name}
        say_ready(exchange, readiness.why, **named, state=readiness.state.value)

    def _models(self, exchange: Exchange) -> None:
        models = []
        for name in self.service.models:
            readiness = self.service.readiness(name)
            versions = self.service.pages.versions(name)
            models.append({"name": name, "versions": versions, "ready": readiness.is_ready, "state": readiness.state})
        say(exchange, {"models": models})

    def _model(self, exchange: Exchange, model: Model, version: str) -> None:
        signature = self.service.model(model.name, version).validator.signature
        body = {
            "name": model.name,
            "versions": self.service.pages.versions(model.name),
            "platform": offered.PLATFORM,
            "inputs": list(map(of_port, signature.inputs)),
            "outputs": list(map(of_port, signature.outputs)),
        }
        say(exchange, body)

    def _metrics(self, exchange: Exchange) -> None:
        exchange.reply(200, self.service.pages.metrics(), content_type=EXPOSITION)

    def _description(self, exchange: Exchange) -> None:
        versions = [(name, *self.service.pages.versions(name)) for name in self.service.models]
        if self._openapi[0] != versions:
            self._openapi = versions, msgspec.json.encode(describe(self.service))
        exchange.reply(200, self._openapi[1])

    def _state(self, exchange: Exchange) -> None:
        exchange.reply(200, self.service.pages.state(self._model_asked(options_of(exchange))))

    def _decisions(self, exchange: Exchange) -> None:
        options = options_of(exchange)
        text = options.get("limit", str(DECISIONS))
        if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= DECISIONS_MAX):
            raise bad("limit", f"{quoted(text)} is not a number of decisions", f"ask for 1 to {DECISIONS_MAX}")
        exchange.reply(200, self.service.pages.decisions(int(text), self._model_asked(options)))

    def _model_asked(self, options: Mapping[str, str]) -> str:
        """The model in the query; empty for all. Raises a 404 if there is no such model."""
        name = options.get("model", "")
        if "model" in options and name not in self.service.models:
            raise self.service.unknown(name)
        return name


def options_of(exchange: Exchange) -> dict[str, str]:
    """The options in the query string; of a repeated one, the last value."""
    return {key: values[-1] for key, values in parse_qs(exchange.query_string, keep_blank_values=True).items()}


def say_ready(exchange: Exchange, why: str, **fields: object) -> None:
    """Answer 200 if `why` is empty, otherwise 503 with the reason."""
    if not why:
        say(exchange, {**fields, "ready": True})
        return
    body = {**fields, "ready": False, "error": f"not ready: {why}; help: ask again in a moment"}
    exchange.reply(503, msgspec.json.encode(body), headers=(("retry-after", "1"),))


def say(exchange: Exchange, body: Mapping[str, object]) -> None:
    """Answer 200 with a JSON object."""
    exchange.reply(200, msgspec.json.encode(body))


def of_port(port: Port) -> dict[str, object]:
    """`$metadata_tensor`."""
    return {"name": port.name, "datatype": port.datatype, "shape": port.shape}
