"""How well does the simulator predict the server? Serves the trace of `sloop demo` several times and simulates it.

    python -m benchmarks.agreement [--repeats 3] [--seconds 60]

The model is profiled once. Each system then serves the same trace several times, which shows how much live runs differ
among themselves. Each run is simulated twice: from the profile, as a prediction, and with the durations that the
batches of that run had (`sloop simulate --recorded`), which leaves only the errors of the simulator itself. The log of
each live run is replayed through a new core, which has to take the same actions.
"""

from collections.abc import Sequence
from pathlib import Path
from shutil import copy

from msgspec import Struct

from benchmarks.notebook import arguments, publish, say, table, workspace
from benchmarks.request_audit import check
from sloop.app.application import SystemChoice
from sloop.app.hardware import local
from sloop.app.scenario import Scenario
from sloop.demo.run import (
    DemoSettings,
    choose_cores,
    fitted,
    measure_profile,
    run_live,
    run_simulated,
    squeezenet,
    write_files,
)
from sloop.profile.profile import path_beside
from sloop.report.run_tables import agreement
from sloop.report.tables import Cell
from sloop.runlog.summary import RunRow
from sloop.serve.cpu_quota import Cgroups, detect
from sloop.sim import NOT_RECORDED, recorded_in

PROFILED, RECORDED = "from the profile", "as recorded"


class Repeat(Struct, frozen=True):
    """One live run of one system, and its simulations, by the source of their service times."""

    system: str
    live: RunRow
    simulated: dict[str, RunRow]
    complaint: str
    replays: bool


def repeat(folder: Path, scenario: Scenario, choice: SystemChoice) -> Repeat:
    """Serve once, simulate twice (from the profile, from the run's own durations), and replay the log."""
    seen = run_live(folder, scenario, choice, lambda done: None)
    truths = {PROFILED: NOT_RECORDED, RECORDED: recorded_in(seen.log, scenario.deployment)}
    simulated = {
        name: run_simulated(scenario, choice, seen, seen.log.with_name("simulated.jsonl"), recorded=recorded).row
        for name, recorded in truths.items()
    }
    complaint, played = check(seen.log)
    return Repeat(choice.name, seen.counted.row, simulated, complaint, played.difference is None)


def repeats(folder: Path, model: Path, setting: DemoSettings, count: int) -> list[Repeat]:
    """Run all systems in turn, `count` times, each run in its own folder."""
    found = []
    for number in range(1, count + 1):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        for file in (model, path_beside(model)):
            copy(file, place)
        scenario = write_files(place, setting, place / model.name)
        for choice in scenario.systems:
            say(f"run {number} of {count}, {choice.name}: live for {setting.duration_s} s, then simulated")
            found.append(repeat(place, scenario, choice))
    return found


def compared(found: Sequence[Repeat]) -> list[tuple[Cell, ...]]:
    """One row for each run and each source of service times."""
    rows: list[tuple[Cell, ...]] = []
    for run in found:
        for truth, simulated in run.simulated.items():
            attainment, p99, *_, cores = agreement(run.live, simulated)
            rows.append(
                (
                    *(run.system, truth, attainment.live, attainment.simulated),
                    *(attainment.difference, attainment.agrees),
                    *(p99.live, p99.simulated, p99.difference, p99.agrees, cores.live, cores.simulated),
                )
            )
    return rows


def spread(found: Sequence[Repeat]) -> list[tuple[Cell, ...]]:
    """The spread of live runs of one system on one trace."""
    rows: list[tuple[Cell, ...]] = []
    for system in dict.fromkeys(run.system for run in found):
        live = [run.live for run in found if run.system == system]
        attained = [100 * row.attainment for row in live]
        p99_ms = [row.p99_ms or 0.0 for row in live]
        sound = all(run.replays and not run.complaint for run in found if run.system == system)
        apart = 100 * (max(p99_ms) / min(p99_ms) - 1)
        rows.append((system, len(live), max(attained) - min(attained), apart, sound))
    return rows


def report(found: Sequence[Repeat], setting: DemoSettings, how: str) -> str:
    """The text of the page."""
    columns = (
        *("system", "truth", "attainment live, %", "simulated", "points apart", "≤ 1"),
        *("p99 live, ms", "simulated", "% apart", "≤ 10", "core-seconds live", "simulated"),
    )
    return "\n\n".join(
        [
            f"SqueezeNet under the demonstration's wave: {min(setting.counts)} to {max(setting.counts)} requests "
            f"in each second, all in one burst, over a synthetic 4G link; {setting.duration_s} s, deadline "
            f"{setting.slo_ms:g} ms; `static` on {setting.static_cores:g} cores, `sponge` on up to "
            f"{setting.cores_max:g}. Cores by {how.partition(':')[0]}. The figures are the server's log's.",
            table(columns, compared(found)),
            "How far live runs of the same trace are from each other, and whether every live log satisfies the "
            "checkers and replays to the same actions:",
            table(("system", "runs", "attainment, points", "p99, %", "sound, same actions"), spread(found)),
        ]
    )


def main() -> None:
    parser = arguments(__doc__, seconds=60, quick=20)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    detected = detect()
    detected.actuator.close()
    cores = choose_cores(local().cores, fractions=isinstance(detected.actuator, Cgroups))
    with workspace(given.keep) as folder:
        model = squeezenet(folder)
        say("profile")
        profile = measure_profile(model, cores, lambda share, what: None)
        setting, _ = fitted(folder, model, profile, cores, duration_s=round(given.seconds), seed=given.seed)
        found = repeats(folder, model, setting, given.repeats)
    publish("agreement", "Simulator against live", report(found, setting, detected.why), write=not given.no_write)


if __name__ == "__main__":
    main()
