"""The service behind both protocols, REST and gRPC: the models of a server, with their metrics, state and decisions.

Models are added and removed while the server runs. A model is an application; which of its versions serve is the core's
decision, which `Pages` reports.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from hmac import compare_digest
from http import HTTPStatus
from typing import Final, Protocol

from msgspec import Struct

from sloop import __version__
from sloop.app.application import Limits
from sloop.serve.gateway.http import INFER, MODELS, BodyMemory
from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.refusal import Refusal
from sloop.serve.protocols import RequestSink
from sloop.text import counted, listed, quoted

SERVER: Final = "sloop"
SERVER_VERSION: Final = __version__
EXTENSIONS: Final = ("binary_tensor_data",)
PLATFORM: Final = "sloop_application"
NAMES_MAX: Final = 5
"""An error names at most this many models, so that it stays readable on a server with hundreds of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One application, as both protocols expose it. All its versions have the same inputs and outputs."""

    name: str
    slo_ns: int
    validator: InputValidator
    limits: Limits


class ModelState(StrEnum):
    """What a version of a model does now."""

    READY = "ready"
    RESTING = "resting"
    """It has no replicas because it had no requests; the next request starts one."""
    STARTING = "starting"
    """It has no ready replica at some stage."""
    WAITING = "waiting"
    """It needs replicas but gets none, because other models need all cores."""
    STOPPING = "stopping"
    """The server shuts down, or has failed."""


class Readiness(Struct, frozen=True):
    """Whether a model answers requests, and why not."""

    state: ModelState
    why: str = ""
    """Empty if it is ready or rests."""

    @property
    def is_ready(self) -> bool:
        """Whether the model serves, or would after a start."""
        return not self.why


class Pages(Protocol):
    """What the gateway shows of the run. `sloop.serve.gateway.insight.Insight` implements it."""

    def versions(self, model: str) -> Sequence[str]:
        """The versions of a model that serve requests, the one with most of them first."""
        ...

    def readiness(self, model: str, version: str = "") -> Readiness | None:
        """The state of a model, or of one of its versions. None for a version that neither serves nor starts."""
        ...

    def unready(self) -> str:
        """Why the server is not ready; empty if every model is ready or rests."""
        ...

    def metrics(self) -> bytes:
        """The metrics in Prometheus' text format."""
        ...

    def state(self, model: str = "") -> bytes:
        """The state page as JSON, of one model or of all."""
        ...

    def decisions(self, limit: int, model: str = "") -> bytes:
        """The latest decisions as JSON, at most `limit`, about one model or about all."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class InferenceService:
    """The models of a server, as exposed by both protocols."""

    sink: RequestSink
    pages: Pages
    bodies: BodyMemory
    api_key: str = ""
    """The key that clients must send; empty for none."""
    models: dict[str, Model] = field(default_factory=dict)
    """By name. Only `add` and `remove` change it."""
    infer_paths: dict[str, Model] = field(default_factory=dict)
    """By the path of inference over HTTP, which nearly all requests have."""

    def add(self, model: Model) -> None:
        """Serve one more model, or replace the one of this name."""
        self.models[model.name] = self.infer_paths[f"{MODELS}{model.name}{INFER}"] = model
        self.bodies.set_quota(model.name, model.limits.requests, model.limits.bytes)

    def remove(self, name: str) -> None:
        """Stop serving a model: further requests for it are answered with 404. Open requests are finished."""
        self.models.pop(name, None)
        self.infer_paths.pop(f"{MODELS}{name}{INFER}", None)
        self.bodies.set_quota(name, 0, 0)

    def model(self, name: str, version: str = "") -> Model:
        """The model, which serves this version if one is given. Raises a 404 otherwise."""
        found = self.models.get(name)
        if found is None:
            raise self.unknown(name)
        if version and version not in (served := self.pages.versions(name)):
            raise self._unknown_version(name, version, served)
        return found

    def readiness(self, name: str, version: str = "") -> Readiness:
        """The state of a model or of a version of it. Raises a 404 if there is no such model or version."""
        if name not in self.models:
            raise self.unknown(name)
        found = self.pages.readiness(name, version)
        if found is None:
            raise self._unknown_version(name, version, self.pages.versions(name))
        return found

    def unknown(self, name: str) -> Refusal:
        """The 404 for a model that this server does not have."""
        return Refusal(HTTPStatus.NOT_FOUND, f"unknown model {quoted(name)}", named(name, self.models))

    def _unknown_version(self, name: str, version: str, served: Sequence[str]) -> Refusal:
        what = f"model {name!r} has no version {quoted(version)} that serves"
        if not served:
            return Refusal(HTTPStatus.NOT_FOUND, what, "no version of it serves now")
        noun = "version" if len(served) == 1 else "versions"
        fix = f"omit the version, or use {noun} {listed([repr(each) for each in served], 'or')}"
        return Refusal(HTTPStatus.NOT_FOUND, what, fix)

    def authorise(self, authorization: str | None, api_key: str | None) -> None:
        """Raise a 401 unless the request has the API key, as a bearer token or as `x-api-key`."""
        if not self.api_key:
            return
        given = api_key or ""
        if authorization is not None and authorization[:7].lower() == "bearer ":
            given = authorization[7:].strip()
        if not compare_digest(given.encode(), self.api_key.encode()):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "the API key is wrong" if given else "this server requires an API key",
                "send the header 'authorization: Bearer KEY' or 'x-api-key: KEY'",
            )


def named(wrong: str, names: Iterable[str]) -> str:
    """The fix for an unknown model: all models if they are few, otherwise those with the nearest names."""
    known = list(names)
    if not known:
        return "this server has no models"
    if len(known) <= NAMES_MAX:
        return f"this server has the model{'' if len(known) == 1 else 's'} {listed([repr(name) for name in known])}"
    near = get_close_matches(wrong, known, n=NAMES_MAX) if len(wrong) <= 100 else []
    nearest = f"did you mean {listed([repr(name) for name in near], 'or')}? " if near else ""
    return f"{nearest}GET /v2/models lists the {counted(len(known), 'model')} of this server"
