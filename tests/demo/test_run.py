from pathlib import Path

from sloop.app.load import load_application
from sloop.demo.run import written
from sloop.demo.setting import setting_of
from sloop.profile.profile import Amdahl, Profile, path_beside, save_profile
from sloop.sim.world import World
from sloop.systems.setup import set_up

PROFILE = Profile(latency_ms=Amdahl(10.0, 0.0, 0.0, 1.0), max_batch=4, max_cores=1.75)


def test_the_files_it_leaves_are_ones_that_sloop_reads(tmp_path: Path) -> None:
    model = tmp_path / "squeezenet.onnx"
    model.write_bytes(b"")
    save_profile(PROFILE, path_beside(model))
    setting = setting_of(PROFILE, (0.25, 0.5, 1.0, 1.75), duration_s=10, seed=1)
    scenario = written(tmp_path, setting, model)
    assert sum(World.from_scenario(scenario).trace.counts_per_s()) == sum(setting.counts)
    for choice in scenario.systems:
        application = load_application(tmp_path / f"{choice.name}.yaml")
        assert application.system.parameters == choice.parameters
        assert set_up(application).application.cluster == scenario.application.cluster
