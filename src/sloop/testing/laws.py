"""Laws that every policy of a verb obeys, whatever it is.

A law takes a function that makes the policy, so that a fresh one can be asked for the same, and a random generator, and
raises AssertionError with what is wrong. It draws one case; `LAWS` has the laws by verb.
"""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from random import Random
from typing import Any, Final

from msgspec import structs

from sloop.core.batching import AssumedDevice, AssumedQueue
from sloop.core.ledger import sites
from sloop.core.protocols import BatchDecision, choosing, deciding
from sloop.core.views import Bucket, ReplicaView, StageView
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.testing.views import Idle, make_idle, make_node, make_stage, make_view
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Life, ReplicaId, ReplicaSpec, Request, RequestId, Slot, Visit

__all__ = ["LAWS"]

Make = Callable[[], Any]
"""Makes a policy."""

BELIEF: Final = Estimate(YOLOV5S_S, variant="v", hardware="local", correct=False)
NODE_CORES: Final = 16
REPLICAS_MAX: Final = 64
"""More replicas than these on one node of 16 cores are no sane plan."""


def _instant_ns(random: Random) -> int:
    return ms(random.randint(0, 200))


def _visit(random: Random) -> Visit:
    sent_ns = _instant_ns(random)
    arrived_ns = sent_ns + _instant_ns(random)
    request = Request(RequestId(random.randint(0, 999)), sent_ns, arrived_ns, sent_ns + _instant_ns(random) + 1)
    return Visit(request, "stage", arrived_ns, request.deadline_ns)


def _visits(random: Random, least: int, most: int) -> list[Visit]:
    found = [_visit(random) for _ in range(random.randint(least, most))]
    return sorted(found, key=lambda visit: visit.deadline_ns)


def _asked(policy: Any, verb: str, *arguments: Any) -> Any:  # noqa: ANN401  # what policies of a verb take and answer
    """The policy's answer, having checked that its arguments are as before."""
    before = deepcopy(arguments, {id(BELIEF): BELIEF})
    answer = getattr(policy, verb)(*arguments)
    assert arguments == before, f"`{verb}` has changed its arguments"
    return answer


def _order(make: Make, random: Random) -> None:
    visit = _visit(random)
    assert make().key(visit) == make().key(visit), "the key depends on more than the visit"


def _batch(make: Make, random: Random) -> None:
    """Batches fit, and waiting ends: it waits at most twice, until a later time, and then starts or gives up."""
    queue, limit, now_ns, each_ms = (
        _visits(random, 1, 40),
        random.randint(1, 16),
        _instant_ns(random),
        random.randint(0, 9),
    )
    costs_ns = [0, *(ms(5 + each_ms * size) for size in range(1, limit + 1))]
    decide, device = deciding(make()), AssumedDevice(limit, costs_ns)
    for _ in range(3):
        decision: BatchDecision = _asked(decide, "__call__", now_ns, AssumedQueue(queue), device)
        assert 0 <= decision.count <= limit, f"a batch of {decision.count}, where at most {limit} may start"
        assert decision.skip >= 0, f"it drops {decision.skip} requests"
        assert decision.skip + decision.count <= len(queue), "it takes more than there are"
        assert not (decision.skip and decision.count), "it drops visits and starts a batch in one answer"
        if decision.skip or decision.count:
            return
        assert decision.wait_until_ns > now_ns, "it waits until a time that has passed"
        now_ns = decision.wait_until_ns
    raise AssertionError("it waits for ever")


def _route(make: Make, random: Random) -> None:
    """It chooses one that is there, and leaves none of several equal replicas out."""
    batches, last = random.randint(0, 9), random.randint(-1, 40)
    idle = [
        Idle(
            ReplicaId(2 * number),
            random.uniform(0.1, 64),
            batches * number,
            random.uniform(0.1, 1e6),
            random.randint(1, 9),
        )
        for number in range(random.randint(1, 20))
    ]
    choose = choosing(make())
    for _ in range(3):
        index = choose(0, idle, ReplicaId(last))
        assert 0 <= index < len(idle), f"it chooses number {index} of {len(idle)}"
        last = idle[index].id
    assert _batches_of_equal_replicas(make(), end_at_once=False) == [1] * 7, "a busy replica gets another batch"
    unused = _batches_of_equal_replicas(make(), end_at_once=True).count(0)
    assert unused in (0, 6), f"of seven equal replicas that are idle again at once, {unused} get nothing"


def _batches_of_equal_replicas(policy: Any, *, end_at_once: bool) -> list[int]:  # noqa: ANN401  # a route policy
    """How many of seven batches each of seven equal replicas gets. If batches do not end at once, a replica that has
    one is not idle."""
    ready, last, batches, choose = make_idle(*range(7)), ReplicaId(-1), [0] * 7, choosing(policy)
    for _ in range(7):
        index = choose(0, ready, last)
        last = ready[index].id
        batches[last] += 1
        if end_at_once:
            ready[index] = structs.replace(ready[index], batches=batches[last])
        else:
            del ready[index]
    return batches


def _drop(make: Make, random: Random) -> None:
    policy, visit, now_ns, cost_ns = make(), _visit(random), _instant_ns(random), _instant_ns(random)
    if policy.is_hopeless(now_ns, visit, cost_ns):
        assert policy.is_hopeless(now_ns + _instant_ns(random), visit, cost_ns), "what was hopeless is no longer so"


def _admit(make: Make, random: Random) -> None:
    request = _visit(random).request
    answer_ns = make().retry_after_ns(request.arrived_ns, request, random.randint(0, 5000), _instant_ns(random))
    assert answer_ns >= 0, f"a client is to try again after {answer_ns} ns"
    assert make().retry_after_ns(request.arrived_ns, request, 0, 0) == 0, "an empty server refuses a request"


def _place(make: Make, random: Random) -> None:
    free = [
        (random.randint(0, 8), [random.randint(0, 10) for _ in range(random.randint(0, 3))])
        for _ in range(random.randint(0, 8))
    ]
    nodes = [
        make_node(f"n{index}", free_cores=own, devices={f"d{at}": each / 10 for at, each in enumerate(shares)})
        for index, (own, shares) in enumerate(free)
    ]
    slot = Slot(random.randint(1, 8), "local", random.choice(("", "T4")), random.randint(0, 10) / 10)
    spec = ReplicaSpec("stage", "v", slot)
    if there := sites(spec, BELIEF, nodes):
        index = _asked(make(), "choose", 0, spec, there)
        assert 0 <= index < len(there), f"it chooses place {index} of {len(there)}"


def _stage(random: Random, queue: Sequence[Visit], now_s: int) -> StageView:
    """A stage whose last seconds brought some requests, each with 0.9 s left, and kept its replicas half busy."""
    counts = [random.randint(0, 60) for _ in range(random.randint(0, 5))]
    ready = random.randint(0, 4)
    lives = [Life.READY] * ready + [Life.STARTING] * random.randint(0, 4)
    replicas = tuple(
        ReplicaView(ReplicaId(number), ReplicaSpec("stage", "v", Slot(1.0, "local")), life, s(number % 7), 0, "n")
        for number, life in enumerate(lives)
    )
    first_s = now_s - len(counts)
    busy_ns, reserved_ns = ready * NS_PER_S // 2, ready * NS_PER_S
    buckets = [
        Bucket(s(first_s + at), count, 0, count * NS_PER_S // 10, busy_ns, reserved_ns, [ms(900)] * count)
        for at, count in enumerate(counts)
    ]
    return make_stage(*buckets, beliefs=(BELIEF,), queue=queue, replicas=replicas)


def _forecast(make: Make, random: Random) -> None:
    demand_rps = _asked(make(), "demand_rps", s(30), _stage(random, (), 30))
    assert math.isfinite(demand_rps), f"it foresees {demand_rps} requests/s"
    assert demand_rps >= 0, f"it foresees {demand_rps} requests/s"


def _scale(make: Make, random: Random) -> None:
    """Whatever a policy has seen, it asks for known things in sane amounts, gives a reason, and answers repeatably."""
    policy, again = make(), make()
    assert policy.period_ns > 0
    memory = None
    plan, node, queue = None, make_node("n", cores=NODE_CORES, free_cores=NODE_CORES), _visits(random, 0, 20)
    for step in range(random.randint(1, 8)):
        now_s = 60 + 15 * step
        view = make_view(_stage(random, queue, now_s), nodes=(node,), plan=plan)
        sent, remembered = pickle.loads(pickle.dumps((policy, memory)))
        answer = _asked(policy, "plan", s(now_s), view, memory)
        assert answer == policy.plan(s(now_s), view, memory), "it plans otherwise when it is asked again"
        assert answer == again.plan(s(now_s), view, memory), "another policy with the same parameters plans otherwise"
        assert answer == sent.plan(s(now_s), view, remembered), "in another process it plans otherwise"
        made, memory = answer
        try:
            hash(memory)
        except TypeError as error:
            raise AssertionError(f"what it remembers can change: {error}") from error
        if made is None:
            continue
        plan = made
        assert plan.why, "the plan has no reason"
        (target,) = plan.stages
        assert target.stage == "stage"
        assert 1 <= target.batch_max <= YOLOV5S_S.max_batch, f"batches of {target.batch_max}"
        for group in target.groups:
            assert (group.spec.stage, group.spec.variant) == ("stage", "v"), f"nobody knows {group.spec}"
            assert 0 < group.spec.cores <= NODE_CORES, f"a replica of {group.spec.cores} cores"
            assert 0 <= group.count <= REPLICAS_MAX, f"{group.count} replicas"
        assert sum(group.count for group in target.groups) > 0 or not queue, (
            "requests wait, and nothing is to serve them"
        )


LAWS: Final[Mapping[str, Callable[[Make, Random], None]]] = {
    "order": _order,
    "batch": _batch,
    "route": _route,
    "drop": _drop,
    "admit": _admit,
    "place": _place,
    "forecast": _forecast,
    "scale": _scale,
}
"""The law of each verb that has one."""
