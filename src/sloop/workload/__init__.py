"""When requests arrive, and over what links: recorded traces, generated ones, their shapes and statistics.

A room of its own below the core: it imports nothing of sloop but units, errors and streams, and everything in it is a
value or a function of values and files. `trace_from` is the door for what a user declares.
"""

from sloop.workload.declare import trace_from
from sloop.workload.generate import KINDS, generated
from sloop.workload.link import Link, LinkFile, link_from, read_link
from sloop.workload.read import Format, TraceFile, read_trace
from sloop.workload.spread import Spread
from sloop.workload.stats import Statistics, statistics
from sloop.workload.trace import Trace, trace_of
from sloop.workload.write import write_counts, write_times

__all__ = [
    "KINDS",
    "Format",
    "Link",
    "LinkFile",
    "Spread",
    "Statistics",
    "Trace",
    "TraceFile",
    "generated",
    "link_from",
    "read_link",
    "read_trace",
    "statistics",
    "trace_from",
    "trace_of",
    "write_counts",
    "write_times",
]
