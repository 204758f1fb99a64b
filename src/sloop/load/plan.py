"""The plan of a load run: server, schedule and request bodies; and the metadata that the server returns.

Every mistake of the user raises `InputError`. Bodies are JSON or use the binary tensor data extension; their
values are generated from a seed, so equal seeds send equal bytes. A deadline is `sent + slo`; a link's transfer time
passes before the server receives the request. Sources: Open Inference Protocol v2; Triton's "Binary tensor data
extension".
"""

import http.client
import ssl
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite, prod
from pathlib import Path
from random import Random
from typing import Any, Final
from urllib.parse import SplitResult, quote, urlsplit

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from sloop.errors import InputError, MachineError
from sloop.streams import stream
from sloop.tensor import NUMPY_TYPES, Port
from sloop.workload import Link, Trace, Work

REQUESTS_MAX: Final = 20_000_000
CONNECTIONS_MAX: Final = 20_000
DURATION_S_MAX: Final = 7 * 86_400.0


class Delivery(StrEnum):
    """How a link's transfer time affects a request."""

    DELAY = "delay"
    """The client delays the request: it arrives later, as on a real link."""
    ATTACH = "attach"
    """The request arrives at once and has that much less time left, as in Sponge's artefact."""


class Encoding(StrEnum):
    """How tensors are encoded."""

    AUTO = "auto"
    """Binary if the server lists the extension, otherwise JSON."""
    JSON = "json"
    BINARY = "binary"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One load run, an open loop: requests are sent when due, whether or not earlier ones were answered."""

    url: str
    """The server's URL, such as `http://localhost:8000`."""
    model: str
    """The name of the model. `version` asks for one of its versions."""
    arrivals: Trace
    slo_ms: float
    seed: int = 0
    """The seed of the generated inputs."""
    link: Link | None = None
    payload_bytes: int | None = None
    """Bytes that the link transfers for each request; None: the size of the body."""
    delivery: Delivery = Delivery.DELAY
    encoding: Encoding = Encoding.AUTO
    input_file: Path | None = None
    """A `.npy` file with the first input's tensor, or a `.json` file with a complete request body. None: inputs are
    generated from the model's metadata."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes by input name, instead of those of the model's metadata. In both, -1 stands for a dimension that follows
    from what a request of the trace brings (`shape_of`), or is 1."""
    timeout_s: float = 30.0
    connections_max: int = 4_096
    warm_connections: int = 16
    """Connections that are opened before the first request is due."""
    records: Path | None = None
    """A file for one line of JSON per request."""
    cpus: tuple[int, ...] = ()
    """The CPUs that the sending process may use; empty: all."""
    version: str = ""
    """Empty: the server chooses the version."""
    api_key: str = field(default="", repr=False)
    """The key for a server that requires one."""

    def __post_init__(self) -> None:
        split_url(self.url)
        if not self.model:
            raise InputError("no model given", where="model", help="name the application or model to send to")
        if not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InputError("the key has characters that no header can have", where="api_key", help="check the key")
        _within(self.slo_ms, 0.001, 1e9, "slo_ms")
        _within(self.timeout_s, 0.001, 3_600.0, "timeout_s")
        _within(self.connections_max, 1, CONNECTIONS_MAX, "connections_max")
        _within(self.warm_connections, 0, self.connections_max, "warm_connections")
        if self.payload_bytes is not None:
            _within(self.payload_bytes, 0, 2**40, "payload_bytes")
        _within(self.arrivals.duration_ns / 1e9, 1e-9, DURATION_S_MAX, "duration_s")


def split_url(url: str) -> SplitResult:
    """The validated parts of an http(s) URL."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url!r} is not a URL: {error}", where="url", help="write http://host:port") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise InputError(f"{url!r} is not a server's URL", where="url", help="write http://host:port")
    if not url.isascii() or any(ord(sign) <= 32 for sign in url):
        raise InputError(f"the URL {url!r} contains invalid characters", where="url", help="write http://host:port")
    before, inside, _ = f"{parts.path}/".partition("/v2/")
    if inside:
        root = parts._replace(path=before).geturl()
        raise InputError(
            f"{url!r}: the URL must not contain a path below /v2",
            where="url",
            help=f"write {root}, and pass the model with --model",
        )
    return parts


def _within(value: float, low: float, high: float, name: str) -> None:
    if not (isfinite(value) and low <= value <= high):
        raise InputError(f"{value!r} is out of range", where=name, help=f"[{low:g}, {high:g}]")


BODY_BYTES_MAX: Final = 256 * 2**20
BODIES_BYTES_MAX: Final = 2**30
"""Of all bodies together: they are made before the first is sent."""
VARIANTS: Final = 4
"""The number of different bodies, sent in turn, so that a cache cannot answer for the model."""
VARIED_MAX: Final = 64
"""If what requests bring differs in more ways than this, there is one body for each of them."""


class ModelMetadata(msgspec.Struct, frozen=True):
    """The used part of the answer to GET /v2/models/NAME."""

    inputs: tuple[Port, ...] = ()
    versions: tuple[str, ...] = ()


class Body(msgspec.Struct, frozen=True):
    """The body of a request, with the lengths for its headers."""

    content: bytes
    json_bytes: int
    """Length of the JSON part; the whole length if no binary tensors follow."""

    @property
    def is_binary(self) -> bool:
        return self.json_bytes != len(self.content)


class JsonTensor(msgspec.Struct, frozen=True):
    """An input with values: numbers as an array, strings as bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: NDArray[Any] | list[bytes]


def variants_of(works: Sequence[Work]) -> int:
    """How many bodies there are for each of these."""
    return VARIANTS if len(works) <= VARIED_MAX else 1


def made_up(
    metadata: ModelMetadata,
    shapes: Mapping[str, Sequence[int]],
    works: Sequence[Work] = (Work(),),
    *,
    seed: int,
    where: str,
) -> Iterator[list[JsonTensor]]:
    """Sets of inputs with values from the seed: floats in [0, 1], integers 0 to 9, short strings. There are
    `variants_of(works)` for each of `works`, which are different, one after the other."""
    if not metadata.inputs:
        raise InputError("the model's metadata lists no inputs", where=where, help="give a request body as a JSON file")
    known = {one.name for one in metadata.inputs}
    for name in shapes:
        if name not in known:
            raise InputError(f"unknown input {name!r}", where=where, help=f"inputs: {', '.join(sorted(known))}")
    ports = [structs.replace(one, shape=tuple(shapes.get(one.name, one.shape))) for one in metadata.inputs]
    brings_sizes, brings_rows = any(work.size for work in works), any(work.rows > 1 for work in works)
    if brings_sizes and not brings_rows and not any(port.open_places for port in ports):
        # Metadata do not say that a model takes no batches, so that its first dimension is a size: --shape says it.
        ports = [structs.replace(one, has_rows=one.has_rows and one.name not in shapes) for one in ports]
    _check_works(ports, works, where)
    rng = stream(seed, "inputs")
    for work in works:
        lengths = iter(work.shape)
        filled = [
            (one, shape_of(one, declared.open_places, work, lengths))
            for one, declared in zip(ports, metadata.inputs, strict=True)
        ]
        for _ in range(variants_of(works)):
            yield [_tensor(one, shape, rng, where) for one, shape in filled]


def _check_works(ports: Sequence[Port], works: Sequence[Work], where: str) -> None:
    """InputError if no input can have the rows, or the sizes, that requests are to bring."""
    if not any(port.counts_rows for port in ports) and any(work.rows > 1 for work in works):
        help = "leave `rows` out, or give the inputs with -1 as their first dimension (--shape)"
        raise InputError("no input of the model has an open number of rows", where=where, help=help)
    if not any(port.open_places for port in ports) and any(work.size for work in works):
        help = (
            "leave `sizes` out, or give the inputs with -1 as an open dimension (--shape); -1 as the first one of a "
            "model that takes no batches"
        )
        raise InputError("all rows of the model's inputs are equally large", where=where, help=help)


def shape_of(port: Port, opened: Sequence[int], work: Work, lengths: Iterator[int]) -> tuple[int, ...]:
    """The shape of an input of a request that brings `work`, of whose `shape` these `lengths` are left.

    Its first dimension, if it counts rows, has them. The size is the product of the dimensions that the model leaves
    open, `opened`. Those of them that the port leaves open too are equally long (the sides of an image), 1 without a
    size.
    """
    shape, places = list(port.shape), port.open_places
    if port.counts_rows:
        shape[0] = work.rows
    fixed = prod(shape[place] for place in opened if place not in places and place < len(shape))
    side = max(1, round((work.size / max(1, fixed)) ** (1 / len(places)))) if places else 1
    for place in sorted({*opened, *places}):
        length = next(lengths, side)
        if place in places:
            shape[place] = length
    return tuple(shape)


def _tensor(one: Port, shape: tuple[int, ...], rng: Random, where: str) -> JsonTensor:
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
    """A complete request body from a file, checked to be a JSON object with inputs."""
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


ANSWER_BYTES_MAX = 16 * 2**20
NAMES_MAX = 8
"""How many models an error names."""


class _ServerMetadata(msgspec.Struct, frozen=True):
    extensions: tuple[str, ...] = ()


class _Model(msgspec.Struct, frozen=True):
    name: str


class _Models(msgspec.Struct, frozen=True):
    models: tuple[_Model, ...]


def model_path(url: SplitResult, model: str, version: str = "") -> str:
    """`/v2/models/NAME`, or `/v2/models/NAME/versions/V`, below the URL's own path."""
    path = f"{url.path.rstrip('/')}/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def fetch_metadata(
    url: SplitResult, model: str, *, timeout_s: float, version: str = "", api_key: str = ""
) -> ModelMetadata:
    """The server's metadata of `model`. InputError also if the server says that it has no such version."""
    where = url.geturl()
    status, body = _get(url, model_path(url, model), timeout_s=timeout_s, api_key=api_key)
    if status == 401:
        help = "give one with --api-key-file, or in the environment as SLOOP_API_KEY"
        raise InputError(f"the server requires {'another' if api_key else 'a'} key", where=where, help=help)
    if status != 200:
        said = body[:200].decode(errors="replace").strip()
        raise InputError(
            f"the server has no model {model!r}: {status} {said}", where=where, help="check the name with GET /v2"
        )
    try:
        found = msgspec.json.decode(body, type=ModelMetadata)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InputError(
            f"the server's metadata of {model!r} does not follow the protocol: {error}",
            where=where,
            help="is it an Open Inference Protocol v2 server?",
        ) from None
    if version and found.versions and version not in found.versions:
        help = f"it serves {', '.join(found.versions)}"
        raise InputError(f"the server has no version {version!r} of {model!r}", where=where, help=help)
    return found


def only_model(url: SplitResult, *, timeout_s: float, api_key: str = "") -> str:
    """The name of the only model that a sloop server serves. InputError if the server has several or does not report
    them."""
    status, body = _get(url, f"{url.path.rstrip('/')}/v2/models", timeout_s=timeout_s, api_key=api_key)
    try:
        names = [model.name for model in msgspec.json.decode(body, type=_Models).models] if status == 200 else []
    except (msgspec.MsgspecError, RecursionError):
        names = []
    if not names:
        raise InputError("the server does not report its models", where=url.geturl(), help="name one with --model")
    if len(names) > 1:
        some = ", ".join(names[:NAMES_MAX]) + (", …" if len(names) > NAMES_MAX else "")
        what = f"the server has {len(names)} models: {some}"
        raise InputError(what, where=url.geturl(), help="name one with --model")
    return names[0]


def preferred_encoding(url: SplitResult, *, timeout_s: float, api_key: str = "") -> Encoding:
    """Binary if the server lists the extension, otherwise JSON."""
    status, body = _get(url, f"{url.path.rstrip('/')}/v2", timeout_s=timeout_s, api_key=api_key)
    try:
        extensions = msgspec.json.decode(body, type=_ServerMetadata).extensions if status == 200 else ()
    except (msgspec.MsgspecError, RecursionError):
        extensions = ()
    return Encoding.BINARY if any("binary_tensor_data" in name for name in extensions) else Encoding.JSON


def _get(url: SplitResult, path: str, *, timeout_s: float, api_key: str = "") -> tuple[int, bytes]:
    host, port = url.hostname or "", url.port or default_port(url)
    if url.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=ssl.create_default_context()
        )
    else:
        connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    headers: dict[str, str] = {"accept": "application/json", **({"x-api-key": api_key} if api_key else {})}
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
    """The URL's port, or the default of its scheme."""
    return 443 if url.scheme == "https" else 80
