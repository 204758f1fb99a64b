"""One stage while it runs: its queue, its replicas, its estimates, and what its losses mean for the next start."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import structs

from sloop.actions import Action
from sloop.app.graph import declared_name
from sloop.core.graph_estimates import StageBacklog
from sloop.core.lanes import LOOKED_AT, DrainTimes, LaneKey, MixedQueue
from sloop.core.life import INCOMPLETE
from sloop.core.monitor import Monitor
from sloop.core.protocols import Drop, Order, ServiceGap
from sloop.core.queue import Queue, rows_of
from sloop.core.rates import BatchLimits
from sloop.core.replica import STALL_FACTOR, ReplicaPool, ReplicaWorker, RunningBatch
from sloop.core.views import Belief, BeliefKey, StageView, StartCosts
from sloop.sizes import GRID
from sloop.text import number
from sloop.units import FOREVER_NS, NS_PER_S, s
from sloop.vocabulary import Life, ModelWeights, ReplicaSpec, RequestId, StagePlan, Visit

if TYPE_CHECKING:
    from sloop.core.application import ApplicationState

SLOW_FACTOR = 3
SLOW_NS_MIN = s(10)
"""A start that takes three times as long as believed, and at least ten seconds, is one that may never end."""

RESPONSE_NS_MIN = s(30)
"""The shortest response timeout of a stage that declares none. Stopping a replica that only computes costs its requests
and a cold start, so the default waits long enough for a model of some 25 s, whatever its profile says. Gunicorn gives
its workers as long, TorchServe 120 s."""

SILENT_NS_MIN = s(3)
"""A replica is given up sooner if its worker has been silent for `STALL_FACTOR` times the believed duration of its
batch, and for at least this time, although it could have spoken (`BatchSilent`)."""

FOUND_OUT_MAX = 8
"""How many replicas may be lost to requests that are found out, without a finished batch in between, before the
losses count as the stage's own: a model that dies of every request must not start again and again without a pause."""

AVOIDED_NS = s(300)
"""For how long other nodes are preferred to one on which a replica was lost before it could serve. Its disk may be
full, or something may be missing there, and a start elsewhere succeeds."""

RESTART_NS_MAX = s(30)
"""The longest delay before a lost replica is replaced: at once first, then after 1, 2, 4, … seconds. Kubernetes doubles
from 10 s to 5 min (CrashLoopBackOff), too long for a server whose only replica answers within milliseconds."""


QUIET_NS = s(3)
"""A stage that has run no batch for this long, and where all that waits is hopeless, serves one of them."""

QUEUE_PART = 0.7
"""The believed time of a batch is its P99, but a queue of batches takes the sum of their means: 0.7 to 0.85 of the sum
of P99s for the models we measured. `Belief.mean_ratio`, which is learnt, does not take its place: with it, `early-drop`
answers 2 % fewer in time in both recorded scenes where it refuses requests (1,035 instead of 1,057, and 387 instead of
395). Why was not measured."""


@dataclass(slots=True, eq=False)
class RestartBackoff:
    """When a lost worker of a stage may be replaced. The delay grows while nothing shows between the losses that the
    next one will work: `reset`."""

    forgets: bool = False
    """Whether losses of which the last is longer ago than the longest delay do not count, because nothing else shows
    that workers stay: the shadows' do."""
    losses: int = 0
    """Replicas lost since a batch last finished."""
    not_before_ns: int = 0
    error: str = ""
    """Why the last replica was lost."""
    charged: int = 0
    """Losses that count for the delay."""
    found_out: int = 0
    """Losses of which a single request is the cause."""

    def lose(self, now_ns: int, *, is_found_out: bool = False) -> int:
        """Count a lost replica; returns the delay of its replacement in ns. Replicas that are lost before the
        replacement of an earlier one starts count as one loss, as when a node fails.

        `is_found_out` says that a single request is the cause. Then neither this loss nor those before it count, unless
        there were `FOUND_OUT_MAX` such losses already.
        """
        if self.forgets and now_ns > self.not_before_ns + RESTART_NS_MAX:
            self.reset()
        self.losses += 1
        if is_found_out and self.found_out < FOUND_OUT_MAX:
            self.found_out += 1
            self.charged, self.not_before_ns = 0, now_ns
            return 0
        if self.charged and now_ns <= self.not_before_ns:
            return self.not_before_ns - now_ns
        wait_ns = min(RESTART_NS_MAX, s(1) << min(self.charged - 1, 5)) if self.charged else 0
        self.charged += 1
        self.not_before_ns = now_ns + wait_ns
        return wait_ns

    def reset(self) -> None:
        """A batch has finished: what was lost before does not count any more."""
        self.losses = self.charged = self.found_out = 0


@dataclass(slots=True, eq=False)
class TimeEstimates:
    """A stage's time estimates for admission policies, updated at every control tick."""

    startup_ns: int = 0
    """Time until the first replica is ready; 0 if a replica is ready."""
    row_ns: int = 0
    """Time that each waiting row adds to the drain time of the queue; 0 if unknown. Not used if the queue is mixed
    (`StageState.until_served_ns`)."""


@dataclass(slots=True, eq=False)
class SplitRequest:
    """What is left of a request that is split at a stage."""

    pieces: int
    """How many pieces have not finished."""
    rows: int
    """How many rows these pieces have together."""


class StageState:
    """One stage while it runs."""

    def __init__(
        self, name: str, after: tuple[str, ...], beliefs: Mapping[BeliefKey, Belief], order: Order, monitor: Monitor
    ) -> None:
        self.name = name
        self.after = after
        self.beliefs = beliefs
        self.application: ApplicationState
        """Set by the `ApplicationState` that it belongs to."""
        self.dispatch: Callable[[int, StageState, list[Action]], int]
        """Starts batches from its queue; set by `DataPath.bind`."""
        self.runs_for_parts = False
        self.response_timeout_ns = 0
        """The response timeout that the stage declares; 0 for the default."""
        self.watched_ns = -1
        """The control path has looked at all running batches that began up to this instant, and looks at none of them
        again before `look_ns`, when the first of them is stalled or given up."""
        self.look_ns = FOREVER_NS
        self.is_disturbed = False
        """Whether a replica was lost since a batch last finished, or a batch runs whose requests have ended in part. If
        so, the data path calls `recover` when a batch finishes."""
        self.finishes_each = False
        """Whether the end of a batch needs more than an answer to each of its requests: in a graph, on a device that is
        shared, if `is_disturbed`, while split requests run, while requests are open that have waited for a start, or if
        rows are padded, so that the estimate wants to know to which size.
        One attribute stands for all these reasons, so that the end of an ordinary batch checks only one."""
        self.size_classes = GRID
        self.is_padded = False
        """Whether rows of different sizes of one class share a forward pass, padded."""
        self.is_divided = False
        """Whether requests with more rows than a forward pass takes are split."""
        self.split: dict[RequestId, SplitRequest] = {}
        """The split requests that have not ended and have not passed the stage."""
        self.ran_ns: dict[int, int] = {}
        """By class of sizes, when its last batch began; filled only if the queue is mixed."""
        self.queue: Queue = Queue(name, order)
        self.monitor = monitor
        self.limits = BatchLimits()
        self.drain_times = DrainTimes()
        """Used only if the queue is mixed."""
        self.pool = ReplicaPool(beliefs, self.limits)
        self.backoff = RestartBackoff()
        self.start_backoff = RestartBackoff()
        """The same for replicas that were lost before they could serve. Batches of other replicas do not reset it: they
        do not show that starts work."""
        self.avoided_ns: dict[str, int] = {}
        """By node on which a replica was lost before it could serve, until when others are preferred."""
        self.shadow_backoff = RestartBackoff(forgets=True)
        """The same for shadows. Batches do not reset it either: the replica finishes them alone."""
        self.times = TimeEstimates()

    def follow(self, target: StagePlan) -> None:
        """Adopt a new plan."""
        self.queue.wait_ns = target.wait_ns
        if self.limits.follow(target):
            self.pool.regroup()
        self.refresh()

    def start_costs(self, spec: ReplicaSpec) -> StartCosts:
        """What a start consists of; weights of its own without a size if nobody has said."""
        costs = self.application.parts.starts.get((self.name, spec.variant, spec.slot.hardware))
        return costs or StartCosts(ModelWeights(f"{self.name}/{spec.variant}", 0))

    def refresh(self) -> None:
        """Recompute the estimates from the beliefs. Called when replicas change and at every control tick."""
        ready, starting = self.pool.refresh()
        self.times.startup_ns = 0 if ready else max(belief.startup_ns for belief in self.beliefs.values())
        capacity = ready or starting
        self.times.row_ns = round(1 / capacity) if capacity else 0
        self.drain_times.forget()

    def until_served_ns(self, now_ns: int, visit: Visit, drop: Drop) -> int:
        """Believed time until a visit has been served that enters the mixed queue now (`Admit`): after what comes
        before it, but for what the drop policy will find hopeless when its turn comes. The visit's own time counts only
        if it is known, because rows of its size have run lately."""
        queue, times = self.queue, self.drain_times
        rest_ns, rest_full_ns = queue.remaining_ns, queue.remaining_full_ns
        if times.is_due(len(queue.visits)):
            done_ns = self.times.startup_ns
            for key, each in islice(zip(queue.keys, queue.visits, strict=True), LOOKED_AT):
                work_ns, alone_ns, full_ns = self._costs_of(self.size_classes.class_of(each.size), each.rows)
                least_ns, full_ns = alone_ns + rest_ns, max(alone_ns + rest_ns, full_ns + rest_full_ns)
                if not drop.is_hopeless(now_ns + round(QUEUE_PART * done_ns), each, least_ns, full_ns):
                    done_ns += work_ns
                    times.keys.append(key)
                    times.done_ns.append(done_ns)
        key, bound = queue.key(visit), self.size_classes.class_of(visit.size)
        own_ns = self._costs_of(bound, visit.rows)[1] + rest_ns if self.ran_lately(now_ns, bound) else 0
        return max(self.times.startup_ns, times.before(key, bisect_right(queue.keys, key))) + own_ns

    def backlog(self, visit: Visit) -> StageBacklog:
        """What runs here now, and what waits here and would come before a visit. If no batch runs, the next one is
        assumed to have one row."""
        queue, waiting = self.queue, self.monitor.waiting
        before = bisect_right(queue.keys, queue.key(visit))
        if before < len(queue.visits):
            waiting = rows_of(queue.visits[:before])
        batches, running = len(self.pool.running), self.monitor.running
        rows = max(1, round(running / batches)) if batches else 1
        alone_ns, taken_ns = self.pool.least_ns()[0], self.pool.least_ns(rows=rows)
        return StageBacklog(waiting, running, self.times.row_ns, alone_ns, taken_ns, self.pool.mean_ratio)

    def ran_lately(self, now_ns: int, size: int) -> bool:
        """Whether rows of this class of sizes have run lately, so that what they take is known."""
        return now_ns - self.ran_ns.get(size, -QUIET_NS) < QUIET_NS

    def _costs_of(self, size: int, rows: int) -> tuple[int, int, int]:
        """How long all replicas together work on a visit of so many rows of a class of sizes, in full batches; and the
        durations of a batch of its own and of a full batch."""
        known = self.drain_times.costs_ns
        found = known.get((size, rows))
        if found is None:
            known[size, rows] = found = round(rows * self.pool.row_ns(size)), *self.pool.least_ns(size, rows)
        return found

    def mix(self) -> None:
        """From now on visits wait in lanes."""
        self.queue = MixedQueue(self.queue, self.lane_key)
        self.choose_finish()

    def lane_key(self, visit: Visit) -> LaneKey:
        """The lane in which a visit waits: visits of one lane can share a forward pass."""
        size = visit.size
        if not size:
            return (0,)
        bound = self.size_classes.class_of(size)
        if self.is_padded:
            return (bound,)
        request = visit.request
        return (bound, size, *request.shape) if request.size == size else (bound, size)

    def lose(self, now_ns: int, worker: ReplicaWorker, error: str, *, is_blamed: bool) -> int:
        """Count a lost worker; see `RestartBackoff.lose`. If its node is lost, it is not to blame (`is_blamed`)."""
        if worker.shadow is not None:
            return self.shadow_backoff.lose(now_ns)
        self.disturb()
        self.backoff.error = error
        batch, node = worker.replica.batch, worker.replica.node
        wait_ns = self.backoff.lose(now_ns, is_found_out=is_blamed and batch is not None and batch.is_suspect)
        if not is_blamed or worker.state not in INCOMPLETE:
            return wait_ns
        self.avoided_ns[node] = now_ns + AVOIDED_NS
        return max(wait_ns, self.start_backoff.lose(now_ns))

    def can_start_on(self, node: str) -> None:
        """A replica on this node can serve."""
        self.avoided_ns.pop(node, None)
        self.start_backoff.reset()

    @property
    def not_before_ns(self) -> int:
        """When a lost replica may be replaced."""
        return max(self.backoff.not_before_ns, self.start_backoff.not_before_ns)

    def service_gap(self, now_ns: int) -> ServiceGap | None:
        """Why no replica serves now; None if one does."""
        lives = [replica.life for replica in self.pool.replicas.values()]
        if Life.READY in lives:
            return None
        name, starting = declared_name(self.name), lives.count(Life.STARTING)
        begun = [replica.since_ns for replica in self.pool.replicas.values() if replica.life is Life.STARTING]
        waited_ns, usual_ns = now_ns - min(begun, default=now_ns), self.times.startup_ns
        if not self.backoff.losses and not self.start_backoff.charged:
            why, is_late = f"no replica of stage {name!r} is ready ({starting} starting", False
            if starting and waited_ns > max(SLOW_NS_MIN, SLOW_FACTOR * usual_ns):
                is_late = True
                why += f" for {waited_ns // NS_PER_S} s, where {number(usual_ns / NS_PER_S)} s are usual"
            return ServiceGap(f"{why})", is_late, max(NS_PER_S, usual_ns - waited_ns))
        wait_ns = max(0, self.not_before_ns - now_ns)
        then = f"next attempt in {max(1, round(wait_ns / NS_PER_S))} s" if wait_ns else "next attempt at once"
        then = "another attempt runs" if starting else then
        can = "can start" if self.start_backoff.charged else "is ready"
        why = f"no replica of stage {name!r} {can}: {self.backoff.error}; {then}"
        return ServiceGap(why, is_known=True, wait_ns=max(NS_PER_S, wait_ns + usual_ns - waited_ns))

    def recover(self) -> None:
        """A batch has finished: the stage works."""
        self.backoff.reset()
        self.is_disturbed = any(batch.ended for batch in self.pool.running.values())
        self.choose_finish()

    def disturb(self) -> None:
        """Something is wrong: look closely at each batch that finishes, until one of them shows that it is over."""
        self.is_disturbed = self.finishes_each = True

    def has_ended(self, visit: Visit) -> bool:
        """Whether a visit is a piece of a request that has ended."""
        return visit.of > 0 and visit.request.id not in self.split

    def pieces_of(self, visit: Visit) -> list[Visit]:
        """The visit, split into pieces if it has more rows than the smallest `batch_max` of the variants: a piece must
        fit into one pass of whatever replica takes it."""
        size = self.size_classes.class_of(visit.size)
        most = min(belief.at(size).batch_max for belief in self.beliefs.values())
        if visit.rows <= most or not self.is_divided:
            return [visit]
        firsts = range(0, visit.rows, most)
        self.split[visit.request.id] = SplitRequest(len(firsts), visit.rows)
        self.finishes_each = True
        return [
            structs.replace(visit, first=first, rows=min(most, visit.rows - first), of=visit.rows) for first in firsts
        ]

    def rows_left(self, visit: Visit) -> int:
        """How many rows must run one after the other until the request of a visit has passed the stage. The pieces of a
        split request are assumed to run on all replicas at the same time."""
        split = self.split.get(visit.request.id) if visit.of else None
        if split is None:
            return visit.rows
        return max(visit.rows, -(-split.rows // max(1, len(self.pool.replicas))))

    def completes(self, visit: Visit) -> bool:
        """Count a finished piece. Returns whether it was the last one, so that the request has passed the stage; False
        if the request ended before."""
        split = self.split.get(visit.request.id)
        if split is None:
            return False
        split.pieces -= 1
        split.rows -= visit.rows
        if not split.pieces:
            del self.split[visit.request.id]
        return not split.pieces

    def choose_finish(self) -> None:
        """Set `finishes_each`."""
        is_graph = self.application.open_requests is not None
        is_shared = any(belief.shares_device for belief in self.beliefs.values())
        running = self.pool.running.values()
        is_split = bool(self.split) or any(visit.of for batch in running for visit in batch.visits)
        is_special = is_shared or is_split or self.is_disturbed or bool(self.application.woken)
        self.finishes_each = is_graph or is_special or (self.queue.is_mixed and self.is_padded)

    def give_up_ns(self, batch: RunningBatch) -> int:
        """When the replica of a batch is given up if the batch has not finished: after the declared response timeout;
        by default after `STALL_FACTOR` times its believed duration, and not before `RESPONSE_NS_MIN` and the deadline
        of the application have passed."""
        slo_ns = self.application.graph.slo_ns
        default_ns = max(RESPONSE_NS_MIN, slo_ns, STALL_FACTOR * batch.cost_ns)
        return batch.started_ns + (self.response_timeout_ns or default_ns)

    def hangs(self, batch: RunningBatch, silent_ns: int) -> bool:
        """Whether a worker that has been silent for so long while it ran a batch, not its first one, hangs. Not if the
        stage declares a response timeout, nor in the second try of a request: the first worker may only have been slow,
        so this one gets all of the response timeout."""
        if self.response_timeout_ns or any(visit.attempts for visit in batch.visits):
            return False
        return silent_ns >= max(SILENT_NS_MIN, STALL_FACTOR * batch.cost_ns)

    def view(self, slo_ns: int, visits: float) -> StageView:
        """The stage as policies see it: without its draining replicas."""
        return StageView(
            name=self.name,
            slo_ns=slo_ns,
            after=self.after,
            beliefs=self.beliefs,
            replicas=self.pool.views(),
            queue=tuple(self.queue.visits),
            running=self.monitor.running,
            buckets=tuple(self.monitor.buckets),
            bucket_ns=self.monitor.bucket_ns,
            visits=visits,
        )
