"""What the gateway offers, the same over REST and gRPC: one application under its name, and a view of the inside."""

from collections.abc import Callable
from dataclasses import dataclass
from hmac import compare_digest
from http import HTTPStatus
from typing import Final

from sloop import __version__
from sloop.serve.gateway.inputs import Intake
from sloop.serve.gateway.refusal import Refusal, shown
from sloop.serve.protocols import Submitter

SERVER: Final = "sloop"
SERVER_VERSION: Final = __version__
EXTENSIONS: Final = ("binary_tensor_data",)
MODEL_VERSION: Final = "1"
"""An application has one version: a changed file is another server."""
PLATFORM: Final = "sloop_application"


@dataclass(frozen=True, slots=True)
class Service:
    """One application behind its two protocols."""

    model: str
    """The application's name."""
    slo_ns: int
    intake: Intake
    submitter: Submitter
    unready: Callable[[], str]
    """Empty when inferences would be taken; otherwise why not."""
    metrics: Callable[[], bytes]
    """Prometheus' text format."""
    state: Callable[[], bytes]
    """JSON."""
    decisions: Callable[[int], bytes]
    """JSON: the last decisions, at most this many."""
    api_key: str = ""
    """Empty: no key is asked for."""

    def known(self, model: str, version: str = "") -> None:
        """Raise a 404 unless this is our model."""
        if model != self.model:
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"there is no model {shown(model)} here",
                f"this server has {self.model!r} (the application's name)",
            )
        if version not in ("", MODEL_VERSION):
            raise Refusal(
                HTTPStatus.NOT_FOUND,
                f"model {self.model!r} has no version {shown(version)}",
                f"leave the version out, or use {MODEL_VERSION!r}",
            )

    def admit(self, authorization: str | None, api_key: str | None) -> None:
        """Raise a 401 unless the key was sent, as a bearer token or as `x-api-key`."""
        if not self.api_key:
            return
        given = api_key or ""
        if authorization is not None and authorization[:7].lower() == "bearer ":
            given = authorization[7:].strip()
        if not compare_digest(given.encode(), self.api_key.encode()):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "the API key is wrong" if given else "this server asks for an API key",
                "send the header 'authorization: Bearer KEY' or 'x-api-key: KEY'",
            )
