"""Batches that are slowed by what runs beside them: the simulated device, the cluster, and the core's belief."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import End, StartBatch, StartWorker, StopWorker
from sloop.app.load import load_scenario
from sloop.app.scenario import InterferenceTruth
from sloop.errors import InputError
from sloop.events import BatchFailed, Event, Finished, NodeLost, WorkerReady
from sloop.profile.estimate import Estimate
from sloop.profile.interference import BandwidthLaw, DeviceDemand
from sloop.profile.profile import Amdahl, DeviceSharing, Profile, Quadratic, sample_of
from sloop.sim import World
from sloop.sim.cluster import Cluster, ClusterTruths
from sloop.sim.engine import play
from sloop.sim.happenings import NodeFailed
from sloop.sim.replicas import Truths
from sloop.sim.truth.cold_start import AcquisitionSampler, ColdStartSampler, ResizeSampler
from sloop.sim.truth.failure import FaultRates, FaultSampler
from sloop.sim.truth.recorded import RecordedRun
from sloop.sim.truth.service import ServiceSampler
from sloop.sim.truth.sharing import BY_CORES, BatchWork, SharedDevice, SharingTruth, alone, lost
from sloop.units import NS_PER_MS, ms, s
from sloop.vocabulary import BatchId, Device, Node, Outcome, ReplicaId, ReplicaSpec, RequestId, Slot
from tests.sim.scene import WORK_CONSERVING, records_of, world
from tests.sim.test_cluster import play_until

LAW = BandwidthLaw(0.5)
GPU = Node("n0", "gpu", 8.0, 10**10, (Device("d0", "M60", 8 * 2**30), Device("d1", "M60", 8 * 2**30)))
KEY = ("only", "a", "gpu")


def profile(solo_ms: float = 64.0, batch: int = 8, bandwidth: float = 0.6) -> Profile:
    """A batch of b takes `solo_ms` × b / `batch` alone."""
    return Profile(
        latency_ms=Quadratic(0.0, solo_ms / batch, 0.0),
        max_batch=batch,
        max_cores=1.0,
        accelerator="M60",
        sharing=DeviceSharing(law=LAW, full_batch=batch, bandwidth=bandwidth),
    )


def cluster_of(
    replicas: int,
    *,
    faults: FaultRates | None = None,
    declared: InterferenceTruth | None = None,
    own: Profile | None = None,
    devices: Sequence[str] = ("d0",),
) -> Cluster:
    """Ready replicas, by turns on these devices of one node."""
    sampler, profiles = FaultSampler(1, faults or FaultRates()), {KEY: own or profile()}
    truths = Truths(
        ServiceSampler(1, profiles, cv=0.0, ratio=1.0),
        ColdStartSampler(1, profiles, start_s=0.0),
        ResizeSampler(1),
        sampler,
        sharing=SharingTruth(profiles, declared or InterferenceTruth(), {}),
    )
    made = Cluster(ClusterTruths({"only": truths}, AcquisitionSampler(1, {}), sampler), [GPU])
    for number in range(replicas):
        spec = ReplicaSpec("only", "a", Slot(1.0, "gpu", "M60", 0.0), "n0", devices[number % len(devices)])
        made.obey(0, StartWorker(ReplicaId(number), spec))
    assert [type(event) for _, event in play_until(made, 0)] == [WorkerReady] * replicas
    return made


def begin(cluster: Cluster, now_ns: int, number: int, size: int = 8) -> None:
    """Replica `number` runs batch `number`."""
    requests = tuple(RequestId(id) for id in range(size))
    cluster.start_batch(now_ns, StartBatch(BatchId(number), ReplicaId(number), "only", requests))


def ends_of(told: Sequence[tuple[int, Event]]) -> list[tuple[float, int]]:
    """When batches end, in ms, and which."""
    return [(now_ns / NS_PER_MS, event.batch) for now_ns, event in told if isinstance(event, Finished)]


def test_batches_beside_each_other_slow_each_other_down_and_end_when_the_law_says() -> None:
    """By hand: L = 1.2, S = 1.2 · 1.1 = 1.32. The first has done 30.3 of its 64 ms when it is alone again."""
    cluster = cluster_of(2)
    begin(cluster, 0, 0)
    begin(cluster, 0, 1, 4)  # 0.3 of the bandwidth: L = 0.9, nobody is slowed
    assert ends_of(play_until(cluster, s(1))) == [(32.0, 1), (64.0, 0)]
    begin(cluster, s(1), 0)
    begin(cluster, s(1) + ms(20), 1)
    both = (64.0 - 20.0) * 1.32
    (first_ms, _), (second_ms, _) = ends_of(play_until(cluster, s(2)))
    assert [first_ms, second_ms] == pytest.approx([1020.0 + both, 1020.0 + both + 20.0])


def test_a_report_says_how_long_the_batch_has_run() -> None:
    cluster = cluster_of(2)
    begin(cluster, ms(5), 0)
    begin(cluster, ms(5), 1)
    first, second = [event for _, event in play_until(cluster, s(1)) if isinstance(event, Finished)]
    assert first.service_ns == second.service_ns == round(ms(64) * 1.32)


def test_devices_do_not_disturb_each_other() -> None:
    cluster = cluster_of(2, devices=("d0", "d1"))
    begin(cluster, 0, 0)
    begin(cluster, 0, 1)
    assert ends_of(play_until(cluster, s(1))) == [(64.0, 0), (64.0, 1)]


def test_batches_one_after_the_other_are_not_slowed() -> None:
    cluster, now_ns = cluster_of(1), 0
    for size in (8, 3, 5):
        begin(cluster, now_ns, 0, size)
        ((at_ms, _),) = ends_of(play_until(cluster, now_ns + s(1)))
        assert at_ms == (now_ns + ms(8 * size)) / NS_PER_MS
        now_ns = ms(at_ms)


@pytest.mark.parametrize("how", ["stopped", "failed node", "failed batch"])
def test_when_a_neighbour_is_gone_the_rest_is_done_as_if_alone(how: str) -> None:
    faults = FaultRates(failed_batch=1.0) if how == "failed batch" else None
    cluster = cluster_of(2, faults=faults)
    if how == "failed batch":
        begin(cluster, 0, 1)
        cluster.stop_faults(0)
        begin(cluster, 0, 0)
        told = play_until(cluster, s(1))
        ((failed_ns, _),) = [each for each in told if isinstance(each[1], BatchFailed)]
        ((end_ms, _),) = ends_of(told)
        assert end_ms == pytest.approx(failed_ns / 1e6 + 64.0 - failed_ns / 1e6 / 1.32)
        return
    begin(cluster, 0, 0)
    begin(cluster, 0, 1)
    if how == "stopped":
        cluster.obey(ms(33), StopWorker(ReplicaId(1), "why"))
        ((end_ms, _),) = ends_of(play_until(cluster, s(1)))
        assert end_ms == pytest.approx(33.0 + 64.0 - 33.0 / 1.32)
    else:
        cluster.happen(ms(33), -1, NodeFailed("n0"))
        told = play_until(cluster, s(1))
        assert any(isinstance(event, NodeLost) for _, event in told)
        assert ends_of(told) == []
        assert cluster._devices._devices["n0", "d0"].next_end() is None


def test_messages_that_are_lost_late_or_repeated_leave_the_device_when_the_work_is_done() -> None:
    lost = cluster_of(2, faults=FaultRates(lost_finished=1.0))
    begin(lost, 0, 1)
    lost.stop_faults(0)
    begin(lost, 0, 0)
    ((end_ms, _),) = ends_of(play_until(lost, s(1)))
    assert end_ms == pytest.approx(64.0 * 1.32, abs=1e-5)
    late = cluster_of(2, faults=FaultRates(late_finished=1.0, late_finished_ns=ms(500), repeated_finished=1.0))
    begin(late, 0, 1)
    late.stop_faults(0)
    begin(late, 0, 0)
    told = ends_of(play_until(late, s(3)))
    assert [at_ms for at_ms, id in told if id == 0] == [pytest.approx(64.0 * 1.32, abs=1e-5)]
    first, again = [at_ms for at_ms, id in told if id == 1]
    assert 64.0 * 1.32 < first < again <= 64.0 * 1.32 + 1000.0


def test_a_scenario_may_declare_another_truth() -> None:
    def both_ms(**declared: Any) -> float:
        cluster = cluster_of(2, declared=InterferenceTruth(**declared))
        begin(cluster, 0, 0)
        begin(cluster, 0, 1)
        return ends_of(play_until(cluster, s(1)))[0][0]

    assert both_ms() == pytest.approx(64 * 1.32)
    assert both_ms(error=2.0) == pytest.approx(64 * 1.64)
    assert both_ms(error=0.0) == 64
    assert both_ms(bandwidth=0.9) == pytest.approx(64 * 1.8 * 1.4)
    assert both_ms(law=BandwidthLaw(0.0)) == pytest.approx(64 * 1.2)
    silent = SharingTruth({KEY: structs.replace(profile(), sharing=None)}, InterferenceTruth(LAW, 0.6), {})
    spec = ReplicaSpec("only", "a", Slot(1.0, "gpu", "M60"))
    truth = silent.of(spec)
    assert truth is not None
    assert truth.work(8, Slot(1.0), 5).demand.bandwidth == 0.6
    unknown = SharingTruth({KEY: structs.replace(profile(), sharing=None)}, InterferenceTruth(), {})
    assert unknown.of(spec) is None


def test_replicas_of_which_nothing_is_known_divide_the_cores_that_are_only_reserved() -> None:
    own = structs.replace(profile(), accelerator="", sharing=None, max_cores=3.0)
    truth = SharingTruth({KEY: own}, InterferenceTruth(), {"n0": 4.0})

    def factor(neighbours: int, slot: Slot) -> float:
        found = truth.of(ReplicaSpec("only", "a", slot, "n0"))
        if found is None:
            return 0.0
        work = found.work(1, slot, 10)
        return work.law.slowdown(work.demand, [work.demand] * neighbours)

    reserved = Slot(0.5, "gpu", is_capped=False)
    assert [factor(neighbours, reserved) for neighbours in range(4)] == [1.0, 1.5, 2.25, 3.0]
    assert factor(1, Slot(0.5, "gpu")) == 0.0
    assert (
        SharingTruth({KEY: own}, InterferenceTruth(error=0.0), {"n0": 4.0}).of(ReplicaSpec("only", "a", reserved, "n0"))
        is None
    )


@given(data=st.data())
def test_work_is_conserved_whenever_batches_come_and_go(data: st.DataObject) -> None:
    """Each batch ends when the integral of its rate is its work."""
    device, now_ns, running = SharedDevice(), 0, dict[int, int]()
    demand = DeviceDemand(bandwidth=0.7)
    for number in range(data.draw(st.integers(1, 12))):
        until_ns = now_ns + data.draw(st.integers(0, 50_000_000))
        while (found := device.next_end()) is not None and found[0] <= until_ns:
            now_ns = found[0]
            device.leave(now_ns, found[1])
            del running[found[1]]
        now_ns = until_ns
        if data.draw(st.booleans()) and running:
            device.leave(now_ns, BatchId(running.popitem()[0]))
        work_ns = data.draw(st.integers(1_000_000, 60_000_000))
        device.join(now_ns, BatchId(number), BatchWork(LAW, demand, float(work_ns)))
        running[number] = now_ns + work_ns
    while (found := device.next_end()) is not None:
        assert found[0] >= now_ns
        now_ns = found[0]
        device.leave(now_ns, found[1])
        assert now_ns >= running.pop(found[1]) - 1, "nothing ends sooner than alone"
    assert not running


# As users declare it

MODEL = {
    "latency_ms": {"form": "quadratic", "alpha": 0.0, "beta": 8.0, "gamma": 0.0},
    "max_batch": 8,
    "max_cores": 1,
    "accelerator": "M60",
    "device_share": 0.33,
    "sharing": {"full_batch": 8, "bandwidth": 0.6, "law": {"form": "bandwidth", "alpha": 0.5}},
}
DETERMINISTIC = {"service": {"shape": "deterministic", "ratio": 1.0}}


def declared(**truth: Any) -> World:
    """Three replicas that share a GPU, and clumps of 24 requests each second."""
    scenario = {
        "name": "scene",
        "slo_ms": 500,
        "stages": [{"name": "only", "variants": [{"name": "a", "profile": MODEL}]}],
        "system": {"name": "static", "replicas": 3, "cores": 1.0, "batch_max": 8, "drop": "never"},
        "cluster": {
            "nodes": [
                {
                    "hardware": "custom",
                    "count": 1,
                    "cores": 8,
                    "memory_bytes": 10**10,
                    "devices": [{"kind": "M60", "memory_gib": 8}],
                }
            ]
        },
        "trace": {"kind": "square", "rate": 1, "burst_rate": 1000, "period_s": 2, "burst_s": 0.1},
        "duration_s": 100,
        "truth": DETERMINISTIC | truth,
    }
    return World.from_scenario(load_scenario(scenario))


def starts_and_ends(world: World) -> dict[BatchId, tuple[int, int, int]]:
    """Of each batch its size, and when it began and ended."""
    began: dict[BatchId, tuple[int, int]] = {}
    found: dict[BatchId, tuple[int, int, int]] = {}
    for now_ns, record in records_of(world):
        if isinstance(record, StartBatch):
            began[record.batch] = len(record.requests), now_ns
        elif isinstance(record, Finished):
            found[record.batch] = *began[record.batch], now_ns
    return found


def test_a_run_has_slower_batches_unless_its_truth_is_without_interference() -> None:
    slowed = [(end - start) / ms(8 * size) for size, start, end in starts_and_ends(declared()).values()]
    assert max(slowed) > 1.5, "three full batches together take 1.8 · 1.4 times as long"
    alone = starts_and_ends(declared(interference="none"))
    assert all(end - start == ms(8 * size) for size, start, end in alone.values())
    ends = [record for _, record in records_of(declared()) if isinstance(record, End)]
    assert ends
    assert all(end.outcome in (Outcome.SERVED, Outcome.LATE) for end in ends)


def test_what_estimates_learn_is_the_time_alone_if_the_belief_is_true() -> None:
    """Batches beside zero to two others; belief and truth differ only by the rounding of instants."""
    world = declared()
    core, seen = world.setup().core(), list[float]()
    (belief,) = core.state.applications["scene"].parts.beliefs.values()
    assert isinstance(belief, Estimate)

    def observe(self: Estimate, batch: int, slot: Slot, taken_ns: int, size: int = 0) -> None:
        seen.append(taken_ns - ms(8 * batch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Estimate, "observe", observe)
        play(core, world.cluster(), world.ingress(), until_ns=world.duration_ns)
    assert len(seen) > 300
    assert max(map(abs, seen)) <= 10, "nanoseconds"
    assert core.state.devices == {}


@pytest.mark.parametrize(
    ("interference", "wrong"),
    [
        ({"law": {"form": "cosine"}}, "Invalid value 'cosine'"),
        ({"error": -1}, "error"),
        ({"bandwidth": 1.5}, "bandwidth"),
        ("never", "interference"),
    ],
)
def test_a_truth_that_cannot_be(interference: object, wrong: str) -> None:
    with pytest.raises(InputError, match=wrong):
        declared(interference=interference)


def test_replicas_with_cores_of_their_own_are_not_disturbed_by_a_law_that_was_measured_without_caps() -> None:
    own = structs.replace(profile(), accelerator="")
    assert own.sharing is not None
    own = structs.replace(own, sharing=structs.replace(own.sharing, cores=2.0))
    truth = SharingTruth({KEY: own}, InterferenceTruth(), {})
    capped, reserved = (ReplicaSpec("only", "a", Slot(1.0, "gpu", is_capped=capped)) for capped in (True, False))
    assert truth.of(capped) is None
    assert truth.of(reserved) is not None
    assert SharingTruth({KEY: profile()}, InterferenceTruth(), {}).of(capped) is not None


def test_the_true_speed_without_a_cap_is_that_of_all_cores_alone() -> None:
    sharing = DeviceSharing(law=LAW, full_batch=8, cores=2.0)
    own = Profile(latency_ms=Amdahl(0.0, 8.0, 0.0, 2.0), max_batch=8, max_cores=4.0, sharing=sharing)
    sampler = ServiceSampler(1, {KEY: own}, cv=0.0, ratio=1.0, quota_ms=10.0)
    capped, reserved = Slot(0.5, "gpu"), Slot(0.5, "gpu", is_capped=False)
    assert sampler.speed("only", "a", capped).means_ns[1] == ms(18)
    assert sampler.speed("only", "a", reserved).means_ns[1] == ms(6)
    assert sampler.quota("only", "a", capped) is not None
    assert sampler.quota("only", "a", reserved) is None, "two whole cores"


# The server's own processes

TWO_CORES = 2.0


@pytest.mark.parametrize(("cores", "ends_ms"), [(1.0, 100.0), (1.5, 105.0), (2.0, 110.0)])
def test_what_the_processes_take_delays_batches_that_want_the_same_cores(cores: float, ends_ms: float) -> None:
    """10 ms of processor time beside a batch of 100 ms on a node with two cores."""
    device = SharedDevice()
    device.join(0, BatchId(1), BatchWork(BY_CORES, DeviceDemand(sm_use=cores / TWO_CORES), ms(100)))
    for at_ms in (20, 50):
        device.disturb(ms(at_ms), ms(5), TWO_CORES)
    assert device.end_ns(BatchId(1)) == pytest.approx(ms(ends_ms))
    assert lost(cores, TWO_CORES) == (ends_ms - 100) / 10


def test_the_processes_delay_batches_whose_law_was_measured_on_all_cores_too() -> None:
    sharing = DeviceSharing(law=LAW, full_batch=8, cores=TWO_CORES)
    device = SharedDevice()
    device.join(0, BatchId(1), BatchWork(sharing.law, sharing.demand(1), ms(100)))
    device.disturb(ms(20), ms(5), TWO_CORES)
    assert device.end_ns(BatchId(1)) == ms(105)


def test_batches_that_leave_no_core_free_lose_in_proportion_to_their_cores() -> None:
    """Of four cores two batches have three and one. They lose what is taken together, and nothing once one ends."""
    device = SharedDevice()
    for number, cores in ((1, 3.0), (2, 1.0)):
        device.join(0, BatchId(number), BatchWork(BY_CORES, DeviceDemand(sm_use=cores / 4), ms(100)))
    device.disturb(ms(10), ms(8), 4.0)
    assert [device.end_ns(BatchId(number)) for number in (1, 2)] == [ms(106), ms(102)]
    device.leave(ms(102), BatchId(2))
    device.disturb(ms(103), ms(8), 4.0)
    assert device.end_ns(BatchId(1)) == ms(106)


def test_a_profile_is_not_slowed_twice_by_what_ran_beside_its_measurement() -> None:
    samples = tuple(structs.replace(sample_of(1, cores, [ms(10)] * 20), beside_cores=0.4) for cores in (1.0, TWO_CORES))
    own = Profile(latency_ms=Quadratic(0.0, 1.0, 9.0), max_batch=1, max_cores=TWO_CORES, samples=samples)
    assert [sample.mean_ms for sample in alone(own, TWO_CORES).samples] == pytest.approx([10.0, 6.0])


@pytest.mark.parametrize(("cores", "is_slower"), [(1, False), (2, True)])
def test_a_server_whose_replica_wants_all_cores_serves_less_beside_its_own_processes(
    cores: int, is_slower: bool
) -> None:
    """100 requests/s of 2 ms each are 0.2 cores."""

    def durations_ns(truth: dict[str, Any]) -> list[int]:
        made = world(system=WORK_CONSERVING | {"cores": cores}, cores=2.0, trace=BUSY, truth=truth)
        return [record.service_ns for _, record in records_of(made) if isinstance(record, Finished)]

    processes = {"processes": {"request_us": 1500, "client_us": 500}}
    still, beside = durations_ns({"service": {"cv": 0}}), durations_ns({"service": {"cv": 0}} | processes)
    assert (sum(beside) / len(beside) > 1.03 * sum(still) / len(still)) is is_slower


BUSY = {"kind": "poisson", "rate": 100}


def test_a_recorded_run_had_its_processes_already() -> None:
    made = world(truth={"processes": {}})
    assert made.processes is not None
    recorded = RecordedRun({0: {("only", "a", "custom"): {(1, 1.0): [ms(10)] * 20}}})
    assert replace(made, recorded=recorded).processes is None
