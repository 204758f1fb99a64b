"""What to send, where and when: the value a load run is made from.

Promises that a plan which exists is sound: anything a user can get wrong raises `InputError`. Knows nothing of sockets.
Deadlines follow the request, not the server: `deadline = sent + slo`, where a link's transfer time passes before the
server sees the request (Sponge specification 1.4 and 4.3, `delay` and `attach`).
"""

import http.client
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite, prod
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from sloop.errors import InputError, MachineError
from sloop.streams import stream
from sloop.tensor import NUMPY_TYPES, Port
from sloop.workload import Link, Trace

REQUESTS_MAX: Final = 20_000_000
CONNECTIONS_MAX: Final = 20_000
DURATION_S_MAX: Final = 7 * 86_400.0


class Delivery(StrEnum):
    """What a link's transfer time does to a request."""

    DELAY = "delay"
    """The client holds it back for that long: it arrives later, as on a real link."""
    ATTACH = "attach"
    """It arrives at once and its budget is that much smaller, as in Sponge's artefact."""


class Encoding(StrEnum):
    """How tensors travel."""

    AUTO = "auto"
    """Binary where the server says it knows the extension, else JSON."""
    JSON = "json"
    BINARY = "binary"


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Instead of a trace: each of `connections` sends its next request as soon as it has an answer."""

    connections: int
    duration_s: float
    warmup_s: float = 0.0
    """Answers before this much time has passed are not counted."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load run. Open loop where `arrivals` is a trace: requests go out when due, answered or not."""

    url: str
    """Of the server, such as `http://localhost:8000`."""
    model: str
    arrivals: Trace | ClosedLoop
    slo_ms: float
    seed: int = 0
    """Of the made-up inputs."""
    link: Link | None = None
    payload_bytes: int | None = None
    """What the link carries for each request; the body's own size where it is None."""
    delivery: Delivery = Delivery.DELAY
    encoding: Encoding = Encoding.AUTO
    input_file: Path | None = None
    """`.npy`: the first input's tensor; `.json`: a whole request body. Otherwise inputs are made up from metadata."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By input name, where the model leaves dimensions open; open ones are 1 otherwise."""
    timeout_s: float = 30.0
    connections_max: int = 4_096
    warm_connections: int = 16
    """Opened before the first request is due."""
    records: Path | None = None
    """Where to write a line of JSON for each request."""
    cpus: tuple[int, ...] = ()
    """CPUs the sending process may run on; all where empty."""

    def __post_init__(self) -> None:
        split_url(self.url)
        if not self.model:
            raise InputError("no model named", where="model", help="name the application or model to send to")
        _within(self.slo_ms, 0.001, 1e9, "slo_ms")
        _within(self.timeout_s, 0.001, 3_600.0, "timeout_s")
        _within(self.connections_max, 1, CONNECTIONS_MAX, "connections_max")
        _within(self.warm_connections, 0, self.connections_max, "warm_connections")
        if self.payload_bytes is not None:
            _within(self.payload_bytes, 0, 2**40, "payload_bytes")
        if isinstance(self.arrivals, ClosedLoop):
            _within(self.arrivals.connections, 1, self.connections_max, "connections")
            _within(self.arrivals.duration_s, 0.001, DURATION_S_MAX, "duration_s")
            _within(self.arrivals.warmup_s, 0.0, self.arrivals.duration_s, "warmup_s")
            if self.link is not None:
                raise InputError("a closed loop has no link", where="link", help="give a trace to replay instead")
        else:
            _within(self.arrivals.duration_ns / 1e9, 1e-9, DURATION_S_MAX, "duration_s")


def split_url(url: str) -> SplitResult:
    """The parts of an http(s) URL, checked."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url!r} is not a URL: {error}", where="url", help="write http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise InputError(f"{url!r} is not a server's URL", where="url", help="write http://host:port")
    if not url.isascii() or any(ord(sign) <= 32 for sign in url):
        raise InputError(f"{url!r} has signs a URL cannot have", where="url", help="write http://host:port")
    before, inside, _ = f"{parts.path}/".partition("/v2/")
    if inside:
        root = parts._replace(path=before).geturl()
        raise InputError(f"{url!r} is inside a server", where="url", help=f"write {root}, and the model with --model")
    return parts


def _within(value: float, low: float, high: float, name: str) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise InputError(f"{value!r} is out of range", where=name, help=f"[{low:g}, {high:g}]")


# == payload: Request bodies in the Open Inference Protocol v2, from a model's metadata or a file the user gives.
#
# Promises bodies a conforming server accepts: JSON, or the binary tensor data extension (tensors appended to the JSON
# as raw little-endian bytes, `Inference-Header-Content-Length` giving the length of the JSON). Values are made up from
# the seed, so equal seeds send equal bytes. Sources: the KServe "Open Inference Protocol" and Triton's "Binary tensor
# data extension" documents.


BODY_BYTES_MAX: Final = 256 * 2**20
VARIANTS: Final = 4
"""Different bodies sent in turn, so that a cache in front of the model does not answer for it."""


class ModelMetadata(msgspec.Struct, frozen=True):
    """The answer to GET /v2/models/NAME, as far as it matters here."""

    inputs: tuple[Port, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """One request's body and what its head must say about it."""

    content: bytes
    json_bytes: int
    """Length of the JSON part; all of it where no binary tensors follow."""

    @property
    def is_binary(self) -> bool:
        return self.json_bytes != len(self.content)


class JsonTensor(msgspec.Struct, frozen=True):
    """An input with values: numbers as an array, texts as bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]


def made_up(
    metadata: ModelMetadata, shapes: Mapping[str, Sequence[int]], *, seed: int, where: str
) -> list[list[JsonTensor]]:
    """`VARIANTS` sets of inputs with values from the seed: floats in [0, 1], integers 0 to 9, short texts."""
    if not metadata.inputs:
        raise InputError("the model says nothing of its inputs", where=where, help="give a request body as a JSON file")
    known = {one.name for one in metadata.inputs}
    for name in shapes:
        if name not in known:
            raise InputError(f"no input {name!r}", where=where, help=f"inputs: {', '.join(sorted(known))}")
    rng = stream(seed, "inputs")
    return [[_tensor(one, shapes.get(one.name), rng, where) for one in metadata.inputs] for _ in range(VARIANTS)]


def _tensor(one: Port, given: Sequence[int] | None, rng: Random, where: str) -> JsonTensor:
    shape = tuple(given) if given is not None else tuple(1 if size < 0 else size for size in one.shape)
    count = prod(shape)
    if min(shape, default=1) < 1 or count > BODY_BYTES_MAX:
        raise InputError(f"input {one.name!r} cannot have the shape {list(shape)}", where=where, help="give its shape")
    if one.datatype == "BYTES":
        return JsonTensor(one.name, one.datatype, shape, [b"sloop %d" % rng.randrange(10) for _ in range(count)])
    if one.datatype not in NUMPY_TYPES:
        raise InputError(
            f"input {one.name!r} has the datatype {one.datatype!r}",
            where=where,
            help=f"known: {', '.join(NUMPY_TYPES)}, BYTES",
        )
    drawn = np.frombuffer(rng.randbytes(count), dtype=np.uint8)
    values = drawn / 255.0 if one.datatype.startswith("FP") else drawn % (2 if one.datatype == "BOOL" else 10)
    return JsonTensor(one.name, one.datatype, shape, values.astype(NUMPY_TYPES[one.datatype]))


def from_array(path: Path, metadata: ModelMetadata, *, where: str) -> list[JsonTensor]:
    """The tensor of a `.npy` file as the model's only input."""
    if len(metadata.inputs) != 1:
        raise InputError(
            f"the model has {len(metadata.inputs)} inputs", where=where, help="give a request body as JSON"
        )
    only = metadata.inputs[0]
    try:
        array = np.load(path, allow_pickle=False)
        if not isinstance(array, np.ndarray) or only.datatype not in NUMPY_TYPES:
            raise ValueError(f"an array for the datatype {only.datatype} is expected")
        values = np.ascontiguousarray(array).astype(NUMPY_TYPES[only.datatype])
    except (OSError, ValueError, EOFError, TypeError, SyntaxError, UnicodeError) as error:
        raise InputError(f"not a usable array: {error}", where=str(path), help="write it with numpy.save") from None
    return [JsonTensor(only.name, only.datatype, tuple(array.shape), values.ravel())]


def from_json(path: Path) -> Body:
    """A whole request body that the user wrote, checked to be a JSON object with inputs."""
    try:
        content = path.read_bytes()
        keys = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except OSError as error:
        raise InputError(f"cannot be read: {error}", where=str(path), help="check the path") from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(f"not a request: {error}", where=str(path), help='write {"inputs": [...]}') from None
    if "inputs" not in keys:
        raise InputError("no `inputs` in it", where=str(path), help='write {"inputs": [...]}')
    return Body(content, len(content))


def encoded(tensors: Sequence[JsonTensor], encoding: Encoding, *, where: str) -> Body:
    """The body that carries these inputs; `encoding` is JSON or BINARY."""
    described: list[dict[str, object]] = []
    tails: list[bytes] = []
    for tensor in tensors:
        entry: dict[str, object] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if encoding == Encoding.BINARY:
            tails.append(_raw(tensor.values))
            entry["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            entry["data"] = _listed(tensor, where)
        described.append(entry)
    message: dict[str, object] = {"inputs": described}
    if encoding == Encoding.BINARY:
        message["parameters"] = {"binary_data_output": True}
    head = msgspec.json.encode(message)
    content = b"".join([head, *tails])
    if len(content) > BODY_BYTES_MAX:
        raise InputError(
            f"a body of {len(content):,} bytes", where=where, help=f"at most {BODY_BYTES_MAX:,}: shrink it"
        )
    return Body(content, len(head))


def _raw(values: NDArray[Any] | list[bytes]) -> bytes:
    if isinstance(values, list):
        return b"".join(len(value).to_bytes(4, "little") + value for value in values)
    return values.tobytes()


def _listed(tensor: JsonTensor, where: str) -> list[object]:
    if tensor.datatype == "FP16":
        raise InputError(
            f"input {tensor.name!r} is FP16, which the protocol's JSON cannot carry",
            where=where,
            help="use binary encoding",
        )
    if isinstance(tensor.values, list):
        return [value.decode() for value in tensor.values]
    listed: list[object] = tensor.values.tolist()
    return listed


# == metadata: Asks an OIP v2 server about itself before any load is sent: is it there, what does the model take.
#
# Promises the model's metadata, or an error a user can act on. Uses the standard library's blocking client: two
# requests, once.


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
