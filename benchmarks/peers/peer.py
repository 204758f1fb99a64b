"""The description of a server under comparison: how to install, start and ask it.

The rest of the benchmark knows only this. It consists of values: nothing here starts a process or opens a socket.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

PROGRAMS: Final = Path(__file__).parent / "programs"
SETTINGS: Final = "PEER_SETTINGS"
"""The environment variable by which a program is told its `Settings`, as JSON."""

Limits = Mapping[str, float]
"""Settings of an admission limit, under the peer's own names; empty for none."""
Tuning = Mapping[str, str]
"""Settings of batches and processes, under names of the peer's program."""
ONE_BY_ONE: Final[Tuning] = {"batches": "none"}
"""Of a server that forms no batches."""


class PeerFailed(Exception):
    """A peer could not be installed, started or asked; the message is the last that it printed."""


class Encoding(StrEnum):
    """How tensors are encoded in requests and answers."""

    JSON = "json"
    BINARY = "binary"


class Environment(Struct, frozen=True):
    """A virtual environment under `.peers/`; without packages, this interpreter."""

    name: str
    packages: tuple[str, ...]
    """With pinned versions."""


class Model(Struct, frozen=True):
    """An ONNX file with one FP32 input and one FP32 output, whose first dimension is the batch."""

    path: Path
    input: str
    output: str
    row: tuple[int, ...]
    """Shape of one request's input without the batch."""
    answer: tuple[int, ...]
    """Shape of one request's output without the batch."""


class Case(Struct, frozen=True):
    """The model that all servers serve, and its folder."""

    model: Model
    encoding: Encoding
    batch_max: int
    slo_ms: float
    folder: Path
    """For what a server writes."""
    tuning: Tuning
    """One of the peer's `tunings`."""
    limits: Limits = {}
    """Of admission, as one of the peer's `limits` gives them."""

    @property
    def rows_at_once(self) -> int:
        """In the largest batch that the server forms."""
        return 1 if ONE_BY_ONE.items() <= self.tuning.items() else self.batch_max


class Settings(Struct, frozen=True):
    """The parameters of a program in `programs/`."""

    model: str
    input: str
    output: str
    row: tuple[int, ...]
    answer: tuple[int, ...]
    encoding: Encoding
    batch_max: int
    port: int
    folder: str
    limits: Limits
    options: Mapping[str, str]
    """The case's tuning, and what else the program has to know."""


class Launch(Struct, frozen=True):
    """How a server is started."""

    command: tuple[str, ...]
    variables: Mapping[str, str]
    port: int
    ready: str
    """The path that answers 200 once the server would take a request."""


class Ask(Struct, frozen=True):
    """One request, and how to read its answer."""

    path: str
    fields: Mapping[str, str]
    """Of its head, beside host and content-length."""
    body: bytes
    read: Callable[[bytes, Mapping[str, str]], list[float]]
    """The numbers in an answer, of its body and its head's fields (lower case)."""


class Peer(Protocol):
    """A server under comparison: one row of the tables."""

    @property
    def name(self) -> str:
        """The name in the tables."""
        ...

    @property
    def environment(self) -> Environment: ...

    @property
    def encodings(self) -> frozenset[Encoding]: ...

    @property
    def how(self) -> str:
        """The important settings, as text for the page."""
        ...

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        """Settings to try in closed loops, by what the tables call them; under deadlines it has the first."""
        ...

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        """How to start the server; may write files to the case's folder."""
        ...

    def ask(self, case: Case, row: bytes) -> Ask:
        """The request for this input, raw FP32."""
        ...

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        """Settings of the admission limit to try, if `queue` requests can be answered within a deadline."""
        ...


def program(name: str, case: Case, python: Path, port: int, ready: str, **options: str) -> Launch:
    """A program of `programs/` run by the peer's interpreter."""
    settings = settings_of(case, port, options)
    return Launch((str(python), str(PROGRAMS / name)), settings, port, ready)


def settings_of(case: Case, port: int, options: Mapping[str, str]) -> dict[str, str]:
    """The environment variable with the settings of a program."""
    from msgspec import json  # noqa: PLC0415

    model = case.model
    settings = Settings(
        model=str(model.path.absolute()),
        input=model.input,
        output=model.output,
        row=model.row,
        answer=model.answer,
        encoding=case.encoding,
        batch_max=case.rows_at_once,
        port=port,
        folder=str(case.folder.absolute()),
        limits=case.limits,
        options={**case.tuning, **options},
    )
    return {SETTINGS: json.encode(settings).decode()}
