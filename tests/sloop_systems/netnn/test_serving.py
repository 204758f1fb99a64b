"""Compiled networks on a server: it computes what the switches would, and its own durations say nothing of them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from sloop.actions import StartWorker
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.events import Finished, WorkerReady
from sloop.profile.model import open_model
from sloop.profile.profile import load_profile, save_profile
from sloop.runlog import read_log
from sloop.serve.protocols import Servable
from sloop.sim.scenarios import run_scenario
from sloop.systems.replay import refined_profiles
from sloop.tensor import Tensor
from sloop.vocabulary import BatchId, ReplicaSpec, Slot
from sloop_systems.netnn.compiled import CompiledNetwork, save
from sloop_systems.netnn.mapper import Fabric
from sloop_systems.netnn.quantiser import quantise
from sloop_systems.netnn.runtime import FABRIC
from sloop_systems.netnn.training import Architecture
from tests.serve.rig import run_of
from tests.serve.test_local_backend import A, local_node
from tests.systems.test_replay import MODEL_APP, logged


@pytest.mark.live
async def test_a_slot_of_a_fabric_is_a_worker_that_computes_what_the_switches_would(tmp_path: Path) -> None:
    network = Architecture(30, (4,), (6,), kernel=3, pool=2).made(1)
    given = np.random.RandomState(0).randint(0, 2, (1, 30))
    compiled = CompiledNetwork(quantise(network, given), Fabric())
    path = tmp_path / "small.innet"
    save(compiled, path)
    async with local_node({"sniff": Servable(str(path), open_model(path, 1).signature)}) as (backend, ear):
        backend.order(StartWorker(A, ReplicaSpec("stage", "sniff", Slot(1, "local", FABRIC, 0.25), "here", "innet")))
        await ear.hear(WorkerReady)
        backend.run(BatchId(5), A, run_of([[Tensor("UINT8", (1, 30), given.astype(np.uint8).tobytes())]]))
        await ear.hear(Finished)
        ((logits, _, _),) = ear.outputs[BatchId(5)]
        assert np.frombuffer(logits.data, np.int32).tolist() == compiled.network.run(given)[0].tolist()


def test_the_profile_of_switches_is_not_refined_by_processors(tmp_path: Path) -> None:
    """A server computes what a fabric would: its durations would replace the modelled ones."""
    path = logged(tmp_path, "live")
    profile = load_profile(tmp_path / "p.json")
    save_profile(msgspec.structs.replace(profile, accelerator="innet"), tmp_path / "p.json")
    fabric = "{hardware: custom, devices: [{kind: innet, memory_gib: 1}],"
    (tmp_path / "scene.yaml").write_text(MODEL_APP.replace("{hardware: custom,", fabric))
    scenario = load_scenario(tmp_path / "scene.yaml")
    run_scenario(scenario, scenario.systems[0], log=path)
    header, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(header) | {"origin": "live"}) + b"\n" + rest)
    with pytest.raises(InputError, match=r"the profile of net\.onnx is of a device whose time is modelled") as refused:
        refined_profiles(read_log(path))
    assert "--hardware local" in str(refused.value.help)
