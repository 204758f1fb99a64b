"""An open-loop load generator for sloop and other Open Inference Protocol v2 servers.

Replays a trace with deadlines from a separate process without waiting for answers, and reports how far it lagged behind
its schedule. It uses traces and links from `sloop.workload`, but no server, core or policy.
"""

from sloop.load.plan import Delivery, Encoding, LoadPlan
from sloop.load.results import LoadResult, SecondRow
from sloop.load.run import run_load, run_loads
from sloop.load.sender import ProgressReport

__all__ = [
    "Delivery",
    "Encoding",
    "LoadPlan",
    "LoadResult",
    "ProgressReport",
    "SecondRow",
    "run_load",
    "run_loads",
]
