"""Why a decision was taken: the plan in force at an instant, and the versions and nodes that it was for."""

from collections.abc import Iterable
from itertools import takewhile
from typing import Final

from msgspec import Struct

from sloop.actions import Decided, RequestPlan, Rollout
from sloop.core.ledger import cores_by_hardware
from sloop.errors import InputError
from sloop.events import Planned
from sloop.report.explain import RECENT_S, StoryStep
from sloop.report.explain.estimates import Estimator
from sloop.report.explain.texts import plan_difference, plan_text, rollout_text
from sloop.runlog import EVENTS, Record
from sloop.runlog.fold import DeploymentState
from sloop.runlog.run import RunState
from sloop.runlog.versions import VersionRecord
from sloop.text import counted, listed, number, quoted
from sloop.units import NS_PER_S, to_s
from sloop.vocabulary import NodeState, Plan

TOGETHER_MAX: Final = 8
"""How many versions are named with the cores that they have by their plans: those with the most."""


class DecisionStory(Struct, frozen=True, kw_only=True):
    """The last plan of an application version at or before an instant, its reasons, and the state at that instant."""

    at_s: float
    application: str
    version: str
    summary: str
    why: str
    steps: tuple[StoryStep, ...]


class VersionStory(Struct, frozen=True, kw_only=True):
    """One version of an application at an instant."""

    application: str
    version: str
    state: str
    share: float
    """Fraction of the application's requests that it gets."""
    state_why: str
    plan: str
    since_s: float
    """When the plan was decided."""
    why: str
    """The reason of the plan."""
    replicas: str
    waiting: int
    """Visits in its queues."""


class DeploymentStory(Struct, frozen=True, kw_only=True):
    """All versions at an instant, the nodes, and how the plans share the nodes' cores."""

    at_s: float
    versions: tuple[VersionStory, ...]
    nodes: str
    together: str


class RolloutStep(Struct, frozen=True):
    """A version of an application enters a state."""

    at_s: float
    application: str
    version: str
    state: str
    share: float
    """Fraction of the application's requests that it gets from then on."""
    why: str


class _Planning:
    """The plan of one version that is in force, and what has happened since it was decided."""

    def __init__(self) -> None:
        self.last: tuple[int, Decided] | None = None
        self.before: Plan | None = None
        self.known: tuple[int, str] = 0, ""
        """What was known when the plan was asked for, and when that was."""
        self.notes: list[tuple[int, Decided | Rollout]] = []

    def decide(self, now_ns: int, decided: Decided, before: Plan | None, known: tuple[int, str]) -> None:
        """A new plan is in force."""
        self.last, self.before, self.known, self.notes = (now_ns, decided), before, known, []


class _Decisions:
    """Follows the decisions about one application through the log."""

    def __init__(self, state: DeploymentState, name: str) -> None:
        self._state = state
        self._name = name
        self.estimator = Estimator(state)
        self.plannings: dict[str, _Planning] = {}
        """By key of the version."""
        self._requested: dict[str, tuple[int, str]] = {}
        """By key, what was known when a plan was requested that is computed beside the event loop."""
        self._is_answer = False
        """Whether the last event was the answer to this request."""
        for record in state.records:  # of a log that begins in the middle of a run
            if record.application == name and record.run.plan is not None:
                decided = Decided("plan", record.run.plan.why, plan=record.run.plan, application=record.key)
                known = record.run.plan_ns, "not in this log, which begins later"
                self.plannings.setdefault(record.key, _Planning()).decide(record.run.plan_ns, decided, None, known)

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        self.estimator.observe(now_ns, record)
        if isinstance(record, EVENTS):
            self._is_answer = isinstance(record, Planned)
        elif isinstance(record, RequestPlan):
            self._requested = {key: (now_ns, self.known(run, now_ns)) for key, run in self._runs()}
        elif isinstance(record, Decided):
            self._decide(now_ns, record)
        elif isinstance(record, Rollout) and record.application == self._name:
            for planning in self.plannings.values():
                planning.notes.append((now_ns, record))
        self._state.append(now_ns, record)

    def _runs(self) -> list[tuple[str, RunState]]:
        return [(record.key, record.run) for record in self._state.records if record.application == self._name]

    def _decide(self, now_ns: int, decided: Decided) -> None:
        if decided.kind == "node":
            for planning in self.plannings.values():
                planning.notes.append((now_ns, decided))
            return
        version = self._state.version_for(decided)
        if version is None or version.application != self._name:
            return
        planning = self.plannings.setdefault(version.key, _Planning())
        if decided.plan is not None:
            at_request = self._requested.get(version.key) if self._is_answer else None
            known = at_request or (now_ns, self.known(version.run, now_ns))
            planning.decide(now_ns, decided, version.run.plan, known)
        planning.notes.append((now_ns, decided))

    def known(self, run: RunState, now_ns: int) -> str:
        """What a policy knows, as text."""
        waiting = counted(run.waiting, "request")
        return f"{_traffic(run, now_ns)}; {waiting} waiting; {self.estimator.replicas(run, now_ns)}"


def explain_decision(
    records: Iterable[tuple[int, Record]], at_ns: int, state: DeploymentState, application: str = ""
) -> DecisionStory:
    """The plan in force at `at_ns`, its reasons, and what has happened since.

    `application` is the name of an application, for the version that serves the most of its requests, or `NAME@2`; it
    may be empty if the deployment has only one. InputError if there is no such application, or nothing had been decided
    for it.
    """
    name, _, wanted = application.partition("@")
    name = name or next(iter(state.applications), "")
    decisions = _Decisions(state, name)
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        decisions.append(now_ns, record)
    known = list(state.applications)
    if name not in known or (len(known) > 1 and not application):
        what = f"there is no application {name!r} at this time" if application else "there are several applications"
        raise InputError(what, help=f"name one of {listed(known)}")
    state.advance()
    versions = [each for each in state.applications[name] if wanted in ("", each.version)]
    found = sorted((each for each in versions if each.key in decisions.plannings), key=lambda each: each.share)
    planning = decisions.plannings[found[-1].key] if found else _Planning()
    if planning.last is None:
        seen = f"the log runs from {to_s(state.start_ns):.3f} s" if state.start_ns is not None else "the log is empty"
        of = f" for {application}" if application else ""
        what = f"nothing had been decided{of} by {to_s(at_ns):.3f} s"
        raise InputError(what, help=f"{seen}; ask for a later instant")
    return _decision_story(at_ns, state, found[-1], planning, decisions)


def _decision_story(
    at_ns: int, state: DeploymentState, version: VersionRecord, planning: _Planning, decisions: _Decisions
) -> DecisionStory:
    assert planning.last is not None
    decided_ns, decided = planning.last
    assert decided.plan is not None
    known_ns, known = planning.known
    change = f"decided: {plan_text(decided.plan)} ({plan_difference(planning.before, decided.plan)})"
    when = " when the plan was requested" if known_ns < decided_ns else ""
    steps = [
        StoryStep(to_s(known_ns), f"what was known{when}: {known}"),
        StoryStep(to_s(decided_ns), change, decided.why),
    ]
    steps += [StoryStep(to_s(ns), _note_text(note), note.why) for ns, note in planning.notes if not _is_plan(note)]
    now_s, run = to_s(at_ns), version.run
    now = f"{decisions.estimator.replicas(run, state.now_ns)}; {_traffic(run, state.now_ns)}"
    steps.append(StoryStep(now_s, f"in force at the instant asked for: {now}"))
    if nodes := _nodes_text(state):
        steps.append(StoryStep(now_s, f"nodes: {nodes}"))
    if weights := _transfers_text(state, at_ns):
        steps.append(StoryStep(now_s, f"weights under way: {weights}"))
    if together := _together_text(state):
        steps.append(StoryStep(now_s, f"the plans in force together: {together}"))
    summary = f"since {to_s(decided_ns):.3f} s: {plan_text(decided.plan)}"
    if not decided.plan.feasible:
        summary += "; no plan met every deadline, this was the best one found"
    return DecisionStory(
        at_s=now_s,
        application=version.application,
        version=version.version,
        summary=summary,
        why=decided.why,
        steps=tuple(steps),
    )


def explain_deployment(records: Iterable[tuple[int, Record]], at_ns: int, state: DeploymentState) -> DeploymentStory:
    """Every version, with its plan, and the nodes at `at_ns`."""
    estimator = Estimator(state)
    for now_ns, record in records:
        if now_ns > at_ns:
            break
        estimator.observe(now_ns, record)
        state.append(now_ns, record)
    state.advance()
    versions = tuple(
        VersionStory(
            application=record.application,
            version=record.version,
            state=record.state.value,
            share=record.share,
            state_why=record.why,
            plan=plan_text(record.run.plan) if record.run.plan is not None else "",
            since_s=to_s(record.run.plan_ns),
            why=record.run.plan.why if record.run.plan is not None else "there is no plan yet",
            replicas=estimator.replicas(record.run, state.now_ns),
            waiting=record.run.waiting,
        )
        for record in state.records
        if not record.has_ended
    )
    together = _together_text(state)
    return DeploymentStory(at_s=to_s(at_ns), versions=versions, nodes=_nodes_text(state), together=together)


def rollouts(records: Iterable[tuple[int, Record]]) -> list[RolloutStep]:
    """The states that versions have entered, and why."""
    return [
        RolloutStep(to_s(now_ns), record.application, record.version, record.state.value, record.share, record.why)
        for now_ns, record in records
        if isinstance(record, Rollout)
    ]


def _transfers_text(state: DeploymentState, at_ns: int) -> str:
    """The transfers under way, up to `TOGETHER_MAX`, as text; empty if there are none."""
    opened = list(state.weights.open.values())
    parts = [
        f"{quoted(each.order.weights.name)} from {each.order.source or 'the store'} to {listed(list(each.receivers))} "
        f"since {number(to_s(at_ns - each.since_ns))} s"
        for each in opened[:TOGETHER_MAX]
    ]
    more = len(opened) - len(parts)
    return "; ".join([*parts, *([f"{more} more"] if more else [])])


def _is_plan(note: Decided | Rollout) -> bool:
    return isinstance(note, Decided) and note.plan is not None


def _note_text(note: Decided | Rollout) -> str:
    """What a decision without a plan is about."""
    if isinstance(note, Rollout):
        return rollout_text(note)
    if note.replica is not None:
        return f"{note.kind} replica {note.replica}"
    return f"{note.kind} at {note.stage}" if note.stage else note.kind


def _nodes_text(state: DeploymentState) -> str:
    """The nodes by kind and state, as text; empty for a cluster of one kind that is all ready."""
    counts: dict[str, dict[NodeState, int]] = {}
    for record in state.nodes.records.values():
        states = counts.setdefault(record.node.hardware, {})
        states[record.state] = states.get(record.state, 0) + 1
    if len(counts) < 2 and all(states.keys() == {NodeState.READY} for states in counts.values()):
        return ""
    return "; ".join(
        f"{hardware}: {', '.join(f'{count} {_state_text(each)}' for each, count in states.items())}"
        for hardware, states in counts.items()
    )


def _state_text(state: NodeState) -> str:
    return "not rented" if state is NodeState.RELEASED else state.value


def _together_text(state: DeploymentState) -> str:
    """The cores that all versions have by their plans, by kind of hardware; empty if there is only one version."""
    present = [record for record in state.records if not record.has_ended]
    if len(present) < 2:
        return ""
    parts = []
    totals: dict[str, float] = {}
    for record in state.nodes.records.values():
        if record.state is not NodeState.LOST:
            totals[record.node.hardware] = totals.get(record.node.hardware, 0.0) + record.node.cores
    for hardware, total in totals.items():
        wants = {each.key: cores_by_hardware(each.run.plan).get(hardware, 0.0) for each in present}
        most = sorted((key for key, cores in wants.items() if cores), key=lambda key: -wants[key])
        shares = [f"{key} {wants[key]:g}" for key in most[:TOGETHER_MAX]]
        if rest := most[TOGETHER_MAX:]:
            shares.append(f"{len(rest)} others {sum(wants[key] for key in rest):g}")
        if shares:
            parts.append(f"{listed(shares)} of at most {counted(total, 'core')}{f' of {hardware}' if hardware else ''}")
    return "; ".join(parts)


def _traffic(run: RunState, now_ns: int) -> str:
    """Arrivals of the last complete seconds, and how many of them and of the current second missed, as text."""
    now_s = (now_ns - (run.start_ns or 0)) // NS_PER_S
    known = list(takewhile(lambda second: second.start_s >= now_s - RECENT_S, reversed(run.seconds)))[::-1]
    complete = [str(second.arrivals) for second in known if second.start_s < now_s]
    arrivals = f"arrivals in the last seconds: {', '.join(complete) or 'none'}"
    if known and not complete:
        arrivals = f"arrivals in the first second so far: {known[-1].arrivals}"
    missed = sum(second.missed for second in known)
    ended = missed + sum(second.served for second in known)
    misses = f"{missed} of the {ended} that have ended were missed" if ended else "none has ended"
    return f"{arrivals}; {misses}"
