"""LitServe: FastAPI in front of worker processes. It has no admission limit: all requests are queued."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.bodies import plain_json, uploaded
from benchmarks.peers.peer import Ask, Case, Encoding, Environment, Launch, Limits, program

WAIT_MS: Final = 1
PACKAGES: Final = ("litserve==0.2.19", "python-multipart==0.0.34", "onnxruntime==1.31.1")
"""The second for uploaded files."""
ENVIRONMENT: Final = Environment("litserve", PACKAGES)


@dataclass(frozen=True, slots=True)
class LitServe:
    name: str = "LitServe"
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return f"one worker, `batch_timeout={WAIT_MS / 1e3:g}` s; binary: the tensor as an uploaded file"

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        return program("litserve_program.py", case, python, port, "/health", wait_ms=str(WAIT_MS))

    def ask(self, case: Case, row: bytes) -> Ask:
        if case.encoding is Encoding.BINARY:
            return uploaded("/predict", row)
        return plain_json("/predict", case, row)

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {"none to be set": {}}


LITSERVE: Final = LitServe()
