"""The models and experiments of the colocation thesis, as the solvers take them.

Source: Elvinger (ETH Zurich, MSc thesis 505, 2024), chapters 5 and 6, with its Table A.1 (`published`).
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

import numpy as np

from sloop.api.devices import SHARE_EXPONENT, IgniterModel
from sloop.api.solvers import BatchOption, Content, PlacedModel, hundredths
from sloop_systems.colocation.milp import SharedModel
from sloop_systems.colocation.published import IGNITER_V100, LANGUAGE_BYTES, LANGUAGE_MODELS, V100_ROWS, VISION_BYTES

AO, WAO, WSM = "peak_occupancy", "occupancy", "sm_use"
VISION: Final = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
"""Experiment E1, 500 requests/s each within 200 ms, and E3."""
MIXED: Final = ("resnet50", "mobilenet_v2", "bert", "gpt2")
"""Experiment E2, 300 requests/s each within 300 ms."""
LANGUAGE_MIX: Final = ("alexnet", "mobilenet_v2", "resnet50", "bert", "gpt2")
"""Experiment E3b."""
USHER_GROUPS: Final[Mapping[tuple[str, tuple[str, ...]], tuple[tuple[int, ...], ...]]] = {
    (AO, VISION): ((1, 2, 4), (0, 3)),
    (WAO, VISION): ((0, 3, 4), (1, 2)),
    (AO, MIXED): ((0, 1, 2, 3),),
    (WAO, MIXED): ((0, 1, 2, 3),),
}
"""Usher's groups in the order of placement, by metric and models. The thesis does not print them; the specification
deduces those of VISION from the placements, which other groups would not give (2.2.2)."""


def options_of(name: str, metric: str = WSM) -> tuple[BatchOption, ...]:
    """The batches of a model, with `metric` as its need for computing."""
    return tuple(
        BatchOption(
            row.batch,
            row.latency_ms,
            row.rate_rps,
            hundredths(getattr(row, metric)),
            hundredths(row.memory_percent),
        )
        for row in V100_ROWS[name]
    )


def _rates(names: Sequence[str], rate_rps: float | Sequence[float]) -> list[float]:
    return [float(rate_rps)] * len(names) if isinstance(rate_rps, int | float) else list(rate_rps)


def models_of(
    names: Sequence[str], rate_rps: float | Sequence[float], slo_ms: float, metric: str = WSM
) -> list[SharedModel]:
    """Models as the published planners see them: one rate for all, or one each."""
    rates = _rates(names, rate_rps)
    return [SharedModel(name, rate, slo_ms, options_of(name, metric)) for name, rate in zip(names, rates, strict=True)]


def placed_models(names: Sequence[str], rate_rps: float | Sequence[float], slo_ms: float) -> tuple[PlacedModel, ...]:
    """The same as our planner and the simulated stack see them: with the sizes of their requests."""
    return tuple(
        PlacedModel(
            name,
            rate,
            slo_ms,
            (options_of(name),),
            LANGUAGE_BYTES if name in LANGUAGE_MODELS else VISION_BYTES,
        )
        for name, rate in zip(names, _rates(names, rate_rps), strict=True)
    )


def named(models: Sequence[SharedModel | PlacedModel], contents: Sequence[Content]) -> list[list[str]]:
    """Contents as `resnet50 b4`, the devices in any order."""
    return sorted(sorted(f"{models[at].name} b{option.batch}" for at, option in content) for content in contents)


def sm_use(name: str, batch: int) -> float:
    """The SMs that a batch needs, in percent: linear between the profiled batches."""
    rows = V100_ROWS[name]
    return float(np.interp(batch, [row.batch for row in rows], [row.sm_use for row in rows]))


@cache
def share_slowdown(name: str, batch: int, share: float) -> float:
    """How many times as long a batch takes with `share` percent of the SMs as a limit: the law that the specification
    fits to the two printed points (7.4)."""
    return float(max(1.0, sm_use(name, batch) / share) ** SHARE_EXPONENT)


# iGniter, whose coefficients for PyTorch the thesis does not print

FIT_BATCHES: Final = (4, 8, 16, 32)
FIT_SHARES: Final = (10.0, 50.0, 100.0)


def fitted_igniter(name: str) -> tuple[IgniterModel, float]:
    """iGniter's coefficients for a model of Table A.1, and the mean relative error of the fit over its grid.

    Fitted are the five coefficients of the active time, to the table's latencies at batches of 4 to 32, times the law
    of shares at 10, 50 and 100 %. What the table does not show counts as nothing: delays of the scheduler, use of the
    L2 cache, power. So iGniter sees no interference here.
    """
    size = LANGUAGE_BYTES if name in LANGUAGE_MODELS else VISION_BYTES
    grid = [
        (row.batch, share, row.latency_ms * share_slowdown(name, row.batch, share))
        for row in V100_ROWS[name]
        if row.batch in FIT_BATCHES
        for share in FIT_SHARES
    ]
    times = np.array([time_ms - batch * size / IGNITER_V100.pcie_bytes_per_ms for batch, _, time_ms in grid])
    best = (np.inf, (0.0, 0.0, 0.0, 0.0, 0.0))
    for offset in np.linspace(-9.0, 30.0, 79):
        columns = np.array([[b * b / (r + offset), b / (r + offset), 1 / (r + offset), 1.0] for b, r, _ in grid])
        found, *_ = np.linalg.lstsq(columns / times[:, None], np.ones(len(times)), rcond=None)
        error = float(np.mean(np.abs(columns @ found / times - 1)))
        if error < best[0]:
            k1, k2, k3, k5 = map(float, found)
            best = (error, (k1, k2, k3, float(offset), k5))
    error, active = best
    model = IgniterModel(
        kernels=0, schedule_ms=0.0, cache=0.0, active=active, power=(0.0, 0.0), l2=(0.0, 0.0),
        load_bytes=size, feedback_bytes=0,
    )  # fmt: skip
    return model, error
