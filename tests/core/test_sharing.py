"""Replicas that share a device, as the core believes: what batches cost, what is learnt of them, what they serve.

A batch of n takes 10 + n ms alone. A full one, of 8, uses 0.6 of the bandwidth, so that two of them take
S = 1.2 · (1 + 0.5 · 0.2) = 1.32 times as long.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from sloop.actions import StartBatch, StopWorker
from sloop.core.protocols import BatchDecision
from sloop.core.views import BatchDevice, QueueView
from sloop.events import WOKE, BatchFailed, Finished, WorkerLost
from sloop.policies.drop import Never
from sloop.profile.interference import NO_SLOWDOWN, BandwidthLaw, CountLaw, DeviceDemand, Interference, ShareLaw
from sloop.profile.profile import DeviceSharing
from sloop.systems.snapshot import restore, save
from sloop.units import ms, s
from sloop.vocabulary import Device, Group, Node, Plan, ReplicaId, ReplicaSpec, RequestId, Slot, StagePlan
from tests.core.scene import Scene, plan_of, request

SHARING = DeviceSharing(law=BandwidthLaw(0.5), full_batch=8, bandwidth=0.6)
R0, R1, R2 = (ReplicaId(id) for id in range(3))


@dataclass
class Told:
    """A batch policy that starts what it can and remembers the costs that it was told."""

    costs_ns: list[tuple[int, ...]] = field(default_factory=list)

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        costs_ns = device.costs_ns
        self.costs_ns.append(tuple(costs_ns))
        assert costs_ns[1:3] == costs_ns[: len(costs_ns)][1:3] == (costs_ns[1], costs_ns[2])
        return BatchDecision(min(len(queue.visits), device.batch_max))


def scene_of(count: int = 2, sharing: DeviceSharing | None = SHARING, **options: Any) -> Scene:
    """Ready replicas on the cores of one node."""
    made = Scene(plan_of(count, batch_max=8), drop=Never(), sharing=sharing, **options)
    made.warm_up()
    return made


def on_gpu(count: int, sharing: DeviceSharing, share: float = 1.0, devices: int = 1, **options: Any) -> Scene:
    """Ready replicas on the accelerators of one node."""
    node = Node("n0", "", 4, 1000, tuple(Device(f"d{number}", "T4", 10**9) for number in range(devices)))
    group = Group(ReplicaSpec("only", "a", Slot(1.0, "", "T4", share)), count)
    plan = Plan((StagePlan("only", (group,), 8),), "the test says so")
    made = Scene(plan, nodes=[node], drop=Never(), sharing=sharing, accelerator="T4", **options)
    made.warm_up()
    return made


def clump(scene: Scene, at_ms: float, first: int, count: int) -> StartBatch:
    """Requests that come together, and the batch that they make."""
    for number in range(first, first + count - 1):
        assert scene.core.handle(ms(at_ms), request(number, at_ms=at_ms), True) == []
    (start,) = scene.act(at_ms, request(first + count - 1, at_ms=at_ms))
    assert isinstance(start, StartBatch)
    assert len(start.requests) == count
    return start


def finish(scene: Scene, at_ms: float, batch: StartBatch) -> None:
    scene.act(at_ms, Finished(batch.batch, batch.replica, 0))


def observed_ms(scene: Scene) -> list[float]:
    """What was learnt of each batch, all of which were full."""
    found = scene.beliefs["only", "a", ""].observed
    assert all(batch == 8 for batch, _, _ in found)
    return [taken_ns / 1e6 for _, _, taken_ns in found]


def test_an_estimate_learns_what_a_batch_would_have_taken_alone() -> None:
    """The first is alone for 9 ms, then beside the second for 11.88 ms, which are 9 ms of work for each."""
    scene = scene_of()
    first = clump(scene, 10, 0, 8)
    second = clump(scene, 19, 10, 8)
    finish(scene, 19 + 9 * 1.32, first)
    assert observed_ms(scene) == pytest.approx([18], abs=1e-5)
    finish(scene, 19 + 9 * 1.32 + 9, second)
    assert observed_ms(scene) == pytest.approx([18, 18], abs=1e-5)
    assert scene.core.state.devices == {}


def test_a_policy_is_told_what_a_batch_costs_beside_those_that_run_now() -> None:
    told = Told()
    scene = scene_of(batch=told)
    alone = tuple(ms(10 + n) if n else 0 for n in range(9))
    clump(scene, 10, 0, 8)
    assert told.costs_ns == [alone] * 1
    clump(scene, 11, 10, 1)
    loads = [0.6 + 0.075 * n for n in range(9)]
    factors = [max(1, load) * (1 + 0.5 * max(0, load - 1)) for load in loads]
    assert told.costs_ns[-1] == (0, *(round(alone[n] * factors[n]) for n in range(1, 9)))


@pytest.mark.parametrize("how", ["fails", "is lost", "is stopped"])
def test_a_batch_that_comes_to_nothing_leaves_its_device(how: str) -> None:
    scene = scene_of()
    first, second = clump(scene, 10, 0, 8), clump(scene, 10, 10, 8)
    if how == "fails":
        scene.act(10 + 6.6, BatchFailed(second.batch, R1, "it raised"))
    elif how == "is lost":
        scene.act(10 + 6.6, WorkerLost(R1, "it died"))
    else:
        scene.act(40_000, WOKE)
        assert [action for action in scene.actions if isinstance(action, StopWorker)]
        assert scene.core.state.devices == {}
        return
    again = [action for action in scene.actions if isinstance(action, StartBatch)][2:]
    running = scene.core.state.devices["n0", ""].batches
    assert list(running) == [first.batch, *(batch.batch for batch in again)]
    assert running[first.batch].done_ns == pytest.approx(ms(5))


def test_replicas_on_one_device_serve_together_what_the_law_says() -> None:
    """A full batch takes 18 ms alone: two of them 23.76 ms, four of them 18 · 2.4 · 1.7 ms."""
    for count, factor in ((1, 1.0), (2, 1.32), (4, 2.4 * 1.7)):
        stage = scene_of(count).application.all_stages[0]
        assert stage.pool.refresh()[0] == pytest.approx(count * 8 / (18e6 * factor))
        assert stage.times.row_ns == pytest.approx(18e6 * factor / count / 8, rel=1e-6)
    silent = scene_of(4, None).application.all_stages[0]
    assert silent.pool.refresh()[0] == pytest.approx(4 * 8 / 18e6)


def test_replicas_on_two_devices_do_not_slow_each_other() -> None:
    scene = on_gpu(2, SHARING, devices=2)
    clump(scene, 10, 0, 8)
    clump(scene, 10, 10, 8)
    assert {key: len(load.batches) for key, load in scene.core.state.devices.items()} == {
        ("n0", "d0"): 1,
        ("n0", "d1"): 1,
    }
    assert scene.application.all_stages[0].pool.refresh()[0] == pytest.approx(2 * 8 / 18e6)


def test_a_batch_is_stalled_later_for_what_runs_beside_it() -> None:
    """A batch of 1.8 s beside another one takes 2.376 s, and is stalled after twenty times as long."""
    scene = scene_of(times={"a": 100.0})
    first = clump(scene, 10, 0, 8)
    batch = scene.core.state.replicas[first.replica].batch
    assert batch is not None
    assert batch.stalled_ns == ms(10) + 20 * ms(1800)
    clump(scene, 20, 10, 8)
    assert batch.stalled_ns == pytest.approx(ms(10) + 20 * ms(1800) * 1.32)


def test_a_capped_share_makes_batches_slower_also_alone() -> None:
    law, own = ShareLaw(), DeviceDemand(sm_use=0.6, share=0.3, is_capped=True)
    sharing = DeviceSharing(law=law, full_batch=8, sm_use={1: 0.6}, is_capped=True)
    scene = on_gpu(1, sharing, share=0.3)
    (rate,) = scene.application.all_stages[0].pool.rates
    assert rate.costs_ns[8] == round(ms(18) * law.slowdown(own, []))
    batch = clump(scene, 10, 0, 8)
    finish(scene, 10 + 18 * law.slowdown(own, []), batch)
    assert observed_ms(scene) == pytest.approx([18], abs=1e-5)


@pytest.mark.parametrize("sharing", [None, DeviceSharing(law=NO_SLOWDOWN, full_batch=8)])
def test_nothing_is_kept_where_nothing_is_known(sharing: DeviceSharing | None) -> None:
    scene = scene_of(2, sharing)
    first, second = clump(scene, 10, 0, 8), clump(scene, 10, 10, 8)
    assert bool(scene.core.state.devices) is (sharing is not None)
    finish(scene, 28, first)
    finish(scene, 28, second)
    assert observed_ms(scene) == [18.0, 18.0]


def test_a_model_that_is_not_slowed_itself_slows_others() -> None:
    scene = scene_of(2, DeviceSharing(law=CountLaw((1.0, 1.5)), full_batch=8))
    scene.beliefs["only", "a", ""].sharing = DeviceSharing(full_batch=8)
    first = clump(scene, 10, 0, 8)
    scene.beliefs["only", "a", ""].sharing = DeviceSharing(law=CountLaw((1.0, 1.5)), full_batch=8)
    clump(scene, 10, 10, 8)
    batch = scene.core.state.replicas[first.replica].batch
    assert batch is not None
    assert batch.cost_ns == ms(27)


def test_a_restored_core_has_the_same_devices() -> None:
    scene = scene_of()
    first = clump(scene, 10, 0, 8)
    clump(scene, 13, 10, 5)
    parts = [application.parts for application in scene.core.state.applications.values()]
    core, _ = restore(save(scene.core, ms(15)), parts, lambda *_: parts[0])
    one, other = scene.core.state.devices["n0", ""], core.state.devices["n0", ""]
    assert [(b.size, b.done_ns, b.demand) for b in one.batches.values()] == [
        (b.size, b.done_ns, b.demand) for b in other.batches.values()
    ]
    batch = core.state.replicas[first.replica].batch
    assert batch is not None
    assert batch.load is other
    ended = Finished(first.batch, first.replica, 0)
    assert core.handle(s(1), ended) == scene.core.handle(s(1), ended)
    assert RequestId(0) in first.requests


def reserved(is_capped: bool) -> Scene:
    """Two ready replicas with a core each, of a model whose law was measured on two cores without caps."""
    group = Group(ReplicaSpec("only", "a", Slot(1.0, is_capped=is_capped)), 2)
    sharing = DeviceSharing(law=CountLaw((1.0, 1.5)), full_batch=8, cores=2.0)
    made = Scene(Plan((StagePlan("only", (group,), 8),), "the test says so"), drop=Never(), sharing=sharing)
    made.warm_up()
    return made


def test_replicas_with_cores_of_their_own_do_not_disturb_each_other() -> None:
    for is_capped, devices in ((True, 0), (False, 1)):
        scene = reserved(is_capped)
        first = clump(scene, 10, 0, 8)
        second = clump(scene, 10, 8, 8)
        assert len(scene.core.state.devices) == devices
        finish(scene, 37, first)
        finish(scene, 37, second)
        assert observed_ms(scene) == pytest.approx([27.0, 27.0] if is_capped else [18.0, 18.0])


def test_what_is_reserved_is_the_same_with_and_without_a_cap() -> None:
    for is_capped in (True, False):
        free = [view.free_cores for view in reserved(is_capped).core.state.ledger.views()]
        assert free == [free[0]]
        assert free[0] == reserved(True).core.state.ledger.views()[0].free_cores


@dataclass
class OneByOne:
    """A batch policy that starts one request at a time on a device, and remembers what it was shown."""

    seen: list[tuple[str, str, int, int, Interference]] = field(default_factory=list)

    def decide(self, now_ns: int, queue: QueueView, device: BatchDevice) -> BatchDecision:
        self.seen.append((*device.key, device.idle, len(device.running), device.law))
        return BatchDecision(0 if device.running else 1)


@pytest.mark.parametrize("is_capped", [True, False])
def test_a_batch_policy_is_told_of_no_law_where_each_replica_has_its_own_cores(is_capped: bool) -> None:
    law, asked = CountLaw((1.0, 1.5)), OneByOne()
    sharing = DeviceSharing(law=law, full_batch=8, cores=2.0)
    group = Group(ReplicaSpec("only", "a", Slot(1.0, is_capped=is_capped)), 2)
    plan = Plan((StagePlan("only", (group,), 8),), "the test says so")
    scene = Scene(plan, drop=Never(), sharing=sharing, batch=asked)
    scene.warm_up()
    scene.act(10, request(0, at_ms=10))
    assert asked.seen == [("n0", "", 2, 0, NO_SLOWDOWN if is_capped else law)]


def test_a_policy_that_leaves_a_device_alone_is_asked_about_the_others() -> None:
    """Two replicas on each of two accelerators: each gets one batch, and is not asked about again at this instant."""
    asked = OneByOne()
    scene = on_gpu(4, SHARING, share=0.5, devices=2, batch=asked)
    for number in range(3):
        scene.core.handle(ms(10), request(number, at_ms=10), True)
    starts = [action for action in scene.act(10, request(3, at_ms=10)) if isinstance(action, StartBatch)]
    devices = [scene.core.state.replicas[start.replica].device for start in starts]
    assert sorted(device or "" for device in devices) == ["d0", "d1"]
    assert len(asked.seen) == 4, "twice about each device"
    assert len(scene.application.all_stages[0].pool.idle) == 2
    scene.act(20, Finished(starts[0].batch, starts[0].replica, 0))
    (again,) = [action for action in scene.actions if isinstance(action, StartBatch)][2:]
    assert scene.core.state.replicas[again.replica].device == devices[0]
