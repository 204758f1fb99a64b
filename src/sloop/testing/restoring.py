"""Does a core that is restored from a snapshot decide as the core would have that was saved?

A world is simulated, and a core is fed the events of its log. Somewhere it is saved, written as JSON, read and
restored, as by another process. From there on both cores must answer alike.
"""

from collections.abc import Iterable, Sequence

import msgspec

from sloop.actions import Action, RequestPlan
from sloop.core import Core
from sloop.errors import InputError
from sloop.events import Deployed, SystemChanged
from sloop.runlog import EVENTS, MemoryLog, Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import Kept
from sloop.sim import World, simulate
from sloop.sim.foretell import OwnSimulations
from sloop.systems.replay import header_of
from sloop.systems.setup import Setup, application_in, build, definition_of
from sloop.systems.snapshot import Snapshot, restore, save

__all__ = ["fresh_run", "restored_run", "restores", "through_json"]

Records = Sequence[tuple[int, Record]]
Run = tuple[Core, DeploymentState]


def fresh_run(setup: Setup) -> Run:
    """A core and a fold that have seen nothing."""
    kept = Kept(seconds=11, routes=False)
    return setup.core(), DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build, kept=kept)


def feed(run: Run, records: Records) -> list[list[Action]]:
    """Feed the events among these records to a core, and all records to its fold; returns the core's answers. Plans are
    as they were recorded, and made again, so that policies remember them."""
    core, fold = run
    events = [(now_ns, record) for now_ns, record in records if isinstance(record, EVENTS)]
    answers: list[list[Action]] = []
    for place, (now_ns, event) in enumerate(events):
        more = place + 1 < len(events) and events[place + 1][0] == now_ns
        answers.append(core.handle(now_ns, event, more))
        if any(isinstance(action, RequestPlan) for action in answers[-1]):
            assert core.plan_input is not None
            core.planner.plan(core.plan_input)
    for now_ns, record in records:
        fold.append(now_ns, record)
    return answers


def through_json(snapshot: Snapshot) -> Snapshot:
    """The snapshot as another process reads it."""
    return msgspec.json.decode(msgspec.json.encode(snapshot), type=Snapshot)


def restored_run(run: Run, setup: Setup, at_ns: int, records: Iterable[tuple[int, Record]]) -> Run:
    """The core and the fold after a snapshot has been written and read, as by another process. `records` are those that
    the run was fed."""
    definitions = [definition_of(each) for each in setup.applications]
    definitions += [record.definition for _, record in records if isinstance(record, Deployed | SystemChanged)]
    parts = {}
    for each in msgspec.json.decode(msgspec.json.encode(definitions)):
        application = application_in(each)
        parts[application.key] = build(application.name, application.version, each)
    core, fold = restore(through_json(save(run[0], at_ns, fold=run[1])), list(parts.values()), build)
    assert fold is not None
    return core, fold


def _cut_after(records: Records, at: int) -> int:
    """The first place from here on where an instant begins."""
    while at < len(records) and (at == 0 or records[at - 1][0] == records[at][0]):
        at += 1
    return at


def restores(world: World, fraction: float) -> bool:
    """Simulate a world, save the core after a fraction of the records, and compare what both cores do afterwards. False
    if there is nothing to compare: the system cannot serve the world, or a plan is being made until the end.

    AssertionError if the cores differ."""
    try:
        setup = world.setup()
    except InputError:
        return False
    log = MemoryLog()
    own = OwnSimulations(header_of(setup, origin="sim")) if world.asks else None
    simulate(world, [log], check_first=0, own=own)
    records = log.records
    run, done = fresh_run(setup), 0
    cut = _cut_after(records, round(fraction * len(records)))
    while True:
        feed(run, records[done:cut])
        if run[0].plan_input is None or cut == len(records):
            break
        done, cut = cut, _cut_after(records, cut + 1)
    if cut == len(records):
        return False
    other = restored_run(run, setup, records[cut - 1][0], records[:cut])
    assert feed(other, records[cut:]) == feed(run, records[cut:]), "the restored core decides otherwise"
    if run[0].plan_input is None:
        one, two = [msgspec.to_builtins(through_json(save(core, 0, fold=fold))) for core, fold in (other, run)]
        same = (one["core"][2], one["fold"]) == (two["core"][2], two["fold"])
        assert same, "the queues, replicas or counts of the restored core differ"
    return True
