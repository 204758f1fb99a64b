"""The service behind both protocols, REST and gRPC: one application with its metrics, state and decisions."""

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from http import HTTPStatus
from typing import Final

from sloop import __version__
from sloop.serve.gateway.inputs import InputValidator
from sloop.serve.gateway.refusal import Refusal
from sloop.serve.protocols import RequestSink
from sloop.text import quoted

SERVER: Final = "sloop"
SERVER_VERSION: Final = __version__
EXTENSIONS: Final = ("binary_tensor_data",)
MODEL_VERSION: Final = "1"
"""The only version of an application: a changed application file needs a new server."""
PLATFORM: Final = "sloop_application"


@dataclass(frozen=True, slots=True)
class InferenceService:
    """One application, as exposed by both protocols."""

    model: str
    """The application's name."""
    slo_ns: int
    validator: InputValidator
    submitter: RequestSink
    unready: Callable[[], str]
    """Returns why the application cannot serve now; empty if it can."""
    metrics: Callable[[], bytes]
    """Returns the metrics in Prometheus' text format."""
    state: Callable[[], bytes]
    """Returns the state page as JSON."""
    decisions: Callable[[int], bytes]
    """Returns the latest decisions as JSON, at most as many as the argument."""
    api_key: str = ""
    """The key that clients must send; empty for none."""

    def check_model(self, model: str, version: str = "") -> None:
        """Raise a 404 if this server does not have the model or version."""
        if model != self.model:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"unknown model {quoted(model)}",
                f"this server has the model {self.model!r} (the application's name)",
            )
        if version not in ("", MODEL_VERSION):
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"model {self.model!r} has no version {quoted(version)}",
                f"omit the version, or use {MODEL_VERSION!r}",
            )

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
