"""Tables and plots of the open loops: goodput and attainment against load, the sweep, and overload."""

from collections.abc import Sequence
from typing import Final

from benchmarks.notebook import table
from benchmarks.peers.open_loop import SQUARE, OpenLoopResults, Plan, Run, goodput
from sloop.report.plots import Figure, Panel, Series

LIMIT: Final = "limit: the bare runtime"


def report(plan: Plan, found: OpenLoopResults) -> str:
    """The tables of one model."""
    rates = ", ".join(f"{load:g}" for load in plan.loads)
    sizes = ", ".join(f"{batch}: {rps:.1f}" for batch, rps in plan.bare.rps_by_batch.items())
    parts = [
        f"### {plan.title}",
        f"Deadline {plan.slo_ms:g} ms; batches of up to {plan.batch_max}. The bare runtime, a loop on one thread, does "
        f"{plan.bare.rps:.1f} images/s in batches of {plan.bare.batch} (by batch, {sizes}); loads of {rates} of that "
        f"for {plan.seconds:g} s each.",
    ]
    heads = ("server", *(f"× {load:g}" for load in plan.loads))
    for wave in plan.waves:
        limits = {load: plan.limit_rps(wave, load) for load in plan.loads}
        runs = {name: {load: found.best(name, wave.name, load) for load in plan.loads} for name in found.peers()}
        parts += [
            f"{wave.name}: goodput, answers inside the deadline per second (over the limit), with the best setting:",
            table(
                heads,
                [(LIMIT, *limits.values())]
                + [(name, *(_shown(run, limits[load]) for load, run in own.items())) for name, own in runs.items()],
            ),
            "Attainment, per cent of all requests:",
            table(heads, [(name, *map(_met, own.values())) for name, own in runs.items()]),
        ]
    parts += [
        f"Past saturation, at {plan.loads[-1]:g} of the bare runtime's capacity ({plan.waves[0].name}):",
        _beyond(plan, found),
        f"The sweep of admission limits ({plan.waves[0].name}): goodput with each setting.",
        _sweep(plan, found),
    ]
    if found.failed:
        parts.append(table(("did not serve", "its last words"), list(found.failed.items())))
    return "\n\n".join(parts)


def _shown(run: Run | None, limit_rps: float) -> str | None:
    return None if run is None else f"{goodput(run):.4g} ({goodput(run) / limit_rps:.2f})"


def _of(run: Run | None) -> float | None:
    return None if run is None else goodput(run)


def _met(run: Run | None) -> float | None:
    return None if run is None or run.result.attainment is None else 100 * run.result.attainment


def _beyond(plan: Plan, found: OpenLoopResults) -> str:
    columns = (
        *("server", "limit", "on time %", "late %", "dropped %", "rejected %", "failed %"),
        *("p50 ms", "p99 ms", "cores used", "generator's lag p99 ms"),
    )
    rows: list[Sequence[object]] = []
    for name in found.peers():
        run = found.best(name, plan.waves[0].name, plan.loads[-1])
        if run is None:
            continue
        seen = run.result
        counts = (seen.ok, seen.late, seen.dropped, seen.rejected, seen.errors)
        shares = (100 * count / seen.sent for count in counts)
        rows.append((name, run.setting, *shares, seen.p50_ms, seen.p99_ms, run.cores, seen.lag_p99_ms))
    return table(columns, rows)


def _sweep(plan: Plan, found: OpenLoopResults) -> str:
    wave = plan.waves[0].name
    rows: list[Sequence[object]] = []
    for peer, setting in dict.fromkeys((run.peer, run.setting) for run in found.runs if run.number == 0):
        cells: list[object] = []
        for load in plan.swept:
            tried = [run for run in found.runs if (run.peer, run.setting, run.load) == (peer, setting, load)]
            first = next((run for run in tried if run.wave == wave and run.number == 0), None)
            best = found.best(peer, wave, load)
            is_best = first is not None and best is not None and best.setting == setting
            cells.append(None if first is None else f"**{goodput(first):.4g}**" if is_best else goodput(first))
        rows.append((peer, setting, *cells))
    return table(("server", "limit", *(f"× {load:g}" for load in plan.swept)), rows)


def curves(plan: Plan, found: OpenLoopResults) -> Figure:
    """A plot of goodput against load with a panel for each wave, and ONNX Runtime as the limit."""
    panels: list[Panel] = []
    for wave in plan.waves:
        limit = Series(LIMIT, plan.loads, tuple(plan.limit_rps(wave, load) for load in plan.loads))
        lines = [limit]
        for name in found.peers():
            met = [(load, run) for load in plan.loads if (run := found.best(name, wave.name, load)) is not None]
            lines.append(Series(name, tuple(load for load, _ in met), tuple(goodput(run) for _, run in met)))
        panels.append(Panel(y_label=f"goodput/s, {wave.name}", series=tuple(lines)))
    said = "; ".join(f"{n} {_of(found.best(n, plan.waves[0].name, plan.loads[-1])) or 0:.0f}" for n in found.peers())
    return Figure(
        name=plan.model.path.stem,
        title=f"{plan.title}: goodput against load",
        x_label="load, of what the bare runtime does",
        panels=tuple(panels),
        alt=f"Goodput against load; at {plan.loads[-1]:g} of {plan.bare.rps:.0f}/s ({plan.waves[0].name}): {said}.",
    )


def orders(plan: Plan, found: OpenLoopResults) -> str:
    """The order by goodput in each round, if there are several."""
    if plan.rounds < 2:
        return ""
    rows: list[Sequence[object]] = []
    for load in plan.loads:
        ranked = {tuple(_ranked(found, plan.waves[0].name, load, number)) for number in range(plan.rounds)}
        rows.append((load, len(ranked) == 1, " / ".join(" > ".join(order) for order in sorted(ranked))))
    return f"Order by goodput in each round ({SQUARE.name}):\n\n" + table(("load", "the same", "orders"), rows)


def _ranked(found: OpenLoopResults, wave: str, load: float, number: int) -> list[str]:
    best: dict[str, float] = {}
    for run in found.runs:
        if (run.wave, run.load, run.number) == (wave, load, number):
            best[run.peer] = max(best.get(run.peer, 0.0), goodput(run))
    return sorted(best, key=lambda name: -best[name])
