"""Answers of PALDIA's solvers: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from random import Random
from typing import Final

from sloop.profile.interference import BandwidthLaw, DeviceDemand
from sloop_systems.paldia import solver as paldia
from tests.sloop_systems.tables import (
    Answers,
    latencies_ms,
)


def paldia_answers() -> Answers:
    """Splits between waiting and running together, and choices of hardware."""
    found: Answers = []
    for seed in range(40):
        random = Random(seed)
        demand = DeviceDemand(bandwidth=random.uniform(0.1, 0.9))
        model = paldia.DeviceModel((0.0, *latencies_ms(random, 16)), BandwidthLaw(random.uniform(0, 0.8)), demand)
        count = random.randint(1, 300)
        for sharing in ("hybrid", "together", "queue", "resident"):
            split = paldia.best_split(model, count, sharing)
            found += [split, paldia.workers_needed(model, count, split)]
        found.append(paldia.executed_ms(model, paldia.batches_of(count // 2, 16), paldia.batches_of(count, 16), 8))
        offers = [
            paldia.HardwareOffer(f"kind-{at}", random.uniform(0.1, 3), random.uniform(50, 400), random.random(), at > 2)
            for at in range(6)
        ]
        limits = {"cpu_limit_ms": 150.0, "gpu_limit_ms": 250.0, "tolerance_ms": 50.0}
        found += [paldia.choose_hardware(offers, choice, **limits) for choice in ("slo_first", "tolerance", "fastest")]
    return found


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"paldia": paldia_answers}
