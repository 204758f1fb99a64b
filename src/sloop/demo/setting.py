"""What the demonstration asks of this machine: cores, rates and deadline, derived from the measured profile.

Promises the same shape on any machine: a wave of bursts whose crest `static`'s cores cannot bear and all of them can.
Pure: from a profile to files' contents. Source: Sponge specification, section 7.2 (a reduced S3: a share of the CPU
left to the load generator, the cores that follow the link and the rate, static at half of them).
"""

import math
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from sloop.profile.profile import Profile

SLO_MS: Final = 1000.0
"""Sponge's own: one second from the client's first byte."""
BATCHES: Final = (1, 2, 4)
MACHINE_CORES_MAX: Final = 2.0
"""More would only need more load to show the same."""
LOADER_CORES: Final = 0.5
"""Left to the load generator and the server's own process, which share this machine: a replica that has to fight them
for a core is slower than its profile."""
STEP_CORES: Final = 0.25
CREST: Final = 0.7
"""Of the throughput promised on all cores, at most. A second's requests come at once, so that the crest keeps all cores
busy for most of what the link leaves of the deadline."""
OVERLOAD: Final = 1.2
"""The crest over what `static`'s cores bear."""
TROUGH: Final = 0.3
"""Of the crest."""
PERIOD_S: Final = 20
BURST_MS: Final = 50.0


class Setting(Struct, frozen=True):
    """One demonstration: `counts` are requests per second."""

    cores: tuple[float, ...]
    """What Sponge may choose from."""
    half_cores: float
    """What `static` gets."""
    counts: tuple[int, ...]
    slo_ms: float
    payload_kb: float
    seed: int

    @property
    def cores_max(self) -> float:
        return self.cores[-1]

    @property
    def duration_s(self) -> int:
        return len(self.counts)


def choose_cores(machine_cores: float, *, fractions: bool) -> tuple[float, ...]:
    """The core counts to measure and to choose from: quarters where the machine gives fractions, else whole cores."""
    most = min(machine_cores, MACHINE_CORES_MAX)
    if not fractions:
        return tuple(float(count) for count in range(1, max(1, math.floor(most)) + 1))
    places = max(1, math.floor((most - LOADER_CORES) / STEP_CORES))
    return tuple(STEP_CORES * place for place in range(1, places + 1))


def setting_of(profile: Profile, cores: Sequence[float], *, duration_s: int, seed: int) -> Setting:
    """The demonstration this profile is worth. `cores` are those it was measured on, ascending."""
    most_rps = throughput_rps(profile, cores[-1])
    half_cores = half_of(profile, cores, CREST * most_rps)
    crest_rps = min(CREST * most_rps, OVERLOAD * measured_rps(profile, half_cores))
    return Setting(
        cores=tuple(cores),
        half_cores=half_cores,
        counts=wave(TROUGH * crest_rps, crest_rps, duration_s),
        slo_ms=SLO_MS,
        payload_kb=284.0,
        seed=seed,
    )


def half_of(profile: Profile, cores: Sequence[float], most_rps: float) -> float:
    """The largest count up to half the cores that `most_rps` really overload; the smallest if they overload none."""
    weak = [c for c in cores if c <= cores[-1] / 2 and OVERLOAD * measured_rps(profile, c) <= most_rps]
    return max(weak, default=cores[0])


def measured_rps(profile: Profile, cores: float) -> float:
    """Requests per second that batches of the best size gave on `cores` in the median."""
    return max((s.batch * 1e3 / s.p50_ms for s in profile.samples if s.cores == cores), default=0.0)


def throughput_rps(profile: Profile, cores: float) -> float:
    """Requests per second that batches of the best size give on `cores`, as the profile promises (P99)."""
    return max(b * 1e3 / profile.latency_ms.latency_ms(b, cores) for b in range(1, profile.max_batch + 1))


def wave(trough_rps: float, crest_rps: float, duration_s: int) -> tuple[int, ...]:
    """Requests per second that swing between trough and crest, once in `PERIOD_S`, starting at the trough."""
    return tuple(
        max(1, round(trough_rps + (crest_rps - trough_rps) * math.sin(math.pi * second / PERIOD_S) ** 2))
        for second in range(duration_s)
    )


def systems_of(setting: Setting) -> list[dict[str, Any]]:
    """The systems to compare, as a scenario names them."""
    return [
        {"name": "static", "cores": setting.half_cores},
        {"name": "sponge", "cores": list(setting.cores)},
    ]


def scenario_of(setting: Setting, model: str, counts_file: str) -> dict[str, Any]:
    """The scenario that both the servers and the simulator are given; batches take what the profile measured."""
    return {
        "name": "demo",
        "slo_ms": setting.slo_ms,
        "stages": [{"name": "classify", "model": model}],
        "systems": systems_of(setting),
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": setting.cores_max}]},
        "trace": {"file": counts_file, "format": "counts", "spread": "burst", "mean_ms": BURST_MS},
        "duration_s": setting.duration_s,
        "seed": setting.seed,
        "truth": {
            "network": {"link": {"kind": "lte"}, "payload_kb": setting.payload_kb, "semantics": "delay"},
        },
    }
