"""Do the simulator and the live server agree on the same trace under the same system?

Promises rows that show both numbers, how far apart they may be, and whether they are. The bounds are the design's:
attainment within one point, p99 within ten per cent.
"""

from typing import Final

from msgspec import Struct

from sloop.report.rows import RunRow
from sloop.report.tables import Table

ATTAINMENT_POINTS_MAX: Final = 1.0
P99_PERCENT_MAX: Final = 10.0


class Agreement(Struct, frozen=True):
    """One measure, live and simulated."""

    metric: str
    unit: str
    live: float | None
    simulated: float | None
    apart: float | None
    """Points for shares, per cent of the live value for the rest; None where one of them is missing."""
    apart_max: float | None
    """None where the measure is for information only."""

    @property
    def agrees(self) -> bool | None:
        """None where nothing is demanded."""
        if self.apart_max is None:
            return None
        return self.apart is not None and abs(self.apart) <= self.apart_max


def agreement(live: RunRow, simulated: RunRow) -> list[Agreement]:
    """Both runs, measure by measure; the first two decide."""
    return [
        Agreement(
            "attainment",
            "%",
            100 * live.attainment,
            100 * simulated.attainment,
            100 * (simulated.attainment - live.attainment),
            ATTAINMENT_POINTS_MAX,
        ),
        _relative("p99", "ms", live.p99_ms, simulated.p99_ms, P99_PERCENT_MAX),
        _relative("p50", "ms", live.p50_ms, simulated.p50_ms, None),
        _relative("mean", "ms", live.mean_ms, simulated.mean_ms, None),
        _relative("goodput", "rps", live.goodput_rps, simulated.goodput_rps, None),
        _relative("core-seconds", "core·s", live.core_seconds, simulated.core_seconds, None),
    ]


def as_table(rows: list[Agreement]) -> Table:
    """For people."""
    return Table(
        "Live against simulated",
        ("measure", "unit", "live", "simulated", "apart", "at most", "agrees"),
        tuple((r.metric, r.unit, r.live, r.simulated, r.apart, r.apart_max, r.agrees) for r in rows),
    )


def _relative(
    metric: str, unit: str, live: float | None, simulated: float | None, apart_max: float | None
) -> Agreement:
    if live is None or simulated is None:
        apart = 0.0 if live is simulated else None
    elif live == 0:
        apart = 0.0 if simulated == 0 else None
    else:
        apart = 100 * (simulated / live - 1)
    return Agreement(metric, unit, live, simulated, apart, apart_max)
