"""Asks an OIP v2 server about itself before any load is sent: is it there, what does the model take.

Promises the model's metadata, or an error a user can act on. Uses the standard library's blocking client: two requests,
once.
"""

import http.client
import ssl
from collections.abc import Mapping
from urllib.parse import SplitResult, quote

import msgspec

from sloop.errors import InputError, MachineError
from sloop.load.payload import ModelMetadata
from sloop.load.plan import Encoding

ANSWER_BYTES_MAX = 16 * 2**20


class _ServerMetadata(msgspec.Struct, frozen=True):
    extensions: tuple[str, ...] = ()


class _State(msgspec.Struct, frozen=True):
    application: str


def model_path(url: SplitResult, model: str) -> str:
    """`/v2/models/NAME` below the URL's own path."""
    return f"{url.path.rstrip('/')}/v2/models/{quote(model, safe='')}"


def fetch_metadata(url: SplitResult, model: str, *, timeout_s: float) -> ModelMetadata:
    """What the server says of `model`."""
    where = url.geturl()
    status, body = _get(url, model_path(url, model), timeout_s=timeout_s)
    if status != 200:
        said = body[:200].decode(errors="replace").strip()
        raise InputError(
            f"the server knows no model {model!r}: {status} {said}", where=where, help="check the name with GET /v2"
        )
    try:
        return msgspec.json.decode(body, type=ModelMetadata)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"what the server says of {model!r} is not the protocol's: {error}",
            where=where,
            help="is it an Open Inference Protocol v2 server?",
        ) from None


def served_application(url: SplitResult, *, timeout_s: float) -> str:
    """The name of the one application a sloop server serves; InputError for a server that does not say."""
    status, body = _get(url, f"{url.path.rstrip('/')}/v2/sloop/state", timeout_s=timeout_s)
    try:
        name = msgspec.json.decode(body, type=_State).application if status == 200 else ""
    except (msgspec.MsgspecError, RecursionError):
        name = ""
    if not name:
        raise InputError("the server does not say what it serves", where=url.geturl(), help="name it with --model")
    return name


def preferred_encoding(url: SplitResult, *, timeout_s: float) -> Encoding:
    """Binary where the server lists the extension."""
    status, body = _get(url, f"{url.path.rstrip('/')}/v2", timeout_s=timeout_s)
    try:
        extensions = msgspec.json.decode(body, type=_ServerMetadata).extensions if status == 200 else ()
    except (msgspec.MsgspecError, RecursionError):
        extensions = ()
    return Encoding.BINARY if any("binary_tensor_data" in name for name in extensions) else Encoding.JSON


def _get(url: SplitResult, path: str, *, timeout_s: float) -> tuple[int, bytes]:
    host, port = url.hostname or "", url.port or default_port(url)
    if url.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    headers: Mapping[str, str] = {"accept": "application/json"}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        raise MachineError(
            f"no server answers at {url.geturl()}: {error}", help="start it first, and check the address"
        ) from None
    finally:
        connection.close()


def default_port(url: SplitResult) -> int:
    """The scheme's, where the URL names none."""
    return 443 if url.scheme == "https" else 80
