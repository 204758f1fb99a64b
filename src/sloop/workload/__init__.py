"""When requests arrive, what they bring, and over which links: traces, their changes and statistics.

`trace_from` and `link_from` read what a user declares. The package must not know applications, policies or drivers.
"""

from sloop.workload.generate import KINDS, Spread, generated
from sloop.workload.link import Link, LinkFile, link_from, read_link
from sloop.workload.read import Format, TraceFile, read_trace, trace_from
from sloop.workload.trace import Statistics, Trace, Work, statistics, trace_of, write_counts, write_times

__all__ = [
    "KINDS",
    "Format",
    "Link",
    "LinkFile",
    "Spread",
    "Statistics",
    "Trace",
    "TraceFile",
    "Work",
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
