"""A recorded run as a page: everything a log can tell, live or simulated.

Promises that the log is all it needs: nodes, profiles and system are those its header names.
"""

from msgspec import Struct

from sloop.report.assumptions import Assumptions
from sloop.report.explain import reasons
from sloop.report.html import Decisions, run_page
from sloop.report.metrics import Metrics
from sloop.report.rows import RunRow
from sloop.runlog import RecordedLog
from sloop.systems.recording import rebuild


class Recorded(Struct, frozen=True):
    """One log: its row, its numbers, its page."""

    row: RunRow
    metrics: Metrics
    page: str


def report(log: RecordedLog) -> Recorded:
    """Fold the log. InputError where it is damaged or its header describes no application."""
    setup, header = rebuild(log.header), log.header
    application = setup.application
    start_ns = 0 if header.origin == "sim" else None
    metrics = Metrics(nodes=application.cluster, beliefs=setup.beliefs, start_ns=start_ns, graph=application.graph)
    assumptions, decisions = Assumptions(application), Decisions()
    for now_ns, record in log:
        metrics.append(now_ns, record)
        assumptions.append(now_ns, record)
        decisions.append(now_ns, record)
    row = metrics.row(system=header.system, seed=header.seed, assumed=assumptions.lines())
    title = f"{application.name}: a {'live' if header.origin == 'live' else 'simulated'} run of {header.system}"
    page = run_page(
        title,
        [(row, metrics)],
        header=header,
        slo_ms=application.slo_ms,
        decisions=decisions,
        reasons=reasons(log),
    )
    return Recorded(row, metrics, page)
