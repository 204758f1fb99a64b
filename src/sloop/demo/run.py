"""The demonstration from nothing to a report: model, profile, setting, two live runs, the same two simulated.

Promises that everything it used is left in its folder, so that any step can be repeated by hand: the model and its
profile, the applications, the scenario, the logs, the page.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import yaml
from msgspec import Struct

from sloop.app.application import SystemChoice
from sloop.app.hardware import local
from sloop.app.load import load_scenario
from sloop.app.scenario import Scenario
from sloop.demo.live import Sending, observe
from sloop.demo.model import squeezenet
from sloop.demo.outcome import Outcome, began_ns, read_outcome
from sloop.demo.setting import BATCHES, Setting, choose_cores, scenario_of, setting_of, systems_of
from sloop.load import Delivery, LoadResult
from sloop.load.run import schedule_of
from sloop.profile.measure import measure
from sloop.profile.profile import Profile, path_beside, save_profile
from sloop.report.simulated import play
from sloop.serve.cpu_quota import detect
from sloop.serve.cpu_quota import Cgroups
from sloop.serve.cpu_quota import confined
from sloop.sim.world import BYTES_PER_KB, NOT_RECORDED, Recorded, World

CELL_S: Final = 1.0
PROFILED: Final = 0.2
"""Share of the time that the profile takes."""
WORLD_KEYS: Final = ("systems", "trace", "duration_s", "seed", "truth")

Tell = Callable[[float, str], None]
"""Called with the share of the work that is done and what is being done."""


class Compared(Struct, frozen=True):
    """One system: live as its log says, as its clients saw it, and as the simulator foretold."""

    system: str
    live: Outcome
    clients: LoadResult
    simulated: Outcome


class Demonstration(Struct, frozen=True):
    """All that came of it."""

    setting: Setting
    profile: Profile
    runs: tuple[Compared, ...]
    how: str
    """What gave the replicas their cores."""


def demonstrate(folder: Path, *, duration_s: int, seed: int, tell: Tell) -> Demonstration:
    """Run it all in `folder`; takes 2 × `duration_s` and half a minute. MachineError where something is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tell(0.0, "the model")
    model = squeezenet(folder)
    detected = detect()
    detected.actuator.close()
    cores = choose_cores(local().cores, fractions=isinstance(detected.actuator, Cgroups))
    profile = profiled(model, cores, tell)
    setting = setting_of(profile, cores, duration_s=duration_s, seed=seed)
    scenario = written(folder, setting, model)
    share = (1.0 - PROFILED) / len(scenario.systems)
    runs = []
    for place, choice in enumerate(scenario.systems):
        begun = PROFILED + share * place
        runs.append(compared(folder, scenario, choice, partial(_within, tell, begun, share, f"{choice.label}, live")))
    tell(1.0, "done")
    return Demonstration(setting, profile, tuple(runs), detected.why)


def _within(tell: Tell, begun: float, share: float, what: str, done: float) -> None:
    tell(begun + share * min(1.0, done), what)


def compared(folder: Path, scenario: Scenario, choice: SystemChoice, tell: Callable[[float], None]) -> Compared:
    """One system on the scenario: served and loaded, then simulated; both logs stay in the folder."""
    seen = observed(folder, scenario, choice, tell)
    simulated = foretold(scenario, choice, seen, seen.log.with_name("simulated.jsonl"))
    return Compared(choice.label, seen.outcome, seen.clients, simulated)


class Observed(Struct, frozen=True):
    """A live run: what came of it, and where its log is."""

    outcome: Outcome
    clients: LoadResult
    log: Path
    first_ns: int
    """When the first request was due to be sent, from the schedule's beginning."""


def observed(folder: Path, scenario: Scenario, choice: SystemChoice, tell: Callable[[float], None]) -> Observed:
    """Serve one system of the scenario, whose application file is in the folder, and load it with the trace."""
    world = World.from_scenario(scenario, choice)
    network = scenario.truth.network
    payload_bytes = round(network.payload_kb[0] * BYTES_PER_KB) if network is not None else 0
    duration_s = round(scenario.duration_s)
    due_ns, elapsed_ns = schedule_of(world.trace, world.link, payload_bytes, Delivery.DELAY)[0].tolist()
    first_ns = due_ns - elapsed_ns
    sending = Sending(world.trace, world.link, payload_bytes, scenario.application.slo_ms, scenario.seed)
    app, state = folder / f"{choice.label}.yaml", folder / choice.label
    clients, log = observe(app, state, sending, tell=lambda told: tell(told.at_s / duration_s))
    return Observed(read_outcome(log, first_ns=first_ns, duration_s=duration_s), clients, log, first_ns)


def foretold(
    scenario: Scenario, choice: SystemChoice, seen: Observed, log: Path, *, recorded: Recorded = NOT_RECORDED
) -> Outcome:
    """The same run simulated, its log written to `log`; with `recorded`, batches and branches are those of that run.

    The trace begins in the same part of a planning period as it did live.
    """
    lead_ns = began_ns(seen.log, first_ns=seen.first_ns)
    assumed = play(scenario, choice, log=log, lead_ns=lead_ns, recorded=recorded).row.assumed
    return read_outcome(log, first_ns=seen.first_ns, duration_s=round(scenario.duration_s), assumed=assumed)


def profiled(model: Path, cores: tuple[float, ...], tell: Tell) -> Profile:
    """The model's profile on this machine, kept beside it; measured anew each time."""
    profile = measure(
        model,
        batches=BATCHES,
        cores=cores,
        seconds=CELL_S,
        limit=confined,
        progress=lambda done, cells, sample: tell(
            PROFILED * done / cells, f"profile: batch {sample.batch} on {sample.cores:g} cores"
        ),
    )
    save_profile(profile, path_beside(model))
    return profile


def written(folder: Path, setting: Setting, model: Path) -> Scenario:
    """The scenario, and an application file for each of its systems, as files anyone can use again."""
    counts = folder / "counts.txt"
    counts.write_text("".join(f"{count}\n" for count in setting.counts))
    declared = scenario_of(setting, f"./{model.name}", f"./{counts.name}")
    dump(folder / "scenario.yaml", declared)
    for system in systems_of(setting):
        app = {key: value for key, value in declared.items() if key not in WORLD_KEYS}
        dump(folder / f"{system['name']}.yaml", app | {"system": system})
    return load_scenario(folder / "scenario.yaml")


def dump(path: Path, value: Mapping[str, Any]) -> None:
    """Write YAML."""
    path.write_text(yaml.safe_dump(dict(value), sort_keys=False, default_flow_style=None))
