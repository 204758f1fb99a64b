"""mosec: a Rust server in front of Python workers. It limits the requests inside it (429) and their duration (408).

The defaults are 1,024 requests and three seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from msgspec import structs

from benchmarks.peers.bodies import plain_json, raw
from benchmarks.peers.peer import ONE_BY_ONE, Ask, Case, Encoding, Environment, Launch, Limits, Tuning, program

CAPACITY: Final = "capacity"
TIMEOUT: Final = "timeout"
TUNINGS: Final[Mapping[str, Tuning]] = {
    "waits 1 ms": {"wait_ms": "1"},
    "waits 10 ms": {"wait_ms": "10"},
    "one by one": ONE_BY_ONE,
}
"""The least that it takes for `max_wait_time`, and its default, which a half-empty batch waits."""
ENVIRONMENT: Final = Environment("mosec", ("mosec==0.9.8", "msgspec==0.22.0", "onnxruntime==1.31.1"))


@dataclass(frozen=True, slots=True)
class Mosec:
    """With one of two serialisers."""

    name: str
    serializer: Literal["json", "msgspec"]
    encodings: frozenset[Encoding]
    environment: Environment = ENVIRONMENT

    @property
    def how(self) -> str:
        by = "msgspec's JSON in `serialize`/`deserialize`" if self.serializer == "msgspec" else "its default JSON"
        return f"one worker, `max_wait_time`; {by}; binary: the raw tensor is the body"

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        made = program("mosec_program.py", case, python, port, "/", serializer=self.serializer)
        flags = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        for name, value in case.limits.items():
            flags += [f"--{name}", str(int(value))]
        return structs.replace(made, command=(*made.command, *flags))

    def ask(self, case: Case, row: bytes) -> Ask:
        if case.encoding is Encoding.BINARY:
            return raw("/inference", row)
        return plain_json("/inference", case, row)

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {
            f"timeout {slo_ms:g} ms": {TIMEOUT: slo_ms},
            f"capacity {queue // 2}": {CAPACITY: queue // 2},
            f"capacity {queue // 4}": {CAPACITY: queue // 4},
        }


MOSEC: Final = Mosec("mosec", "json", frozenset(Encoding))
MOSEC_MSGSPEC: Final = Mosec("mosec, msgspec", "msgspec", frozenset({Encoding.JSON}))
