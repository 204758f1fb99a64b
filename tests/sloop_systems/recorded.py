"""What the systems plan, what their simulated runs give, and what solvers answer, recorded: a change that moves or
renames code changes none of it, and one that changes some on purpose records it again and says so.

`recorded.json` has a line for each system in each scene of `scenes/`, and one for each table of `tables`: digests of
everything, and a few numbers to read. `python -m tests.sloop_systems.recorded` says what differs; with `--write` it
records again, and the difference is the diff of that file.

Digests are equal where arithmetic is equal, bit by bit. Other libraries or another processor may round a sum or a
logarithm otherwise, and one bit can turn a plan. So the file has a digest of such sums too, and the version of HiGHS,
which breaks ties; where these differ, only the numbers to read are compared, with some tolerance.
"""

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct, structs

from sloop.actions import Decided, End, StartBatch, StartWorker
from sloop.app.load import load_scenario
from sloop.app.scenario import Scenario
from sloop.errors import InputError
from sloop.runlog import MemoryLog
from sloop.sim.run import simulate
from sloop.sim.scenarios import summary_of
from sloop.sim.world import World
from sloop.solvers import highs
from sloop.systems import SYSTEMS
from sloop.systems.planning import explain_plan
from sloop.systems.setup import set_up
from sloop.vocabulary import Plan, Worker
from tests.sloop_systems.tables import tables
from tests.without import publications

FOLDER: Final = Path(__file__).parent
FILE: Final = FOLDER / "recorded.json"
HEX: Final = 16
"""Characters of a digest: 64 bits."""
PUBLICATIONS: Final = 10
"""Folders of all; where some are not there, neither are scenes with their profiles."""
NEAR: Final = 0.05
"""On other machines, by what part a number may differ: a plan that turned at a tie."""

Entry = Mapping[str, Any]


class Run(NamedTuple):
    """A system in a scene."""

    scene: str
    place: int
    """Among the scene's systems."""
    name: str
    """The system's, with its place if it has parameters of its own."""

    def __str__(self) -> str:
        return f"{self.scene}/{self.name}"


@cache
def scene(name: str) -> Scenario:
    """The scenario of a file in `scenes`."""
    return load_scenario(FOLDER / "scenes" / f"{name}.yaml")


def runs() -> Iterator[Run]:
    """Every system that is installed in every scene whose profiles are."""
    for path in sorted((FOLDER / "scenes").glob("*.yaml")):
        try:
            systems = scene(path.stem).systems
        except InputError:
            if len(publications()) == PUBLICATIONS:
                raise
            continue
        for place, choice in enumerate(systems):
            if choice.name in SYSTEMS:
                yield Run(path.stem, place, choice.label + (f"-{place}" if choice.own else ""))


# Digests


def digest(values: object) -> str:
    """Of plain values, bit by bit."""
    return sha256(repr(plain(values)).encode()).hexdigest()[:HEX]


def plain(value: Any) -> Any:
    """The same without names of classes and fields, so that these may change. TypeError for what has no plain form."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)  # also an enumeration's member
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        names = value.__struct_fields__ if isinstance(value, Struct) else [each.name for each in fields(value)]
        value = [getattr(value, name) for name in names]
    return tuple(map(plain, value))


def arithmetic() -> str:
    """Of functions that round differently on other machines and with other libraries."""
    values = [0.37 * place + 1e-3 for place in range(1, 400)]
    arrays = np.array(values), np.array(values[::-1])
    found = [
        *([function(value) for value in values] for function in (math.log, math.exp, math.lgamma, math.sin, math.erf)),
        [value**0.37 for value in values],
        [sum(values), math.fsum(values), *(float(array.sum()) for array in arrays), float(arrays[0] @ arrays[1])],
        [np.exp(-arrays[0]), np.log(arrays[0]), np.tanh(arrays[0] / 50), np.sqrt(arrays[0])],
        highs.minimise([1.0, 1.3, 0.7], [({0: 2.0, 1: 3.0, 2: 1.0}, 3.1, 9.0)], integers=2, nodes_max=99).values,
    ]
    return digest(found)


# Entries


def planned(run: Run) -> Entry:
    """The plan for the mean rate of each application, as `sloop plan` shows it."""
    world = world_of(run)
    seconds = world.duration_ns / 1e9
    rates_rps = {name: sum(own.trace.counts_per_s()) / seconds for name, own in world.clients.items()}
    setup = set_up(world.deployment, must_fit=False)
    found = explain_plan(setup, rates_rps, "even", clock=perf_counter_ns)
    stages = [
        (each.application, each.stage, each.variant, each.replicas, each.batch, each.cores, each.predicted_ms)
        for each in found.stages
    ]
    placements = [structs.astuple(each) for each in found.placements]
    return {
        "feasible": found.feasible,
        "cores": found.cores,
        "usd_per_h": found.usd_per_h,
        "plan": digest((found.feasible, stages, placements, found.cores, found.usd_per_h, found.predicted_ms)),
    }


def played(run: Run) -> Entry:
    """One simulated run."""
    world = world_of(run)
    log, summary = MemoryLog(), summary_of(world, world.setup())
    totals = simulate(world, [log, summary], check_first=0)
    row = summary.row(system=run.name, seed=world.seed)
    plans: list[Any] = []
    starts: list[Any] = []
    batches: list[Any] = []
    ends: list[Any] = []
    first_workers: list[int] = []  # of replicas, which a digest has by their places here
    for now_ns, record in log:
        if isinstance(record, Decided) and record.plan is not None:
            plans.append((now_ns, record.application, target(record.plan)))
        elif isinstance(record, StartWorker) and record.replica is not None:
            starts.append((now_ns, first_workers.index(record.replica), helper(record.spec.shadow)))
        elif isinstance(record, StartWorker):
            spec = record.spec
            first_workers.append(record.worker)
            layers = None if record.part is None else (record.part.span.first, record.part.span.end)
            starts.append((now_ns, spec.stage, spec.variant, spec.cores, spec.node, spec.device, layers))
        elif isinstance(record, StartBatch):
            batches.append((now_ns, record.stage, record.requests, record.parts))
        elif isinstance(record, End):
            ends.append((now_ns, record.request, record.outcome.value))
    counts = {name: getattr(row, name) for name in ("served", "late", "dropped", "rejected", "failed")}
    return {
        **counts,
        "open": totals.open,
        "core_seconds": row.core_seconds,
        "usd": row.usd,
        "p99_ms": row.p99_ms,
        "plans": digest(plans),
        "starts": digest(starts),
        "batches": digest(batches),
        "ends": digest(ends),
    }


def world_of(run: Run) -> World:
    """The world of a run."""
    found = scene(run.scene)
    return World.from_scenario(found, found.systems[run.place])


def target(plan: Plan) -> Any:
    """What a plan wants: not why, and not how the project represents it."""
    stages = [
        (stage.stage, stage.batch_max, stage.in_place, stage.wait_ns, [
            (group.count, group.batch_max, group.rate_rps, group.spec.variant, slot.cores, slot.share,
             slot.hardware, slot.is_capped, group.spec.node, group.spec.device, helper(group.spec.shadow))
            for group in stage.groups
            for slot in (group.spec.slot,)
        ])
        for stage in plan.stages
    ]  # fmt: skip
    return plan.feasible, plan.saturated, plan.gave_up, stages


def helper(shadow: Worker | None) -> tuple[float, tuple[int, ...]] | None:
    """The cores and blocks of a shadow."""
    return None if shadow is None else (shadow.cores, shadow.layers)


def tabled(name: str) -> Entry:
    """All answers of one table."""
    answers = tables()[name]()
    return {"answers": len(answers), "different": len(Counter(map(digest, answers))), "digest": digest(answers)}


def everything() -> dict[str, dict[str, Entry]]:
    """What `recorded.json` has."""
    return {
        "machine": {"arithmetic": {"digest": arithmetic(), "highs": version("highspy")}},
        "plans": {str(run): planned(run) for run in runs()},
        "runs": {str(run): played(run) for run in runs()},
        "tables": {name: tabled(name) for name in tables()},
    }


# Comparison


@cache
def recorded() -> dict[str, dict[str, Entry]]:
    """The file."""
    found: dict[str, dict[str, Entry]] = json.loads(FILE.read_text())
    return found


@cache
def is_exact() -> bool:
    """Whether this machine computes as the one that recorded."""
    return recorded()["machine"] == {"arithmetic": {"digest": arithmetic(), "highs": version("highspy")}}


def differences(kind: str, name: str, now: Entry, *, exact: bool | None = None) -> list[str]:
    """How an entry differs from the recorded one, in words; none if it is equal. Without `exact` (None: as this machine
    computes) digests are not compared, and numbers may differ somewhat."""
    then = recorded()[kind].get(name)
    if then is None:
        return [f"{kind} of {name} are not recorded"]
    if is_exact() if exact is None else exact:
        return [
            f"{name}: {key} was {then.get(key)!r}, is {now.get(key)!r}"
            for key in {**then, **now}
            if then.get(key) != now.get(key)
        ]
    answered = sum(value for key, value in then.items() if key in ENDS)
    return [
        f"{name}: {key} was {was!r}, is {now.get(key)!r}"
        for key, was in then.items()
        if not isinstance(was, str) and not near(was, now.get(key), least=NEAR * answered if key in ENDS else 0.0)
    ]


ENDS: Final = ("served", "late", "dropped", "rejected", "failed", "open")


def near(was: float | None, value: Any, least: float) -> bool:
    """Whether two numbers may stem from equal code on different machines."""
    if was is None or value is None or isinstance(was, bool):
        return was is value
    return math.isclose(was, value, rel_tol=NEAR, abs_tol=least)


def main(arguments: Sequence[str] = ()) -> int:
    """Record again with `--write`; else say what differs and return 1 if anything does."""
    now = everything()
    if "--write" in arguments:
        lines = [
            f"{json.dumps(kind)}: {{\n"
            + ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items()))
            + "\n}"
            for kind, entries in now.items()
        ]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    found = [
        line
        for kind in ("plans", "runs", "tables")
        for name, entry in now[kind].items()
        for line in differences(kind, name, entry)
    ]
    print("\n".join(found) or "nothing differs")  # noqa: T201
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
