import re
from dataclasses import replace
from pathlib import Path

import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.sim import World, simulate
from sloop.vocabulary import Request

SCENARIO = """
name: demo
slo_ms: 200
stages:
  - name: only
    profile: {latency_ms: {form: amdahl, gamma: 20, epsilon: 5, delta: 1, eta: 2}, max_batch: 8, max_cores: 16}
systems: [static, {name: sponge, margin: 0.9}]
cluster: {nodes: [{hardware: custom, count: 1, cores: 16, memory_bytes: 1000000000}]}
trace: {kind: poisson, rate: 20}
duration_s: 5
seed: 3
truth:
  profile_error: 1.2
  network: {link: {kind: constant, mbps: 20}, payload_kb: [100, 200], semantics: attach}
  failures: {mtbf_s: 4}
"""


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "scene.yaml"
    path.write_text(SCENARIO)
    return path


def test_a_scenario_is_a_world_for_each_of_its_systems(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    first = World.from_scenario(scenario)
    second = World.from_scenario(scenario, scenario.systems[1])
    assert first.setup().system.name == "static"
    assert second.setup().system.name == "sponge"
    assert first.origin == f"sloop simulate {scenario_file} --system static --seed 3"
    arrivals = [list(played.outside()) for played in (first, second)]
    assert arrivals[0] == arrivals[1], "the same requests for everybody"


def test_what_the_scenario_declares_is_what_happens(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    requests = [event for _, event in played.outside() if isinstance(event, Request)]
    transfers_ms = {round(request.elapsed_ns / 1e6, 3) for request in requests}
    assert transfers_ms == {40.96, 81.92}, "100 and 200 KB at 2,500 bytes per ms"
    assert {request.slo_ns for request in requests} == {200_000_000}
    assert played.faults.crash_mtbf_s == 4
    assert simulate(played).played.open == 0


def test_a_lead_moves_the_trace_and_nothing_else(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    late = replace(played, lead_ns=400_000_000)
    now, then = ([event for _, event in world.outside() if isinstance(event, Request)] for world in (played, late))
    assert [request.sent_ns + 400_000_000 for request in now] == [request.sent_ns for request in then]
    assert [request.elapsed_ns for request in now] == [request.elapsed_ns for request in then]
    run = simulate(late)
    assert run.played.open == 0


def test_a_world_can_be_played_again(scenario_file: Path) -> None:
    played = World.from_scenario(load_scenario(scenario_file))
    assert simulate(played).played == simulate(played).played


def test_a_recorded_link_is_read_from_beside_the_scenario(scenario_file: Path) -> None:
    link = scenario_file.with_name("link.log")
    link.write_text("0 1000 51.0 3.7 1000000 1000\n1 2000 51.0 3.7 9995000 1000\n")
    text = SCENARIO.replace("{kind: constant, mbps: 20}", "link.log")
    scenario_file.write_text(text)
    found = World.from_scenario(load_scenario(scenario_file)).link
    assert found is not None
    assert list(found.bytes_per_ms) == [1_000.0, 9_995.0]


def test_a_variant_nobody_has_measured_is_refused(scenario_file: Path) -> None:
    scenario = load_scenario(scenario_file)
    with pytest.raises(InputError, match="spong"):
        simulate(World.from_scenario(scenario, SystemChoice("sponge", {"spong": 1})))


def test_a_trace_that_is_wrong_says_where_in_the_scenario(scenario_file: Path) -> None:
    scenario_file.write_text(re.sub(r"trace: \{.*\}", "trace: {kind: poisson, rate: -20}", SCENARIO))
    with pytest.raises(InputError, match=r"\.yaml:\d+: trace\.rate: -20(\.0)? is out of range"):
        World.from_scenario(load_scenario(scenario_file))


def test_a_recorded_link_is_a_path_or_a_file_with_options(scenario_file: Path) -> None:
    (scenario_file.parent / "bus.csv").write_text("carrier,mbps\nA,20\nB,1\nA,40\n")
    text = scenario_file.read_text()
    assert "{kind: constant, mbps: 20}" in text
    scenario_file.write_text(
        text.replace("{kind: constant, mbps: 20}", "{file: bus.csv, column: mbps, only: {carrier: A}}")
    )
    link = World.from_scenario(load_scenario(scenario_file)).link
    assert link is not None
    assert tuple(link.bytes_per_ms) == (2500.0, 5000.0)
    scenario_file.write_text(text.replace("{kind: constant, mbps: 20}", "{mbps: 20}"))
    with pytest.raises(InputError, match=r"link has either `kind` or `file`"):
        World.from_scenario(load_scenario(scenario_file))
