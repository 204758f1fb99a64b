"""MLServer: FastAPI in front of worker processes, the Open Inference Protocol in JSON. It has no admission limit.

Over HTTP it does not support the protocol's binary extension, only base64 for bytes. It asks for an event loop before
there is one, which uvloop after 0.21 no longer creates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from benchmarks.peers.bodies import oip, oip_base64
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
from benchmarks.peers.processes import free_port

TUNINGS: Final[Mapping[str, Tuning]] = {
    "one worker, waits 1 ms": {"workers": "1"},
    "in the server's process, waits 1 ms": {"workers": "0"},
    "in the server's process, one by one": {**ONE_BY_ONE, "workers": "0"},
}
WAIT_S: Final = 0.001
ENVIRONMENT: Final = Environment("mlserver", ("mlserver==1.7.1", "uvloop==0.21.0", "onnxruntime==1.31.1"))


@dataclass(frozen=True, slots=True)
class MLServer:
    name: str = "MLServer"
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return f"`parallel_workers`, `max_batch_time={WAIT_S:g}` s; binary: base64 in JSON"

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        folder = case.folder.absolute() / "mlserver"
        folder.mkdir(exist_ok=True)
        settings = {
            "host": "127.0.0.1",
            "http_port": port,
            "grpc_port": free_port(),
            "metrics_port": free_port(),
            "parallel_workers": int(case.tuning["workers"]),
            "debug": False,
        }
        model = {
            "name": "model",
            "implementation": "mlserver_program.Inference",
            "max_batch_size": case.rows_at_once,
            "max_batch_time": WAIT_S,
        }
        (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        (folder / "model-settings.json").write_bytes(msgspec.json.encode(model))
        made = program("mlserver_program.py", case, python, port, "/v2/models/model/ready")
        command = (str(python.parent / "mlserver"), "start", str(folder))
        return structs.replace(made, command=command, variables=dict(made.variables) | {"PYTHONPATH": str(PROGRAMS)})

    def ask(self, case: Case, row: bytes) -> Ask:
        return (oip_base64 if case.encoding is Encoding.BINARY else oip)(case, row, "model")

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {"none to be set": {}}


MLSERVER: Final = MLServer()
