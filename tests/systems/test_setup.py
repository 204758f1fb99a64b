"""Setting up: fresh policies and beliefs of each application, definitions, and plans that are refused beforehand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.actions import Action, StartWorker
from sloop.app.application import SystemChoice
from sloop.app.load import load_application, load_deployment
from sloop.core import ApplicationParts, Core
from sloop.errors import InputError
from sloop.events import WOKE, Event, Finished, WorkerReady
from sloop.machine import Capacity
from sloop.profile.profile import save_profile
from sloop.profile.published import RESNET_T
from sloop.serve.control.versions import threads_of
from sloop.solvers.cuts import PieceCosts, PiecePlan, coarse_fronts
from sloop.systems import SYSTEMS
from sloop.systems.setup import application_in, build, definition_of, set_up
from sloop.units import NS_PER_S, ms
from sloop.vocabulary import Node, Request, RequestId
from tests.sim.test_pipelines import example

MINIMAL = {"name": "x", "slo_ms": 9, "stages": [{"name": "a", "profile": "ResNet-T"}], "system": "static"}


def test_beliefs_and_policies_are_fresh_each_time() -> None:
    application = load_application(MINIMAL)
    first, second = set_up(application), set_up(application)
    assert first.beliefs["a", "a", "local"] is not second.beliefs["a", "a", "local"]
    assert first.system.policies.scale is not second.system.policies.scale
    assert first.core().state is not second.core().state


@pytest.mark.parametrize(
    ("system", "memory_bytes", "threads"), [("elastic", 700, 2), ("static", 400, 0), ("hpa", 400, 0)]
)
def test_only_replicas_that_may_be_resized_count_sessions_for_other_numbers_of_threads(
    system: str, memory_bytes: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = structs.replace(RESNET_T, memory_bytes=700, resize_bytes=300)
    save_profile(profile, tmp_path / "p.json")
    stages = [{"name": "a", "profile": str(tmp_path / "p.json")}]
    (setup,) = set_up(load_application({**MINIMAL, "stages": stages, "system": system})).applications
    assert setup.beliefs["a", "a", "local"].memory_bytes == memory_bytes
    monkeypatch.setattr("sloop.serve.control.versions.capacity", lambda: Capacity(2.0, None))
    assert threads_of(setup) == threads


def test_sizes_of_which_nothing_is_known_and_nothing_learnt_are_refused() -> None:
    declared = {**MINIMAL, "stages": [{"name": "a", "profile": "ResNet-T", "sizes": [16, 64]}]}
    set_up(load_application(declared))
    with pytest.raises(InputError, match="a has `sizes`, its profile knows none, and `correct: false` learns none"):
        set_up(load_application({**declared, "estimates": {"correct": False}}))


def test_the_response_timeouts_that_stages_declare_come_into_the_core() -> None:
    stages = [{"name": "a", "profile": "ResNet-T", "response_timeout_s": 2}, {"name": "b", "profile": "ResNet-T"}]
    (application,) = set_up(load_application({**MINIMAL, "stages": stages})).core().state.applications.values()
    assert {name: stage.response_timeout_ns for name, stage in application.stages.items()} == {"a": ms(2000), "b": 0}


def test_another_system_can_be_chosen_with_its_own_parameters() -> None:
    setup = set_up(load_application(MINIMAL), SystemChoice("static", {"cores": 0.5}))
    assert setup.system.slots["scale"]["cores"] == 0.5
    assert setup.application.system.parameters == {"cores": 0.5}


def test_a_wrong_parameter_names_its_line(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, coores: 1}\n")
    with pytest.raises(InputError, match=r"app.yaml:4.*coores(.|\n)*did you mean 'cores'"):
        set_up(load_application(file))


def test_an_own_plan_of_fewer_replicas_than_none_is_refused(tmp_path: Path) -> None:
    """`sloop check` called a plan of -3 replicas feasible, with -6 cores in all."""
    (tmp_path / "own.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from sloop.core.protocols import Scale\n"
        "from sloop.policies import targets\n"
        "from sloop.systems import build_system\n"
        "from sloop.vocabulary import Plan\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Own(Scale):\n"
        "    period_ns: int = 10**9\n"
        "    def plan(self, now_ns, view, memory):\n"
        "        (stage,) = view.stages\n"
        "        belief = targets.belief_of(stage)\n"
        "        return Plan((targets.equal_replicas(stage, belief, count=-3, cores=1.0, batch_max=1),), ''), None\n"
        "static = build_system('static')\n"
        "SYSTEM = replace(static, name='own', policies=replace(static.policies, scale=Own()))\n"
    )
    application = load_application(MINIMAL | {"system": str(tmp_path / "own.py")})
    with pytest.raises(InputError, match="the plan of stage a has -3 replicas"):
        set_up(application, must_fit=False)


FOUR_CORES = {"nodes": [{"hardware": "custom", "cores": 4}]}


@pytest.mark.parametrize("system", ["static", "hpa", "kpa"])
def test_replicas_that_no_node_could_hold_are_refused_with_the_node(system: str) -> None:
    """They would never start, and every request would be dropped."""
    application = load_application(MINIMAL | {"cluster": FOUR_CORES, "system": {"name": system, "cores": 8}})
    with pytest.raises(InputError, match=r"a/a with 8 cores, which no node could hold\nhelp: .*custom-0, has 4 cores"):
        set_up(application)
    assert set_up(application, SystemChoice(system, {"cores": 4}))


def test_memory_that_no_node_has_is_refused_and_memory_nobody_told_is_not() -> None:
    large = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "memory_bytes": 3 << 30}
    stages = {"stages": [{"name": "a", "profile": large | {"max_batch": 4, "max_cores": 1}}]}
    small = {"nodes": [{"hardware": "custom", "cores": 4, "memory_bytes": 2 << 30}]}
    with pytest.raises(InputError, match=r"1 core, 3 GiB, which no node could hold\nhelp: .*4 cores, 2 GiB"):
        set_up(load_application(MINIMAL | stages | {"cluster": small}))
    assert set_up(load_application(MINIMAL | stages | {"cluster": FOUR_CORES}))


@pytest.mark.parametrize(("system", "needed_gib"), [({"name": "hpa", "provision": "cheapest_start"}, 2), ("hpa", 0)])
def test_memory_of_weights_that_no_node_has_is_refused(system: object, needed_gib: int) -> None:
    """Files of 2 GiB, for which the core of some systems keeps memory."""
    large = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 1, "gamma": 1}, "weights_bytes": 2 << 30}
    stages = {"stages": [{"name": "a", "profile": large | {"max_batch": 4, "max_cores": 1}}], "system": system}

    def on_node(gib: float) -> Any:
        node = {"hardware": "custom", "cores": 4, "memory_bytes": int(gib * (1 << 30))}
        return load_application(MINIMAL | stages | {"cluster": {"nodes": [node]}})

    assert set_up(on_node(max(1, needed_gib)))
    if needed_gib:
        weights = rf"1 core and, for its weights on a node, {needed_gib} GiB, which no node could hold"
        with pytest.raises(InputError, match=rf"{weights}\nhelp: .*{needed_gib - 0.5} GiB"):
            set_up(on_node(needed_gib - 0.5))


def test_what_a_system_cannot_plan_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(
        "name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, stages: {b: {cores: 1}}}\n"
    )
    with pytest.raises(InputError, match=r"app.yaml:4: system: system static: no stage 'b'"):
        set_up(load_application(file))


def test_a_variant_without_profile_says_how_to_get_one(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"")
    application = load_application(MINIMAL | {"stages": [{"name": "a", "model": str(model)}]})
    with pytest.raises(InputError, match="sloop profile"):
        set_up(application)


def test_an_error_in_the_file_names_its_line_and_one_of_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text("name: x\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: statik\n")
    with pytest.raises(InputError, match=r"app\.yaml:4: system: unknown system 'statik'\nhelp: did you mean 'static'"):
        set_up(load_application(file))
    with pytest.raises(InputError, match=r"^system: unknown system 'elastik'\nhelp: did you mean 'elastic'"):
        set_up(load_application(MINIMAL), SystemChoice("elastik"))


# Kinds of hardware

ON_T4 = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.1, "gamma": 3},
    "max_batch": 8,
    "accelerator": "T4",
    "device_memory_bytes": 2 << 30,
}


def on_kinds(profiles: dict[str, Any], *nodes: dict[str, Any], system: Any = "static") -> Any:
    stages = [{"name": "a", "profiles": profiles}]
    return load_application(MINIMAL | {"stages": stages, "cluster": {"nodes": list(nodes)}, "system": system})


CPU, GPU = {"hardware": "c5.2xlarge"}, {"hardware": "g4dn.xlarge"}


def test_beliefs_are_of_the_kinds_with_a_profile() -> None:
    setup = set_up(on_kinds({"c5.2xlarge": "ResNet-T", "g4dn.xlarge": ON_T4}, {"hardware": "m5.xlarge"}, CPU, GPU))
    assert list(setup.beliefs) == [("a", "a", "c5.2xlarge"), ("a", "a", "g4dn.xlarge")], "in the cluster's order"
    on_t4 = setup.beliefs["a", "a", "g4dn.xlarge"]
    assert (on_t4.variant, on_t4.hardware, on_t4.accelerator) == ("a", "g4dn.xlarge", "T4")


def test_no_kind_with_a_profile_is_refused() -> None:
    says = r"a/a has no profile for any kind of the cluster \(m5\.xlarge and c5\.2xlarge\)"
    with pytest.raises(InputError, match=says):
        set_up(on_kinds({"g4dn.xlarge": ON_T4}, {"hardware": "m5.xlarge"}, CPU))


def test_a_device_without_room_is_refused_with_its_memory() -> None:
    large = ON_T4 | {"device_memory_bytes": 20 << 30}
    with pytest.raises(InputError, match=r"1 of a T4 with 20 GiB, which no node could hold\nhelp: .*T4 with 16 GiB"):
        set_up(on_kinds({"g4dn.xlarge": large}, GPU))
    assert set_up(on_kinds({"g4dn.xlarge": large}, GPU), must_fit=False)


def test_nodes_on_demand_hold_replicas_of_the_first_plan() -> None:
    assert set_up(on_kinds({"c5.2xlarge": "ResNet-T"}, CPU | {"count": 0, "most": 1}))


def own_system(folder: Path, slot: str) -> str:
    """A system that asks for one replica on this slot."""
    (folder / "own.py").write_text(
        "from dataclasses import dataclass, replace\n"
        "from sloop.core.protocols import Scale\n"
        "from sloop.systems import build_system\n"
        "from sloop.vocabulary import Group, Plan, ReplicaSpec, Slot, StagePlan\n"
        "@dataclass(frozen=True, slots=True)\n"
        "class Own(Scale):\n"
        "    period_ns: int = 10**9\n"
        "    def plan(self, now_ns, view, memory):\n"
        f"        spec = ReplicaSpec('a', 'a', {slot})\n"
        "        return Plan((StagePlan('a', (Group(spec, 1),), batch_max=1),), ''), None\n"
        "static = build_system('static')\n"
        "SYSTEM = replace(static, name='own', policies=replace(static.policies, scale=Own()))\n"
    )
    return str(folder / "own.py")


@pytest.mark.parametrize(
    ("slot", "says"),
    [
        ("Slot(1, 'p3.2xlarge')", r"a replica of a/a on hardware 'p3\.2xlarge'\nhelp: it can run a on c5\.2xlarge"),
        ("Slot(1, 'c5.2xlarge', 'T4')", r"no node of hardware 'c5\.2xlarge' has a device 'T4'\nhelp: name hardware"),
        ("Slot(9, 'c5.2xlarge')", r"a/a with 9 cores, which no node could hold\nhelp: .*c5\.2xlarge-0, has 8 cores"),
        ("1 / 0", r"own\.py:9: it cannot plan: ZeroDivisionError"),
    ],
)
def test_plans_for_hardware_that_is_not_there_are_refused(tmp_path: Path, slot: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        set_up(on_kinds({"c5.2xlarge": "ResNet-T"}, CPU, system=own_system(tmp_path, slot)))


# Several applications


def inline(name: str, **more: Any) -> dict[str, Any]:
    return MINIMAL | {"name": name} | more


def test_each_application_has_its_own_policies_and_parameters() -> None:
    own = inline("b", system={"name": "static", "cores": 2}, weight=3, rest_after_s=60)
    setup = set_up(load_deployment([inline("a"), own]))
    a, b = setup.applications
    assert [each.system.slots["scale"]["cores"] for each in (a, b)] == [1, 2]
    assert a.system.policies.order is not b.system.policies.order
    assert set(setup.beliefs) == {("a/a", "a", "local"), ("b/a", "a", "local")}
    parts = b.parts()
    assert (parts.key, parts.weight, parts.rest_after_ns) == ("b", 3, 60 * NS_PER_S)
    assert set(setup.core().state.applications) == {"a", "b"}


def test_what_a_system_cannot_plan_names_the_application_and_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: static\n")
    (tmp_path / "b.yaml").write_text(
        "name: b\nslo_ms: 9\nstages: [{name: a, profile: ResNet-T}]\nsystem: {name: static, stages: {c: {cores: 1}}}\n"
    )
    with pytest.raises(InputError, match=r"b\.yaml:4: system: application 'b': system static: no stage 'c'"):
        set_up(load_deployment([tmp_path / "a.yaml", tmp_path / "b.yaml"]))


def test_another_system_is_chosen_for_all() -> None:
    setup = set_up(
        load_deployment([inline("a"), inline("b", system={"name": "static", "cores": 2})]), SystemChoice("hpa")
    )
    assert [each.system.name for each in setup.applications] == ["hpa", "hpa"]


# Definitions


def test_a_definition_of_a_shared_cluster_has_one_node_of_each_kind() -> None:
    nodes: list[dict[str, Any]] = [
        CPU | {"count": 300},
        GPU | {"count": 200},
        {"hardware": "g4dn.xlarge", "name": "bare", "devices": []},
    ]
    (made,) = set_up(on_kinds({"c5.2xlarge": "ResNet-T"}, *nodes)).applications
    definition = definition_of(made)
    assert [node["name"] for node in definition["cluster"]] == ["c5.2xlarge-0", "g4dn.xlarge-300", "bare-0"]
    assert application_in(definition).accelerators == made.application.accelerators
    assert "lines" not in definition["system"] or not definition["system"]["lines"]


def test_a_definition_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match="does not describe an application"):
        build("x", "1", {"name": "x"})


KINDS = ("c5.2xlarge", "g4dn.xlarge", "rack")
NODES = [
    {"hardware": "c5.2xlarge", "count": 2, "most": 4},
    {"hardware": "g4dn.xlarge"},
    {"hardware": "custom", "name": "rack", "cores": 12},
]
PROFILES = st.sampled_from(
    [
        "ResNet-T",
        "ResNet18-human",
        {
            "latency_ms": {"form": "table", "table": {1: {1: 46.1, 2.5: 28.9}, 4: {1: 145.4, 2.5: 82.4}}},
            "max_batch": 4,
            "load_s": 0.1,
        },
    ]
)


@st.composite
def applications(draw: st.DrawFn) -> dict[str, Any]:
    """An application of one stage or two, with one variant or two on some kinds of hardware, under any system."""
    stages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 2))):
        variants = []
        for name in draw(st.sampled_from([("small",), ("small", "large")])):
            kinds = draw(st.lists(st.sampled_from(KINDS), unique=True))
            profiles = {kind: ON_T4 if kind == "g4dn.xlarge" else draw(PROFILES) for kind in kinds}
            accuracy = {"accuracy": 70 if name == "small" else 76.123}
            variants.append(
                {"name": name, "profile": draw(PROFILES), **({"profiles": profiles} if kinds else {}), **accuracy}
            )
        after = {"after": [stages[-1]["name"]]} if stages else {}
        stages.append({"name": f"s{number}", "variants": variants, **after})
    return {
        "name": "x",
        "slo_ms": draw(st.floats(50, 3000)),
        "stages": stages,
        "estimates": {"margin": draw(st.floats(0.5, 2)), "correct": draw(st.booleans())},
        "weight": draw(st.floats(0.1, 10)),
        "rest_after_s": draw(st.sampled_from([0, 0.5])),
        "system": draw(st.sampled_from(sorted(SYSTEMS))),
        "cluster": {"nodes": NODES},
    }


def decisions(parts: ApplicationParts, cluster: tuple[Node, ...], rates: list[int]) -> list[list[Action]]:
    """What a core decides in some seconds of these request rates, in which every replica starts and batch runs at
    once."""
    core, answers, number = Core([parts], cluster), list[list[Action]](), 0

    def tell(now_ns: int, event: Event) -> None:
        answers.append(core.handle(now_ns, event))
        if core.plan_input is not None:
            tell(now_ns, core.planner.plan(core.plan_input))
        for action in list(answers[-1]):
            if isinstance(action, StartWorker):
                tell(now_ns, WorkerReady(action.worker))

    for second, rate in enumerate(rates):
        tell(second * NS_PER_S, WOKE)
        for index in range(rate):
            now_ns = second * NS_PER_S + index * NS_PER_S // rate
            tell(now_ns, Request(RequestId(number), now_ns, now_ns, now_ns + ms(500)))
            number += 1
            for replica in list(core.state.replicas.values()):
                if replica.batch is not None:
                    tell(now_ns, Finished(replica.batch.id, replica.id, ms(7)))
    return answers


@given(applications(), st.lists(st.integers(1, 12), min_size=3, max_size=3))
@settings(max_examples=60)
def test_a_definition_through_json_gives_the_same_decisions(declared: dict[str, Any], rates: list[int]) -> None:
    application = load_application(declared)
    try:
        (made,) = set_up(application, must_fit=False).applications
    except InputError:  # this system keeps to one kind of hardware, and the stages have none in common
        return
    definition = msgspec.json.decode(msgspec.json.encode(definition_of(made)))
    built = build("x", "1", definition)
    assert definition_of(made) == definition, "JSON holds it as it is"
    assert decisions(built, application.cluster, rates) == decisions(made.parts(), application.cluster, rates)


def test_a_version_is_built_from_the_system_file_as_it_is_now(tmp_path: Path) -> None:
    """As in a server in which `sloop deploy` replaces a version: the earlier one keeps the code it was built from."""
    own = tmp_path / "own.py"
    text = (
        "from dataclasses import replace\nfrom sloop.systems import SYSTEMS, build_system\n"
        "SYSTEM = replace(build_system('static', {'replicas': 1}), name='own')\n"
    )
    own.write_text(text)
    (first,) = set_up(load_application(MINIMAL | {"system": str(own)})).applications
    definition = definition_of(first)
    own.write_text(text.replace("'replicas': 1", "'replicas': 3"))
    name = first.application.name
    later = build(name, "2", definition | {"version": "2"})
    assert (first.system.policies.scale.replicas, later.policies.scale.replicas) == (1, 3)  # type: ignore[attr-defined]


def test_plans_of_parts_are_found_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def noted(costs: PieceCosts, pieces_max: int) -> list[list[PiecePlan]]:
        found.append(costs.layers)
        return coarse_fronts(costs, pieces_max)

    monkeypatch.setattr("sloop.policies.sourcing.coarse_fronts", noted)
    parts = {"name": "cheapest_start", "partition": True, "link_mbps": 12.5}
    set_up(replace(example().application, system=SystemChoice("static", {"provision": parts})))
    assert found == [2]
