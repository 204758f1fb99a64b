"""The demonstration's page: what was asked, what came of it live, what the simulator had foretold, where it all is.

Pure: from values to one self-contained HTML document, and the one figure the README shows.
"""

from sloop.demo.run import Compared, Demonstration
from sloop.report.compare import agreement, as_table
from sloop.report.figures import Figure, latency_cdf, timeline
from sloop.report.html import Section, page
from sloop.report.tables import Table, beliefs

TITLE = "sloop: the demonstration"


def html(shown: Demonstration, folder: str) -> str:
    """The whole page."""
    sections = [
        Section(title="Result", text=(words(shown),), tables=(result(shown),)),
        Section(title="Live, over time", figures=(live_timeline(shown),)),
        Section(
            title="Latency",
            figures=(latency_cdf({run.system: run.live.metrics for run in shown.runs}, slo_ms=shown.setting.slo_ms),),
        ),
        *(foretold(run) for run in shown.runs),
        asked(shown),
        Section(
            title="Try it again",
            text=(
                f"Everything is in {folder}: the model and its profile, an application file per system, the scenario, "
                f"counts.txt and the event logs. For example: sloop simulate {folder}/scenario.yaml --seed 2; "
                f"sloop explain {folder}/static/events.jsonl; sloop replay {folder}/sponge/events.jsonl.",
            ),
        ),
    ]
    lead = (
        "A real image model on this machine under waves of bursts over a mobile link: a fixed share of the cores, "
        "then cores that follow the deadline, each served live and then simulated from the model's profile."
    )
    return page(TITLE, sections, lead=lead)


def words(shown: Demonstration) -> str:
    """The result in one sentence per system."""
    return " ".join(
        f"{run.system} answered {100 * (run.clients.attainment or 0):.1f} % of {run.clients.sent:,} requests in time "
        f"with {run.live.row.core_seconds:,.0f} core-seconds; foretold were "
        f"{100 * run.simulated.row.attainment:.1f} % with {run.simulated.row.core_seconds:,.0f}."
        for run in shown.runs
    )


def result(shown: Demonstration) -> Table:
    """Every run in a row: as the clients saw it, as the server's log has it, as it was simulated."""
    columns = ("system", "run", "requests", "attainment %", "p50 ms", "p99 ms", "goodput rps", "core-seconds")
    rows: list[tuple[str | float | None, ...]] = []
    for run in shown.runs:
        seen = run.clients
        share = None if seen.attainment is None else 100 * seen.attainment
        cores = run.live.row.core_seconds
        rows.append((run.system, "live, clients", seen.sent, share, seen.p50_ms, seen.p99_ms, seen.goodput_rps, cores))
        for name, outcome in (("live, server", run.live), ("simulated", run.simulated)):
            row = outcome.row
            rows.append(
                (
                    *(run.system, name, row.requests, 100 * row.attainment, row.p50_ms, row.p99_ms),
                    *(row.goodput_rps, row.core_seconds),
                )
            )
    return Table("", columns, tuple(rows))


def live_timeline(shown: Demonstration) -> Figure:
    """Both systems live, second by second."""
    metrics = {run.system: run.live.metrics for run in shown.runs}
    return timeline(metrics, name="live", title="The same bursts under two systems, live")


def foretold(run: Compared) -> Section:
    """One system, live against simulated."""
    both = {"live": run.live.metrics, "simulated": run.simulated.metrics}
    figure = timeline(both, name=f"foretold-{run.system}", title=f"{run.system}: live and simulated")
    tables = (as_table(agreement(run.live.row, run.simulated.row)), beliefs(run.live.metrics.service_errors()))
    return Section(title=f"Foretold: {run.system}", figures=(figure,), tables=tables)


def asked(shown: Demonstration) -> Section:
    """The machine, the model, and what was derived from them."""
    setting, profile = shown.setting, shown.profile
    facts = (
        ("hardware", profile.hardware),
        ("software", profile.software),
        ("cores are given by", shown.how),
        ("deadline", f"{setting.slo_ms:g} ms from the client's first byte"),
        ("requests/s", f"{min(setting.counts)} to {max(setting.counts)}, each second's within a burst"),
        ("link", f"synthetic 4G, {setting.payload_kb:g} kB per request, seed {setting.seed}"),
        ("static", f"{setting.half_cores:g} cores"),
        ("sponge", f"{', '.join(f'{count:g}' for count in setting.cores)} cores, resized in place"),
        ("truth simulated", "batches take what the profile measured, run by run"),
    )
    cells = tuple((sample.batch, sample.cores, sample.p50_ms, sample.p99_ms, sample.n) for sample in profile.samples)
    columns = ("batch", "cores", "p50 ms", "p99 ms", "runs")
    return Section(title="What was asked", tables=(Table("", ("", "value"), facts), Table("Profile", columns, cells)))
