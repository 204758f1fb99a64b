"""Biscale's results without simulation: optimisation programs, decision times, the baseline of predictors, and threads.

Experiments are named as in the specification. `derived` figures are the specification's, from an independent program.
Source: dissertation chapter P4.
"""

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from sloop.api.models import free_batch, usable_cpus
from sloop.api.solvers import SizeChoice, SizedStage, SizeProblem, Throughput, chain_problem
from sloop_systems.biscale.experiments.runs import CORES_MAX, PIPELINES
from sloop_systems.biscale.solver import horizontal
from sloop_systems.comparison.rows import Claim, ResultLimits, Row, bounded, compare
from sloop_systems.comparison.twitter import Excerpt

Pairs = tuple[tuple[int, int], ...]

PURE: Final[tuple[tuple[str, int, Pairs, Pairs | None, Pairs], ...]] = (
    ("video", 5, ((1, 1), (1, 1)), ((1, 1), (1, 1)), ((2, 1), (1, 1))),
    ("video", 10, ((2, 1), (1, 1)), ((2, 1), (1, 1)), ((2, 1), (1, 3))),
    ("video", 20, ((4, 1), (1, 3)), ((6, 1), (1, 3)), ((2, 1), (2, 5))),
    ("video", 40, ((8, 1), (2, 3)), None, ((2, 1), (2, 5))),
    ("video", 60, ((11, 1), (3, 3)), None, ((3, 1), (2, 5))),
    ("audio", 5, ((1, 3), (1, 1)), ((1, 3), (1, 1)), ((2, 5), (1, 1))),
    ("audio", 10, ((2, 3), (1, 1)), ((2, 5), (1, 1)), ((2, 5), (2, 1))),
    ("audio", 20, ((3, 5), (2, 1)), None, ((3, 7), (2, 1))),
    ("audio", 30, ((4, 7), (2, 2)), None, ((4, 8), (2, 6))),
    ("nlp", 2, ((1, 1), (1, 1), (1, 1)), ((1, 1), (1, 1), (1, 1)), ((1, 1), (2, 1), (2, 1))),
    ("nlp", 6, ((1, 1), (3, 1), (3, 1)), ((1, 1), (4, 1), (4, 2)), ((1, 2), (2, 1), (2, 1))),
    ("nlp", 12, ((1, 2), (5, 1), (5, 1)), None, ((2, 2), (3, 1), (3, 1))),
)
"""Pipeline, rate λ in requests/s, and the solutions per stage: H as (replicas, batch), V with one replica each as
(cores, batch), V for 2 λ with H's replicas."""

WITH_QUEUE: Final = {
    "video": {10: 3, 20: 6, 40: 11, 60: 16},
    "audio": {5: 3, 10: 4, 20: 6, 30: 8},
    "nlp": {2: 3, 6: 7, 10: 12, 12: 14},
}
"""Cores of H by λ, if the waiting time counts as service time."""

CARRIED: Final = {"video": 24, "audio": 17, "nlp": 8}
"""The largest λ in requests/s that one replica per stage with eight cores can serve."""
BUSIEST_RPS: Final = {"video": 62, "audio": 32, "nlp": 13}
"""The rate in the busiest second of each pipeline's excerpt, in requests/s."""
PREDICTED_S: Final = 10
LSTM_ERROR: Final = 5.8
"""Mean error in % of the published network."""


def offline_rows(testing: Excerpt | None) -> list[Row]:
    """All rows of this module; `testing` are the trace's later days, None to leave the predictor out."""
    return [*_programs(), *_times(), *([] if testing is None else [_persistence(testing)]), *_threads()]


def program(name: str, throughput: Throughput) -> SizeProblem:
    """Biscale's optimisation problem for a published pipeline."""
    pipeline = PIPELINES[name]
    models = []
    for _, form in pipeline.models:
        sizes = range(1, CORES_MAX + 1)
        latency_ms = [[form.latency_ms(b, c) for b in range(1, pipeline.batch_max + 1)] for c in sizes]
        models.append(SizedStage(np.array(latency_ms)))
    return chain_problem(models, pipeline.slo_ms, throughput=throughput)


def _programs() -> list[Row]:
    right = dict.fromkeys(("H", "V", "V for 2 λ with H's replicas"), 0)
    for name, rate_rps, h, v, v_of_h in PURE:
        found = program(name, "pure")
        equal = horizontal(found, rate_rps) or ()
        solutions = (
            tuple((one.replicas, one.batch) for one in equal) == h,
            _sizes(found.vertical(rate_rps, [1] * len(h))) == v,
            _sizes(found.vertical(2 * rate_rps, [one.replicas for one in equal])) == v_of_h,
        )
        for what, same in zip(right, solutions, strict=True):
            right[what] += same
    queued = [
        sum(one.replicas for one in horizontal(program(name, "with_queue"), rate) or ()) == cores
        for name, by_rate in WITH_QUEUE.items()
        for rate, cores in by_rate.items()
    ]
    carried = {
        name: max(rate for rate in range(1, 40) if single.vertical(rate, [1] * len(single.stages)))
        for name, single in ((name, program(name, "pure")) for name in CARRIED)
    }
    figures = [
        *((f"solutions of {what} equal to the derived", f"of {len(PURE)}", len(PURE), n) for what, n in right.items()),
        ("cores of H if the wait counts as work, equal to the derived", f"of {len(queued)}", len(queued), sum(queued)),
        *(
            (f"{n}: what one replica of each stage carries", "requests/s", CARRIED[n], rps)
            for n, rps in carried.items()
        ),
    ]
    return [
        compare(Claim("programs", metric, unit, known="exact", derived=derived), [ours])
        for metric, unit, derived, ours in figures
    ]


def _sizes(found: Sequence[SizeChoice] | None) -> Pairs | None:
    return None if found is None else tuple((one.cores, one.batch) for one in found)


def _times() -> list[Row]:
    """Time to solve all programs of one decision, at the busiest second of each pipeline's excerpt."""
    rows = []
    for name, rate_rps in BUSIEST_RPS.items():
        asked, samples = program(name, "with_queue"), []
        single = [1] * len(asked.stages)
        for _ in range(5):
            started_s = time.perf_counter()
            horizontal(asked, rate_rps)
            horizontal(asked, 1.2 * rate_rps)
            asked.vertical(rate_rps, single)
            asked.split(rate_rps, single)
            samples.append(1e3 * (time.perf_counter() - started_s))
        claim = Claim("decision time", f"{name}: all programs", "ms", paper=100, computed=True)
        rows.append(bounded(claim, samples, at_most=100))
    return rows


def _persistence(testing: Excerpt) -> Row:
    """The baseline of predictors: the forecast is the maximum of the last ten seconds."""
    counts = np.array(testing.counts, dtype=float)
    peaks = counts[: len(counts) // PREDICTED_S * PREDICTED_S].reshape(-1, PREDICTED_S).max(axis=1)
    before, after = peaks[:-1], peaks[1:]
    positive = after > 0
    error = float(100 * np.mean(np.abs(before[positive] - after[positive]) / after[positive]))
    claim = Claim(
        "predictor",
        "mean error of the last ten seconds' maximum, days 14 to 21",
        "%",
        known="exact",
        derived=9.0,
        note=f"expected: more than the published LSTM's {LSTM_ERROR:g} %; {testing.provenance}",
    )
    return compare(claim, [error], shape=ResultLimits(above=LSTM_ERROR))


# E5: threads within an operator make one batch faster, threads between operators do not. Fig. P4.10 shows it for
# YOLOv5n and ResNet18 under PyTorch; here it is SqueezeNet, from the `onnx` package's test data, under ONNX Runtime.

SQUEEZENET: Final = Path("backend/test/data/light/light_squeezenet.onnx")
BATCH: Final = 8
ROUNDS: Final = 30
THREADS: Final = {"one": (1, 1), "two within": (2, 1), "two between": (1, 2)}
"""Threads within an operator, and between operators."""


def _threads() -> list[Row]:
    """Two rows; none on a machine with one core, or without the model."""
    package = importlib.util.find_spec("onnx")
    source = Path(package.origin).parent / SQUEEZENET if package and package.origin else None
    if source is None or not source.is_file() or len(usable_cpus()) < 2:
        return []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "squeezenet.onnx"
        free_batch(source, path)
        fastest_ms, cores = _fastest_passes(path)
    one_ms = fastest_ms["one"]
    within, between = (100 * (1 - fastest_ms[name] / one_ms) for name in ("two within", "two between"))

    def claim(metric: str, note: str) -> Claim:
        return Claim("E5 threads", metric, "%", note=note, computed=True)

    measured = f"SqueezeNet, batch {BATCH}, {one_ms:.0f} ms on one thread here; two threads used {cores:.1f} cores"
    branches = "ONNX Runtime runs the two branches of a fire module in parallel; PyTorch, which was published, does not"
    return [
        bounded(
            claim("time saved by a second thread within operators", measured),
            [within],
            at_least=25,
            shape=ResultLimits(above=0),
        ),
        bounded(
            claim("time saved by a second thread between operators", branches),
            [between],
            at_least=-5,
            at_most=5,
            shape=ResultLimits(below=within),
        ),
    ]


def _fastest_passes(path: Path) -> tuple[dict[str, float], float]:
    """The fastest pass of each setting in ms, and the cores used by two threads within operators in their fastest pass.

    Settings alternate and the fastest pass counts, so that a busy machine disturbs all of them equally.
    """
    sessions = {name: _session(path, *threads) for name, threads in THREADS.items()}
    given = sessions["one"].get_inputs()[0]
    shape = [dimension if isinstance(dimension, int) else BATCH for dimension in given.shape]
    feed = {given.name: np.ones(shape, dtype=np.float32)}
    fastest = dict.fromkeys(THREADS, (float("inf"), 0.0))
    for _ in range(ROUNDS):
        for name, session in sessions.items():
            started_s, used_s = time.perf_counter(), time.process_time()
            session.run(None, feed)
            passed_s, used_s = time.perf_counter() - started_s, time.process_time() - used_s
            fastest[name] = min(fastest[name], (1e3 * passed_s, used_s / passed_s))
    return {name: passed_ms for name, (passed_ms, _) in fastest.items()}, fastest["two within"][1]


def _session(path: Path, within: int, between: int) -> Any:  # noqa: ANN401  # ONNX Runtime ships no types
    import onnxruntime as ort  # type: ignore[import-untyped]  # noqa: PLC0415  # slow to import

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = within, between
    options.execution_mode = ort.ExecutionMode.ORT_PARALLEL if between > 1 else ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    # Spinning threads would take cores from the setting that is being measured.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
