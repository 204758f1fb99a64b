"""The models and experiments of the colocation thesis, as the solvers take them."""

from collections.abc import Sequence
from typing import Final

from sloop.profile.v100 import LANGUAGE_BYTES, LANGUAGE_MODELS, V100_ROWS, VISION_BYTES
from sloop.solvers.colocation import BatchOption, Content, SharedModel, hundredths
from sloop.solvers.harbor import PlacedModel

AO, WAO, WSM = "peak_occupancy", "occupancy", "sm_use"
VISION: Final = ("alexnet", "densenet121", "efficientnet_b7", "resnet50", "vgg19")
"""Experiment E1, 500 requests/s each within 200 ms, and E3."""
MIXED: Final = ("resnet50", "mobilenet_v2", "bert", "gpt2")
"""Experiment E2, 300 requests/s each within 300 ms."""
LANGUAGE_MIX: Final = ("alexnet", "mobilenet_v2", "resnet50", "bert", "gpt2")
"""Experiment E3b."""


def options_of(name: str, metric: str = WSM) -> tuple[BatchOption, ...]:
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


def models_of(
    names: Sequence[str], rate_rps: float | Sequence[float], slo_ms: float, metric: str = WSM
) -> list[SharedModel]:
    rates = [float(rate_rps)] * len(names) if isinstance(rate_rps, int | float) else list(rate_rps)
    return [SharedModel(name, rate, slo_ms, options_of(name, metric)) for name, rate in zip(names, rates, strict=True)]


def placed_models(names: Sequence[str], rate_rps: float, slo_ms: float) -> tuple[PlacedModel, ...]:
    return tuple(
        PlacedModel(
            name,
            rate_rps,
            slo_ms,
            (options_of(name),),
            LANGUAGE_BYTES if name in LANGUAGE_MODELS else VISION_BYTES,
        )
        for name in names
    )


def named(models: Sequence[SharedModel | PlacedModel], contents: Sequence[Content]) -> list[list[str]]:
    """Contents as `resnet50 b4`, the devices in any order."""
    return sorted(sorted(f"{models[at].name} b{option.batch}" for at, option in content) for content in contents)
