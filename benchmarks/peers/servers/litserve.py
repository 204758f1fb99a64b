"""LitServe: FastAPI in front of worker processes. It has no admission limit: all requests are queued."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.peers.bodies import plain_json, uploaded
from benchmarks.peers.peer import ONE_BY_ONE, Ask, Case, Encoding, Environment, Launch, Limits, Tuning, program

TUNINGS: Final[Mapping[str, Tuning]] = {
    "waits 1 ms": {"wait_s": "0.001"},
    "waits 1 ms, fast queue": {"wait_s": "0.001", "queue": "fast"},
    "one by one, fast queue": {**ONE_BY_ONE, "queue": "fast"},
}
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
        return "one worker, `batch_timeout`, `fast_queue`; binary: the tensor as an uploaded file"

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        return program("litserve_program.py", case, python, port, "/health")

    def ask(self, case: Case, row: bytes) -> Ask:
        if case.encoding is Encoding.BINARY:
            return uploaded("/predict", row)
        return plain_json("/predict", case, row)

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {"none to be set": {}}


LITSERVE: Final = LitServe()
