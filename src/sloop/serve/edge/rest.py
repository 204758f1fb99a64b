"""The Open Inference Protocol v2 over REST: paths, headers and status codes of an `InferenceService`.

Every request is answered, and every answer that is not a success is `{"error": …}`. Source: Open Inference Protocol v2,
"HTTP/REST"; docs/serving.md lists the status codes and headers.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qs

import msgspec

from sloop.serve.edge import service as offered
from sloop.serve.edge import v1
from sloop.serve.edge.bodies import MODELS, PREDICT, V1_MODELS, inferred
from sloop.serve.edge.exchange import Buffer, Exchange
from sloop.serve.edge.identity import NAMELESS, REQUEST_ID, TRACEPARENT, identity_of
from sloop.serve.edge.inputs import HEADER_LENGTH, AnswerForm, ParsedRequest, decoded, read, write
from sloop.serve.edge.intake import LARGE_BYTES
from sloop.serve.edge.large import LargeJson, is_binary, must_be_written_apart
from sloop.serve.edge.openapi import describe
from sloop.serve.edge.parameters import ELAPSED, OF_BUDGET, SLO, TIMEOUT, budget_ns
from sloop.serve.edge.refusal import Refusal, bad, refusal_of
from sloop.serve.edge.service import InferenceService, Model, readiness_of, server_readiness_of
from sloop.serve.edge.sink import COPIED_BYTES
from sloop.serve.edge.triton import changed_not, check_change, classified, configuration
from sloop.serve.messages import Ask, Topic
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port, Tensor
from sloop.text import quoted
from sloop.vocabulary import Outcome

MET: Final = (("x-slo-met", "true"),)
NOT_MET: Final = (("x-slo-met", "false"),)
EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"
OCTETS: Final = "application/octet-stream"
VERSIONS: Final = "versions/"
REPOSITORY_INDEX: Final = "/v2/repository/index"
REPOSITORY_MODELS: Final = "/v2/repository/models/"
DECISIONS: Final = 100
DECISIONS_MAX: Final = 10_000
SHORT_BYTES_MAX: Final = 64 * 1024
"""The largest body of a request that is not inference."""

UNSUPPORTED: Final[Mapping[str, str]] = {
    "/generate": "outputs are not streamed: POST …/infer answers with all of them at once",
    "sharedmemory": "this server reads no shared memory of clients; send tensors in the request, in binary form",
    "/trace/setting": "/v2/sloop/decisions and `sloop explain` say what happened to a request",
    "/v2/logging": "the server's log has one level; GET /v2/sloop/state shows what the server does",
    ":explain": "models of this server have no explainers",
}
"""Parts of paths that Triton or KServe has and this server has not, with what to use instead."""


class IndexRequest(msgspec.Struct):
    """`$repository_index_request`."""

    ready: bool = False


class ChangeRequest(msgspec.Struct):
    """`$repository_load_request` and `$repository_unload_request`."""

    parameters: dict[str, object] | None = None


_INDEX: Final = msgspec.json.Decoder(IndexRequest)
_CHANGE: Final = msgspec.json.Decoder(ChangeRequest)

OPTIONAL: Final[Mapping[str, object]] = {"parameters": {"optional": True}}
"""In the metadata of an input that need not be given."""

Page = Callable[[Exchange], None]
ModelPage = Callable[[Exchange, Model, str], None]
"""Answers a request about a model, or about a version of it; the version is empty if the path has none."""


class Rest:
    """Answers HTTP requests; the HTTP server calls `answer`."""

    def __init__(self, service: InferenceService, large: LargeJson) -> None:
        self.service, self._large = service, large
        self._openapi: tuple[object, list[bytes]] = (None, [])
        """The models and versions that the description was last made for, and the description."""
        pages: dict[str, Page] = {
            "/v2": self._server,
            "/v2/": self._server,
            "/v2/health/live": self._live,
            "/v2/health/ready": self._ready,
            "/v2/models": self._models,
            "/v2/models/stats": self._all_stats,
            "/v1/models": self._v1_models,
            "/metrics": self._metrics,
            "/openapi.json": self._description,
            "/v2/sloop/openapi": self._description,
            "/v2/sloop/state": self._state,
            "/v2/sloop/decisions": self._decisions,
        }
        self.pages: Mapping[str, Mapping[str, Page]] = {
            path: {"GET": page, "HEAD": page} for path, page in pages.items()
        }
        self.pages = {**self.pages, REPOSITORY_INDEX: {"POST": self._index}}
        """By path and method."""
        self.model_pages: Mapping[str, Mapping[str, ModelPage]] = {
            "": {"GET": self._model, "HEAD": self._model},
            "ready": {"GET": self._model_ready, "HEAD": self._model_ready},
            "config": {"GET": self._config, "HEAD": self._config},
            "stats": {"GET": self._stats, "HEAD": self._stats},
            "infer": {"POST": self._infer},
        }
        """By what follows the name, or the version, of the model, and by method. There is no table of all models: they
        come and go."""
        self.v1_pages: Mapping[str, Mapping[str, ModelPage]] = {
            "": {"GET": self._v1_model, "HEAD": self._v1_model},
            PREDICT: {"POST": partial(self._infer, is_v1=True)},
        }
        """The same for KServe's V1 protocol."""

    def authorise(self, exchange: Exchange) -> bool:
        """Raise a 401 if a request, whose body need not be here yet, lacks a key that it needs, and a 403 if its key
        may not do this. Returns whether its client may use the server: it has a key, or the server requires none."""
        if not self.service.keys.is_required:
            return True
        headers = exchange.headers
        is_probe = exchange.path.startswith("/v2/health/") and exchange.method in ("GET", "HEAD")
        if not is_probe or exchange.left_bytes or "transfer-encoding" in headers:
            is_change = exchange.path.startswith(REPOSITORY_MODELS)
            self.service.authorise(headers.get("authorization"), headers.get("x-api-key"), as_admin=is_change)
            return True
        return False

    def deadline_ns(self, path: str) -> int | None:
        """The deadline of requests to a path, unless they have their own; None if it is not one for inference."""
        service = self.service
        model = service.infer_paths.get(path) or service.models.get(inferred(path))
        return None if model is None else model.slo_ns

    def answer(self, exchange: Exchange) -> None:
        """Answer a complete request that was authorised, now or later. Never raises."""
        service = self.service
        try:
            model = service.infer_paths.get(exchange.path)
            if model is not None and exchange.method == "POST":
                self._infer(exchange, model, "")
            else:
                self._route(exchange)
        except Exception as error:
            exchange.refuse_for(error)

    def _route(self, exchange: Exchange) -> None:
        """Answer any request. Inference without a version does not come here: it has a table of its own."""
        path, method = exchange.path, exchange.method
        verbs = self.pages.get(path) if path != "*" else {}
        if verbs is not None:
            if method not in verbs:
                self._refuse_method(exchange, verbs)
            else:
                verbs[method](exchange)
            return
        if path.startswith(MODELS):
            name, _, rest = path[len(MODELS) :].partition("/")
            version = ""
            if rest.startswith(VERSIONS):
                version, _, rest = rest[len(VERSIONS) :].partition("/")
            pages = self.model_pages.get(rest)
        elif path.startswith(REPOSITORY_MODELS):
            self._change(exchange)
            return
        elif path.startswith(V1_MODELS):
            name, colon, verb = path[len(V1_MODELS) :].partition(":")
            name, _, version = name.partition("/" + VERSIONS)
            pages = self.v1_pages.get(colon + verb)
        else:
            raise unknown_path(path)
        model = self.service.models.get(name)
        if model is None:
            self._refuse_unknown(exchange, name)
            return
        if pages is None:
            raise unknown_path(path)
        if method not in pages:
            self._refuse_method(exchange, pages)
        else:
            pages[method](exchange, model, version)

    def _refuse_unknown(self, exchange: Exchange, name: str) -> None:
        """Answer a request for a model that is not there: 404, or 503 if the server is to have it and cannot load
        it."""

        def answer(found: bytes) -> None:
            readiness = server_readiness_of(found).models.get(name)
            if readiness is None:
                raise self.service.unknown(name)
            what = f"model {quoted(name)} is not served: {readiness.why}"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, what, "try again later", retry_after_s=10)

        self._ask(exchange, Ask(Topic.READY), answer)

    def _refuse_method(self, exchange: Exchange, verbs: Iterable[str]) -> None:
        """Answer a method that a path does not support; OPTIONS asks which it does."""
        allowed = ", ".join((*verbs, "OPTIONS"))
        if exchange.method == "OPTIONS":
            exchange.reply(HTTPStatus.NO_CONTENT, b"", headers=(("allow", allowed),))
            return
        what = f"{exchange.path} does not support {exchange.method}"
        exchange.reply_error(HTTPStatus.METHOD_NOT_ALLOWED, what, f"use {allowed}", headers=(("allow", allowed),))

    def _infer(self, exchange: Exchange, model: Model, version: str, *, is_v1: bool = False) -> None:
        if version:
            self.service.model(model.name, version)
        body, header_length = exchange.body, None if is_v1 else exchange.headers.get(HEADER_LENGTH)
        if len(body) > LARGE_BYTES and not (
            len(body) <= COPIED_BYTES and is_binary(body, header_length, model.validator)
        ):
            exchange.answer_later(self._infer_large(exchange, model, version, header_length, is_v1=is_v1))
            return
        wanted = v1.read(body, model.validator) if is_v1 else read(body, header_length, model.validator)
        self._submit(exchange, model, version, wanted.tensors, wanted)

    async def _infer_large(
        self, exchange: Exchange, model: Model, version: str, header_length: str | None, *, is_v1: bool
    ) -> None:
        wanted = await self._large.read(exchange.body, header_length, model, is_v1=is_v1)
        exchange.body = b""
        tensors = await self._store(exchange, model, version, wanted)
        self._submit(exchange, model, version, tensors, wanted)

    async def _store(
        self, exchange: Exchange, model: Model, version: str, wanted: ParsedRequest
    ) -> Mapping[str, Tensor]:
        """Store the tensors of a large request. Raises a 404 if the model has gone meanwhile, and a 504 if its deadline
        has passed: nobody would wait for the answer any more."""
        self.service.model(model.name, version)
        stored = await self.service.sink.store(wanted.tensors, model.name)
        self.service.model(model.name, version)
        slo_ns, elapsed_ns = _budget_ns(exchange, model, wanted.parameters)
        if exchange.age_ns > (model.slo_ns if slo_ns is None else slo_ns) - elapsed_ns:
            what = "dropped: its deadline had passed before it was read"
            raise Refusal(HTTPStatus.GATEWAY_TIMEOUT, what, "allow more time with x-slo-ms, or send less")
        return stored

    def _submit(
        self, exchange: Exchange, model: Model, version: str, tensors: Mapping[str, Tensor], wanted: ParsedRequest
    ) -> None:
        """Submit what was read. `tensors` are its own, or where they are stored."""
        sink, headers, form = self.service.sink, exchange.headers, wanted.form
        identity = NAMELESS
        if REQUEST_ID in headers or TRACEPARENT in headers or form.id:
            identity = identity_of(headers.get(REQUEST_ID), headers.get(TRACEPARENT), form.id)
            exchange.request_id = identity.request_id
        exchange.body = b""
        if exchange.on_read is not None:
            exchange.note_read()
        slo_ns, elapsed_ns = _budget_ns(exchange, model, wanted.parameters)
        request = sink.submit(
            tensors,
            application=model.name,
            version=version,
            slo_ns=slo_ns,
            elapsed_ns=elapsed_ns,
            began_ns=exchange.began_ns,
            request_id=identity.request_id,
            trace=identity.trace,
            outputs=form.outputs,
            on_end=partial(_end, self._write, exchange, model, form),
        )
        if exchange.is_open:
            exchange.on_gone = partial(sink.cancel, request)

    def _write(self, exchange: Exchange, model: Model, form: AnswerForm, ended: RequestResult) -> None:
        """Answer an inference, in the protocol of its request."""
        if must_be_written_apart(form, ended.outputs):
            exchange.answer_later(self._write_large(exchange, model, form, ended))
            return
        outputs = ended.outputs
        if form.is_v1:
            _reply(exchange, ended.outcome, v1.write(form.rows, outputs), None)
            return
        if form.classes:
            outputs = classified(outputs, form.classes, model.validator.signature.outputs, model.labels)
        _reply(exchange, ended.outcome, *write(model.name, ended.version, form, outputs))

    async def _write_large(self, exchange: Exchange, model: Model, form: AnswerForm, ended: RequestResult) -> None:
        _reply(exchange, ended.outcome, *(await self._large.write(model, ended.version, form, ended.outputs)))

    def _server(self, exchange: Exchange) -> None:
        say(
            exchange, {"name": offered.SERVER, "version": offered.SERVER_VERSION, "extensions": self.service.extensions}
        )

    def _live(self, exchange: Exchange) -> None:
        say(exchange, {"live": True})

    def _ask(self, exchange: Exchange, question: Ask[Topic], then: Callable[[bytes], None]) -> None:
        """Ask the deciding process, and answer with `then` when its answer has come."""

        def answer(found: bytes) -> None:
            try:
                then(found)
            except Exception as error:
                exchange.refuse_for(error)

        self.service.sink.ask(question, answer)

    def _ready(self, exchange: Exchange) -> None:
        """Whether the server is ready, and which models are not. Why they are not is told only to who may use them: it
        may quote what a model has raised."""

        def answer(found: bytes) -> None:
            server, is_known = server_readiness_of(found), self._has_key(exchange)
            models = {
                name: {"state": each.state} | ({"why": each.why} if is_known else {})
                for name, each in server.models.items()
            }
            why = server.why if is_known or not models else "no model answers, or some are starting"
            say_ready(exchange, why if server.why else "", **({"not_ready": models} if models else {}))

        self._ask(exchange, Ask(Topic.READY), answer)

    def _has_key(self, exchange: Exchange) -> bool:
        headers = exchange.headers
        if self.service.keys.is_required and headers.keys().isdisjoint(("authorization", "x-api-key")):
            return False  # a probe is not counted as one whose key is missing
        try:
            self.service.authorise(headers.get("authorization"), headers.get("x-api-key"))
        except Refusal:
            return False
        return True

    def _model_ready(self, exchange: Exchange, model: Model, version: str) -> None:
        def answer(found: bytes) -> None:
            readiness = self.service.readiness_in(found, model, version)
            named = {"name": model.name, "version": version} if version else {"name": model.name}
            say_ready(exchange, readiness.why, **named, state=readiness.state.value)

        self._ask(exchange, Ask(Topic.MODELS, model.name, version), answer)

    def _models(self, exchange: Exchange) -> None:
        def answer(found: bytes) -> None:
            states = readiness_of(found)
            models = [
                {
                    "name": model.name,
                    "versions": model.versions,
                    "ready": states[model.name].is_ready,
                    "state": states[model.name].state,
                }
                for model in self.service.models.values()
                if model.name in states  # it may have ended meanwhile
            ]
            say(exchange, {"models": models})

        self._ask(exchange, Ask(Topic.MODELS), answer)

    def _index(self, exchange: Exchange) -> None:
        asked = decoded(_short(exchange.body), _INDEX).ready if exchange.body else False

        def answer(found: bytes) -> None:
            models = msgspec.json.decode(found, type=list[dict[str, str]])
            ready = [model for model in models if not asked or model["state"] == "READY"]
            exchange.reply(200, msgspec.json.encode(ready))

        self._ask(exchange, Ask(Topic.INDEX), answer)

    def _change(self, exchange: Exchange) -> None:
        """Load or end a model."""
        name, _, verb = exchange.path[len(REPOSITORY_MODELS) :].rpartition("/")
        if verb not in ("load", "unload"):
            raise unknown_path(exchange.path)
        if exchange.method != "POST":
            self._refuse_method(exchange, ("POST",))
            return
        parameters = decoded(_short(exchange.body), _CHANGE).parameters if exchange.body else None
        check_change(parameters or {}, verb)

        def answer(found: bytes) -> None:
            if found:
                raise changed_not(found)
            exchange.reply(200, b"{}")

        self._ask(exchange, Ask(Topic(verb), name), answer)

    def _v1_models(self, exchange: Exchange) -> None:
        say(exchange, {"models": list(self.service.models)})

    def _v1_model(self, exchange: Exchange, model: Model, version: str) -> None:
        def answer(found: bytes) -> None:
            say_ready(exchange, self.service.readiness_in(found, model, version).why, name=model.name)

        self._ask(exchange, Ask(Topic.MODELS, model.name, version), answer)

    def _model(self, exchange: Exchange, model: Model, version: str) -> None:
        signature = self.service.model(model.name, version).validator.signature
        body = {
            "name": model.name,
            "versions": model.versions,
            "platform": offered.PLATFORM,
            "inputs": [
                *map(port_fields, signature.inputs),
                *({**port_fields(p), **OPTIONAL} for p in signature.optional),
            ],
            "outputs": list(map(port_fields, signature.outputs)),
            "parameters": self.service.bounds(model),
        }
        say(exchange, body)

    def _config(self, exchange: Exchange, model: Model, version: str) -> None:
        say(exchange, configuration(self.service.model(model.name, version), self.service.bounds(model)))

    def _stats(self, exchange: Exchange, model: Model, version: str) -> None:
        self.service.model(model.name, version)
        self._ask(exchange, Ask(Topic.STATISTICS, model.name, version), lambda found: exchange.reply(200, found))

    def _all_stats(self, exchange: Exchange) -> None:
        self._ask(exchange, Ask(Topic.STATISTICS), lambda found: exchange.reply(200, found))

    def _metrics(self, exchange: Exchange) -> None:
        self._ask(exchange, Ask(Topic.METRICS), lambda text: exchange.reply(200, text, content_type=EXPOSITION))

    def _description(self, exchange: Exchange) -> None:
        versions = [(model.name, *model.versions) for model in self.service.models.values()]
        if self._openapi[0] == versions:
            exchange.reply(200, self._openapi[1])
        else:
            exchange.answer_later(self._describe(exchange, versions))

    async def _describe(self, exchange: Exchange, versions: object) -> None:
        self._openapi = versions, await describe(self.service)
        exchange.reply(200, self._openapi[1])

    def _state(self, exchange: Exchange) -> None:
        question = Ask(Topic.STATE, self._model_asked(options_of(exchange)))
        self._ask(exchange, question, lambda page: exchange.reply(200, page))

    def _decisions(self, exchange: Exchange) -> None:
        options = options_of(exchange)
        text = options.get("limit", str(DECISIONS))
        if not (text.isascii() and text.isdigit() and len(text) < 8 and 1 <= int(text) <= DECISIONS_MAX):
            raise bad("limit", f"{quoted(text)} is not a number of decisions", f"ask for 1 to {DECISIONS_MAX}")
        question = Ask(Topic.DECISIONS, self._model_asked(options), limit=int(text))
        self._ask(exchange, question, lambda page: exchange.reply(200, page))

    def _model_asked(self, options: Mapping[str, str]) -> str:
        """The model in the query; empty for all. Raises a 404 if there is no such model."""
        name = options.get("model", "")
        if "model" in options and name not in self.service.models:
            raise self.service.unknown(name)
        return name


def _budget_ns(exchange: Exchange, model: Model, parameters: Mapping[str, object]) -> tuple[int | None, int]:
    """(slo_ns, elapsed_ns) of a request from its headers and its parameters."""
    headers = exchange.headers
    if SLO not in headers and ELAPSED not in headers and OF_BUDGET.isdisjoint(parameters):
        return None, 0
    return budget_ns(
        headers.get(SLO, parameters.get(SLO)),
        headers.get(ELAPSED, parameters.get(ELAPSED)),
        timeout=parameters.get(TIMEOUT),
        own_ns=model.slo_ns,
    )


def _end(
    write_answer: Callable[[Exchange, Model, AnswerForm, RequestResult], None],
    exchange: Exchange,
    model: Model,
    form: AnswerForm,
    ended: RequestResult,
) -> None:
    """Answer an inference; if that fails, answer an error, because the client would otherwise wait for ever."""
    if not exchange.is_open:
        return
    try:
        outcome = ended.outcome
        if outcome is not Outcome.SERVED and outcome is not Outcome.LATE:
            raise refusal_of(ended)
        write_answer(exchange, model, form, ended)
    except Exception as error:
        exchange.refuse_for(error)


def _reply(exchange: Exchange, outcome: Outcome, body: Buffer | Sequence[Buffer], json_bytes: int | None) -> None:
    met = MET if outcome is Outcome.SERVED else NOT_MET
    if json_bytes is None:
        exchange.reply(200, body, headers=met)
    else:
        exchange.reply(200, body, content_type=OCTETS, headers=(*met, (HEADER_LENGTH, str(json_bytes))))


def _short(body: bytes | bytearray) -> bytes | bytearray:
    """The body of a request that is not inference. Raises a 413 if it takes long to read."""
    if len(body) > SHORT_BYTES_MAX:
        raise Refusal(
            413, f"the body has {len(body)} bytes; the limit is {SHORT_BYTES_MAX}", "send the parameters alone"
        )
    return body


def unknown_path(path: str) -> Refusal:
    """The 404 for a path that there is not, or the 501 for one that Triton or KServe has."""
    for part, fix in UNSUPPORTED.items():
        if part in path:
            return Refusal(HTTPStatus.NOT_IMPLEMENTED, f"{path} is not supported", fix)
    fix = "requests to a model go to /v2/models/NAME/infer; /openapi.json lists all paths"
    return Refusal(HTTPStatus.NOT_FOUND, f"unknown path {quoted(path)}", fix)


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


def port_fields(port: Port) -> dict[str, object]:
    """`$metadata_tensor`."""
    return {"name": port.name, "datatype": port.datatype, "shape": port.shape}
