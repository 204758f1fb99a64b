"""Ray Serve: a proxy process in front of replicas, which are actors of a Ray cluster of this machine alone.

Its limits: `max_ongoing_requests` per replica (5 by default; its guide on batching recommends at least the batch size),
and `max_queued_requests` at the proxy (503 above it; unlimited by default).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import structs

from benchmarks.peers.bodies import plain_json, raw
from benchmarks.peers.peer import ONE_BY_ONE, Ask, Case, Encoding, Environment, Launch, Limits, Tuning, program

ONGOING: Final = "max_ongoing_requests"
QUEUED: Final = "max_queued_requests"
THROUGHPUT: Final = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
"""What its guide on high throughput sets: HAProxy in front, and cheaper calls between its processes."""
TUNINGS: Final[Mapping[str, Tuning]] = {
    "waits 1 ms, HAProxy, throughput flags": {"wait_s": "0.001", **THROUGHPUT},
    "waits 1 ms": {"wait_s": "0.001"},
    "one by one, HAProxy, throughput flags": {**ONE_BY_ONE, **THROUGHPUT},
}
ENVIRONMENT: Final = Environment("ray", ("ray[serve,haproxy]==2.60.0", "onnxruntime==1.31.1"))


@dataclass(frozen=True, slots=True)
class RayServe:
    name: str = "Ray Serve"
    environment: Environment = ENVIRONMENT
    encodings: frozenset[Encoding] = frozenset(Encoding)

    @property
    def how(self) -> str:
        return (
            "one replica without FastAPI, `batch_wait_timeout_s`, `max_ongoing_requests` twice the batch; "
            "binary: the raw tensor is the body"
        )

    @property
    def tunings(self) -> Mapping[str, Tuning]:
        return TUNINGS

    def launch(self, case: Case, python: Path, port: int) -> Launch:
        limited = structs.replace(case, limits={ONGOING: 2 * case.batch_max, **case.limits})
        made = program("ray_program.py", limited, python, port, "/-/healthz")
        flags = {name: value for name, value in case.tuning.items() if name in THROUGHPUT}
        return structs.replace(made, variables={**made.variables, **flags, "RAY_USAGE_STATS_ENABLED": "0"})

    def ask(self, case: Case, row: bytes) -> Ask:
        return raw("/", row) if case.encoding is Encoding.BINARY else plain_json("/", case, row)

    def limits(self, queue: int, slo_ms: float) -> Mapping[str, Limits]:
        return {
            f"queued {queue // 2}": {QUEUED: queue // 2},
            "ongoing 4, queued 4": {ONGOING: 4, QUEUED: 4},
        }


RAY_SERVE: Final = RayServe()
