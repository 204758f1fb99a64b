"""A fabric as a device: sessions, profiles, and plans that give each replica its share."""

from pathlib import Path

import numpy as np
import pytest

from sloop.actions import StartWorker
from sloop.app.hardware import foreign_profiles
from sloop.app.load import load_deployment, load_scenario
from sloop.errors import InputError
from sloop.profile.examine import examine
from sloop.profile.model import is_model, open_model
from sloop.profile.profile import load_profile, path_beside, save_profile
from sloop.runlog import read_log
from sloop.sim.scenarios import run_scenario
from sloop.vocabulary import Slot
from sloop_systems.netnn.compiled import CompiledNetwork, save
from sloop_systems.netnn.emulator import Emulator
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.netnn.runtime import FabricSession, fabric_profile
from sloop_systems.netnn.training import Architecture
from sloop_systems.netnn.xdp import why_no_xdp

ROWS = np.random.RandomState(0).randint(0, 2, (12, 30))


@pytest.fixture
def compiled() -> CompiledNetwork:
    network = Architecture(30, (4,), (6,), kernel=3, pool=2).made(1)
    return CompiledNetwork(quantise(network, ROWS), Fabric(slots=4), doubt=30)


@pytest.fixture
def model(tmp_path: Path, compiled: CompiledNetwork) -> Path:
    path = tmp_path / "small.innet"
    save(compiled, path)
    save_profile(fabric_profile(compiled, path, emulated_rows=3), path_beside(path))
    return path


def test_it_is_a_model_like_any_other(model: Path, compiled: CompiledNetwork) -> None:
    assert is_model(model)
    session = open_model(model, 1)
    found = examine(model)
    assert found.signature == session.signature
    assert not found.obstacle
    logits, classes, doubtful = session.run({"features": ROWS.astype(np.uint8)})
    expected = compiled.network.run(ROWS)
    assert np.array_equal(logits, expected)
    assert np.array_equal(classes, (expected >= 0).astype(int))
    assert np.array_equal(doubtful[:, 0], np.abs(expected[:, 0]) < 30)
    example = session.example(3)
    assert example is not None
    assert session.run(example)[0].shape == (3, 1)
    with pytest.raises(InputError, match="a feature is 2"):
        session.run({"features": np.full((1, 30), 2, np.uint8)})


@pytest.mark.needs_hosts
@pytest.mark.skipif(bool(why_no_xdp()), reason=why_no_xdp() or "-")
def test_in_the_kernel_it_answers_the_same(tmp_path: Path, compiled: CompiledNetwork) -> None:
    path = tmp_path / "kernel.innet"
    save(CompiledNetwork(compiled.network, compiled.fabric, doubt=30, in_kernel=True), path)
    session = FabricSession(path)
    assert session.software == "programs in the kernel"
    assert np.array_equal(session.run({"features": ROWS})[0], compiled.network.run(ROWS))
    session.close()


def test_its_profile_believes_the_model_and_has_what_the_emulator_took(model: Path, compiled: CompiledNetwork) -> None:
    profile = load_profile(path_beside(model))
    time = compiled.program.time
    assert profile.accelerator == "innet"
    assert profile.latency_ms.latency_ms(1, 1.0) == pytest.approx(time.latency_ns / 1e6)
    assert profile.device_share == pytest.approx(1 / time.shares)
    assert profile.max_batch == 1
    (sample,) = profile.samples
    verdicts, _ = Emulator(compiled.program).run(ROWS[:1])
    assert sample.n == 3
    assert sample.p50_ms == pytest.approx((verdicts[0].end_ns - verdicts[0].start_ns) / 1e6, rel=0.5)
    assert not fabric_profile(compiled, model, emulated_rows=0).samples


APPLICATION = """
name: flows
slo_ms: 5
stages:
  - {name: sniff, model: ./small.innet}
  - name: inspect
    profile: {max_batch: 4, latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}}
    after: sniff
    when: {output: doubtful, is: 1, share: 0.1}
system: mixed
cluster:
  nodes:
    - {hardware: custom, name: fabric, cores: 8, devices: [{kind: innet, memory_gib: 0.01}]}
    - {hardware: custom, name: server, cores: 8}
trace: {kind: poisson, rate: 2000}
duration_s: 2
"""


def test_plans_simulations_and_explanations_treat_it_as_a_device(model: Path) -> None:
    file = model.with_name("flows.yaml")
    file.write_text(APPLICATION)
    application = load_deployment([file]).applications[0]
    assert not foreign_profiles(application)
    (belief,) = [application.profiles_of(variant) for variant in application.stages[0].variants]
    assert list(belief) == ["fabric"]
    slots, attained = _simulated(file)
    assert attained > 0.99
    share = load_profile(path_beside(model)).device_share
    assert {(slot.hardware, slot.accelerator, slot.share) for slot in slots} == {("fabric", "innet", share)}


def test_its_profile_is_not_of_this_machines_processor(model: Path) -> None:
    file = model.with_name("flows.yaml")
    local = "{hardware: local, devices: [{kind: innet, memory_gib: 0.01}]}"
    file.write_text(APPLICATION.replace("{hardware: custom, name: server, cores: 8}", local))
    application = load_deployment([file]).applications[0]
    assert application.profiles_of(application.stages[0].variants[0]).keys() == {"fabric", "local"}
    assert not foreign_profiles(application)


def _simulated(file: Path) -> tuple[list[Slot], float]:
    """The slots of the replicas of `sniff`, and the share of requests in time."""
    scenario = load_scenario(file)
    log = file.with_name("run.jsonl")
    run = run_scenario(scenario, scenario.systems[0], log=log)
    starts = [record for _, record in read_log(log) if isinstance(record, StartWorker)]
    return [record.spec.slot for record in starts if record.spec.stage == "sniff"], run.row.attainment


def test_more_replicas_than_shares_do_not_fit(model: Path) -> None:
    """A device of one share has room for one replica."""
    file = model.with_name("flows.yaml")
    profile = load_profile(path_beside(model))
    text = path_beside(model).read_text()
    path_beside(model).write_text(text.replace(f'"device_share": {profile.device_share}', '"device_share": 1.0'))
    file.write_text(APPLICATION.replace("rate: 2000", "rate: 20000").replace("duration_s: 2", "duration_s: 0.2"))
    assert len(_simulated(file)[0]) == 1
