"""The planner process: it makes the plans of scaling policies that may take long, beside the event loop.

It has policies and estimates of its own, built from the definitions of the applications. The server sends what the
core's view of them is at each request for a plan; only monitoring buckets are sent once, not all 600 of them every
second. From that the process builds the same `PlanInput`, so that a replay, which asks the policies of the core itself,
gets the same plans.

The process runs at the lowest priority, so that a policy at work does not delay requests. If a plan is late because all
cores are busy, the process gets the usual priority until it answers. A process that dies, or does not answer for
`ANSWER_S_MAX`, is replaced; meanwhile the plan in force stays.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from sloop.core import ApplicationParts
from sloop.core.monitor import SLACK_BUCKETS_KEPT
from sloop.core.planner import Planner
from sloop.core.views import ApplicationView, Belief, BeliefKey, Bucket, PlanInput
from sloop.events import Deployed, Planned, Removed, SystemChanged
from sloop.profile.estimate import Estimate
from sloop.profile.size_law import SizeLessons
from sloop.serve.messages import Ask, Page, Report, decoder
from sloop.serve.processes import begin, kill, set_priority, spawn, stay_aside
from sloop.serve.transport import ProcessChannel, RecordLink, records_in, socket_pair
from sloop.systems.setup import build
from sloop.systems.snapshot import Snapshot, SnapshotError, save_memories
from sloop.vocabulary import version_key

ANSWER_S_MAX: Final = 20.0
"""Seconds after which a process that has not answered is replaced; less than the core waits (`PLANNER_NS_MAX`)."""
LATE_S: Final = 2.0
"""Seconds after which a process that has not answered gets the usual priority."""
RESTART_S_MAX: Final = 30.0
"""The longest delay before the process is replaced: at once first, then after 1, 2, 4, … seconds."""
CALM_S: Final = 60.0
"""Seconds without a failure after which the next one is the first again."""
REAP_S: Final = 0.002
"""How often to check whether a killed process has ended."""
CLOSE_S_MAX: Final = 5.0
COMPLETE: Final = 2
"""How many requests have all buckets after old ones have changed: the view of a plan that the core requests together
with the change may be older than the change."""

NO_BELIEFS: Final[Mapping[BeliefKey, Belief]] = {}

_log: Final = logging.getLogger("sloop.planner")


# What is sent


Lesson = tuple[float, float, SizeLessons, float]
"""What an estimate has learnt: its factor, how much the profile alone still counts in it, the lessons about sizes, and
the ratio of means to the estimate."""


class PlanRequest(Struct, array_like=True, tag=True):
    """A `PlanInput`, without the estimates and the buckets that the process has."""

    given: PlanInput
    lessons: Sequence[Sequence[Lesson]]
    """By application, those of the estimates of all its stages, in order."""
    counts: Sequence[Sequence[int]]
    """By application, how many buckets each stage and then the application has now, with those that the process has."""
    are_same: Sequence[bool]
    """By application, whether what is new of it is what is new of its only stage, and is not sent twice."""


Definition = Deployed | SystemChanged
"""What describes an application version completely."""
Memories = Literal["memories"]
"""What the policies remember (`sloop.systems.snapshot.Snapshot`), or why that cannot be saved: the only question."""
ToPlanner = Report[Definition | Removed] | PlanRequest | Ask[Memories]
"""It makes plans for a version until that is `Removed`."""
FromPlanner = Report[Planned] | Page


class _SentBuckets:
    """Which buckets of an application version the process has."""

    def __init__(self, series: int) -> None:
        self.last_ns = [-1] * series
        """Start of the last one of each stage and of the application."""
        self.complete = COMPLETE
        """How many of the next requests must have all buckets."""

    def new(self, at: int, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
        """Those that are to be sent. They count as sent from then on."""
        last_ns = self.last_ns[at]
        if buckets:
            self.last_ns[at] = buckets[-1].start_ns
        if self.complete:
            return buckets
        first = len(buckets)
        while first and buckets[first - 1].start_ns > last_ns:
            first -= 1
        return buckets[first:]


class PlanSender:
    """Turns a `PlanInput` into what is sent."""

    def __init__(self) -> None:
        self._sent: dict[str, _SentBuckets] = {}

    def forget(self, key: str) -> None:
        """Send everything about an application version again."""
        self._sent.pop(key, None)

    def forget_traffic(self, key: str) -> None:
        """Send all buckets of an application version again, because old ones have changed."""
        if key in self._sent:
            self._sent[key].complete = COMPLETE

    def request_of(self, given: PlanInput) -> PlanRequest:
        """What the process needs for this input, which follows those before."""
        lessons = [[_lesson(each) for stage in view.stages for each in stage.beliefs.values()] for view in given.due]
        counts = [list(map(len, _series(view))) for view in given.due]
        due, are_same = zip(*map(self._unsent, given.due), strict=True) if given.due else ((), ())
        return PlanRequest(replace(given, due=due), lessons, counts, are_same)

    def _unsent(self, view: ApplicationView) -> tuple[ApplicationView, bool]:
        """The view without estimates, and with the buckets that the process does not have; and whether those of the
        application are those of its only stage."""
        sent = self._sent.setdefault(view.key, _SentBuckets(len(view.stages) + 1))
        new = [sent.new(at, buckets) for at, buckets in enumerate(_series(view))]
        sent.complete = max(0, sent.complete - 1)
        is_same = len(view.stages) == 1 and list(map(id, new[0])) == list(map(id, new[1]))
        if is_same:
            new[1] = ()
        no_beliefs = dict.fromkeys([stage.name for stage in view.stages], NO_BELIEFS)
        return _with_traffic(view, new, no_beliefs), is_same


def _series(view: ApplicationView) -> list[Sequence[Bucket]]:
    """The buckets of each stage, and then of the application."""
    return [*(stage.buckets for stage in view.stages), view.ingress.buckets]


def _with_traffic(
    view: ApplicationView, series: Sequence[Sequence[Bucket]], beliefs: Mapping[str, Mapping[BeliefKey, Belief]]
) -> ApplicationView:
    """The view with other buckets, in the order of `_series`, and with other estimates of each stage."""
    stages = [
        replace(stage, beliefs=beliefs[stage.name], buckets=buckets)
        for stage, buckets in zip(view.stages, series, strict=False)
    ]
    return replace(view, stages=tuple(stages), ingress=replace(view.ingress, buckets=series[-1]))


def _lesson(belief: Belief) -> Lesson:
    return belief.correction, belief.prior_weight, belief.size_lessons, belief.mean_ratio


# The server's side


class PlannerProcess:
    """The planner process as the driver sees it. It is started by `start`, and then kept alive until `close`.

    It reports the answer to each request, and a `Planned` that says `restarted` when a process has died.
    """

    def __init__(self, loop: AbstractEventLoop, *, answer_s_max: float = ANSWER_S_MAX, late_s: float = LATE_S) -> None:
        self._loop = loop
        self._report: Callable[[Planned], None] = lambda _: None
        self._answer_s_max, self._late_s = answer_s_max, late_s
        self._definitions: dict[str, Definition] = {}
        self._prepared: dict[str, Definition] = {}
        """By key, versions under the systems that were ordered for them."""
        self._sender = PlanSender()
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        """Processes whose end is still to come."""
        self._link: RecordLink | None = None
        self._asked: tuple[int, tuple[str, ...]] | None = None
        """Number and keys of the request that is not answered."""
        self._number = 0
        self._on_saved: Callable[[int, Snapshot | str], None] | None = None
        """Who asked for the state of the policies and has no answer yet."""
        self._late_timer: TimerHandle | None = None
        self._answer_timer: TimerHandle | None = None
        self._restart_timer: TimerHandle | None = None
        self._failures = 0
        self._failed_s = -CALM_S
        self._is_humble = True
        """Whether the process runs at the lowest priority."""
        self._is_hurried = False
        self._is_closed = False

    @property
    def is_started(self) -> bool:
        """Whether `start` was called."""
        return self._process is not None or self._restart_timer is not None

    @property
    def pid(self) -> int | None:
        """The id of the process, for monitoring and fault tests."""
        return self._process.pid if self._process is not None else None

    def attach(self, report: Callable[[Planned], None]) -> None:
        """Set the receiver of reports."""
        self._report = report

    def add(self, key: str, definition: Definition) -> None:
        """Let the process plan for one more application version, or for one under another system."""
        self._definitions[key] = definition
        if self._link is not None:
            self._link.tell(Report(definition))

    def prepare(self, key: str, definition: Definition) -> None:
        """Another system is ordered for an application version. It plans from the next `change_system` on."""
        self._prepared[key] = definition

    def change_system(self, key: str) -> None:
        """The system that was prepared for an application version decides, and remembers nothing yet."""
        self._sender.forget(key)
        self.add(key, self._prepared.pop(key))

    def discard(self, key: str) -> None:
        """An application version has ended."""
        self._sender.forget(key)
        self._prepared.pop(key, None)
        ended = self._definitions.pop(key, None)
        if ended is not None and self._link is not None:
            self._link.tell(Report(Removed(ended.application, ended.version)))

    def traffic_changed(self, key: str) -> None:
        """The past traffic of an application version has changed, because other versions have begun or ended."""
        self._sender.forget_traffic(key)

    def start(self) -> None:
        """Start the process."""
        self._restart_timer = None
        ours, theirs = socket_pair()
        with theirs:
            acts: dict[type, Callable[[Any], None]] = {Report: self._on_planned, Page: self._on_memories}
            self._link = link = RecordLink(self._loop, ours, FromPlanner, acts, self._fail)
            try:
                arguments = (theirs.fileno(), os.getpid(), int(self._is_humble))
                self._process = spawn("sloop.serve.planner", arguments, [theirs.fileno()])
            except OSError as error:
                self._fail(f"cannot be started: {error}")
                return
        for definition in self._definitions.values():
            link.tell(Report(definition))
        if self._on_saved is not None:
            self.save(self._on_saved)

    def save(self, then: Callable[[int, Snapshot | str], None]) -> bool:
        """Ask for the state of the policies. `then` is called later, once, with the number of the last plans that are
        in it, and the state, or why it cannot be saved. False if the process was never started."""
        if not self.is_started:
            return False
        self._on_saved = then
        if self._link is not None:
            self._link.tell(Ask[Memories]("memories", number=self._number))
        return True

    def request(self, given: PlanInput) -> None:
        """Ask for the plans of `given`. The answer is reported later, or at once if there is no process."""
        self._number = given.number
        keys = tuple(view.key for view in given.due)
        if self._link is None:
            why = "the planner process has died and is not yet replaced"
            self._report(Planned(given.number, {}, dict.fromkeys(keys, why), restarted=True))
            return
        self._asked = (given.number, keys)
        self._link.tell(self._sender.request_of(given))
        self._late_timer = self._loop.call_later(self._late_s, self._hurry)
        self._answer_timer = self._loop.call_later(self._answer_s_max, self._give_up)

    async def close(self) -> None:
        """End the process."""
        self._is_closed = True
        self._stop_timers()
        if self._restart_timer is not None:
            self._restart_timer.cancel()
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._kill(self._process)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await self._loop.run_in_executor(None, process.wait, CLOSE_S_MAX)

    def _on_memories(self, page: Page) -> None:
        then, self._on_saved = self._on_saved, None
        if then is not None:
            then(page.number, msgspec.json.decode(page.body, type=Snapshot | str))

    def _on_planned(self, record: Report[Planned]) -> None:
        self._asked = None
        self._stop_timers()
        if self._is_hurried and self._process is not None:
            self._is_hurried = False
            set_priority(self._process.pid, humble=True)
        self._report(record.event)

    def _hurry(self) -> None:
        """The answer is late. Perhaps all cores are busy, and the lowest priority gets no time."""
        if self._process is not None and self._is_humble:
            self._is_hurried = set_priority(self._process.pid, humble=False)

    def _give_up(self) -> None:
        # Without the right to raise a priority, a busy machine can be the reason.
        self._is_humble = self._is_humble and self._is_hurried
        self._fail(f"has not answered for {self._answer_s_max:g} s")

    def _fail(self, why: str) -> None:
        """The process has died, or must: report it, and start another one."""
        if self._link is not None:
            self._link.close()
            self._link = None
        self._stop_timers()
        process, self._process = self._process, None
        if process is not None:
            self._kill(process)
            self._reap()
        if self._is_closed:
            return
        now_s = self._loop.time()
        self._failures = self._failures + 1 if now_s - self._failed_s < CALM_S else 1
        self._failed_s = now_s
        after_s = min(RESTART_S_MAX, 2.0 ** (self._failures - 2)) if self._failures > 1 else 0.0
        again = f"in {after_s:g} s" if after_s else "at once"
        _log.error("the planner process %s; the plans in force stay, and another process starts %s", why, again)
        self._sender = PlanSender()
        self._is_hurried = False
        number, keys = self._asked or (self._number, ())
        self._asked = None
        self._restart_timer = self._loop.call_later(after_s, self.start)
        self._report(Planned(number, {}, dict.fromkeys(keys, f"the planner process {why}"), restarted=True))

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        kill(process.pid)
        # At the lowest priority, a process on a busy machine gets no time to end.
        set_priority(process.pid, humble=False)
        self._killed.append(process)

    def _reap(self) -> None:
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._killed and not self._is_closed:
            self._loop.call_later(REAP_S, self._reap)

    def _stop_timers(self) -> None:
        for timer in (self._late_timer, self._answer_timer):
            if timer is not None:
                timer.cancel()
        self._late_timer = self._answer_timer = None


# The process's side


class _Known:
    """What the process knows of an application version."""

    def __init__(self, parts: ApplicationParts) -> None:
        self._beliefs: dict[str, dict[BeliefKey, Belief]] = {name: {} for name in parts.graph.stages}
        for (name, variant, hardware), belief in parts.beliefs.items():
            self._beliefs[name][variant, hardware] = belief
        self._series: list[list[Bucket]] = [[] for _ in (*self._beliefs, parts)]
        """The buckets of each stage, and then of the application."""

    def view(
        self, sent: ApplicationView, lessons: Sequence[Lesson], counts: Sequence[int], *, are_same: bool
    ) -> ApplicationView:
        """The application version as it is now."""
        estimates = [each for stage in self._beliefs.values() for each in stage.values()]
        for estimate, lesson in zip(estimates, lessons, strict=True):
            assert isinstance(estimate, Estimate), estimate
            estimate.apply(*lesson)
        new = _series(sent)
        if are_same:
            new[1] = new[0]
        series = [_followed(*each) for each in zip(self._series, new, counts, strict=True)]
        return _with_traffic(sent, series, self._beliefs)


def _followed(kept: list[Bucket], new: Sequence[Bucket], count: int) -> tuple[Bucket, ...]:
    """The `count` buckets after new ones have come, as the core's monitor keeps them."""
    kept += new
    del kept[: len(kept) - count]
    for bucket in kept[-SLACK_BUCKETS_KEPT - len(new) : -SLACK_BUCKETS_KEPT]:
        bucket.slack_ns = []
    assert len(kept) == count, f"{len(kept)} buckets, not {count}"
    return tuple(kept)


class PlanReceiver:
    """Builds each `PlanInput` from what was sent: the inverse of `PlanSender`."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def add(self, parts: ApplicationParts) -> None:
        """Know one more application version."""
        self._known[parts.key] = _Known(parts)

    def discard(self, key: str) -> None:
        """An application version has ended."""
        self._known.pop(key, None)

    def input_of(self, request: PlanRequest) -> PlanInput:
        """The input that was sent. Leaves out application versions that it does not know."""
        given = request.given
        sent = zip(given.due, request.lessons, request.counts, request.are_same, strict=True)
        due = [
            self._known[view.key].view(view, lessons, counts, are_same=are_same)
            for view, lessons, counts, are_same in sent
            if view.key in self._known
        ]
        return replace(given, due=tuple(due))


class PlanningProcess:
    """Answers the requests of the server until it closes the socket."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel
        self._planner, self._receiver = Planner(), PlanReceiver()
        self._parts: dict[str, ApplicationParts] = {}
        self._broken: dict[str, str] = {}
        """By key, why an application version cannot be built."""
        self._decode = decoder(list[ToPlanner]).decode

    def serve(self) -> None:
        """Process frames; returns when the server closes the socket."""
        while (frame := self._channel.receive()) is not None:
            for record in records_in(frame, self._decode):
                self._follow(record)

    def _follow(self, record: ToPlanner) -> None:
        match record:
            case PlanRequest():
                self._channel.tell(Report(self._planned(record)))
            case Ask(number=number):
                self._channel.tell(Page(number, msgspec.json.encode(self._saved())))
            case Report(Removed(application, version)):
                self._discard(version_key(application, version))
            case Report(Deployed() | SystemChanged() as definition):
                self._define(definition)

    def _define(self, given: Definition) -> None:
        key = version_key(given.application, given.version)
        self._discard(key)
        try:
            parts = build(given.application, given.version, given.definition)
        except (Exception, SystemExit) as error:  # a user's file may do anything
            self._broken[key] = f"{type(error).__name__}: {error}"
            return
        self._parts[key] = parts
        self._receiver.add(parts)
        self._planner.add(key, parts.policies, parts.choices)

    def _discard(self, key: str) -> None:
        self._broken.pop(key, None)
        if self._parts.pop(key, None) is not None:
            self._planner.discard(key)
            self._receiver.discard(key)

    def _saved(self) -> Snapshot | str:
        """What the policies remember, or why that cannot be saved."""
        try:
            return save_memories(self._parts.values(), self._planner.memories)
        except SnapshotError as error:
            return error.what

    def _planned(self, request: PlanRequest) -> Planned:
        planned = self._planner.plan(self._receiver.input_of(request))
        broken = {each.key: self._broken[each.key] for each in request.given.due if each.key in self._broken}
        return msgspec.structs.replace(planned, errors=planned.errors | broken)


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: socket, process id of the server, whether to run at the lowest priority."""
    fd, parent, humble = map(int, arguments)
    begin(parent, (fd,))
    if humble:
        set_priority(0, humble=True)
        stay_aside()
    with socket.socket(fileno=fd) as sock, contextlib.suppress(ConnectionError):
        PlanningProcess(ProcessChannel(sock)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # threads that policies have started must not keep it
