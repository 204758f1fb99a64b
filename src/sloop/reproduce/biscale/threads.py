"""E5, measured here: threads within an operator make one batch faster, threads between operators do not.

Fig. P4.10 shows it for YOLOv5n and ResNet18 under PyTorch; here it is SqueezeNet, from the `onnx` package's test data,
under ONNX Runtime. Settings take turns and the quickest pass of each counts, so that a busy machine disturbs all alike.
"""

import importlib.util
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from sloop.machine import usable_cpus
from sloop.profile.batchable import free_batch
from sloop.reproduce.rows import Claim, Row, bounded

INSIDE: Final = Path("backend/test/data/light/light_squeezenet.onnx")
BATCH: Final = 8
ROUNDS: Final = 30
SETTINGS: Final = {"one": (1, 1), "two within": (2, 1), "two between": (1, 2)}
"""Threads within an operator, and between operators."""


def rows() -> list[Row]:
    """Two rows; none on a machine with one core, or without the model."""
    source = _source()
    if source is None or len(usable_cpus()) < 2:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "squeezenet.onnx"
        free_batch(source, path)
        quickest_ms, cores = _measured(path)
    one = quickest_ms["one"]

    def claim(metric: str, note: str) -> Claim:
        return Claim(experiment="E5 threads", metric=metric, unit="%", note=note)

    within = 100 * (1 - quickest_ms["two within"] / one)
    between = 100 * (1 - quickest_ms["two between"] / one)
    measured = f"measured here: SqueezeNet, batch {BATCH}, {one:.0f} ms on one thread; two had {cores:.1f} cores"
    branches = "ONNX Runtime runs a fire module's two branches at once, as PyTorch, which was published, does not"
    return [
        bounded(
            claim("time saved by a second thread within operators", measured), [within], at_least=25, shape=within > 0
        ),
        bounded(
            claim("time saved by a second thread between operators", branches),
            [between],
            at_least=-5,
            at_most=5,
            shape=between < within,
        ),
    ]


def _source() -> Path | None:
    """The model among the test data of the `onnx` package, if that is installed."""
    found = importlib.util.find_spec("onnx")
    path = Path(found.origin).parent / INSIDE if found and found.origin else None
    return path if path is not None and path.is_file() else None


def _measured(path: Path) -> tuple[dict[str, float], float]:
    """The quickest pass of each setting, in ms; and how many cores two threads within operators had in theirs, which
    on a busy machine are fewer than two."""
    sessions = {name: _session(path, *threads) for name, threads in SETTINGS.items()}
    shape = [dimension if isinstance(dimension, int) else BATCH for dimension in sessions["one"].get_inputs()[0].shape]
    feed = {sessions["one"].get_inputs()[0].name: np.ones(shape, dtype=np.float32)}
    quickest = dict.fromkeys(SETTINGS, (float("inf"), 0.0))
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            started_s, used_s = time.perf_counter(), time.process_time()
            session.run(None, feed)
            passed_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
            quickest[name] = min(quickest[name], (1e3 * passed_s, used_s / passed_s))
    return {name: passed_ms for name, (passed_ms, _) in quickest.items()}, quickest["two within"][1]


def _session(path: Path, within: int, between: int) -> Any:  # noqa: ANN401  # ONNX Runtime ships no types
    import onnxruntime as ort  # type: ignore[import-untyped]  # noqa: PLC0415  # loaded where something is measured

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = within, between
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if between > 1 else ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Threads that wait by spinning would take the cores from the setting whose turn it is.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
