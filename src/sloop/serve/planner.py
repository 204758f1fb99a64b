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
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from sloop.core import ApplicationParts
from sloop.core.monitor import SLACK_BUCKETS_KEPT
from sloop.core.planner import Planner
from sloop.core.views import (
    ApplicationView,
    Belief,
    BeliefKey,
    Bucket,
    CoreDemand,
    NodeView,
    PlanInput,
    ReplicaView,
    StageView,
    Traffic,
)
from sloop.events import Deployed, Planned, SystemChanged
from sloop.profile.estimate import Estimate
from sloop.profile.size_law import SizeLessons
from sloop.serve.processes import begin, kill, set_priority, spawn, stay_aside
from sloop.serve.transport import Frame, FrameKind, ProcessChannel, ProcessLink, socket_pair
from sloop.systems.setup import build
from sloop.systems.snapshot import Snapshot, SnapshotError, save_memories
from sloop.vocabulary import Plan, Visit

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

_log: Final = logging.getLogger("sloop.planner")


# What is sent. Structs as arrays: without the names of their fields, they take half the time and bytes.


class BucketChanges(Struct, array_like=True):
    """The buckets of a stage, or of an application: those that the process does not have."""

    count: int
    """How many there are now, with those that the process has."""
    new: Sequence[Bucket]
    is_complete: bool
    """Whether `new` are all of them."""


Correction = tuple[float, float, SizeLessons, float]
"""What an estimate has learnt: its factor, how much the profile alone still counts in it, the lessons about sizes, and
the ratio of means to the estimate."""


class SentStage(Struct, array_like=True):
    """A stage, without what its definition says."""

    running: int
    visits: float
    queue: Sequence[Visit]
    series: BucketChanges
    replicas: tuple[ReplicaView, ...]
    corrections: Sequence[Correction]
    starts: Sequence[tuple[str, str, int]]
    """`StageView.starts_ns`, each with its variant and hardware."""


class SentApplication(Struct, array_like=True):
    """An application version that is to be planned, without what its definition says."""

    key: str
    share: float
    weight: float
    bucket_ns: int
    stages: Sequence[SentStage]
    ingress: BucketChanges | None
    """None: the same as of its only stage."""
    plan: Plan | None
    choice: str


class PlanRequest(Struct, array_like=True):
    """A `PlanInput`, with the buckets that the process does not have."""

    number: int
    now_ns: int
    nodes: tuple[NodeView, ...]
    due: Sequence[SentApplication]
    others: Sequence[CoreDemand]


Definition = Deployed | SystemChanged
"""What describes an application version completely."""


class _SentBuckets:
    """Which buckets of an application version the process has."""

    def __init__(self, stages: int) -> None:
        self.last_ns = [-1] * (stages + 1)
        """Start of the last one of each stage and of the application."""
        self.complete = COMPLETE
        """How many of the next requests must have all buckets."""


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
        due = [self._application(view) for view in given.due]
        return PlanRequest(given.number, given.now_ns, given.nodes, due, given.others)

    def _application(self, view: ApplicationView) -> SentApplication:
        sent = self._sent.get(view.key)
        if sent is None:
            self._sent[view.key] = sent = _SentBuckets(len(view.stages))
        stages = [_sent_stage(sent, at, stage) for at, stage in enumerate(view.stages)]
        is_same = len(stages) == 1 and _are_same(view.ingress.buckets, view.stages[0].buckets)
        ingress = None if is_same else _series(sent, -1, view.ingress.buckets)
        sent.complete = max(0, sent.complete - 1)
        return SentApplication(
            key=view.key,
            share=view.share,
            weight=view.weight,
            bucket_ns=view.ingress.bucket_ns,
            stages=stages,
            ingress=ingress,
            plan=view.plan,
            choice=view.choice,
        )


def _sent_stage(sent: _SentBuckets, at: int, stage: StageView) -> SentStage:
    corrections = [
        (each.correction, each.prior_weight, each.size_lessons, each.mean_ratio) for each in stage.beliefs.values()
    ]
    series = _series(sent, at, stage.buckets)
    starts = [(*key, start_ns) for key, start_ns in stage.starts_ns.items()]
    return SentStage(stage.running, stage.visits, stage.queue, series, stage.replicas, corrections, starts)


def _series(sent: _SentBuckets, at: int, buckets: Sequence[Bucket]) -> BucketChanges:
    last_ns = sent.last_ns[at]
    if buckets:
        sent.last_ns[at] = buckets[-1].start_ns
    if sent.complete:
        return BucketChanges(len(buckets), buckets, is_complete=True)
    first = len(buckets)
    while first and buckets[first - 1].start_ns > last_ns:
        first -= 1
    return BucketChanges(len(buckets), buckets[first:], is_complete=False)


def _are_same(one: Sequence[Bucket], other: Sequence[Bucket]) -> bool:
    """Whether these are the same objects; the first and the last decide."""
    return len(one) == len(other) and (not one or (one[0] is other[0] and one[-1] is other[-1]))


# The server's side


class PlannerProcess:
    """The planner process as the driver sees it. It is started by `start`, and then kept alive until `close`.

    It reports the answer to each request, and a `Planned` that says `restarted` when a process has died.
    """

    def __init__(self, loop: AbstractEventLoop, *, answer_s_max: float = ANSWER_S_MAX, late_s: float = LATE_S) -> None:
        self._loop = loop
        self._report: Callable[[Planned], None] = lambda _: None
        self._answer_s_max, self._late_s = answer_s_max, late_s
        self._definitions: dict[str, bytes] = {}
        self._prepared: dict[str, Definition] = {}
        """By key, versions under the systems that were ordered for them."""
        self._sender = PlanSender()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Planned)
        self._process: subprocess.Popen[bytes] | None = None
        self._killed: list[subprocess.Popen[bytes]] = []
        """Processes whose end is still to come."""
        self._link: ProcessLink | None = None
        self._asked: tuple[int, tuple[str, ...]] | None = None
        """Number and keys of the request that is not answered."""
        self._number = 0
        self._on_saved: Callable[[int, Snapshot | str], None] | None = None
        """Who asked for the state of the policies and has no answer yet."""
        self._saved_number = 0
        """The number of the last request before the question."""
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
        self._definitions[key] = encoded = self._encoder.encode((key, definition))
        if self._link is not None:
            self._link.send(FrameKind.DEFINE, payload=[encoded])

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
        if self._definitions.pop(key, None) is not None and self._link is not None:
            self._link.send(FrameKind.DEFINE, payload=[self._encoder.encode((key, None))])

    def traffic_changed(self, key: str) -> None:
        """The past traffic of an application version has changed, because other versions have begun or ended."""
        self._sender.forget_traffic(key)

    def start(self) -> None:
        """Start the process."""
        self._restart_timer = None
        ours, theirs = socket_pair()
        with theirs:
            self._link = link = ProcessLink(self._loop, ours)
            link.attach(self._on_frame, self._fail)
            try:
                arguments = (theirs.fileno(), os.getpid(), int(self._is_humble))
                self._process = spawn("sloop.serve.planner", arguments, [theirs.fileno()])
            except OSError as error:
                self._fail(f"cannot be started: {error}")
                return
        for encoded in self._definitions.values():
            link.send(FrameKind.DEFINE, payload=[encoded])
        if self._on_saved is not None:
            self.save(self._on_saved)

    def save(self, then: Callable[[int, Snapshot | str], None]) -> bool:
        """Ask for the state of the policies. `then` is called later, once, with the number of the last plans that are
        in it, and the state, or why it cannot be saved. False if the process was never started."""
        if not self.is_started:
            return False
        self._on_saved, self._saved_number = then, self._number
        if self._link is not None:
            self._link.send(FrameKind.SAVE)
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
        self._link.send(FrameKind.PLAN, given.number, payload=[self._encoder.encode(self._sender.request_of(given))])
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

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is FrameKind.SAVE:
            then, self._on_saved = self._on_saved, None
            if then is not None:
                then(self._saved_number, msgspec.json.decode(frame.payload, type=Snapshot | str))
            return
        try:
            planned = self._decoder.decode(frame.payload)
        except msgspec.DecodeError as error:
            self._fail(f"sent an answer that cannot be read: {error}")
            return
        self._asked = None
        self._stop_timers()
        if self._is_hurried and self._process is not None:
            self._is_hurried = False
            set_priority(self._process.pid, humble=True)
        self._report(planned)

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
        graph = parts.graph
        self.paths = graph.paths
        self.slo_ns = graph.slo_ns
        self.stages = tuple((name, stage.after) for name, stage in graph.stages.items())
        self.beliefs: dict[str, dict[BeliefKey, Belief]] = {name: {} for name in graph.stages}
        for (name, variant, hardware), belief in parts.beliefs.items():
            self.beliefs[name][variant, hardware] = belief
        self.buckets: dict[str, list[Bucket]] = {}
        """By stage; those of the application under ""."""

    def view(self, sent: SentApplication) -> ApplicationView:
        """The application version as it is now."""
        stages = tuple([self._stage(*pair, sent.bucket_ns) for pair in zip(self.stages, sent.stages, strict=True)])
        ingress = stages[0].buckets if sent.ingress is None else self._follow("", sent.ingress)
        return ApplicationView(
            key=sent.key,
            stages=stages,
            ingress=Traffic(buckets=ingress, bucket_ns=sent.bucket_ns),
            share=sent.share,
            weight=sent.weight,
            paths=self.paths,
            plan=sent.plan,
            choice=sent.choice,
        )

    def _stage(self, declared: tuple[str, tuple[str, ...]], sent: SentStage, bucket_ns: int) -> StageView:
        name, after = declared
        beliefs = self.beliefs[name]
        for belief, correction in zip(beliefs.values(), sent.corrections, strict=True):
            assert isinstance(belief, Estimate), belief
            belief.apply(*correction)
        return StageView(
            name=name,
            slo_ns=self.slo_ns,
            after=after,
            beliefs=beliefs,
            replicas=sent.replicas,
            queue=tuple(sent.queue),
            running=sent.running,
            buckets=self._follow(name, sent.series),
            bucket_ns=bucket_ns,
            visits=sent.visits,
            starts_ns={(variant, hardware): start_ns for variant, hardware, start_ns in sent.starts},
        )

    def _follow(self, name: str, series: BucketChanges) -> tuple[Bucket, ...]:
        """The buckets after these changes, as the core's monitor keeps them."""
        kept = self.buckets.setdefault(name, [])
        if series.is_complete:
            kept[:] = series.new
        else:
            kept += series.new
            del kept[: len(kept) - series.count]
            for bucket in kept[-SLACK_BUCKETS_KEPT - len(series.new) : -SLACK_BUCKETS_KEPT]:
                bucket.slack_ns = []
        assert len(kept) == series.count, f"{len(kept)} buckets of {name!r}, not {series.count}"
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
        due = tuple([self._known[each.key].view(each) for each in request.due if each.key in self._known])
        return PlanInput(request.number, request.now_ns, request.nodes, due, tuple(request.others))


class PlanningProcess:
    """Answers the requests of the server until it closes the socket."""

    def __init__(self, channel: ProcessChannel) -> None:
        self._channel = channel
        self._planner, self._receiver = Planner(), PlanReceiver()
        self._parts: dict[str, ApplicationParts] = {}
        self._broken: dict[str, str] = {}
        """By key, why an application version cannot be built."""
        self._definitions = msgspec.msgpack.Decoder(tuple[str, Definition | None])
        self._requests = msgspec.msgpack.Decoder(PlanRequest)
        self._encoder = msgspec.msgpack.Encoder()

    def serve(self) -> None:
        """Process frames; returns when the server closes the socket."""
        while (frame := self._channel.receive()) is not None:
            if frame.kind is FrameKind.PLAN:
                self._channel.send(FrameKind.PLAN, frame.subject, payload=[self._answer(frame.payload)])
            elif frame.kind is FrameKind.SAVE:
                self._channel.send(FrameKind.SAVE, payload=[msgspec.json.encode(self._saved())])
            elif frame.kind is FrameKind.DEFINE:
                self._define(*self._definitions.decode(frame.payload))

    def _define(self, key: str, given: Definition | None) -> None:
        if key in self._parts or key in self._broken:
            self._discard(key)
        if given is None:
            return
        try:
            parts = build(given.application, given.version, given.definition)
        except (Exception, SystemExit) as error:  # a user's file may do anything
            self._broken[key] = f"{type(error).__name__}: {error}"
            return
        self._parts[key] = parts
        self._receiver.add(parts)
        self._planner.add(key, parts.policies, parts.choices)

    def _discard(self, key: str) -> None:
        if self._broken.pop(key, None) is None:
            self._planner.discard(key)
        self._receiver.discard(key)
        self._parts.pop(key, None)

    def _saved(self) -> Snapshot | str:
        """What the policies remember, or why that cannot be saved."""
        try:
            return save_memories(self._parts.values(), self._planner.memories)
        except SnapshotError as error:
            return error.what

    def _answer(self, payload: memoryview) -> bytes:
        request = self._requests.decode(payload)
        planned = self._planner.plan(self._receiver.input_of(request))
        broken = {each.key: self._broken[each.key] for each in request.due if each.key in self._broken}
        planned = msgspec.structs.replace(planned, errors=planned.errors | broken)
        return self._encoder.encode(planned)


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
