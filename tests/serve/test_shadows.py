"""Bodies and shadows: rows that are shared give what the model gives, and no answer depends on the shadow."""

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from sloop.actions import ResizeWorker, StartWorker, StopWorker
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.events import (
    Finished,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.profile.examine import Declared, examine
from sloop.profile.profile import Profile, save_profile
from sloop.serve.control.cutting import cut_of, needs_blocks
from sloop.serve.control.loading import loadable
from sloop.serve.control.servables import servables_of
from sloop.serve.dataflow import wire
from sloop.serve.messages import PairSetup, Reached, ShadowSetup, decoder
from sloop.serve.node.node import LiveNode
from sloop.serve.protocols import Servable
from sloop.serve.runtimes import Array
from sloop.serve.shadows import CutRuntime, Partner, PartnerLost, RowExchange, ShadowWorker
from sloop.serve.transport import ProcessChannel, records_in, socket_pair
from sloop.sim.checkers import Checkers, Rules
from sloop.systems.replay import replay_log
from sloop.systems.setup import set_up
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, Outcome, ReplicaId, ReplicaSpec, Slot, Worker, WorkerId
from tests.hosts import Hosts
from tests.onnx_graphs import save_model
from tests.serve.fleet import Fleet, Load, until
from tests.serve.rig import run_of
from tests.serve.test_live import TWO_CORES, check_each_ended_once, live_driver
from tests.serve.test_local_backend import Ear, local_node
from tests.serve.test_pipelines import WIDTH, check_equal, inputs, layers_of, model, profile_of, session_of
from tests.serve.test_pipelines import servable as cut_servable

__all__ = ["model"]  # a fixture

A, B, SHADOW, OTHER = (WorkerId(number) for number in (1, 2, 7, 8))


def servable(model: Path, folder: Path, row_ms: float = 200.0) -> Servable:
    return cut_servable(model, folder, row_ms=row_ms, for_shadows=True)


# Both sides in this process


@contextmanager
def beside(made: Servable, blocks: tuple[int, ...], rows: tuple[int, ...]) -> Iterator[CutRuntime]:
    """A body whose shadow is a thread of this process."""
    assert made.cut is not None
    ours, theirs = socket_pair()
    ours.setblocking(True)
    held = {place: made.cut.blocks[place] for place in blocks}
    worker = ShadowWorker(ProcessChannel(theirs), ShadowSetup("stage", held, os.getpid()))
    thread = threading.Thread(target=worker.serve)
    with ours, theirs:
        thread.start()
        ready = ProcessChannel(ours).receive()
        assert ready is not None
        (reached,) = records_in(ready, decoder(list[Reached]).decode)
        assert reached.step == "ready"
        runtime = CutRuntime(made.cut.blocks, made.signature)
        runtime.load(1)
        setup = PairSetup(WorkerId(3), reached.address, os.getpid(), blocks, rows, (20_000.0,) * len(rows))
        runtime.partner = Partner.connect(setup)
        try:
            yield runtime
        finally:
            runtime.detach()
            thread.join()


@pytest.mark.parametrize("blocks", [(0,), (0, 1), (1, 2), (0, 2), (3,), (0, 1, 2, 3), (1, 3)])
def test_any_blocks_and_any_division_give_what_the_model_gives(
    model: Path, tmp_path: Path, blocks: tuple[int, ...]
) -> None:
    with beside(servable(model, tmp_path), blocks, (0, 1, 0, 1, 2, 5)) as runtime:
        for count in (1, 2, 3, 4, 5, 6, 3):
            [y], _ = runtime.run([inputs(count)], 1)
            check_equal(y, model, inputs(count))
            assert runtime.lost is None


def test_a_shadow_may_compute_all_rows(model: Path, tmp_path: Path) -> None:
    with beside(servable(model, tmp_path), (0, 1), (0, 1, 2)) as runtime:
        for _ in range(2):  # what came first must not lie in memory that is used again
            [y], _ = runtime.run([inputs(2)], 1)
            check_equal(y, model, inputs(2))


def wrong_partner(runtime: CutRuntime, change: Callable[[dict[str, Array]], dict[str, Array]]) -> None:
    """Let the shadow's answers be changed on their way."""
    partner = runtime.partner
    assert partner is not None
    receive = partner.receive
    partner.receive = lambda first, last, until_s: change(receive(first, last, until_s))  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: {}, "nothing"),
        (lambda found: {name: each[:1] for name, each in found.items()}, r"\[1, 256\]"),
        (lambda found: {name: each[0] for name, each in found.items()}, r"\[256\]"),
    ],
)
def test_an_answer_that_is_not_these_rows_is_not_used(
    model: Path, tmp_path: Path, change: Callable[[dict[str, Array]], dict[str, Array]], why: str
) -> None:
    with beside(servable(model, tmp_path), (0, 1), (0, 0, 0, 0, 2)) as runtime:
        wrong_partner(runtime, change)
        [y], _ = runtime.run([inputs(4)], 1)
        check_equal(y, model, inputs(4))
        assert runtime.partner is None
        assert runtime.lost is not None
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(runtime.lost[1])


def test_rows_that_the_model_refuses_fail_the_batch_and_leave_the_pair_in_order(model: Path, tmp_path: Path) -> None:
    with beside(servable(model, tmp_path), (0, 1), (0, 0, 0, 0, 2)) as runtime:
        with pytest.raises(Exception, match="Got: 255"):
            runtime.run([inputs(4)[:, :255]], 1)
        assert runtime.partner is None
        [y], _ = runtime.run([inputs(4)], 1)
        check_equal(y, model, inputs(4))


def test_only_the_process_that_was_named_is_met(model: Path, tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(PartnerLost, match=f"process {os.getpid()} has connected, not process 1"):
        RowExchange.meet(ours, 1)
    setup = PairSetup(WorkerId(1), b"\0sloop-nobody", os.getpid(), (0,), (0, 1), (1.0, 1.0))
    with pytest.raises(PartnerLost, match="cannot be reached"):
        Partner.connect(setup)


# What can be cut


def test_blocks_are_cut_once_and_kept(model: Path, tmp_path: Path) -> None:
    first, second = servable(model, tmp_path), servable(model, tmp_path)
    assert first == second
    assert first.cut is not None
    assert len(list(tmp_path.iterdir())) == 1
    assert [Path(block.file).is_file() for block in first.cut.blocks] == [True] * 4


@pytest.mark.parametrize("damage", ["pieces.json", "skips.2-of-4.onnx", "", "cut"])
def test_blocks_that_are_damaged_are_cut_again(model: Path, tmp_path: Path, damage: str) -> None:
    first = servable(model, tmp_path)
    [folder] = tmp_path.iterdir()
    if damage == "pieces.json":
        (folder / damage).write_bytes(b"")
    elif damage == "cut":
        (folder / "pieces.json").write_text("[1")
    elif damage:
        (folder / damage).unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    assert servable(model, tmp_path) == first
    assert list(tmp_path.iterdir()) == [folder]
    assert first.cut is not None
    assert all(Path(block.file).stat().st_size for block in first.cut.blocks)


def test_what_a_killed_process_has_cut_goes(model: Path, tmp_path: Path) -> None:
    old, new = (tmp_path / f".{number}-{model.name}.blocks-0123" for number in (1, 2))
    for left in (old, new):
        left.mkdir()
        (left / "half").write_bytes(b"half")
    os.utime(old, (0, 0))
    servable(model, tmp_path)
    assert not old.exists()
    assert new.exists(), "perhaps its process is at work"


@pytest.mark.parametrize("for_shadows", [True, False])
def test_says_why_a_model_can_have_no_shadow_or_start_in_parts(model: Path, tmp_path: Path, for_shadows: bool) -> None:
    known, made = examine(model), profile_of()

    def refused(message: str, *profiles: Profile, obstacle: str = "") -> str:
        named = {str(number): profile for number, profile in enumerate(profiles)}
        with pytest.raises(InputError, match=message) as raised:
            cut_of(structs.replace(known, obstacle=obstacle), named, {}, tmp_path, for_shadows=for_shadows)
        return raised.value.help

    without = "shadows: false" if for_shadows else "partition: false"
    use = "attaches shadows" if for_shadows else "as parts of a model"
    unmeasured = refused(f"{use}.* were not measured", structs.replace(made, layers=None))
    assert "--layers" in unmeasured
    assert without in unmeasured
    assert without in refused("cannot share one: rows depend", made, obstacle="rows depend on each other")
    refused("cannot be cut after 'nowhere'", profile_of(layers_of(("r1", "nowhere", "y"), (2, 2, 5))))
    refused("different blocks", made, profile_of(layers_of(("r2", "y"), (4, 5))))
    assert list(tmp_path.iterdir()) == []


def test_a_boundary_where_rows_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    """y = x + mean of all x - mean of all x: rows are independent at the end, but not in between."""
    text = """(float[n, 4] x) => (float[n, 4] y) {
        [mean] mean = ReduceMean<axes = [0]>(x) [more] more = Add(x, mean) [y] y = Sub(more, mean)
    }"""
    path = save_model(tmp_path / "means.onnx", text)
    profile = profile_of(layers_of(("more", "y"), (2, 1)))
    with pytest.raises(InputError, match="cannot be divided"):
        cut_of(examine(path, declared=Declared(joins_rows=True)), {"": profile}, {}, tmp_path)
    assert list(tmp_path.iterdir()) == [path]


# Live processes

PAIR = Worker(1.0, (0, 1))


def spec() -> ReplicaSpec:
    return ReplicaSpec("stage", "skips", Slot(1.0), "here")


def batch_of(rows: int) -> list[list[Tensor]]:
    return [[Tensor("FP32", (1, WIDTH), row.tobytes())] for row in inputs(rows)]


def check(ear: Ear, batch: int, model: Path, rows: int) -> None:
    got = np.concatenate([np.frombuffer(y.data, np.float32).reshape(y.shape) for [y] in ear.outputs[BatchId(batch)]])
    check_equal(got, model, inputs(rows))


def pid_of(backend: LiveNode, worker: WorkerId = SHADOW) -> int:
    found = backend.pid(worker)
    assert found is not None
    return found


def start_shadow(backend: LiveNode, worker: WorkerId, shadow: Worker = PAIR, body: ReplicaId = A) -> None:
    variant = "skips" if body == A else "whole"
    backend.order(StartWorker(worker, ReplicaSpec("stage", variant, Slot(1.0), "here", shape=(shadow,)), body))


async def paired(backend: LiveNode, ear: Ear) -> None:
    backend.order(StartWorker(A, spec()))
    await ear.hear(WorkerReady)
    start_shadow(backend, SHADOW)
    assert await ear.hear(WorkerReady, count=2) == WorkerReady(SHADOW)


@pytest.mark.live
@pytest.mark.parametrize("spares", [0, 1])
async def test_a_life_of_a_shadow(model: Path, tmp_path: Path, spares: int) -> None:
    async with local_node({"skips": servable(model, tmp_path)}, spares_max=spares) as (backend, ear):
        await paired(backend, ear)
        for batch, rows in enumerate((4, 1, 8, 3)):
            backend.run(BatchId(batch), A, run_of(batch_of(rows)))
            await ear.hear(Finished, count=batch + 1)
            check(ear, batch, model, rows)
        pid = pid_of(backend)
        backend.order(StopWorker(SHADOW, ""))
        assert await ear.hear(WorkerStopped) == WorkerStopped(SHADOW)
        assert str(pid) not in os.listdir("/proc")
        backend.run(BatchId(9), A, run_of(batch_of(4)))
        await ear.hear(Finished, count=5)
        check(ear, 9, model, 4)
        start_shadow(backend, OTHER, Worker(1.0, (0, 1, 2)))
        assert await ear.hear(WorkerReady, count=3) == WorkerReady(OTHER)
        pid = pid_of(backend, OTHER)
        backend.order(StopWorker(A, ""))
        assert await ear.hear(WorkerStopped, count=2) == WorkerStopped(A)
        assert str(pid) not in os.listdir("/proc")
        assert not [event for event in ear.events if isinstance(event, WorkerLost)]


@pytest.mark.live
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_shadow_that_dies_or_hangs_during_a_batch_costs_no_answer(
    model: Path, tmp_path: Path, way: int
) -> None:
    # A shadow is waited for twice as long as its rows are predicted to take, and 0.1 s longer at least.
    async with local_node({"skips": servable(model, tmp_path, row_ms=200.0 if way == signal.SIGKILL else 20.0)}) as (
        backend,
        ear,
    ):
        await paired(backend, ear)
        pid = pid_of(backend)
        os.kill(pid, signal.SIGSTOP)  # so that the batch waits for it
        backend.run(BatchId(1), A, run_of(batch_of(8)))
        await asyncio.sleep(0.1)
        os.kill(pid, way)
        await ear.hear(Finished)
        check(ear, 1, model, 8)
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert lost.worker == SHADOW
        assert "in time" in lost.error if way == signal.SIGSTOP else "SIGKILL" in lost.error or "ended" in lost.error
        assert str(pid) not in os.listdir("/proc")
        backend.run(BatchId(2), A, run_of(batch_of(3)))
        await ear.hear(Finished, count=2)
        check(ear, 2, model, 3)
        start_shadow(backend, OTHER)
        assert await ear.hear(WorkerReady, count=3) == WorkerReady(OTHER)
        backend.run(BatchId(3), A, run_of(batch_of(8)))
        await ear.hear(Finished, count=3)
        check(ear, 3, model, 8)


@pytest.mark.live
async def test_attaching_and_detaching_under_load_answers_every_batch(model: Path, tmp_path: Path) -> None:
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        done, is_over = 0, False

        async def load() -> None:
            nonlocal done
            while not is_over:
                backend.run(BatchId(done), A, run_of(batch_of(1 + done % 8)))
                done += 1
                await ear.hear(Finished, count=done)
                await asyncio.sleep(0.005)

        loading = asyncio.create_task(load())
        for number in range(3):
            shadow = WorkerId(7 + number)
            start_shadow(backend, shadow, Worker(1.0, ((0, 1), (0, 2), (1, 2, 3))[number]))
            await ear.hear(WorkerReady, count=number + 2)
            await ear.hear(Finished, count=done + 8)
            if number == 1:
                backend.order(ResizeWorker(A, 0.5))
                await ear.hear(WorkerResized)
            backend.order(StopWorker(shadow, ""))
            await ear.hear(WorkerStopped, count=number + 1)
        is_over = True
        await loading
        for batch in range(done):
            check(ear, batch, model, 1 + batch % 8)
        assert not [event for event in ear.events if isinstance(event, WorkerLost)]


@pytest.mark.live
async def test_a_shadow_ends_with_its_body_and_says_why_it_cannot_start(model: Path, tmp_path: Path) -> None:
    whole = servable(model, tmp_path)
    async with local_node({"skips": whole, "whole": structs.replace(whole, cut=None)}) as (backend, ear):
        await paired(backend, ear)
        shadow = pid_of(backend)
        os.kill(pid_of(backend, A), signal.SIGKILL)
        await ear.hear(WorkerLost)
        assert str(shadow) not in os.listdir("/proc")
        start_shadow(backend, OTHER)  # too late: its replica's end is its own
        backend.order(StartWorker(B, ReplicaSpec("stage", "whole", Slot(1.0), "here")))
        await ear.hear(WorkerReady, count=3)
        assert [event.worker for event in ear.events if isinstance(event, WorkerLost)] == [A]
        start_shadow(backend, WorkerId(9), body=B)
        assert await ear.hear(WorkerLost, count=2) == WorkerLost(
            WorkerId(9), "the model of 'whole' of 'stage' is not cut into blocks"
        )
        backend.order(StopWorker(WorkerId(9), ""))
        assert await ear.hear(WorkerStopped) == WorkerStopped(WorkerId(9))


@pytest.mark.live
async def test_a_shadow_whose_blocks_are_gone_is_lost_and_its_body_serves(model: Path, tmp_path: Path) -> None:
    async with local_node({"skips": servable(model, tmp_path)}) as (backend, ear):
        backend.order(StartWorker(A, spec()))
        await ear.hear(WorkerReady)
        shutil.rmtree(tmp_path)
        start_shadow(backend, SHADOW)
        lost = await ear.hear(WorkerLost)
        assert isinstance(lost, WorkerLost)
        assert ".onnx" in lost.error
        backend.run(BatchId(1), A, run_of(batch_of(5)))
        await ear.hear(Finished)
        check(ear, 1, model, 5)


def application(model: Path, folder: Path, *, has_layers: bool = True) -> dict[str, Any]:
    """One model of which a body with one core carries 25 requests per second, by its profile.

    Bodies are adapted to `initial_rps` at once and then not for a minute, however long the first of them loads: the
    second core is left for a shadow.
    """
    profile = structs.replace(profile_of(), load_s=0.3, memory_bytes=1_000_000, hardware="here")
    save_profile(profile if has_layers else structs.replace(profile, layers=None), folder / "profile.json")
    variant = {"name": "skips", "model": str(model), "profile": str(folder / "profile.json")}
    return {
        "name": "live",
        "slo_ms": 1000,
        "stages": [{"name": "stage", "variants": [variant]}],
        "system": {"name": "headstart", "provision": "as_placed", "bursts": "shadows", "cores_max": 1}
        | {"adapt_ms": 60_000, "initial_rps": 10, "drop": "never"},
        "cluster": TWO_CORES,
    }


@pytest.mark.live
async def test_a_burst_is_met_with_a_shadow_whose_death_loses_nothing(model: Path, tmp_path: Path) -> None:
    """The whole system: the plan attaches a shadow, it is killed and replaced, and the end of the burst detaches it."""
    setup = set_up(load_application(application(model, tmp_path)))
    assert needs_blocks(setup.applications[0])
    models = servables_of(setup.application, tmp_path, in_blocks=True)
    wiring = wire(setup.application.graph, {key: each.signature for key, each in models.items()})
    async with live_driver(setup, models, wiring) as live:
        await live.until(WorkerReady)
        asked = 0

        async def burst(kind: type, count: int = 1) -> None:
            nonlocal asked
            while sum(isinstance(record, kind) for _, record in live.log) < count:
                asked += 1
                assert asked < 3000, f"no {kind.__name__} in {live.log.records[-1][0] / 1e9:.0f} s"
                live.ask(Tensor("FP32", (1, WIDTH), inputs(1 + asked % 8)[0].tobytes()))
                await asyncio.sleep(0.01)

        await burst(WorkerReady, 2)
        shadow = next(r.worker for _, r in live.log if isinstance(r, StartWorker) and r.replica is not None)
        os.kill(pid_of(live.backend, shadow), signal.SIGKILL)
        await burst(WorkerReady, 3)
        await burst(Finished, 3 + sum(isinstance(record, Finished) for _, record in live.log))
        await live.until(WorkerStopped)
        await live.all_answered()
        outcomes = check_each_ended_once(live)
        assert outcomes[Outcome.FAILED] == outcomes[Outcome.DROPPED] == outcomes[Outcome.REJECTED] == 0
        for number, [ended] in live.answers.items():
            got = np.frombuffer(ended.outputs["y"].data, np.float32)
            check_equal(got[None], model, inputs(1 + (number + 1) % 8)[:1])
        checkers = Checkers([Rules(setup.application, setup.system.policies.order)], setup.deployment.cluster)
        for now_ns, record in live.log:
            checkers.append(now_ns, record)
        assert [record.worker for _, record in live.log if isinstance(record, WorkerLost)] == [shadow]
        assert replay_log(list(live.log), set_up(setup.application).core()).difference is None


@pytest.mark.live
@pytest.mark.needs_hosts
def test_a_body_whose_host_dies_starts_on_another_one_long_before_bodies_are_adapted(
    model: Path, tmp_path: Path
) -> None:
    """Bodies are adapted once a minute here, the only one is on the host that dies, and what waits for the replacement
    is answered."""
    app = application(model, tmp_path)
    app |= {"slo_ms": 20_000, "cluster": {"nodes": [{"hardware": "local", "count": 2, "cores": 1}]}}
    app["system"]["batch"] = "full"  # adaptive batches would drop what waits
    profile = structs.replace(profile_of(), load_s=0.3, memory_bytes=1_000_000, hardware="local")
    save_profile(profile, tmp_path / "profile.json")
    with Hosts(3) as hosts:
        fleet = Fleet(list(hosts), tmp_path, json.dumps(app), env={"SLOOP_MODELS_CACHE": "/dev/shm/models"})
        try:
            fleet.start_server()
            for number in range(2):
                fleet.start_agent(f"local-{number}", hosts[1 + number])
            fleet.until_ready(1)
            (node,) = fleet.ready().values()
            with Load(
                fleet.address, "live", lambda x: session_of(model).run(None, {"x": x})[0], rate_rps=20, width=WIDTH
            ) as asking:
                asking.until_steady(10)
                hosts[1 + int(node[-1])].kill()
                until(lambda: {*fleet.ready().values()} == {f"local-{1 - int(node[-1])}"}, "a body on the other host")
                asking.until_steady(10)
            asking.check((200,))
        finally:
            fleet.stop()


def test_a_system_with_shadows_needs_measured_blocks(model: Path, tmp_path: Path) -> None:
    declared = application(model, tmp_path, has_layers=False)
    setup = set_up(load_application(declared))
    with pytest.raises(InputError, match="blocks of this one were not measured"):
        loadable(setup, tmp_path)
    without = set_up(load_application({**declared, "system": {**declared["system"], "shadows": False}}))
    assert not needs_blocks(without.applications[0])
    assert [each.cut for each in loadable(without, tmp_path)[1].values()] == [None]
