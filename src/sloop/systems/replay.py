"""Replay: rebuilds the core of a recorded run from the log's header, and compares its actions with the recorded ones.

The core of `rebuild(header_of(setup, …))` decides as the recorded one did: the header has the cluster, and the
applications with their profiles and their system's parameters. Applications that were deployed later are in the log's
`Deployed` events. Must not depend on a driver or clock.
"""

import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from sloop import __version__
from sloop.actions import Action, Decided, RequestPlan, Rollout, StartBatch, StartWorker, VersionState
from sloop.app.application import Application, Deployment, SystemChoice
from sloop.core import ApplicationParts, Core
from sloop.errors import InputError
from sloop.events import Deployed, Event, Planned, SystemChanged, WorkerReady
from sloop.profile.fit import Percentile
from sloop.profile.model import is_modelled
from sloop.profile.passes import refined, refined_by_size
from sloop.profile.profile import Profile, digest, load_profile, path_beside
from sloop.runlog import ACTIONS, EVENTS, Header, ProcessorTime, Record, RecordedLog
from sloop.runlog.durations import BATCHES_MIN, BatchFold
from sloop.runlog.fold import DeploymentState
from sloop.runlog.processes import ProcessorUse
from sloop.runlog.run import Kept
from sloop.systems.catalogue import deciding
from sloop.systems.setup import Setup, application_in, build, definition_of, set_up
from sloop.systems.snapshot import Snapshot, restore
from sloop.text import listed
from sloop.vocabulary import Life, Node, Request, version_key


def header_of(
    setup: Setup,
    *,
    origin: str,
    seed: int | None = None,
    date: str = "",
    machine: str = "",
    assumed_starts: Mapping[str, str] | None = None,
) -> Header:
    """The header of this run's log; `origin` is `live` or `sim`, `date` an ISO 8601 instant. For the others see
    `Header`."""
    deployment = setup.deployment
    return Header(
        origin=origin,
        name=deployment.name,
        system=deployment.system.name,
        definitions={application.application.key: definition_of(application) for application in setup.applications},
        cluster=deployment.cluster,
        seed=seed,
        software={"sloop": __version__, "python": platform.python_version()},
        date=date,
        machine=machine,
        assumed_starts=dict(assumed_starts or {}),
        first_worker=setup.first_worker,
    )


def rebuild(header: Header) -> Setup:
    """The setup with which a log was recorded, fresh. InputError for a header that does not describe it completely."""
    applications = tuple(
        replace(application_in(definition), cluster=header.cluster) for definition in header.definitions.values()
    )
    keys = tuple(application.key for application in applications)
    if not keys or keys != tuple(header.definitions):
        what = "the log's header does not describe its applications"
        raise InputError(what, help="record the run again with this sloop")
    deployment = Deployment(header.name, applications, system_of(header, applications), header.cluster)
    return replace(set_up(deployment, must_fit=False), first_worker=header.first_worker)


def system_of(header: Header, applications: Sequence[Application]) -> SystemChoice:
    """The system of a deployment with these applications of a log: that of its header, unless all of them were given
    others while they served (`SystemChanged`)."""
    names = [application.system.name for application in applications]
    return SystemChoice(header.system if header.system in names else names[0])


@dataclass(frozen=True, slots=True)
class RefinedProfile:
    """A profile of a model with the durations of a log's batches as one more pass."""

    model: Path
    file: Path
    """The file of the profile: the one that the application read, else the one beside the model."""
    is_read: bool
    """Whether the application reads this file. It does not if it declares the profile itself, or if several models
    share the file."""
    profile: Profile


def require_all(log: RecordedLog, what: str) -> None:
    """InputError if a log has only a sample of the requests."""
    if log.header.sample < 1.0:
        raise InputError(
            f"{what} needs all requests, and this log has {log.header.sample:.3%} of those served in time",
            where=str(log.path),
            help="record a run without `log_sample` in the server's limits",
        )


def changed_systems(log: RecordedLog) -> list[str]:
    """A sentence for each Python file of a system that is not, or no longer, the one that decided in the log."""
    notes: dict[str, None] = {}
    for application in _applications_of(log):
        system = application.system
        if system.digest and not (Path(system.name).is_file() and digest(Path(system.name)) == system.digest):
            notes[f"{system.name} has changed since this run, so its present code may decide otherwise"] = None
    return list(notes)


class Beginning(NamedTuple):
    """The state with which a log begins: fresh, or that of the snapshot of its first segment."""

    core: Core
    fold: DeploymentState
    """Its beliefs are those of the core."""


def beginning_of(log: RecordedLog, kept: Kept = Kept()) -> Beginning:  # noqa: B008  # frozen
    """The state at a log's start. InputError if it begins in the middle of a run, without a snapshot."""
    header = log.header
    if log.is_whole:
        setup = rebuild(header)
        fold = DeploymentState(setup.parts(), nodes=setup.deployment.cluster, build=build, kept=kept)
        return Beginning(setup.core(), fold)
    snapshot = log.snapshot
    if snapshot is None:
        raise InputError(
            f"segment {header.segment} has no snapshot, so that nothing can go on from there",
            where=str(log.files[0]),
            help="name a later segment",
        )
    applications = [application_in(definition) for definition in header.definitions.values()]
    made = [
        build(application.name, application.version, definition)
        for application, definition in zip(applications, header.definitions.values(), strict=True)
    ]
    core, restored = restore(msgspec.json.decode(snapshot, type=Snapshot), made, build)
    if restored is None:
        raise InputError("the snapshot has no fold", where=str(log.files[0]), help="name a later segment")
    restored.keep(kept)
    return Beginning(core, restored)


def parts_of(log: RecordedLog) -> tuple[Sequence[ApplicationParts], Sequence[Node]]:
    """The versions with which a log begins, fresh, and the nodes."""
    if log.is_whole:
        setup = rebuild(log.header)
        return setup.parts(), setup.deployment.cluster
    made = [application_in(definition) for definition in log.header.definitions.values()]
    parts = [build(each.name, each.version, log.header.definitions[each.key]) for each in made]
    return parts, [record.node for record in beginning_of(log).fold.nodes.records.values()]


def with_beginning(log: RecordedLog) -> Iterable[tuple[int, Record]]:
    """The records of a log, for a fold that has the versions of its header and nothing else: where it begins in the
    middle of a run, first those that start the replicas, plans and versions that were there. Of requests that had
    arrived before, only the end is there, which a fold ignores."""
    if log.is_whole:
        return log
    core, fold = beginning_of(log)
    at_ns = log.header.from_ns
    records: list[Record] = []
    for version in fold.records:
        if version.has_ended:
            continue
        records.append(Rollout(version.application, version.version, version.state, version.share, version.why))
        if version.run.plan is not None:
            key = version.key if len(core.state.applications) > 1 else ""
            records.append(Decided("plan", version.run.plan.why, plan=version.run.plan, application=key))
        for id, replica in version.run.replicas.items():
            records.append(StartWorker(id, replica.spec.with_cores(replica.cores)))
            if replica.life is not Life.STARTING:
                records.append(WorkerReady(id))
    return chain([(at_ns, record) for record in records], log)


def refined_profiles(
    log: RecordedLog, model: Path | None = None, percentile: Percentile = "p99"
) -> list[RefinedProfile]:
    """The profiles that the batches of a log were planned with, with their durations as one more pass
    (`sloop.profile.passes`).

    What is refined is the profile in its file as it is now, if that is of the same version of the model as the log's;
    otherwise the log's. `model` selects one model. InputError for a simulated run, or if the log has too few batches
    (of `model`).
    """
    header, where = log.header, str(log.path)
    if header.origin != "live":
        raise InputError("a simulated run shows nothing about a machine", where=where, help="give a server's log")
    require_all(log, "a profile")
    folds = {size: BatchFold(header.cluster, only_busy=True, size=size) for size in classes_in(log)}
    use = ProcessorUse()
    for now_ns, record in with_beginning(log):
        use.append(now_ns, record)
        for fold in folds.values():
            fold.append(now_ns, record)
    variants = {
        (stage.name, variant.name): variant
        for application in _applications_of(log)
        for stage in application.stages
        for variant in stage.variants
    }
    profiles: dict[tuple[Path, str], Profile] = {}
    runs_ns: dict[tuple[Path, str], dict[int, dict[tuple[int, float], list[int]]]] = {}
    modelled: set[Path] = set()
    shared = 0
    found = [(size, fold, *each) for size, fold in folds.items() for each in fold.durations().items()]
    for size, fold, (stage, name, hardware), cells in found:
        variant = variants.get((stage, name))
        profile = variant.on(hardware) if variant is not None else None
        if variant is None or variant.model is None or profile is None:
            continue
        path = Path(variant.model)
        if model is None or path.resolve() == model.resolve():
            shared += fold.shared[stage, name, hardware] if not size else 0  # each fold counts all of them
            if not cells:
                continue
            if is_modelled(profile.accelerator):  # the server computed on its processor what the device would
                modelled.add(path)
                continue
            key = (path, variant.file_on(hardware))
            profiles[key] = profile
            for cell, found_ns in cells.items():
                runs_ns.setdefault(key, {}).setdefault(size, {}).setdefault(cell, []).extend(found_ns)
    if not profiles:
        raise _no_batches(model, modelled, shared, where)
    beside = f"a server under {header.system}, {log.path.name}"
    sharing = Counter(file for _, file in profiles)
    refinements: list[RefinedProfile] = []
    for (path, declared), profile in profiles.items():
        is_read = bool(declared) and sharing[declared] == 1
        file = Path(declared) if is_read else path_beside(path)
        newest = _newest(file, profile)
        by_size = runs_ns[path, declared]
        of_one_size = by_size.pop(0, {})  # of an earlier version of the model, if there are others
        pass_of: dict[str, Any] = {"date": header.date, "beside": beside, "percentile": percentile}
        pass_of["beside_cores"] = use.cores
        made = refined_by_size(newest, by_size, **pass_of) if by_size else refined(newest, of_one_size, **pass_of)
        refinements.append(RefinedProfile(path, file, is_read, made))
    return refinements


def classes_in(log: RecordedLog) -> list[int]:
    """The classes of sizes of the batches of a log, ascending; 0 is that of rows of one size."""
    return sorted({0, *(record.size for _, record in log if isinstance(record, StartBatch))})


def sizes_in(log: RecordedLog, model: Path) -> Counter[tuple[int, tuple[int, ...]]]:
    """How many rows of each size and shape came to a model, by the arrivals of a server's log. InputError if none
    have a size, or if clients do not send the model's inputs."""
    where, served = str(log.path), [*_applications_of(log)]
    names = {
        application.name
        for application in served
        for stage in application.stages
        if not stage.after
        and any(each.model and Path(each.model).resolve() == model.resolve() for each in stage.variants)
    }
    if not names:
        what = f"no application of this log begins with {model.name!r}"
        raise InputError(what, where=where, help="name a log of this model, or give sizes with --sizes")
    found = Counter[tuple[int, tuple[int, ...]]]()
    for _, record in log:
        if isinstance(record, Request) and record.size and (record.application in names or len(served) == 1):
            found[record.size, record.shape] += record.rows
    if not found:
        what = f"the requests for {model.name!r} have no sizes"
        raise InputError(what, where=where, help="record requests of this version of sloop, or give --sizes")
    return found


def _no_batches(model: Path | None, modelled: Set[Path], shared: int, where: str) -> InputError:
    """Why no batch of `model`, or of any, says how long one takes: they were on devices that are `modelled`, or
    `shared` of them ran beside others on the same cores."""
    if modelled:
        names = listed(sorted(path.name for path in modelled))
        what = f"the profile of {names} is of a device whose time is modelled; a server computes it on processors"
        fix = f"measure it for nodes of this kind: sloop profile {min(modelled)} --hardware local"
        return InputError(what, where=where, help=fix)
    of = f"{model.name!r}" if model else "any model"
    what = f"no {BATCHES_MIN} batches of one size on one core count were run by {of}"
    fix = "record a longer run, or one of this model"
    if shared >= BATCHES_MIN:
        what += f": {shared} of its batches shared the cores of their node with others, and had no fixed number"
        fix = "record a run under `system: {name: static, cores: 1}`, whose replicas keep their cores to themselves"
    return InputError(what, where=where, help=fix)


def _applications_of(log: RecordedLog) -> Iterator[Application]:
    """Every application version of a log: those of its header, and those deployed later."""
    for definition in log.header.definitions.values():
        yield application_in(definition)
    for _, record in log:
        if isinstance(record, Deployed | SystemChanged):
            yield application_in(record.definition)


class ServedApplications:
    """The application versions that serve, by name, as a log tells: those of its header, and those deployed later. One
    that has ended keeps its last version, and is in `ended`."""

    def __init__(self, header: Header) -> None:
        applications = map(application_in, header.definitions.values())
        self._versions = {(application.name, application.version): application for application in applications}
        self.by_name = {application.name: application for application in self._versions.values()}
        self.ended: set[str] = set()
        self._chosen: dict[str, str] = {}
        """By key, what the overseer of a version has chosen."""

    def deciding(self, application: Application) -> Application:
        """A version under the system that decides for it: the one that its overseer has chosen, if it has one."""
        return replace(application, system=deciding(application.system, self._chosen.get(application.key, "")))

    def append(self, record: Record) -> None:
        """Add the next record of the log."""
        if isinstance(record, Deployed):
            deployed = self._versions[record.application, record.version] = application_in(record.definition)
            self.by_name.setdefault(record.application, deployed)
        elif isinstance(record, SystemChanged) and (record.application, record.version) in self._versions:
            before = self._versions[record.application, record.version]
            changed = self._versions[record.application, record.version] = application_in(record.definition)
            self._chosen.pop(changed.key, None)
            if self.by_name[record.application] is before:
                self.by_name[record.application] = changed
        elif isinstance(record, Decided) and record.choice:
            self._chosen[record.application] = record.choice
        elif isinstance(record, Rollout) and (record.application, record.version) in self._versions:
            version = self._versions[record.application, record.version]
            if record.state is VersionState.SERVING:
                self.by_name[record.application] = version
                self.ended.discard(record.application)
            elif record.state is VersionState.RETIRED and self.by_name[record.application] is version:
                self.ended.add(record.application)


def _newest(file: Path, logged: Profile) -> Profile:
    """The profile in its file, which other logs may have refined since; the logged one if the model changed."""
    kept = load_profile(file) if file.is_file() else logged
    return kept if kept.model_digest == logged.model_digest else logged


class ReplayDifference(Struct, frozen=True):
    """The first place where a replay differs from its recording."""

    at_ns: int
    record: int
    """Number of the record in the log, from 1, without the header."""
    recorded: dict[str, Any]
    """The record in the log."""
    replayed: dict[str, Any] | None
    """The core's action, or the planner's answer, instead; None if there was no further action."""


class Replayed(Struct, frozen=True):
    """The result of a replay; `difference` is None if every action equals the recorded one."""

    events: int
    actions: int
    difference: ReplayDifference | None


def replay_log(
    records: Iterable[tuple[int, Record]], core: Core, *, definitions: Mapping[str, Mapping[str, Any]] | None = None
) -> Replayed:
    """Feed the recorded events to a fresh core and compare its actions, and the plans that were made beside the event
    loop, with the recorded ones, up to the first difference.

    The actions after an event in a log answer that event; a log that was cut may lack the last ones. Events of one
    instant were handed to the core together. `definitions` (`Header.definitions`) are needed if the planner's process
    was replaced during the run, with fresh policies.
    """
    events = actions = 0
    planner = _ReplayedPlanner(core, definitions or {})
    for step in _steps(records):
        events += 1
        expected = planner.answer_to(step.event)
        if expected is not None and expected != step.event:
            return Replayed(events, actions, _plan_difference(step, expected))
        answers = core.handle(step.now_ns, step.event, more_at_this_instant=step.next_ns == step.now_ns)
        planner.request(answers)
        for place, recorded in enumerate(step.actions):
            actions += 1
            if place >= len(answers) or answers[place] != recorded:
                return Replayed(events, actions, _difference(step, place, answers))
        if step.next_ns is not None and len(answers) > len(step.actions):
            return Replayed(events, actions, _difference(step, len(step.actions), answers))
    return Replayed(events, actions, None)


class _ReplayedPlanner:
    """Computes the plans that were computed beside the event loop, with the core's own policies."""

    def __init__(self, core: Core, definitions: Mapping[str, Mapping[str, Any]]) -> None:
        self._core = core
        self._definitions = dict(definitions)
        self._answers: dict[int, Planned] = {}
        """By number, the answers that are not yet in the log."""

    def request(self, actions: Iterable[Action]) -> None:
        """Make the plan that these actions request, if any."""
        for action in actions:
            if isinstance(action, RequestPlan):
                assert self._core.plan_input is not None, action
                self._answers[action.number] = self._core.planner.plan(self._core.plan_input)

    def answer_to(self, event: Event) -> Planned | None:
        """What the event should be if it is an answer of the planner; None for other events, and after a restart, from
        which on all policies are fresh."""
        if isinstance(event, Deployed | SystemChanged):
            key = version_key(event.application, event.version)
            self._definitions[key] = event.definition
        if not isinstance(event, Planned):
            return None
        answer = self._answers.pop(event.number, None)
        if not event.restarted:
            return answer
        for application in self._core.state.applications.values():
            parts, planner = application.parts, self._core.planner
            planner.discard(parts.key)
            fresh = build(parts.name, parts.version, self._definitions[parts.key])
            planner.add(parts.key, fresh.policies, fresh.choices)
        return None


@dataclass(slots=True)
class _Step:
    """An event of a log, the actions that follow it, and the next event: None at the log's end."""

    now_ns: int
    event: Event
    record: int
    """Number of the event's record in the log, from 1."""
    actions: list[Action] = field(default_factory=list)
    next_ns: int | None = None
    next_record: Record | None = None


def _steps(records: Iterable[tuple[int, Record]]) -> Iterator[_Step]:
    step: _Step | None = None
    for number, (now_ns, record) in enumerate(records, start=1):
        if isinstance(record, ACTIONS):
            if step is None:
                what = f"the log begins with an action ({type(record).__name__}) before any event"
                raise InputError(what, help="the file was changed; record the run again")
            step.actions.append(record)
            continue
        if isinstance(record, ProcessorTime):
            continue
        assert isinstance(record, EVENTS), record
        if step is not None:
            step.next_ns, step.next_record = now_ns, record
            yield step
        step = _Step(now_ns, record, number)
    if step is not None:
        yield step


def _plan_difference(step: _Step, expected: Planned) -> ReplayDifference:
    """The difference if the planner answers otherwise than the log says."""
    return ReplayDifference(step.now_ns, step.record, msgspec.to_builtins(step.event), msgspec.to_builtins(expected))


def _difference(step: _Step, place: int, answers: Sequence[Action]) -> ReplayDifference:
    """The difference at action number `place` after the step's event, or at the next event if the log has none."""
    recorded = step.actions[place] if place < len(step.actions) else step.next_record
    return ReplayDifference(
        at_ns=step.now_ns if place < len(step.actions) or step.next_ns is None else step.next_ns,
        record=step.record + 1 + place,
        recorded=msgspec.to_builtins(recorded),
        replayed=msgspec.to_builtins(answers[place]) if place < len(answers) else None,
    )
