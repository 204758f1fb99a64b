"""A measurement pass in real service: serve the model, send requests for some seconds, read durations from the log.

No stand-in loads a machine exactly as the server and its clients do, so `sloop profile` also measures the model in a
server. The rate varies up to about the throughput of batches of 1, so that several batch sizes occur; the deadline is
long, so that no request is dropped.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

import yaml

from sloop.demo.live import serving
from sloop.errors import MachineError
from sloop.load import LoadPlan, run_load
from sloop.profile.profile import LatencyTable, Pass, Profile, Sample, sample_of, save_profile
from sloop.runlog import read_log
from sloop.runlog.durations import batch_durations
from sloop.workload import trace_from

RATES: Final = (0.4, 0.6, 0.8, 0.5, 0.7, 0.9, 0.9, 0.4)
"""Request rate of each step, as a share of the throughput with batches of 1 in the pass before; it is lower in service.
"""
STEP_S, STEP_S_MAX = 1, 3
"""Seconds of each step; longer for a slow model, so that each step has `REQUESTS_MIN` requests."""
START_S: Final = 3.0
"""About how long a server takes to start and end."""
REQUESTS_MIN: Final = 10
RATE_RPS_MAX: Final = 600.0
"""Largest request rate: with faster models the load generator would saturate first."""
SLO_MS: Final = 30_000.0


def service_pass(
    model: Path,
    samples: Sequence[Sample],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rates: Sequence[float],
    seed: int,
    keys: Mapping[str, bool],
) -> Pass | None:
    """Serve the model on each core count of `samples` for some seconds; None if no cell ran often enough.

    `samples` of the pass before determine the request rate, of which `rates` are shares, one for each step (`RATES`);
    `shapes` has the shapes that inputs with open dimensions have in a request of one row, `keys` what its stage
    declares (`joins_rows`, `batch`). MachineError if the server does not start or answers no request.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    found: list[Sample] = []
    sent = 0
    for cores in sorted({sample.cores for sample in samples}):
        chosen = [sample for sample in samples if sample.cores == cores]
        with TemporaryDirectory(prefix="sloop-profile-") as name:
            requests, log = _serve(Path(name), model, chosen, shapes, rates, seed, keys)
            sent += requests
            for cells in batch_durations(read_log(log)).values():
                found += [sample_of(*cell, runs_ns) for cell, runs_ns in sorted(cells.items())]
    beside = f"the server and a load generator, {sent} requests"
    return Pass(date=date, in_service=True, beside=beside, samples=tuple(found)) if found else None


def _serve(
    folder: Path,
    model: Path,
    samples: Sequence[Sample],
    shapes: Mapping[str, tuple[int, ...]],
    rates: Sequence[float],
    seed: int,
    keys: Mapping[str, bool],
) -> tuple[int, Path]:
    """Serve and load the model; returns the number of sent requests and the server's log."""
    cores, single_ms = samples[0].cores, samples[0].p50_ms / samples[0].batch
    profile = Profile(
        latency_ms=LatencyTable({sample.batch: {cores: sample.p50_ms} for sample in samples}),
        max_batch=max(sample.batch for sample in samples),
        max_cores=cores,
    )
    save_profile(profile, folder / "p.json")
    variant = {"name": "model", "model": str(model.absolute()), "profile": "p.json", **keys}
    stage = {"name": "model", "variants": [variant]}
    app = {"name": "profiled", "slo_ms": SLO_MS, "stages": [stage], "system": {"name": "static", "cores": cores}}
    (folder / "app.yaml").write_text(yaml.safe_dump(app))
    rate_rps = min(RATE_RPS_MAX, 1e3 / single_ms)
    step_s = min(STEP_S_MAX, max(STEP_S, round(REQUESTS_MIN / (rate_rps * median(rates)))))
    counts = [round(share * rate_rps) for share in rates for _ in range(step_s)]
    (folder / "counts.txt").write_text("".join(f"{count}\n" for count in counts))
    trace = trace_from({"file": "counts.txt", "spread": "poisson"}, seed=seed, duration_s=len(counts), folder=folder)
    with serving(folder / "app.yaml", folder / "state") as where:
        own = dict(shapes)
        plan = LoadPlan(url=where.http, model=where.application, arrivals=trace, slo_ms=SLO_MS, shapes=own)
        result = run_load(plan)
    if not result.ok:
        what = f"the server answered none of {result.sent} requests to {model.name!r}"
        raise MachineError(what, help="measure without it, with --alone")
    return result.ok, Path(where.log)
