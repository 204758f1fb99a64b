"""The demonstration's report: one self-contained HTML page with results, predictions and settings."""

from datetime import datetime
from typing import Final

from sloop import __version__
from sloop.demo.run import ComparedRun, Demonstration, elsewhere
from sloop.page.report import page
from sloop.report.plots import Figure, latency_cdf, timeline
from sloop.report.run_tables import agreement, agreement_table, estimate_errors
from sloop.report.sections import Section, date_text
from sloop.report.tables import Table
from sloop.text import listed

TITLE = "sloop: the demonstration"
SLOWER: Final = 1.2
"""Beyond this, the live runs differ from the simulated ones because the machine was slower."""


def html(results: Demonstration, folder: str, *, made: datetime) -> str:
    """The whole page, made at `made`."""
    sections = [
        Section(title="Result", text=(results.why_inconclusive or summary(results),), tables=(result(results),)),
        Section(title="Live, over time", figures=(live_timeline(results),)),
        Section(
            title="Latency",
            figures=(
                latency_cdf({run.system: run.live.summary for run in results.runs}, slo_ms=results.settings.slo_ms),
            ),
        ),
        *(_prediction(run) for run in results.runs),
        _settings(results),
        Section(
            title="Try it again",
            text=(
                f"Everything is in {folder}: the model and its profile, an application file per system, the scenario, "
                f"counts.txt and the event logs. For example: sloop simulate {folder}/scenario.yaml --seed 2; "
                f"sloop explain {folder}/static; sloop replay {folder}/sponge.",
            ),
        ),
    ]
    lead = (
        "A real image model on this machine under waves of bursts over a mobile link: a fixed share of the cores, "
        "then cores that follow the deadline, each served live and then simulated from the model's profile."
    )
    settings, profile = results.settings, results.profile
    facts = (
        ("date", date_text(made)),
        ("machine", profile.hardware),
        ("model", "SqueezeNet (squeezenet.onnx)"),
        ("deadline", f"{settings.slo_ms:g} ms from the client's first byte"),
        ("systems", listed([run.system for run in results.runs])),
        ("sloop", __version__),
    )
    return page(TITLE, sections, facts=facts, lead=lead)


def summary(results: Demonstration) -> str:
    """The result in one sentence per system, and what made the machine slower than its profile."""
    slower = max(run.slower for run in results.runs)
    return " ".join(
        f"{run.system} answered {100 * (run.clients.attainment or 0):.1f} % of {run.clients.sent:,} requests in time "
        f"with {run.live.row.core_seconds:,.0f} core-seconds; the simulator predicted "
        f"{100 * run.simulated.row.attainment:.1f} % with {run.simulated.row.core_seconds:,.0f}."
        for run in results.runs
    ) + (f" Batches took up to {slower:.1f} times as long as in the profile: {elsewhere()}." if slower > SLOWER else "")


def result(results: Demonstration) -> Table:
    """One row per run: measured by the clients, from the server's log, and simulated."""
    columns = ("system", "run", "requests", "attainment %", "p50 ms", "p99 ms", "goodput rps", "core-seconds")
    rows: list[tuple[str | float | None, ...]] = []
    for run in results.runs:
        clients = run.clients
        share = None if clients.attainment is None else 100 * clients.attainment
        cores = run.live.row.core_seconds
        rows.append(
            (
                run.system,
                "live, clients",
                clients.sent,
                share,
                clients.p50_ms,
                clients.p99_ms,
                clients.goodput_rps,
                cores,
            )
        )
        for name, counted in (("live, server", run.live), ("simulated", run.simulated)):
            row = counted.row
            rows.append(
                (
                    *(run.system, name, row.requests, 100 * row.attainment, row.p50_ms, row.p99_ms),
                    *(row.goodput_rps, row.core_seconds),
                )
            )
    return Table("", columns, tuple(rows))


def live_timeline(results: Demonstration) -> Figure:
    """Both systems live, second by second."""
    summaries = {run.system: run.live.summary for run in results.runs}
    return timeline(summaries, name="live", title="The same bursts under two systems, live")


def _prediction(run: ComparedRun) -> Section:
    """One system, live compared with simulated."""
    both = {"live": run.live.summary, "simulated": run.simulated.summary}
    figure = timeline(both, name=f"prediction-{run.system}", title=f"{run.system}: live and simulated")
    tables = (
        agreement_table(agreement(run.live.row, run.simulated.row)),
        estimate_errors([(run.system, run.live.summary.estimate_errors())]),
    )
    return Section(title=f"Prediction: {run.system}", figures=(figure,), tables=tables)


def _settings(results: Demonstration) -> Section:
    """The settings, which follow from machine and model, and the profile."""
    settings, profile = results.settings, results.profile
    facts = (
        ("software", profile.software),
        ("cores are limited by", results.limited_by),
        ("requests/s", f"{min(settings.counts)} to {max(settings.counts)}, sent as one burst per second"),
        ("link", f"synthetic 4G, {settings.payload_kb:g} kB per request, seed {settings.seed}"),
        ("static", f"{settings.static_cores:g} cores"),
        ("sponge", f"{', '.join(f'{count:g}' for count in settings.cores)} cores, resized in place"),
        ("simulated durations", "drawn from the runs that the profile measured"),
    )
    cells = tuple((sample.batch, sample.cores, sample.p50_ms, sample.p99_ms, sample.n) for sample in profile.samples)
    columns = ("batch", "cores", "p50 ms", "p99 ms", "runs")
    return Section(title="Settings", tables=(Table("", ("", "value"), facts), Table("Profile", columns, cells)))
