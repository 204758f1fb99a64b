"""The service behind both protocols, REST and gRPC: the models of a server, with their metrics, state and decisions,
and the keys that clients must send.

Models are added and removed while the server runs. A model is an application; which of its versions serve is the core's
decision, and the model is added again when that changes.
"""

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from hashlib import blake2b
from heapq import nlargest
from http import HTTPStatus
from itertools import takewhile
from pathlib import Path
from secrets import token_bytes
from typing import Final, NamedTuple

import msgspec

from sloop import __version__
from sloop.app.limits import Limits
from sloop.errors import InputError
from sloop.serve.edge.bodies import INFER, MODELS, BodyMemory
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.refusal import Refusal
from sloop.serve.edge.sink import EdgeSink
from sloop.serve.protocols import Readiness, ServerReadiness
from sloop.text import counted, listed, quoted

SERVER: Final = "sloop"
SERVER_VERSION: Final = __version__
EXTENSIONS: Final = ("binary_tensor_data", "classification", "model_configuration", "statistics")
"""Triton's names of the extensions that every server has."""
PLATFORM: Final = "sloop_application"
NAMES_MAX: Final = 5
COMPARED_MAX: Final = 16
"""Names with which a wrong one is compared, those that begin alike: each takes 50 µs."""
"""An error names at most this many models, so that it stays readable on a server with hundreds of them."""
KEY_FILE_BYTES_MAX: Final = 2**20
KEY_CHECK_S: Final = 1.0
"""How often, in seconds, a server that gets requests looks whether its key file has changed."""

_log: Final = logging.getLogger("sloop.keys")


ADMIN: Final = "admin"
"""The role of keys whose holders may load and unload models. A key without a role only reads and infers."""


class ClientKey(NamedTuple):
    """What a server knows of a key, but for the key itself."""

    name: str
    """Empty for a key without one."""
    is_admin: bool = False


class Keys:
    """The API keys of a server: one given at its start, and those of a file, which is read again when it changes.

    Each line of the file is `KEY`, `NAME KEY`, or `NAME KEY admin`; several keys may have one name. Requests are
    counted by name. The key given at the start has no role: it is easier to see for others than a file.
    Raises `InputError` for a key or file that cannot be used; a file that becomes wrong later changes nothing, and is
    reported in the log. Without `must_read`, a file that is wrong at first is reported there too, and none of
    its keys is accepted until it is right.
    """

    __slots__ = ("_file", "_given", "_known", "_next_look_s", "_secret", "_stamp", "accepted", "is_required", "refused")

    def __init__(self, key: str = "", file: Path | None = None, *, must_read: bool = True) -> None:
        self._file, self._next_look_s = file, 0.0
        self._stamp: tuple[int, int, int] | None = None
        self._secret = token_bytes(32)
        self.is_required = bool(key) or file is not None
        self.accepted: Counter[str] = Counter()
        """Requests by the name of their key, which is empty for a key without one."""
        self.refused: Counter[str] = Counter()
        """Requests without a key (`missing`), with another one (`wrong`), or with one that may not do this (`role`)."""
        self._given = {self._digest(checked_key(key, "the API key")): ClientKey("")} if key else {}
        self._known = self._given
        """By the digest of the key."""
        if file is not None and must_read:
            self._stamp = self._stamp_now(file)
            self._known = self._given | self._read(file)
        elif file is not None:
            self.reload()

    @property
    def has_admin(self) -> bool:
        """Whether there is a key whose holder may load and unload models."""
        return any(key.is_admin for key in self._known.values())

    def accepts(self, key: str) -> bool:
        """Whether a client may come in with this key."""
        if self._file is not None and time.monotonic() >= self._next_look_s:
            self._look(self._file)
        # A look-up by a digest with a secret takes as long for a key that is nearly right as for any other, and no
        # longer where there are many keys. Comparing with each in turn would need `compare_digest`, and all of them.
        found = self._known.get(self._digest(key))
        if found is None:
            self.refused["wrong" if key else "missing"] += 1
            return False
        self.accepted[found.name] += 1
        return True

    def administers(self, key: str) -> bool:
        """Whether the holder of this key, which was accepted, may load and unload models."""
        if self._known[self._digest(key)].is_admin:
            return True
        self.refused["role"] += 1
        return False

    def reload(self) -> None:
        """Read the key file again, whether it has changed or not (SIGHUP)."""
        if self._file is not None:
            self._stamp = 0, 0, 0
            self._look(self._file)

    def _digest(self, key: str) -> bytes:
        return blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32, key=self._secret).digest()

    def _look(self, file: Path) -> None:
        """Read the file if it has changed since the last look."""
        self._next_look_s = time.monotonic() + KEY_CHECK_S
        before, self._stamp = self._stamp, None
        try:
            self._stamp = self._stamp_now(file)
            if self._stamp != before:
                self._known = self._given | self._read(file)
                _log.info("%s: read again, %s", file, counted(len(self._known), "key"))
        except InputError as error:
            if before is not None or self._stamp is not None:  # a missing file is reported once
                _log.error("the keys stay as they were: %s; %s", error.args[0], error.help)

    @staticmethod
    def _stamp_now(file: Path) -> tuple[int, int, int]:
        try:
            found = file.stat()
        except OSError as error:
            raise unreadable(file, error) from error
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self, file: Path) -> dict[bytes, ClientKey]:
        """The keys in the file, by digest."""
        try:
            with file.open("rb") as opened:
                mode = os.fstat(opened.fileno()).st_mode
                raw = opened.read(KEY_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise unreadable(file, error) from error
        if len(raw) > KEY_FILE_BYTES_MAX:
            raise InputError(f"more than {KEY_FILE_BYTES_MAX} bytes", where=str(file), help="one key per line")
        if mode & 0o077:
            _log.warning("%s: others than its owner can read or change the keys; chmod 600 it", file)
        found: dict[bytes, ClientKey] = {}
        for place, line in enumerate(raw.decode("utf-8-sig", "replace").splitlines(), 1):
            words = line.split()
            if not words or line.lstrip().startswith("#"):
                continue
            where = f"{file}:{place}"
            fix = f"write KEY, NAME KEY, or NAME KEY {ADMIN}"
            if len(words) > 3 or words[2:] not in ([], [ADMIN]):
                what = f"{len(words)} words" if len(words) > 3 else f"the third word is not the role {ADMIN!r}"
                raise InputError(what, where=where, help=fix)
            if words[1:] == [ADMIN]:  # else the secret would be taken for a name, and shown in metrics
                raise InputError(f"{ADMIN!r} is a role, and cannot be a key", where=where, help=fix)
            name = words[0] if len(words) > 1 else ""
            if not re.fullmatch(r"[A-Za-z0-9_.-]{0,64}", name):
                what = "the name of a key has characters other than letters, digits, '_', '.' and '-', or over 64"
                raise InputError(what, where=where, help="write NAME KEY, such as: robot-1 dGhpcyBp")
            digest = self._digest(checked_key(words[min(1, len(words) - 1)], "the key", where))
            if digest in found:
                raise InputError("this key stands in the file twice", where=where, help="remove one of the lines")
            found[digest] = ClientKey(name, is_admin=len(words) > 2)
        if not found:
            raise InputError(
                "no key in it", where=str(file), help=f"write one key per line, as KEY, NAME KEY, or NAME KEY {ADMIN}"
            )
        return found


def checked_key(key: str, what: str, where: str = "") -> str:
    """The key, if clients can send it in a header. Raises an `InputError` that does not show it."""
    if not (key.isascii() and key.isprintable() and " " not in key and len(key) <= 1024):
        fix = "use at most 1024 printable ASCII characters without spaces, such as the output of `openssl rand -hex 32`"
        raise InputError(f"{what} cannot be sent in a header", where=where, help=fix)
    return key


def unreadable(file: Path, error: OSError) -> InputError:
    """The error for a key file that cannot be read."""
    return InputError(
        f"the key file cannot be read: {error.strerror}", where=str(file), help="name a file of keys, one per line"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """One application, as both protocols expose it. All its versions have the same inputs and outputs."""

    name: str
    slo_ns: int
    validator: InputValidator
    limits: Limits
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By output, the names of its classes in the order of their indices; outputs without names are left out."""
    versions: Sequence[str] = ("1",)
    """The versions that serve requests, the one with most of them first."""
    joining: Mapping[str, str] = field(default_factory=dict)
    """By stage and variant, whether requests may share a forward pass, and why."""


@dataclass(frozen=True, slots=True, eq=False)
class InferenceService:
    """The models of a server, as exposed by both protocols."""

    sink: EdgeSink
    bodies: BodyMemory
    keys: Keys = field(default_factory=Keys)
    """One of them must be sent by clients, if there are any."""
    has_repository: bool = False
    """Whether clients may load and end models."""
    models: dict[str, Model] = field(default_factory=dict)
    """By name. Only `add` and `remove` change it."""
    infer_paths: dict[str, Model] = field(default_factory=dict)
    """By the path of inference over HTTP, which nearly all requests have."""

    def bounds(self, model: Model) -> dict[str, int]:
        """What a request to the model may have at most, for its metadata."""
        found = {"request_bytes_max": self.bodies.each_bytes_max, "json_bytes_max": self.bodies.json_bytes_max}
        return {"rows_max": model.validator.signature.rows_max, **found} if model.validator.counting else found

    @property
    def extensions(self) -> Sequence[str]:
        """Triton's names of the extensions that this server has."""
        return (*EXTENSIONS, "model_repository") if self.has_repository else EXTENSIONS

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
        if version and version not in found.versions:
            raise self.unknown_version(found, version)
        return found

    def readiness_in(self, answer: bytes, model: Model, version: str) -> Readiness:
        """The state of a model or of a version of it, from the answer about `Topic.MODELS`. Raises a 404 if the version
        neither serves nor starts."""
        found = readiness_of(answer).get(model.name)
        if found is None:
            raise self.unknown_version(model, version)
        return found

    def unknown(self, name: str) -> Refusal:
        """The 404 for a model that this server does not have."""
        return Refusal(HTTPStatus.NOT_FOUND, f"unknown model {quoted(name)}", named(name, self.models))

    def unknown_version(self, model: Model, version: str) -> Refusal:
        """The 404 for a version that does not serve."""
        what, served = f"model {model.name!r} has no version {quoted(version)} that serves", model.versions
        if not served:
            return Refusal(HTTPStatus.NOT_FOUND, what, "no version of it serves now")
        noun = "version" if len(served) == 1 else "versions"
        fix = f"omit the version, or use {noun} {listed([repr(each) for each in served], 'or')}"
        return Refusal(HTTPStatus.NOT_FOUND, what, fix)

    def authorise(self, authorization: str | None, api_key: str | None, *, as_admin: bool = False) -> None:
        """Raise a 401 unless the request has an API key of this server, as a bearer token or as `x-api-key`; and a 403
        if it would load or end a model (`as_admin`) with a key that may not do so."""
        if not self.keys.is_required:
            return
        given = api_key or ""
        if authorization is not None and authorization[:7].lower() == "bearer ":
            given = authorization[7:].strip()
        if not self.keys.accepts(given):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                "the API key is wrong" if given else "this server requires an API key",
                "send the header 'authorization: Bearer KEY' or 'x-api-key: KEY'",
            )
        if as_admin and not self.keys.administers(given):
            what = "this API key may not load or unload models"
            fix = f"use one with the role {ADMIN}, which the server's key file has as NAME KEY {ADMIN}"
            raise Refusal(HTTPStatus.FORBIDDEN, what, fix)


def server_readiness_of(answer: bytes) -> ServerReadiness:
    """The answer about `Topic.READY`."""
    return _SERVER_READINESS.decode(answer)


_SERVER_READINESS: Final = msgspec.json.Decoder(ServerReadiness)
_READINESS: Final = msgspec.json.Decoder(dict[str, Readiness])


def readiness_of(answer: bytes) -> Mapping[str, Readiness]:
    """The states in an answer about `Topic.MODELS`, by model."""
    return _READINESS.decode(answer)


def _prefix_length(one: str, other: str) -> int:
    """How many characters two names have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def named(wrong: str, names: Iterable[str]) -> str:
    """The fix for an unknown model: all models if they are few, otherwise those with the nearest names."""
    known = list(names)
    if not known:
        return "this server has no models"
    if len(known) <= NAMES_MAX:
        return f"this server has the model{'' if len(known) == 1 else 's'} {listed([repr(name) for name in known])}"
    similar = nlargest(COMPARED_MAX, known, key=lambda name: _prefix_length(name, wrong))
    near = get_close_matches(wrong, similar, n=NAMES_MAX) if len(wrong) <= 100 else []
    nearest = f"did you mean {listed([repr(name) for name in near], 'or')}? " if near else ""
    return f"{nearest}GET /v2/models lists the {counted(len(known), 'model')} of this server"
