"""BentoML: Starlette and an adaptive batcher that learns how long batches take.

It has two limits, neither set by default: `max_concurrency` (status 429 above it), and `max_latency_ms`, with which the
batcher drops requests that it expects to be late (503).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from benchmarks.peers.bodies import plain_json, uploaded
from benchmarks.peers.peer import (
    ONE_BY_ONE,
    PROGRAMS,
    Ask,
    Case,
    Encoding,
    Environment,
    Launch,
    Limits,
    Tuning,
    program,
)

TUNINGS: Final[Mapping[str, Tuning]] = {"waits as it learns": {}, "one by one": ONE_BY_ONE}
CONCURRENCY: Final = "max_concurrency"
LATENCY: Final = "max_latency_ms"
ENVIRONMENT: Final = Environment("bentoml", ("bentoml==1.4.39", "onnxruntime==1.31.1"))


@dataclass(frozen=True, slots=True)
class BentoML:
    name: str = "BentoML"
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return "`workers=1`, `batchable`; binary: the tensor as an uploaded file"

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        made = program("bentoml_program.py", case, python, port, "/readyz")
        flags = ("--host", "127.0.0.1", "--port", str(port), "--working-dir", str(PROGRAMS))
        command = (str(python), "-m", "bentoml", "serve", "bentoml_program:Inference", *flags)
        quiet = {"BENTOML_DO_NOT_TRACK": "True", "BENTOML_HOME": str(case.folder.absolute() / "bentoml")}
        return structs.replace(made, command=command, variables=dict(made.variables) | quiet)

    def ask(self, case: Case, row: bytes) -> Ask:
        if case.encoding is Encoding.BINARY:
            return uploaded("/predict", row, batched=True)
        return plain_json("/predict", case, row, batched=True)

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {
            f"max_latency {slo_ms * 0.7:g} ms": {LATENCY: slo_ms * 0.7},
            f"max_concurrency {queue // 8 + 1}": {CONCURRENCY: queue // 8 + 1},
        }


BENTOML: Final = BentoML()
