"""Triton Inference Server with a model bound by PyTriton: a C++ server in front of a Python process.

Its Python stub is linked to libpython, and must find that of the environment's interpreter instead of the system's. The
package has no ONNX backend, so ONNX Runtime runs in the bound function, as with all peers. Its limits: the length of
the queue, and how long a request may wait in it.
"""

import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from benchmarks.peers.bodies import oip
from benchmarks.peers.peer import Ask, Case, Encoding, Environment, Launch, Limits, Tuning, program
from benchmarks.peers.processes import free_port

SIZE: Final = "max_queue_size"
TIMEOUT: Final = "default_timeout_microseconds"
TUNINGS: Final[Mapping[str, Tuning]] = {"waits 0.1 ms": {"wait_us": "100"}, "does not wait": {"wait_us": "0"}}
"""What Triton's guide on its batcher begins with, and its default."""
ENVIRONMENT: Final = Environment("triton", ("nvidia-pytriton==0.7.0", "onnxruntime==1.31.1"))


@dataclass(frozen=True, slots=True)
class Triton:
    name: str = "Triton"
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return "PyTriton, `DynamicBatcher(max_queue_delay_microseconds)`; binary: the protocol's extension"

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        ports = {"metrics_port": str(free_port())}
        made = program("triton_program.py", case, python, port, "/v2/models/model/ready", **ports)
        library = {"LD_LIBRARY_PATH": str(sysconfig.get_config_var("LIBDIR"))}
        return structs.replace(made, variables=dict(made.variables) | library)

    def ask(self, case: Case, row: bytes) -> Ask:
        return oip(case, row, "model")

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {
            f"queue {queue // 8 + 1}": {SIZE: queue // 8 + 1},
            f"waits at most {slo_ms / 2:g} ms": {TIMEOUT: slo_ms * 500},
        }


TRITON: Final = Triton()
