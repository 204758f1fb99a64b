"""Laws every policy of a verb obeys, whatever it is; a new policy is under them as soon as it is registered."""

import math
import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.core.ledger import sites
from sloop.core.planner import copied
from sloop.core.protocols import Take
from sloop.core.views import Bucket, ReplicaView, StageView, Traffic
from sloop.errors import InputError
from sloop.options import keys_of
from sloop.profile.estimate import Estimate
from sloop.profile.published import YOLOV5S_S
from sloop.systems.registry import POLICIES, build
from sloop.units import NS_PER_S, ms, s
from sloop.vocabulary import Life, ReplicaId, ReplicaSpec, Request, RequestId, Slot, Visit
from tests.policies.conftest import Idle, make_idle, make_node, make_stage, make_view

BELIEF = Estimate(YOLOV5S_S, variant="v", hardware="local", correct=False)
laws = settings(max_examples=50)
instants = st.integers(0, 200).map(ms)
LENGTHS_NS = (ms(1), ms(100), s(1), s(10))


def _keys(forecaster: str) -> tuple[str, ...]:
    return keys_of(POLICIES["forecast"][forecaster])


@st.composite
def visits(draw: st.DrawFn) -> Visit:
    sent_ns = draw(instants)
    arrived_ns = sent_ns + draw(instants)
    request = Request(RequestId(draw(st.integers(0, 999))), sent_ns, arrived_ns, sent_ns + draw(instants) + 1)
    return Visit(request, "stage", arrived_ns, request.deadline_ns)


def twice(policy: Any, verb: str, *arguments: Any) -> Any:
    """The policy's answer, having checked that a fresh one gives the same and that neither touched its arguments."""
    before = deepcopy(arguments, {id(BELIEF): BELIEF})
    answer = getattr(policy, verb)(*arguments)
    assert arguments == before, "a policy must not change its arguments"
    return answer


@pytest.mark.parametrize("name", POLICIES["order"])
@laws
@given(visit=visits())
def test_a_key_depends_on_the_visit_alone(name: str, visit: Visit) -> None:
    assert build("order", name, {}).key(visit) == build("order", name, {}).key(visit)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", POLICIES["batch"])
@laws
@given(
    queue=st.lists(visits(), min_size=1, max_size=40), limit=st.integers(1, 16), now_ns=instants, each=st.integers(0, 9)
)
def test_batches_fit_and_waiting_ends(name: str, queue: list[Visit], limit: int, now_ns: int, each: int) -> None:
    queue.sort(key=lambda visit: visit.deadline_ns)
    costs_ns = [0, *(ms(5 + each * size) for size in range(1, limit + 1))]
    policy = build("batch", name, {})
    for _ in range(3):  # waits at most as often as it says, and then starts or gives up
        take: Take = twice(policy, "decide", now_ns, queue, limit, costs_ns)
        assert 0 <= take.count <= limit
        assert take.skip + take.count <= len(queue)
        if take.skip or take.count:
            return
        assert take.wait_until_ns > now_ns, "to wait until a time that has passed is to spin"
        now_ns = take.wait_until_ns
    pytest.fail("it waits for ever")


@pytest.mark.parametrize("name", POLICIES["route"])
@laws
@given(
    replicas=st.lists(st.tuples(st.floats(0.1, 64), st.floats(0.1, 1e6), st.integers(1, 9)), min_size=1, max_size=20),
    batches=st.integers(0, 9),
    last=st.integers(-1, 40),
)
def test_routers_choose_one_that_is_there(
    name: str, replicas: list[tuple[float, float, int]], batches: int, last: int
) -> None:
    idle = [
        Idle(ReplicaId(2 * number), cores, batches * number, weight, alone_ns)
        for number, (cores, weight, alone_ns) in enumerate(replicas)
    ]
    policy = build("route", name, {})
    for _ in range(3):
        index = policy.choose(0, idle, ReplicaId(last))  # type: ignore[attr-defined]
        assert 0 <= index < len(idle)
        last = idle[index].id


def batches_of_equal_replicas(policy: Any, *, end_at_once: bool) -> list[int]:
    """How many of seven batches each of seven equal replicas gets. If batches do not end at once, a replica that has
    one is not idle."""
    ready, last, batches = make_idle(*range(7)), ReplicaId(-1), [0] * 7
    for _ in range(7):
        index = policy.choose(0, ready, last)
        last = ready[index].id
        batches[last] += 1
        if end_at_once:
            ready[index] = structs.replace(ready[index], batches=batches[last])
        else:
            del ready[index]
    return batches


def leaves_no_equal_replica_out(policies: Callable[[], Any]) -> bool:
    """Whether busy replicas make a router use all others, and it uses either one or all of those that are idle again
    at once."""
    together = batches_of_equal_replicas(policies(), end_at_once=False)
    return together == [1] * 7 and batches_of_equal_replicas(policies(), end_at_once=True).count(0) in (0, 6)


@pytest.mark.parametrize("name", POLICIES["route"])
def test_routers_leave_no_equal_replica_out(name: str) -> None:
    assert leaves_no_equal_replica_out(lambda: build("route", name, {}))


class OverlooksTheLast:
    """Takes turns, and takes the last replica only if no other is idle."""

    def choose(self, now_ns: int, idle: Sequence[Idle], last: ReplicaId) -> int:
        later = [index for index, replica in enumerate(idle[:-1]) if replica.id > last]
        return later[0] if later else 0


def test_routers_that_leave_replicas_out_are_found_out() -> None:
    assert not leaves_no_equal_replica_out(OverlooksTheLast)


@pytest.mark.parametrize("name", POLICIES["drop"])
@laws
@given(visit=visits(), now_ns=instants, later_ns=instants, cost_ns=instants)
def test_what_is_hopeless_stays_so(name: str, visit: Visit, now_ns: int, later_ns: int, cost_ns: int) -> None:
    policy: Any = build("drop", name, {})
    if policy.is_hopeless(now_ns, visit, cost_ns):
        assert policy.is_hopeless(now_ns + later_ns, visit, cost_ns)


@pytest.mark.parametrize("name", POLICIES["admit"])
@laws
@given(visit=visits(), queued=st.integers(0, 5000), drain_ns=instants)
def test_an_answer_at_the_door_is_never_negative(name: str, visit: Visit, queued: int, drain_ns: int) -> None:
    policy: Any = build("admit", name, {})
    request = visit.request
    assert policy.retry_after_ns(request.arrived_ns, request, queued, drain_ns) >= 0
    assert policy.retry_after_ns(request.arrived_ns, request, 0, 0) == 0, "an empty server lets everybody in"


@pytest.mark.parametrize("name", POLICIES["place"])
@laws
@given(
    free=st.lists(st.tuples(st.integers(0, 8), st.lists(st.integers(0, 10), max_size=3)), max_size=8),
    cores=st.integers(1, 8),
    share=st.integers(0, 10),
    accelerator=st.sampled_from(["", "T4"]),
)
def test_a_replica_goes_to_one_of_the_places(
    name: str, free: list[tuple[int, list[int]]], cores: int, share: int, accelerator: str
) -> None:
    nodes = [
        make_node(f"n{index}", free_cores=own, devices={f"d{at}": each / 10 for at, each in enumerate(shares)})
        for index, (own, shares) in enumerate(free)
    ]
    spec = ReplicaSpec("stage", "v", Slot(cores, "local", accelerator, share / 10))
    found = sites(spec, BELIEF, nodes)
    if found:
        assert 0 <= twice(build("place", name, {}), "choose", 0, spec, found) < len(found)


def stage_of(counts: Sequence[int], ready: int, starting: int, queue: Sequence[Visit], now_s: int) -> StageView:
    """A stage whose last seconds brought `counts` requests, each with 0.9 s left, and kept its replicas half busy."""
    lives = [Life.READY] * ready + [Life.STARTING] * starting
    replicas = tuple(
        ReplicaView(ReplicaId(number), ReplicaSpec("stage", "v", Slot(1.0, "local")), life, s(number % 7), 0, "n")
        for number, life in enumerate(lives)
    )
    first_s = now_s - len(counts)
    buckets = [
        Bucket(
            s(first_s + at),
            count,
            0,
            count * NS_PER_S // 10,
            ready * NS_PER_S // 2,
            ready * NS_PER_S,
            [ms(900)] * count,
        )
        for at, count in enumerate(counts)
    ]
    return make_stage(*buckets, beliefs=(BELIEF,), queue=queue, replicas=replicas)


FORESEEN_MOST = {"times": 1.2}
"""Forecasts that by their nature go beyond what was seen, and how many times its largest second at most."""


@pytest.mark.parametrize("name", POLICIES["forecast"])
@laws
@given(counts=st.lists(st.integers(0, 100), max_size=30))
def test_a_forecast_lies_within_what_was_seen(name: str, counts: list[int]) -> None:
    demand_rps = twice(build("forecast", name, {}), "demand_rps", s(30), stage_of(counts, 1, 0, (), 30))
    least = 0 if name in FORESEEN_MOST else min(counts, default=0)
    assert least - 1e-9 <= demand_rps <= FORESEEN_MOST.get(name, 1) * max(counts, default=0) + 1e-9


ODD = (0, -0.0, 5e-324, 1e-9, 0.3, 1, 1.5, 60, 1e6, 1e9, 1e10, 1e300, 1e308, math.inf, math.nan, -1e-9, -1, 10**400)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in POLICIES["forecast"] for key in _keys(name)])
@laws
@given(data=st.data(), counts=st.lists(st.integers(0, 10**7), max_size=30), length_ns=st.sampled_from(LENGTHS_NS))
def test_a_forecast_is_a_finite_rate_or_its_parameters_are_refused(
    name: str, key: str, data: st.DataObject, counts: list[int], length_ns: int
) -> None:
    odd = st.sampled_from(ODD)
    values = {"counts": st.lists(odd, max_size=3), "weights": st.sampled_from(["ipa", "biscale"])}
    others = [other for other in _keys(name) if other == "weights"]
    parameters = {each: data.draw(values.get(each, odd), label=each) for each in {key, *others}}
    try:
        policy = build("forecast", name, parameters)
    except InputError:
        return
    buckets = [Bucket(at * length_ns, arrivals=count) for at, count in enumerate(counts)]
    demand_rps = policy.demand_rps(data.draw(instants), Traffic(buckets=buckets, bucket_ns=length_ns))  # type: ignore[attr-defined]
    assert math.isfinite(demand_rps)
    assert demand_rps >= 0
    assert math.isfinite(1e6 * demand_rps), "nor is what a fan-out makes of it"


@pytest.mark.parametrize("name", POLICIES["scale"])
@settings(max_examples=25)
@given(
    history=st.lists(
        st.tuples(st.lists(st.integers(0, 60), max_size=5), st.integers(0, 4), st.integers(0, 4)),
        min_size=1,
        max_size=8,
    ),
    queue=st.lists(visits(), max_size=20),
)
def test_plans_can_be_carried_out(name: str, history: list[tuple[list[int], int, int]], queue: list[Visit]) -> None:
    """Whatever a policy has seen, it asks for known things in sane amounts, gives a reason, and answers repeatably."""
    policy: Any = build("scale", name, {})
    again: Any = build("scale", name, {})
    assert policy.period_ns > 0
    plan = None
    node = make_node("n", cores=16, free_cores=16)
    for step, (counts, ready, starting) in enumerate(history):
        now_s = 60 + 15 * step
        stage = stage_of(counts, ready, starting, queue, now_s)
        view = make_view(stage, nodes=(node,), plan=plan)
        sent = pickle.loads(pickle.dumps(policy))
        tried = copied(policy).plan(s(now_s), view)  # before the policy itself, which must not notice
        answer = twice(policy, "plan", s(now_s), view)
        assert answer == again.plan(s(now_s), view)
        assert answer == tried == sent.plan(s(now_s), view), "plans are made in other processes"
        if answer is None:
            continue
        plan = answer
        assert plan.why
        (target,) = plan.stages
        assert target.stage == "stage"
        assert 1 <= target.batch_max <= YOLOV5S_S.max_batch
        for group in target.groups:
            assert group.spec.stage == "stage"
            assert group.spec.variant == "v"
            assert 0 < group.spec.cores <= 16
            assert 0 <= group.count <= 64
        if queue:
            assert sum(group.count for group in target.groups) > 0, "somebody waits"
