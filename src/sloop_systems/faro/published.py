"""Faro's published settings: Jeon et al., EuroSys 2025, and the configuration files of its repository (beomyeol/faro at
b595c4a). What is not in print and was chosen here is marked so; README.md lists it."""

from typing import Final

from sloop.api import s

PUBLICATION: Final = "Jeon et al., Faro, EuroSys 2025"

TICK_NS: Final = s(10)
"""The reactive loop decides so often."""
LOOK_BACK_NS: Final = s(30)
"""Its latency is the mean over this time."""
OUT_TICKS, IN_TICKS = 3, 60
"""After so many ticks in a row above, or at most at, the target it scales out (30 s), or in (600 s)."""
PREDICT_NS: Final = s(300)
"""The predictive loop decides so often,"""
FIRST_NS: Final = s(60)
"""and once soon after the beginning."""
HORIZON_STEPS: Final = 7
"""The minutes that it looks ahead: 420 s."""
STEP_NS: Final = s(60)
START_STEPS: Final = 1
"""The first minutes in which workers that are added do not serve yet: 65 s, in whole minutes."""
PERCENTILE: Final = 0.99
"""The tail of the latency whose utility counts."""
BUSY_MAX: Final = 0.95
"""Beyond this utilisation the latency is that at it, times the excess of the rate."""
QUANTILE: Final = 0.6
"""Of the forecast rates, the one to plan with; `MEDIAN` for MArk, whose forecast is a point."""
MEDIAN: Final = 0.5
GROUPS: Final = 10
"""More applications than these are divided among as many groups first."""
REPLICAS_MAX: Final = 100
SHRINK: Final = 1e-4
"""Workers that add less utility are not wanted."""
PENALTIES: Final = ((0.0, 0.0), (0.001, 0.0), (0.03, 0.25), (0.08, 0.5), (1.0, 1.0))
"""The part of the utility that is lost by the part of the requests that is refused, linear in between."""
QUEUE_MAX: Final = 50
"""The router refuses a request behind so many."""

CONTEXT_STEPS: Final = 10
"""The minutes that the forecast looks back. Published: 10 or 15; views have ten minutes."""
DECAY: Final = 0.7
"""Chosen here: a deviation from the mean of these minutes shrinks so from minute to minute."""
