"""Logs and their setups: headers, replay, and profiles refined from a server's log."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.actions import Decided, End, StartWorker
from sloop.app.load import load_application, load_deployment, load_scenario
from sloop.cli import main
from sloop.core import Core
from sloop.errors import InputError
from sloop.events import WOKE, Deployed, Event, Finished, Planned, WorkerCompleted, WorkerReady
from sloop.profile.profile import LatencyTable, Profile, sample_of, save_profile
from sloop.runlog import EVENTS, FileLog, Header, MemoryLog, ProcessorTime, Record, read_log
from sloop.sim import simulate
from sloop.sim.scenarios import run_scenario
from sloop.systems.replay import Replayed, changed_systems, header_of, rebuild, refined_profiles, replay_log, sizes_in
from sloop.systems.setup import Setup, definition_of, set_up
from sloop.units import NS_PER_S, ms
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId
from tests.sim.scene import in_parts

TABLE = {"form": "table", "table": {1: {1: 10.0, 2.5: 5.0}, 4: {1: 30.0, 2.5: 12.0}}}
VARIANT = {"name": "v", "accuracy": 71, "profile": {"latency_ms": TABLE, "max_batch": 4}}
DECLARED = {
    "name": "two",
    "slo_ms": 100,
    "stages": [
        {"name": "a", "profile": "ResNet-T"},
        {
            "name": "b",
            "after": ["a"],
            "variants": [{"name": "v", "accuracy": 71, "profile": {"latency_ms": TABLE, "max_batch": 4}}],
        },
    ],
    "system": {"name": "static", "cores": 2, "drop": {"limit": 3}},
    "cluster": {"nodes": [{"hardware": "c5.4xlarge", "count": 2}]},
}


def setup() -> Setup:
    return set_up(load_application(DECLARED))


def drive(core: Core, log: MemoryLog, steps: Sequence[tuple[int, Event]]) -> None:
    """Log these events and the core's answers, as a driver does."""
    for place, (now_ns, event) in enumerate(steps):
        log.append(now_ns, event)
        more = place + 1 < len(steps) and steps[place + 1][0] == now_ns
        for action in core.handle(now_ns, event, more):
            log.append(now_ns, action)


def recorded() -> list[tuple[int, Record]]:
    """One request through both stages, as a driver would log it."""
    core, log = setup().core(), MemoryLog()
    steps: list[tuple[int, Event]] = [
        (0, WOKE),
        (ms(1), WorkerReady(ReplicaId(0))),
        (ms(1), WorkerReady(ReplicaId(1))),
        (ms(2), Request(RequestId(0), ms(1), ms(2), ms(101))),
        (ms(32), Finished(BatchId(0), ReplicaId(0), ms(30))),
        (ms(40), Finished(BatchId(1), ReplicaId(1), ms(8))),
    ]
    drive(core, log, steps)
    assert log.records[-1][1] == End(RequestId(0), Outcome.SERVED)
    return log.records


def test_a_header_through_a_file_gives_the_same_application(tmp_path: Path) -> None:
    header = header_of(setup(), origin="sim", seed=7)
    with FileLog(tmp_path / "run.jsonl", header):
        pass
    again = rebuild(read_log(tmp_path / "run.jsonl").header)
    first = setup()
    assert again.application.stages == first.application.stages
    assert again.application.cluster == first.application.cluster
    assert again.application.system.parameters == first.application.system.parameters
    assert again.system.slots == first.system.slots


def test_a_replay_of_an_honest_recording_finds_no_difference() -> None:
    noted = [each for now_ns, record in recorded() for each in ((now_ns, record), (now_ns, ProcessorTime(now_ns)))]
    played = replay_log(noted, setup().core())
    assert played.difference is None
    assert played.events == 6
    assert played.actions == sum(
        not isinstance(record, (type(WOKE), Request, Finished, WorkerReady)) for _, record in recorded()
    )


@pytest.mark.parametrize("together", [False, True])
def test_a_replay_tells_the_events_of_one_instant_together(together: bool) -> None:
    core, log = setup().core(), MemoryLog()
    begun = [record for record in recorded() if record[0] < ms(2)]
    drive(core, MemoryLog(), [(now_ns, record) for now_ns, record in begun if isinstance(record, EVENTS)])
    pair = [Request(RequestId(id), ms(1), ms(2), ms(901)) for id in (0, 1)]
    for place, request in enumerate(pair):
        log.append(ms(2), request)
        for action in core.handle(ms(2), request, together and place == 0):
            log.append(ms(2), action)
    assert (replay_log([*begun, *log], setup().core()).difference is None) is together


def test_a_log_that_begins_with_an_answer_is_refused() -> None:
    with pytest.raises(InputError, match="begins with an action"):
        replay_log(recorded()[1:], setup().core())


def test_a_changed_action_is_found_where_it_is() -> None:
    records = recorded()
    place = next(index for index, (_, record) in enumerate(records) if isinstance(record, StartWorker))
    now_ns, start = records[place]
    assert isinstance(start, StartWorker)
    records[place] = (now_ns, StartWorker(ReplicaId(9), start.spec))
    difference = replay_log(records, setup().core()).difference
    assert difference is not None
    assert difference.record == place + 1
    assert difference.recorded["worker"] == 9
    assert difference.replayed is not None
    assert difference.replayed["worker"] == 0


@pytest.mark.parametrize("dropped", [-1, 1])
def test_a_missing_action_is_found_unless_the_log_was_cut_there(dropped: int) -> None:
    records = recorded()
    del records[dropped]
    assert (replay_log(records, setup().core()).difference is None) == (dropped == -1)


def test_another_system_answers_differently() -> None:
    other = set_up(load_application(DECLARED | {"system": {"name": "static", "cores": 1}}))
    assert replay_log(recorded(), other.core()).difference is not None


def test_a_header_that_describes_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="does not describe an application"):
        rebuild(Header(origin="sim", name="x", system="static", definitions={"x": {"name": "x"}}))
    with pytest.raises(InputError, match="does not describe its applications"):
        rebuild(Header(origin="sim", name="x", system="static"))
    header = header_of(setup(), origin="sim")
    with pytest.raises(InputError, match="does not describe its applications"):
        rebuild(msgspec.structs.replace(header, definitions={"other": header.definitions["two"]}))


def test_a_header_whose_stages_do_not_exist_is_refused() -> None:
    header = header_of(setup(), origin="sim")
    definition = header.definitions["two"]
    stages = [stage | {"after": ["missing"]} for stage in definition["stages"]]
    with pytest.raises(InputError, match="does not describe an application"):
        rebuild(msgspec.structs.replace(header, definitions={"two": definition | {"stages": stages}}))


# Several applications and versions


def several() -> Setup:
    second = DECLARED | {"name": "second", "weight": 2, "system": {"name": "static", "cores": 1}}
    return set_up(load_deployment([DECLARED, second]))


def new_version(setup: Setup, version: str, cores: int) -> Deployed:
    """A version of the first application with other parameters."""
    declared = DECLARED | {"system": {"name": "static", "cores": cores}}
    joined = setup.deployment.joined_by(load_application(declared, cluster=setup.deployment.cluster))
    (made,) = set_up(joined.qualified(version)).applications
    return Deployed("two", version, definition_of(made))


def test_several_applications_and_later_versions_replay_from_a_file(tmp_path: Path) -> None:
    path, made = tmp_path / "run.jsonl", several()
    core, log = made.core(), MemoryLog()
    steps: list[tuple[int, Event]] = [
        (0, WOKE),
        *((ms(1), WorkerReady(ReplicaId(id))) for id in range(4)),
        (ms(2), Request(RequestId(0), ms(2), ms(2), ms(101), application="second")),
        (ms(3), new_version(made, "2", cores=3)),
        (ms(4), WOKE),
        *((ms(5), WorkerReady(ReplicaId(id))) for id in (4, 5)),
        (ms(1000), WOKE),
        (ms(1001), Request(RequestId(1), ms(1001), ms(1001), ms(1100), application="two")),
    ]
    drive(core, log, steps)
    started = [record.spec for _, record in log if isinstance(record, StartWorker)]
    assert [(spec.stage, spec.cores) for spec in started if "@" in spec.stage] == [("two@2/a", 3), ("two@2/b", 3)]
    assert {(spec.stage, spec.cores) for spec in started} >= {("two/a", 2), ("second/a", 1)}
    with FileLog(path, header_of(made, origin="live")) as file:
        for now_ns, record in log:
            file.append(now_ns, record)
    read = read_log(path)
    again = rebuild(read.header)
    assert again.deployment == made.deployment
    assert replay_log(read, again.core()).difference is None


def test_a_run_with_pipelines_replays_from_a_file(tmp_path: Path) -> None:
    world = in_parts()
    with FileLog(tmp_path / "run.jsonl", header_of(world.setup(), origin="sim")) as file:
        simulate(world, [file])
    log = read_log(tmp_path / "run.jsonl")
    assert any(isinstance(record, WorkerCompleted) for _, record in log)
    assert replay_log(log, rebuild(log.header).core()).difference is None


@st.composite
def scenarios(draw: st.DrawFn) -> dict[str, Any]:
    """Two applications on two kinds of hardware, of which one is rented, and changes while they serve."""
    trace = {"kind": "poisson", "rate": draw(st.sampled_from([3, 20]))}
    first = DECLARED | {"slo_ms": 400, "rest_after_s": draw(st.sampled_from([0, 2]))}
    first = {key: value for key, value in first.items() if key not in ("system", "cluster")}
    second = {"name": "second", "slo_ms": 900, "stages": [{"name": "s", "profile": "ResNet18-human"}]}
    faster = second | {"stages": [{"name": "s", "profile": "ResNet-T"}]}
    canary = draw(st.sampled_from([None, {"share": 0.3, "requests_min": 5}, {"share": 0.5, "promote_after_s": 1}]))
    deploy = {"at_s": draw(st.floats(0, 4)), "deploy": faster, **({"canary": canary} if canary else {})}
    changes: list[dict[str, Any]] = [{"remove": "two"}, {"deploy": second | {"name": "third"}}]
    changes += [{"promote": "second"}] if canary and "promote_after_s" not in canary else []
    last = draw(st.sampled_from(changes))
    rented = {"hardware": "m5.2xlarge", "count": 0, "most": 2}
    return {
        "name": "both",
        "applications": [first, second],
        "system": draw(st.sampled_from(["elastic", "mixed", "hpa", "kpa", "harbor", "static"])),
        "cluster": {"nodes": [{"hardware": "c5.4xlarge"}, rented]},
        "traces": {"two": trace, "second": trace} | ({"third": trace} if "deploy" in last else {}),
        "truth": {"nodes": {"acquire_s": 0.5, "mtbf_s": 5, "repair_s": 0.5}, "cold_start": {"start_s": 0.3}},
        "duration_s": 8,
        "seed": draw(st.integers(0, 99)),
        "changes": [deploy, {"at_s": draw(st.floats(4, 8))} | last],
    }


@given(scenarios())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_simulated_runs_replay_whatever_changes_during_them(tmp_path: Path, declared: dict[str, Any]) -> None:
    scenario = load_scenario(declared)
    run_scenario(scenario, scenario.systems[0], log=tmp_path / "run.jsonl")
    log = read_log(tmp_path / "run.jsonl")
    played = replay_log(log, rebuild(log.header).core(), definitions=log.header.definitions)
    assert played.difference is None
    assert played.actions > 20


# Plans that are made beside the event loop

SLOW = """
from dataclasses import dataclass, field, replace
from sloop.core.protocols import Scale
from sloop.policies import targets
from sloop.systems import build_system
from sloop.vocabulary import Plan

@dataclass(frozen=True, slots=True)
class Slow(Scale):
    period_ns: int = 10**9

    def plan(self, now_ns, view, memory):
        calls = (memory or 0) + 1
        (stage,) = view.stages
        belief = targets.belief_of(stage)
        replicas = targets.equal_replicas(stage, belief, count=calls, cores=1.0, batch_max=1)
        return Plan((replicas,), f"call {calls}"), calls

static = build_system("static")
SYSTEM = replace(static, name="slow", policies=replace(static.policies, scale=Slow()))
"""


@pytest.fixture
def slow(tmp_path: Path) -> Setup:
    """An application under a policy that wants one replica more at each plan."""
    (tmp_path / "slow.py").write_text(SLOW)
    stages = [{"name": "a", "profile": "ResNet-T"}]
    cluster = {"nodes": [{"hardware": "c5.4xlarge"}]}
    system = str(tmp_path / "slow.py")
    return set_up(load_application({"name": "x", "slo_ms": 90, "stages": stages, "cluster": cluster, "system": system}))


def planned(made: Setup, *, restart: bool = False, forged: bool = False) -> MemoryLog:
    """Three plans, made by a planner beside the loop with policies of its own, which die before the second plan."""
    core, planner, log = made.core(), made.core().planner, MemoryLog()
    for second in range(3):
        drive(core, log, [(second * NS_PER_S, WOKE)])
        assert core.plan_input is not None
        answer = planner.plan(core.plan_input)
        if restart and second == 1:
            planner = rebuild(header_of(made, origin="live")).core().planner
            answer = Planned(answer.number, {}, {"x": "the planner process has died"}, restarted=True)
        if forged and second == 1:
            answer = Planned(answer.number, {})
        drive(core, log, [(second * NS_PER_S + ms(5), answer)])
    return log


def replayed(made: Setup, log: MemoryLog) -> Replayed:
    header = header_of(made, origin="live")
    return replay_log(log, rebuild(header).core(), definitions=header.definitions)


def whys(log: MemoryLog) -> list[str]:
    return [record.why for _, record in log if isinstance(record, Decided) and record.kind == "plan"]


def test_a_replay_makes_requested_plans_again(slow: Setup) -> None:
    log = planned(slow)
    assert whys(log) == ["call 1", "call 2", "call 3"]
    assert replayed(slow, log).difference is None


def test_after_a_restart_of_the_planner_its_policies_are_fresh(slow: Setup) -> None:
    log = planned(slow, restart=True)
    assert whys(log) == ["call 1"], "the third plan is the first of fresh policies, and the same"
    assert replayed(slow, log).difference is None


def test_a_system_file_that_has_changed_since_the_run_is_named(slow: Setup, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with FileLog(path, header_of(slow, origin="live")) as file:
        for now_ns, record in planned(slow):
            file.append(now_ns, record)
    assert changed_systems(read_log(path)) == []
    (tmp_path / "slow.py").write_text(SLOW.replace("count=calls", "count=1"))
    (said,) = changed_systems(read_log(path))
    assert said == f"{tmp_path / 'slow.py'} has changed since this run, so its present code may decide otherwise"
    result = CliRunner().invoke(main, ["replay", str(path)])
    assert result.exit_code == 1
    assert said in " ".join(result.stdout.split())


def test_another_plan_than_the_recorded_one_is_a_difference(slow: Setup) -> None:
    log = planned(slow, forged=True)
    difference = replayed(slow, log).difference
    assert difference is not None
    assert difference.recorded["plans"] == {}
    assert difference.replayed is not None
    assert difference.replayed["plans"]["x"]["why"] == "call 2"
    assert log.records[difference.record - 1][1] == Planned(2, {})


# Profiles from a server's log

MODEL_APP = """
name: one
slo_ms: 1000
stages: [{name: only, variants: [{name: net, model: net.onnx, profile: p.json}]}]
system: {name: static, cores: 1}
cluster: {nodes: [{hardware: custom, count: 2, cores: 1}]}
trace: {kind: poisson, rate: 30}
duration_s: 10
seed: 1
truth: {profile_error: 1.5, cold_start: {start_s: 1}}
"""


def logged(folder: Path, origin: str, more: str = "", app: str = MODEL_APP, cores_max: int = 1) -> Path:
    """The log of a run in which every batch took 1.5 × its profile, which has 1 to `cores_max` cores. `more` are
    further lines of the scenario."""
    all_cores = range(1, cores_max + 1)
    samples = tuple(
        sample_of(batch, float(cores), [ms(10 * batch / cores)] * 100) for batch in (1, 2, 4) for cores in all_cores
    )
    table = LatencyTable({batch: {float(cores): 10 * batch / cores for cores in all_cores} for batch in (1, 2, 4)})
    profile = Profile(
        latency_ms=table, max_batch=4, max_cores=cores_max, origin="measured", samples=samples, date="2026-11-20"
    )
    save_profile(profile, folder / "p.json")
    (folder / "net.onnx").write_bytes(b"a model")
    (folder / "scene.yaml").write_text(app + more)
    scenario = load_scenario(folder / "scene.yaml")
    path = folder / "run.jsonl"
    run_scenario(scenario, scenario.systems[0], log=path)
    header, rest = path.read_bytes().split(b"\n", 1)
    first = msgspec.json.decode(header) | {"origin": origin, "date": "2026-11-22T10:00:00"}
    path.write_bytes(msgspec.json.encode(first) + b"\n" + rest)
    return path


def test_a_servers_log_refines_the_profiles_of_its_models(tmp_path: Path) -> None:
    log = read_log(logged(tmp_path, "live"))
    (found,) = refined_profiles(log)
    assert (found.model, found.file, found.is_read) == (tmp_path / "net.onnx", tmp_path / "p.json", True)
    refined = found.profile
    means = {sample.batch: sample.mean_ms for sample in refined.samples}
    assert means == pytest.approx({1: 15, 2: 30, 4: 60}, rel=0.01)
    assert refined.passes[-1].in_service
    assert refined.passes[-1].beside == "a server under static, run.jsonl"
    save_profile(refined, found.file)
    assert refined_profiles(log) == [found]  # the same log adds nothing


def test_rows_of_several_sizes_refine_the_profile_size_by_size(tmp_path: Path) -> None:
    app = MODEL_APP.replace("rate: 30", "rate: 30, sizes: [16, 64]")
    log = read_log(logged(tmp_path, "live", app=app))
    (found,) = refined_profiles(log)
    assert [each.size for each in found.profile.sizes] == [16, 64]
    assert found.profile.latency_at(64, 1, 1) == pytest.approx(15, rel=0.01)
    assert sizes_in(log, tmp_path / "net.onnx").keys() == {(16, ()), (64, ())}
    save_profile(found.profile, found.file)
    assert refined_profiles(log) == [found]


def test_batches_on_cores_that_are_only_reserved_count_for_all_cores_of_the_node(tmp_path: Path) -> None:
    """Under the default system, a replica has reserved one core and uses both: those are what its batches took."""
    app = MODEL_APP.replace("system: {name: static, cores: 1}\n", "").replace("count: 2, cores: 1", "cores: 2")
    log = read_log(logged(tmp_path, "live", app=app, cores_max=2))
    plan = next(record.plan for _, record in log if isinstance(record, Decided) and record.plan is not None)
    slot = plan.stages[0].groups[0].spec.slot
    assert (slot.cores, slot.is_capped) == (1.0, False)
    (found,) = refined_profiles(log)
    (seen,) = [sample for sample in found.profile.passes[-1].samples if sample.batch == 1]
    assert seen.cores == 2.0
    assert seen.mean_ms == pytest.approx(7.5, rel=0.01)


def test_a_log_whose_batches_shared_all_cores_says_so(tmp_path: Path) -> None:
    system = "{name: static, stages: {only: {groups: [{replicas: 2, cores: 1, is_capped: false}]}}}"
    app = MODEL_APP.replace("{name: static, cores: 1}", system).replace("count: 2, cores: 1", "cores: 2")
    path = logged(tmp_path, "live", app=app.replace("rate: 30", "rate: 1000"), cores_max=2)
    with pytest.raises(InputError, match=r"of its batches shared the cores of their node with others") as refused:
        refined_profiles(read_log(path), tmp_path / "net.onnx")
    assert "static" in refused.value.help


def test_models_that_were_deployed_during_the_run_are_refined_too(tmp_path: Path) -> None:
    (tmp_path / "new.onnx").write_bytes(b"another model")
    stages = "stages: [{name: only, variants: [{name: net, model: new.onnx, profile: p.json}]}]"
    (tmp_path / "new.yaml").write_text(f"name: one\nslo_ms: 1000\n{stages}\n")
    more = "changes: [{at_s: 3, deploy: new.yaml, truth: {profile_error: 2}}]\n"
    found = refined_profiles(read_log(logged(tmp_path, "live", more)))
    means = {each.model.name: each.profile.passes[-1].samples[0].mean_ms for each in found}
    assert means == pytest.approx({"net.onnx": 15, "new.onnx": 30}, rel=0.01)
    assert [(each.file.name, each.is_read) for each in found] == [
        ("net.onnx.profile.json", False),  # both read p.json, which cannot be right for both
        ("new.onnx.profile.json", False),
    ]


def test_the_profile_for_a_kind_of_hardware_is_refined_where_it_was_read(tmp_path: Path) -> None:
    """It is neither declared nor the one for every other kind: `sloop profile --hardware rack` wrote it."""
    path = logged(tmp_path, "live")
    (tmp_path / "p.json").rename(tmp_path / "net.onnx.rack.profile.json")
    declared = MODEL_APP.replace(", profile: p.json", "").replace(
        "{hardware: custom,", "{hardware: custom, name: rack,"
    )
    (tmp_path / "scene.yaml").write_text(declared)
    scenario = load_scenario(tmp_path / "scene.yaml")
    run_scenario(scenario, scenario.systems[0], log=path)
    header, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(header) | {"origin": "live"}) + b"\n" + rest)
    (found,) = refined_profiles(read_log(path))
    assert (found.file, found.is_read) == (tmp_path / "net.onnx.rack.profile.json", True)


def test_only_servers_logs_of_that_model_refine_a_profile(tmp_path: Path) -> None:
    path = logged(tmp_path, "sim")
    with pytest.raises(InputError, match="a simulated run shows nothing about a machine"):
        refined_profiles(read_log(path))
    path = logged(tmp_path, "live")
    with pytest.raises(InputError, match=r"no 20 batches .* were run by 'other.onnx'"):
        refined_profiles(read_log(path), tmp_path / "other.onnx")
