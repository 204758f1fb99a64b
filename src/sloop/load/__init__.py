"""An open-loop load generator for Open Inference Protocol v2 servers, ours or not.

Replays a trace with deadlines from a process of its own and never waits for answers; says how far it lagged behind its
own schedule. A room above `arrivals`: it knows traces and links, but no server, core or policy.
"""

from sloop.load.plan import ClosedLoop, Delivery, Encoding, LoadPlan
from sloop.load.results import LoadResult, SecondRow
from sloop.load.run import run_load
from sloop.load.sender import ProgressReport

__all__ = ["ClosedLoop", "Delivery", "Encoding", "LoadPlan", "LoadResult", "ProgressReport", "SecondRow", "run_load"]
