"""The demonstration: a model, its profile, a scenario for this machine, two live runs, and their simulations.

All files stay in its folder, so that any step can be repeated by hand: the model and its profile, the applications, the
scenario, the logs, the report.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from os import cpu_count, getloadavg
from pathlib import Path
from time import monotonic
from typing import Any, Final

import yaml
from msgspec import Struct

from sloop.app.application import SystemChoice
from sloop.app.hardware import local
from sloop.app.load import load_scenario
from sloop.app.scenario import Scenario
from sloop.demo.live import ClientLoad, CountedRun, count_run, schedule_start_ns, serve_and_load
from sloop.errors import InputError, MachineError
from sloop.load import Delivery, LoadResult
from sloop.load.run import schedule_of
from sloop.profile.examine import free_batch
from sloop.profile.measure import PASSES, measure
from sloop.profile.profile import Profile, Sample, path_beside, save_profile
from sloop.serve.cpu_quota import Cgroups, confined, detect
from sloop.sim import BYTES_PER_KB, NOT_RECORDED, RecordedRun, World
from sloop.sim.scenarios import run_scenario
from sloop.systems import SYSTEMS
from sloop.text import counted

CELL_S: Final = 1.0
"""Seconds of measurement for each batch size on each core count."""
PROFILE_SHARE: Final = 0.2
"""Share of the whole time that the profile takes."""
WORLD_KEYS: Final = ("systems", "trace", "traces", "changes", "duration_s", "seed", "truth")
"""Keys that only scenarios have, not applications."""

Progress = Callable[[float, str], None]
"""Called with the finished share of the work, 0 to 1, and the current step."""

# The model.

SQUEEZENET: Final = Path("backend/test/data/light/light_squeezenet.onnx")
"""Path in the `onnx` package. The architecture is as published; the weights are constants, which take the same time."""


def squeezenet(folder: Path) -> Path:
    """A real image model without a download: SqueezeNet from the `onnx` package's test data, with a free batch size.

    Returns its path in `folder`, where it is written on first use. MachineError if the package is not installed.
    """
    target = folder / "squeezenet.onnx"
    if target.is_file():
        return target
    found = importlib.util.find_spec("onnx")
    source = Path(found.origin).parent / SQUEEZENET if found and found.origin else None
    if source is None or not source.is_file():
        raise MachineError(
            "the demonstration's model comes with the onnx package, which is not installed",
            help="pip install onnx",
        )
    free_batch(source, target)
    return target


def measure_profile(model: Path, cores: tuple[float, ...], progress: Progress) -> Profile:
    """The model's profile on this machine, measured each time and saved next to it."""
    begin_s = monotonic()

    def update(left_s: float, sample: Sample) -> None:
        spent_s = monotonic() - begin_s
        done = PROFILE_SHARE * spent_s / (spent_s + left_s)
        progress(done, f"profile: batch {sample.batch} on {sample.cores:g} cores")

    profile = measure(
        model, batches=BATCHES, cores=cores, seconds=CELL_S / PASSES, passes=PASSES, limit=confined, progress=update
    )
    save_profile(profile, path_beside(model))
    return profile


ADAPTIVE: Final = "sponge"
"""The system that `static` is compared with: a publication's."""

# Cores, rates and deadline for this machine, derived from the profile: a wave of bursts whose crest is too much for the
# cores of `static`, and for which all cores suffice. The simulator decides whether that holds. Source: Sponge
# specification, section 7.2 (a reduced S3: part of the CPU is left to the load generator, Sponge's cores follow link
# and rate, static has half).
SLOS_MS: Final = (1000.0, 800.0, 1500.0, 2500.0)
"""Deadlines to try. The first is Sponge's: one second from the client's first byte. Where more cores help little, a
shorter one separates the systems; where a row takes long, or bursts are of a few requests, a longer one."""
CRESTS: Final = (0.7, 0.6, 0.5, 0.8)
"""Ratios of the crest's rate to the throughput on all cores, to try in this order. The requests of a second arrive at
once, so that at the crest all cores are busy for most of the time that the link leaves of the deadline."""
RATE_RPS_MAX: Final = 250.0
"""Requests of 600 kB: more would keep the load generator busier than the server."""
BATCHES: Final = (1, 2, 4)
MACHINE_CORES_MAX: Final = 2.0
"""Limit of the cores used; more cores would only need more load for the same result."""
LOADER_CORES: Final = 0.5
"""Cores left to the load generator and the server process, which share this machine: a replica that competes with them
for a core is slower than its profile."""
STEP_CORES: Final = 0.25
TROUGH: Final = 0.3
"""Ratio of the trough's rate to the crest's."""
PERIOD_S: Final = 20
BURST_MS: Final = 50.0
PAYLOAD_KB: Final = 284.0
MARGINS: Final = ((1.3, 0.9), (1.1, 1.0))
"""A live machine differs from its profile: if batches take so many times as long, `sponge` must still be in time, and
`static` still be late. The second pair is for machines on which nothing passes the first."""
GAIN_MIN: Final = 1.2
"""If all cores do less than this times as much as the fewest, no load is tried."""
IN_TIME_MIN, IN_TIME_MAX = 0.97, 0.9
"""The attainment that a setting must give `sponge` at least, and `static` at most, in the simulator."""
DIFFERENCE_MIN: Final = 0.05
"""A smaller difference between the live systems' attainments may be chance."""


class DemoSettings(Struct, frozen=True):
    """The settings of both runs: `counts` are the requests of each second, `cores` the core counts for Sponge."""

    cores: tuple[float, ...]
    static_cores: float
    counts: tuple[int, ...]
    slo_ms: float
    payload_kb: float
    seed: int

    @property
    def cores_max(self) -> float:
        return self.cores[-1]

    @property
    def duration_s(self) -> int:
        return len(self.counts)


def choose_cores(machine_cores: float, *, fractions: bool) -> tuple[float, ...]:
    """Core counts to measure and to choose from: quarters if the machine can limit to fractions, else whole cores; a
    machine of less than that is used whole."""
    most = min(machine_cores, MACHINE_CORES_MAX)
    if not fractions:
        return tuple(float(count) for count in range(1, math.floor(most) + 1)) or (most,)
    places = max(1, math.floor((most - LOADER_CORES) / STEP_CORES))
    return tuple(min(most, STEP_CORES * place) for place in range(1, places + 1))


def candidates(profile: Profile, cores: Sequence[float], *, duration_s: int, seed: int) -> Iterator[list[DemoSettings]]:
    """Settings that may show a difference, the preferred first. Those of one list differ only in the cores of `static`:
    at most half of all, and fewer if that many bear the load. `cores` are the measured core counts, ascending."""
    weak = [count for count in reversed(cores) if count <= cores[-1] / 2]
    for slo_ms, crest in product(SLOS_MS, CRESTS):
        crest_rps = min(RATE_RPS_MAX, crest * measured_rps(profile, cores[-1]))
        counts = wave(TROUGH * crest_rps, crest_rps, duration_s)
        yield [DemoSettings(tuple(cores), static, counts, slo_ms, PAYLOAD_KB, seed) for static in weak]


def fitted(
    folder: Path, model: Path, profile: Profile, cores: Sequence[float], *, duration_s: int, seed: int
) -> tuple[DemoSettings, Scenario]:
    """The first settings under which the simulated systems differ clearly, and their scenario, whose files are in
    `folder` beside the model and its profile. MachineError, with the reason, if there are none."""
    if cores[0] > cores[-1] / 2:
        what = f"a replica cannot grow here: it can have only {counted(cores[-1], 'core')}"
        raise MachineError(what, help=elsewhere())
    gain = measured_rps(profile, cores[-1]) / measured_rps(profile, cores[0])
    little = f"{cores[-1]:g} cores do only {gain:.1f} times as much as {cores[0]:g}"
    if gain < GAIN_MIN:
        raise MachineError(f"no load tells the systems apart here: {little}", help=elsewhere())
    best = (-1.0, 0.0, 0.0)
    for slow, fast in MARGINS:
        for similar in candidates(profile, cores, duration_s=duration_s, seed=seed):
            adaptive: float | None = None
            for settings in similar:
                scenario = write_files(folder, settings, model)
                static, sponge = scenario.systems
                adaptive = foreseen(scenario, sponge, slow) if adaptive is None else adaptive
                fixed = foreseen(scenario, static, fast)
                if adaptive >= IN_TIME_MIN and fixed <= IN_TIME_MAX:
                    return settings, scenario
                best = max(best, (adaptive - fixed, adaptive, fixed))
                if adaptive < IN_TIME_MIN:
                    break
    what = (
        f"no load tells the systems apart here: {little}, and at best the simulator gives sponge {100 * best[1]:.0f} % "
        f"in time and static {100 * best[2]:.0f} %"
    )
    raise MachineError(what, help=elsewhere())


def foreseen(scenario: Scenario, choice: SystemChoice, slower: float) -> float:
    """The attainment of a system in the simulator if batches take `slower` times as long as in the profile."""
    truth = replace(scenario.truth, profile_error=slower)
    return run_scenario(replace(scenario, truth=truth), choice, check_first=0).row.attainment


def elsewhere() -> str:
    """What to do if this machine cannot show a difference, and how busy it is."""
    load, count = getloadavg()[0], cpu_count() or 1
    busy = f"; {load:.0f} processes want its {counted(count, 'core')} now" if load > 2 * count else ""
    return f"try it when nothing else runs, or on a machine with more cores{busy}"


def measured_rps(profile: Profile, cores: float) -> float:
    """The median throughput on `cores` with the best batch size, in requests per second."""
    return max((s.batch * 1e3 / s.p50_ms for s in profile.samples if s.cores == cores), default=0.0)


def wave(trough_rps: float, crest_rps: float, duration_s: int) -> tuple[int, ...]:
    """Requests per second that swing between trough and crest, once in `PERIOD_S`, starting at the trough."""
    return tuple(
        max(1, round(trough_rps + (crest_rps - trough_rps) * math.sin(math.pi * second / PERIOD_S) ** 2))
        for second in range(duration_s)
    )


def systems_of(settings: DemoSettings) -> list[dict[str, Any]]:
    """The systems to compare, as a scenario names them."""
    return [{"name": "static", "cores": settings.static_cores}, {"name": ADAPTIVE, "cores": list(settings.cores)}]


def scenario_of(settings: DemoSettings, model: str, counts_file: str) -> dict[str, Any]:
    """The scenario for servers and simulator; batches take the durations that the profile measured."""
    return {
        "name": "demo",
        "slo_ms": settings.slo_ms,
        "stages": [{"name": "classify", "model": model}],
        "systems": systems_of(settings),
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": settings.cores_max}]},
        "trace": {"file": counts_file, "format": "counts", "spread": "burst", "mean_ms": BURST_MS},
        "duration_s": settings.duration_s,
        "seed": settings.seed,
        "truth": {"network": {"link": {"kind": "lte"}, "payload_kb": settings.payload_kb, "semantics": "delay"}},
    }


def write_files(folder: Path, settings: DemoSettings, model: Path) -> Scenario:
    """Write the scenario, its trace, and an application file for each of its systems; returns the scenario as read."""
    counts = folder / "counts.txt"
    counts.write_text("".join(f"{count}\n" for count in settings.counts))
    declared = scenario_of(settings, f"./{model.name}", f"./{counts.name}")
    dump_yaml(folder / "scenario.yaml", declared)
    for system in systems_of(settings):
        app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
        dump_yaml(folder / f"{system['name']}.yaml", app | {"system": system})
    return load_scenario(folder / "scenario.yaml")


def dump_yaml(path: Path, value: Mapping[str, Any]) -> None:
    """Write a mapping to a file."""
    path.write_text(yaml.safe_dump(dict(value), sort_keys=False, default_flow_style=None))


# The runs.


class LiveRun(Struct, frozen=True):
    """A live run: figures from its log and from its clients, and the path of the log."""

    counted: CountedRun
    clients: LoadResult
    log: Path
    first_ns: int
    """When the first request was due, in ns from the start of the schedule."""


class ComparedRun(Struct, frozen=True):
    """One system: the live run from its log and from its clients, and the simulated run."""

    system: str
    live: CountedRun
    clients: LoadResult
    simulated: CountedRun

    @property
    def slower(self) -> float:
        """How many times as long batches took live as in the simulator, which draws from the profile."""
        live, simulated = (each.summary.estimate_errors() for each in (self.live, self.simulated))
        return (1 + live[0].bias) / (1 + simulated[0].bias) if live and simulated else 1.0


class Demonstration(Struct, frozen=True):
    """The results."""

    settings: DemoSettings
    profile: Profile
    runs: tuple[ComparedRun, ...]
    limited_by: str
    """How this machine limits replicas to their cores."""

    @property
    def why_inconclusive(self) -> str:
        """Why the live runs say nothing about the systems; empty if they show the difference that was to be shown."""
        live = [run.clients.attainment or 0.0 for run in self.runs]
        if live[1] - live[0] >= DIFFERENCE_MIN:
            return ""
        each = [
            f"{run.system} answered {100 * share:.1f} % in time ({100 * run.simulated.row.attainment:.1f} % expected, "
            f"and batches took {run.slower:.1f} times as long as expected)"
            for run, share in zip(self.runs, live, strict=True)
        ]
        why = "this machine was not as fast as when the model was measured just before"
        return f"These runs do not compare the systems, because {why}: {' and '.join(each)}; {elsewhere()}."


def demonstrate(folder: Path, *, duration_s: int, seed: int, progress: Progress) -> Demonstration:
    """Run the demonstration in `folder`; takes 2 × `duration_s` + 40 s. MachineError if the model is not installed, or
    if this machine cannot show a difference between the systems; InputError without the publication that it shows."""
    if ADAPTIVE not in SYSTEMS:
        what = f"the demonstration shows the published system {ADAPTIVE!r}, and no installed distribution has it"
        raise InputError(what, help="install sloop with its package sloop_systems; `sloop demo --files .` needs none")
    folder.mkdir(parents=True, exist_ok=True)
    progress(0.0, "the model")
    model = squeezenet(folder)
    detected = detect()
    detected.actuator.close()
    cores = choose_cores(local().cores, fractions=isinstance(detected.actuator, Cgroups))
    profile = measure_profile(model, cores, progress)
    progress(PROFILE_SHARE, "a load that suits this machine")
    settings, scenario = fitted(folder, model, profile, cores, duration_s=duration_s, seed=seed)
    share = (1.0 - PROFILE_SHARE) / len(scenario.systems)
    runs = []
    for place, choice in enumerate(scenario.systems):
        report = partial(_report, progress, PROFILE_SHARE + share * place, share, f"{choice.label}, live")
        runs.append(run_both(folder, scenario, choice, report))
    progress(1.0, "done")
    return Demonstration(settings, profile, tuple(runs), detected.why)


def _report(progress: Progress, before: float, share: float, what: str, done: float) -> None:
    """Report the progress of one part that starts at the fraction `before` of the whole and takes `share` of it."""
    progress(before + share * min(1.0, done), what)


def run_both(folder: Path, scenario: Scenario, choice: SystemChoice, progress: Callable[[float], None]) -> ComparedRun:
    """Serve and load one system of the scenario, then simulate it; both logs stay in the folder."""
    live = run_live(folder, scenario, choice, progress)
    simulated = run_simulated(scenario, choice, live, live.log.with_name("simulated.jsonl"))
    return ComparedRun(choice.label, live.counted, live.clients, simulated)


def run_live(folder: Path, scenario: Scenario, choice: SystemChoice, progress: Callable[[float], None]) -> LiveRun:
    """Serve one system of the scenario, whose application file is in the folder, and load it with the trace."""
    (clients,) = World.from_scenario(scenario, choice).clients.values()
    network = scenario.truth.network
    payload_bytes = round(network.payload_kb[0] * BYTES_PER_KB) if network is not None else 0
    duration_s = round(scenario.duration_s)
    due_ns, elapsed_ns = schedule_of(clients.trace, clients.link, payload_bytes, Delivery.DELAY)[0, :2].tolist()
    first_ns = due_ns - elapsed_ns
    load = ClientLoad(clients.trace, clients.link, payload_bytes, scenario.application.slo_ms, scenario.seed)
    app, state = folder / f"{choice.label}.yaml", folder / choice.label
    seen, log = serve_and_load(app, state, load, progress=lambda now: progress(now.at_s / duration_s))
    return LiveRun(count_run(log, first_ns=first_ns, duration_s=duration_s), seen, log, first_ns)


def run_simulated(
    scenario: Scenario, choice: SystemChoice, live: LiveRun, log: Path, *, recorded: RecordedRun = NOT_RECORDED
) -> CountedRun:
    """Simulate the same run and write its log to `log`; `recorded` replaces durations and branches by recorded ones.

    The trace starts at the same phase of the planning period as in the live run.
    """
    lead_ns = schedule_start_ns(live.log, first_ns=live.first_ns)
    assumed = run_scenario(scenario, choice, log=log, lead_ns=lead_ns, recorded=recorded).row.assumed
    return count_run(log, first_ns=live.first_ns, duration_s=round(scenario.duration_s), assumed=assumed)
