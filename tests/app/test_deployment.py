"""Deployments: several applications on one cluster, and the scenarios that change them; the place of every mistake."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.document import parse_yaml
from sloop.app.graph import declared_name
from sloop.app.limits import Limits, ServerLimits
from sloop.app.load import (
    DEPLOYMENT_KEYS,
    SCENARIO_KEYS,
    load_application,
    load_deployment,
    load_scenario,
    read_scenario,
)
from sloop.app.scenario import Change, NodeTruth
from sloop.errors import InputError
from sloop.systems.setup import set_up
from sloop.vocabulary import Canary

STAGES = "stages: [{name: detect, profile: ResNet-T}]\n"
GRAPH = """\
slo_ms: 300
stages:
  - {name: detect, profile: ResNet-T}
  - {name: read, profile: ResNet-T, after: detect, each: {of: detect, mean: 2}, when: {of: detect, share: 0.5}}
paths: [{stages: [detect, read]}, {stages: [detect, read], slo_ms: 250}]
"""


CLUSTER = {"nodes": [{"hardware": "c5.4xlarge"}]}
POISSON = {"kind": "poisson", "rate": 10}


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)


def app_text(name: str, rest: str = "") -> str:
    return f"name: {name}\nslo_ms: 100\n{STAGES}{rest}"


def inline(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "slo_ms": 100, "stages": [{"name": "detect", "profile": "ResNet-T"}], **more}


def stages_of(deployment: Deployment) -> list[str]:
    return [stage.name for application in deployment.applications for stage in application.stages]


# What a deployment means


def test_one_application_is_a_deployment_with_the_stage_names_of_its_file(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("a"))
    deployment = load_deployment(tmp_path / "a.yaml")
    assert deployment.application == load_application(tmp_path / "a.yaml")
    assert (deployment.name, stages_of(deployment)) == ("a", ["detect"])


def test_applications_side_by_side_have_stage_names_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("a"), b=f"name: b\n{GRAPH}")
    deployment = load_deployment([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert (deployment.name, list(deployment.by_name)) == ("a+b", ["a", "b"])
    assert stages_of(deployment) == ["a/detect", "b/detect", "b/read"]
    read = deployment.by_name["b"].by_name["b/read"]
    assert (read.after, read.each and read.each.of, read.when[0].of) == (("b/detect",), "b/detect", "b/detect")
    assert [path.stages for path in deployment.by_name["b"].paths] == [("b/detect", "b/read")] * 2
    assert deployment.by_name["b"].graph.scopes["b/read"] == "b/read"
    assert declared_name("b/read") == declared_name("read") == "read"
    assert all(each.cluster == deployment.cluster for each in deployment.applications)


def test_versions_have_stage_names_of_their_own() -> None:
    application = load_application(inline("a"))
    second = application.qualified("2")
    assert (application.key, second.key, second.stages[0].name) == ("a", "a@2", "a@2/detect")
    assert application.qualified().stages[0].name == "a/detect"


def test_a_file_lists_applications_and_says_what_holds_instead_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    write(
        tmp_path,
        a=app_text("a", "weight: 3\nlimits: {requests: 7}\nlabels: {y: names.txt}\n"),
        all="""\
name: all
applications:
  - a.yaml
  - {file: a.yaml, name: again, weight: 2, rest_after_s: 30, limits: {bytes: 1e6}}
  - {name: own, slo_ms: 50, stages: [{name: s, profile: ResNet-T}], system: {name: static, cores: 2}, wake_s: 5}
system: {name: static, cores: 4}
cluster: {nodes: [{hardware: c5.4xlarge}]}
limits: {requests: 100}
""",
    )
    deployment = load_deployment(tmp_path / "all.yaml")
    a, again, own = deployment.applications
    assert (a.weight, a.rest_after_s, a.limits) == (3, 0, Limits(requests=7))
    assert (a.wake_s, again.wake_s, own.wake_s) == (0, 30, 5), "it is 30 s where an application may rest"
    assert (a.labels, again.labels) == ({"y": str(tmp_path / "names.txt")}, {"y": str(tmp_path / "names.txt")})
    assert (again.name, again.weight, again.rest_after_s, again.limits) == ("again", 2, 30, Limits(bytes=1_000_000))
    assert [each.system.parameters["cores"] for each in deployment.applications] == [4, 4, 2]
    assert (deployment.name, deployment.limits) == ("all", ServerLimits(requests=100))
    assert {each.cluster for each in deployment.applications} == {deployment.cluster}
    assert own.locate("stages[0].profile") == f"{tmp_path}/all.yaml:5: applications[2].stages[0].profile"
    assert a.locate("slo_ms") == f"{tmp_path}/a.yaml:2: slo_ms"


def parameters(deployment: Deployment) -> list[Any]:
    return [each.system.parameters for each in deployment.applications]


def test_the_system_is_the_one_that_the_applications_name() -> None:
    named = inline("b", system={"name": "static", "cores": 2})
    deployment = load_deployment([inline("a"), named, inline("c", system="static")])
    assert deployment.system == SystemChoice("static")
    assert [each.system.name for each in deployment.applications] == ["static"] * 3
    assert parameters(deployment) == [{}, {"cores": 2}, {}], "each has only its own parameters"
    assert load_deployment([inline("a"), inline("b")]).system.name == "elastic"


def test_own_parameters_replace_those_of_the_deployment_with_the_same_key() -> None:
    own = inline("b", system={"name": "static", "cores": 2, "drop": {"limit": 3}})
    declared = {"name": "x", "applications": [inline("a"), own, inline("c", system="static")]}
    deployment = load_deployment(declared | {"system": {"name": "static", "cores": 4, "replicas": 3}})
    assert parameters(deployment) == [
        {"cores": 4, "replicas": 3},
        {"cores": 2, "replicas": 3, "drop": {"limit": 3}},
        {"cores": 4, "replicas": 3},
    ]
    under = deployment.under(SystemChoice("static", {"batch_max": 1, "cores": 9}))
    assert parameters(under) == [
        {"batch_max": 1, "cores": 9},
        {"batch_max": 1, "cores": 2, "drop": {"limit": 3}},
        {"batch_max": 1, "cores": 9},
    ], "the deployment's parameters were for its own system"
    assert parameters(under.under(SystemChoice("static"))) == [{}, {"cores": 2, "drop": {"limit": 3}}, {}]


def test_wrong_parameters_name_the_file_that_declares_them(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("a", "system: {name: static, replicas: -1}\n"))
    write(tmp_path, x="name: x\napplications: [a.yaml]\nsystem:\n  name: static\n  cores: 1\n")
    with pytest.raises(InputError, match=r"a\.yaml:4: system\.replicas: must be .* at least 0 .*, not -1"):
        set_up(load_deployment(tmp_path / "x.yaml"))
    write(tmp_path, a=app_text("a", "system: {name: static, replicas: 2}\n"))
    write(tmp_path, x="name: x\napplications: [a.yaml]\nsystem:\n  name: static\n  cors: 1\n")
    with pytest.raises(InputError, match=r"x\.yaml:5: system\.cors: unknown key 'cors'\nhelp: did you mean 'cores'"):
        set_up(load_deployment(tmp_path / "x.yaml"))


def test_another_system_replaces_all() -> None:
    own = inline("b", system={"name": "static", "cores": 2})
    given = load_deployment({"name": "x", "applications": [inline("a"), own], "system": "hpa"})
    assert [each.system.name for each in given.applications] == ["hpa", "hpa"], "the deployment's file overrules"
    assert parameters(given) == [{}, {}]
    says = "b runs under hpa, its deployment's system, not static of its file"
    assert [each.overruled for each in given.applications] == [(), (says,)]
    given = load_deployment([inline("a", system={"name": "static", "cores": 1}), own])
    assert parameters(given.under(SystemChoice("static"))) == [{"cores": 1}, {"cores": 2}]
    assert [each.system.name for each in given.under(SystemChoice("hpa")).applications] == ["hpa", "hpa"]


def test_the_systems_of_a_single_application_do_not_mix() -> None:
    systems = [{"name": "static", "cores": 2}, "static"]
    single = load_scenario(inline("a", cluster=CLUSTER, systems=systems) | {"trace": POISSON})
    assert [parameters(single.deployment.under(choice)) for choice in single.systems] == [[{"cores": 2}], [{}]]


def test_the_cluster_of_one_is_that_of_all() -> None:
    nodes = {"nodes": [{"hardware": "c5.4xlarge"}]}
    deployment = load_deployment([inline("a"), inline("b", cluster=nodes), inline("c", cluster=nodes)])
    assert {node.name for each in deployment.applications for node in each.cluster} == {"c5.4xlarge-0"}


def test_an_application_that_joins_knows_the_kinds_of_the_cluster() -> None:
    rack = {"nodes": [{"hardware": "custom", "name": "rack", "cores": 4}]}
    first = load_deployment(inline("a", cluster=rack, system={"name": "static", "cores": 2}))
    declared = inline("b") | {"stages": [{"name": "s", "profiles": {"rack": "ResNet-T"}}]}
    joined = first.joined_by(load_application(declared, cluster=first.cluster))
    assert (joined.cluster, joined.system) == (first.cluster, first.system)
    with pytest.raises(InputError, match="unknown hardware 'rack'"):
        load_application(declared)


# Mistakes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\napplications: []", r"2: applications: 0 applications; a deployment has 1 to 1,000"),
        ("applications: [a.yaml]", r"1: the key 'name' is missing"),
        ("name: x\napplications: [a.yaml, a.yaml]", r"a\.yaml:1: name: two applications are called 'a'"),
        ("name: x\napplications: [c.yaml]", r"2: applications\[0\]: no application file 'c\.yaml'"),
        ("name: x\napplications: [{name: y}]", r"2: applications\[0\]: an application needs 'file' or 'stages'"),
        ("name: x\napplications: [{file: a.yaml, slo: 1}]", r"2: applications\[0\]\.slo: unknown key 'slo'"),
        ("name: x\napplications: [{file: a.yaml, weight: 0}]", r"2: applications\[0\]\.weight: must be .* above 0"),
        ("name: x\napplications: [{file: a.yaml, rest_after_s: -1}]", r"rest_after_s: must be a number of at least 0"),
        (
            "name: x\napplications: [{file: a.yaml, wake_s: 9999}]",
            r"applications\[0\]\.wake_s: must be a number of at least 0 and at most 3,600",
        ),
        ("name: x\napplications: [{file: a.yaml, limits: {request: 1}}]", r"limits\.request: .*(.|\n)*'requests'"),
        ("name: x\napplications: [x.yaml]", r"2: applications\[0\]: a deployment cannot list itself"),
        ("name: x\napplications: [y.yaml]", r"applications\[0\]: y\.yaml is a deployment, not an application"),
        ("name: x\napplications: [a.yaml]\nsytem: static", r"3: sytem: unknown key 'sytem'(.|\n)*'system'"),
        ("name: x\napplications: 3", r"2: applications: must be a list, not 3"),
        ("name: x\napplications: [{slo_ms: 9, stages: []}]", r"2: applications\[0\]: the key 'name' is missing"),
        ("name: x\napplications: [{name: [y], slo_ms: 9, stages: [{name: s, profile: ResNet-T}]}]", "must be text"),
        (
            "name: x\napplications: [a.yaml, b.yaml]",
            r"b\.yaml:4: cluster: the application declares another cluster than its .* \(.*a\.yaml:4: cluster\)",
        ),
        (
            "name: x\ncluster: {nodes: [{hardware: r5.large}]}\napplications: [a.yaml]",
            r"a\.yaml:4: cluster: .*\(.*x\.yaml:2: cluster\)\nhelp: applications of one deployment share its cluster",
        ),
    ],
)
def test_mistakes_in_a_deployment_are_named(tmp_path: Path, text: str, says: str) -> None:
    write(
        tmp_path,
        a=app_text("a", "cluster: {nodes: [{hardware: c5.4xlarge}]}\n"),
        b=app_text("b", "cluster: {nodes: [{hardware: m5.xlarge}]}\n"),
        x=text,
        y="name: y\napplications: [a.yaml]\n",
    )
    with pytest.raises(InputError, match=says):
        load_deployment(tmp_path / "x.yaml")


def test_two_of_one_name_are_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("demo"), b="slo_ms: 100\nname: demo\n" + STAGES)
    with pytest.raises(InputError, match=r"b\.yaml:2: name: two applications .*\nhelp: the first is in .*a\.yaml:1;"):
        load_deployment([tmp_path / "a.yaml", tmp_path / "b.yaml"])


def test_two_systems_are_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("a", "system: static\n"), b=app_text("b", "system: {name: hpa}\n"))
    with pytest.raises(InputError) as caught:
        load_deployment([tmp_path / "a.yaml", tmp_path / "b.yaml"])
    assert caught.value.where == f"{tmp_path}/b.yaml:4: system"
    assert f"'b' declares the system 'hpa', not 'static' as its deployment ({tmp_path}/a.yaml:4" in caught.value.what


def test_a_deployment_is_no_application_and_stands_alone(tmp_path: Path) -> None:
    write(tmp_path, a=app_text("a"), x="name: x\napplications: [a.yaml]\n")
    with pytest.raises(InputError, match=r"x\.yaml:2: applications: a deployment of several applications; one"):
        load_application(tmp_path / "x.yaml")
    with pytest.raises(InputError, match=r"x\.yaml:2: .* beside other files\nhelp: give it alone"):
        load_deployment([tmp_path / "a.yaml", tmp_path / "x.yaml"])


def test_there_may_be_a_thousand_applications() -> None:
    many = {"name": "many", "applications": [inline(f"app{number}") for number in range(1_000)]}
    assert len(load_deployment(many).applications) == 1_000
    assert load_deployment(many["applications"]).name == "app0+999"  # type: ignore[arg-type]  # a list of mappings
    with pytest.raises(InputError, match="1001 applications"):
        load_deployment({"name": "more", "applications": [inline(f"app{number}") for number in range(1_001)]})


# Scenarios


TWO = {"name": "x", "applications": [inline("a"), inline("b")], "cluster": CLUSTER}


def scenario(**more: Any) -> Any:
    return TWO | {"traces": {"a": POISSON, "b": POISSON}} | more


def test_each_application_has_a_trace_and_an_empty_one_is_no_request() -> None:
    read = load_scenario(scenario(traces={"a": POISSON, "b": None}))
    assert read.traces == {"a": POISSON}
    assert read.systems == (read.deployment.system,)
    single = inline("a", cluster=CLUSTER)
    assert load_scenario(single | {"trace": POISSON}).traces == {"a": POISSON}
    assert load_scenario(single | {"traces": {"a": POISSON}}).traces == {"a": POISSON}


def test_the_place_of_a_trace_is_known(tmp_path: Path) -> None:
    write(tmp_path, one=app_text("a") + "trace: {kind: poisson, rate: 1}\n")
    write(tmp_path, two=f"name: x\napplications: [{{file: one.yaml}}]\ntraces:\n  a: {POISSON}\n")
    assert load_scenario(tmp_path / "one.yaml").declared_trace("a").where == f"{tmp_path}/one.yaml:4: trace"
    assert load_scenario(tmp_path / "two.yaml").declared_trace("a").where == f"{tmp_path}/two.yaml:4: traces.a"
    assert len(load_deployment(tmp_path / "two.yaml").applications) == 1, "a scenario file is a deployment file"


def test_the_truth_of_nodes_and_plans() -> None:
    truth = load_scenario(scenario(truth={"nodes": {"acquire_s": 9, "mtbf_s": 100}, "plan_ms": 40})).truth
    assert truth.nodes == NodeTruth(acquire_s=9, mtbf_s=100)
    assert (truth.plan_ms, truth.nodes.repair_s) == (40, 300)
    assert load_scenario(scenario()).truth.plan_ms == 5


def test_shares_and_fan_outs_name_the_stages_of_the_deployment(tmp_path: Path) -> None:
    write(tmp_path, g=f"name: g\n{GRAPH}", h=f"name: h\n{GRAPH}")
    declared = {"name": "x", "applications": ["g.yaml", "h.yaml"], "traces": {"g": POISSON, "h": POISSON}}
    truth = {"shares": {"g/read": 0.2}, "fan_out": {"h/read": [1, 2]}}
    read = load_scenario(declared | {"truth": truth}, folder=tmp_path)
    assert (read.truth.shares, read.truth.fan_out) == ({"g/read": 0.2}, {"h/read": (1, 2)})
    with pytest.raises(InputError, match=r"unknown key 'read'(.|\n)*'[gh]/read'"):
        load_scenario(declared | {"truth": {"shares": {"read": 0.2}}}, folder=tmp_path)


def test_changes_are_sorted_by_time(tmp_path: Path) -> None:
    write(tmp_path, a2=app_text("a"), c=app_text("c"))
    changes = [
        {"at_s": 40, "remove": "b"},
        {
            "at_s": 10,
            "deploy": "a2.yaml",
            "canary": {"share": 0.2, "promote_after_s": 5},
            "truth": {"profile_error": 3},
        },
        {"at_s": 20, "promote": "a@2"},
        {"at_s": 5, "deploy": {"file": "c.yaml", "name": "d"}},
    ]
    read = load_scenario(scenario(changes=changes, traces={"a": POISSON, "b": None, "d": POISSON}), folder=tmp_path)
    new, version, promotion, removal = read.changes
    assert new.deploy is not None
    assert (new.at_ns, new.deploy.name, new.deploy.cluster) == (5_000_000_000, "d", read.deployment.cluster)
    assert version.deploy is not None
    assert [stage.name for stage in version.deploy.stages] == ["detect"], "not yet qualified"
    assert (version.canary, version.profile_error) == (Canary(share=0.2, promote_after_s=5), 3)
    assert promotion == Change(20, promote="a", version="2")
    assert removal == Change(40, remove="b")
    assert set(read.traces) == {"a", "d"}


CANARY = {"at_s": 1, "deploy": inline("a"), "canary": {"share": 0.1}}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"traces": {"a": POISSON}}, "traces: no trace for application 'b'\nhelp: add 'b:', empty if nobody calls it"),
        ({"traces": {"a": POISSON, "b": None, "c": POISSON}}, r"traces\.c: unknown key 'c'"),
        ({"traces": {"a": {"kind": "poison"}, "b": None}}, r"traces\.a\.kind: "),
        ({"trace": POISSON}, "either 'trace' or 'traces'"),
        ({"changes": [{"at_s": 1}]}, r"changes\[0\]: a change has one of 'deploy', 'promote', 'remove' and 'system'"),
        ({"changes": [{"at_s": 1, "remove": "a", "promote": "a"}]}, "a change has one of"),
        ({"changes": [{"remove": "a"}]}, "the key 'at_s' is missing"),
        ({"changes": [{"at_s": 61, "remove": "a"}]}, r"changes\[0\]\.at_s: must be a number .* at most 60, not 61"),
        ({"changes": [{"at_s": 1, "remove": "c"}]}, r"changes\[0\]\.remove: no application 'c' is deployed at 1 s"),
        ({"changes": [{"at_s": 1, "remove": "a@2"}]}, "'a' has no version 2 at 1 s"),
        ({"changes": [{"at_s": 1, "remove": "a@x"}]}, "the version 'x' is not a number"),
        (
            {"changes": [{"at_s": 1, "remove": "a"}, {"at_s": 2, "promote": "a"}]},
            "no application 'a' is deployed at 2 s",
        ),
        ({"changes": [{"at_s": 1, "remove": "a", "canary": {}}]}, "'canary' is only for 'deploy'"),
        (
            {"changes": [{"at_s": 1, "deploy": inline("a"), "canary": {"share": 0}}]},
            r"canary\.share: must be .*above 0",
        ),
        ({"changes": [{"at_s": 1, "deploy": inline("a"), "canary": {"share": 1}}]}, "less than all requests"),
        ({"changes": [{"at_s": 1, "deploy": inline("a"), "canary": {"share": 2}}]}, "less than all requests"),
        ({"changes": [{"at_s": 1, "deploy": inline("a"), "canary": {"shar": 1}}]}, "unknown key 'shar'"),
        (
            {"changes": [{"at_s": 1, "promote": "a"}]},
            r"\.promote: version 1 of 'a' is not a canary at 1 s\nhelp: deploy",
        ),
        (
            {"changes": [CANARY, {"at_s": 2, "deploy": inline("a")}, {"at_s": 3, "promote": "a"}]},
            "version 3 of 'a' is not a canary at 3 s\nhelp: write a@2",
        ),
        ({"changes": [CANARY, {"at_s": 2, "promote": "a"}, {"at_s": 3, "promote": "a"}]}, "not a canary at 3 s"),
        ({"changes": [CANARY, {"at_s": 2, "remove": "a@2"}, {"at_s": 3, "promote": "a@2"}]}, "not a canary at 3 s"),
        (
            {"changes": [{"at_s": 1, "deploy": inline("c"), "canary": {}}]},
            r"canary: no version of 'c' could serve the other requests at 1 s",
        ),
        ({"changes": [{"at_s": 1, "deploy": inline("c")}]}, "no trace for application 'c'\nhelp: add 'c:'"),
        ({"changes": [{"at_s": 1, "deploy": "new.yaml"}]}, r"changes\[0\]\.deploy: no application file 'new\.yaml'"),
        ({"changes": [{"at_s": 1, "deploy": inline("a", system="hpa")}]}, "declares the system 'hpa', not 'elastic'"),
        (
            {"changes": [{"at_s": 1, "deploy": inline("a", cluster={"nodes": [{"hardware": "local"}]})}]},
            r"changes\[0\]\.deploy\.cluster: the application declares another cluster",
        ),
    ],
)
def test_mistakes_in_a_scenario_are_named(more: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        load_scenario(scenario(**more))


def test_a_scenario_needs_traces() -> None:
    with pytest.raises(InputError, match="the key 'traces' is missing"):
        load_scenario(TWO)
    with pytest.raises(InputError, match="one trace for several applications\nhelp: give each its own"):
        load_scenario(TWO | {"trace": POISSON})
    with pytest.raises(InputError, match="the key 'trace' is missing"):
        load_scenario(inline("a"))


def test_the_only_application_of_several_is_none() -> None:
    with pytest.raises(ValueError, match="too many values"):
        assert isinstance(load_deployment(TWO).application, Application)


# Any input

MANY_KEYS = """\
name: shop
applications:
  - {name: a, slo_ms: 100, stages: [{name: s, profiles: {rack: ResNet-T, c5.2xlarge: ResNet18-human}}], weight: 2}
  - {name: b, slo_ms: 9, stages: [{name: s, profile: ResNet-T}], limits: {requests: 1, bytes: 1e6}, rest_after_s: 3}
system: {name: static, cores: 2}
limits: {requests: 100}
cluster:
  nodes:
    - {hardware: c5.2xlarge, count: 0, most: 3}
    - {hardware: custom, name: rack, cores: 2, devices: [T4, {kind: A, memory_gib: 3, name: x, clients: 2}]}
traces: {a: {kind: poisson, rate: 1}, b: , c: {kind: poisson, rate: 2}}
duration_s: 20
truth: {nodes: {acquire_s: 3, mtbf_s: 50, repair_s: 2}, plan_ms: 9}
changes:
  - {at_s: 1, deploy: {name: c, slo_ms: 5, stages: [{name: s, profile: ResNet-T}]}}
  - {at_s: 2, deploy: {name: a, slo_ms: 5, stages: [{name: s, profile: ResNet-T}]}, canary: {share: 0.3}}
  - {at_s: 3, promote: a@2}
  - {at_s: 4, remove: b}
"""


@given(data=st.data())
@settings(max_examples=200)
def test_any_mutation_is_read_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(MANY_KEYS) - 1))
    length = data.draw(st.integers(0, 12))
    piece = data.draw(st.one_of(st.text("{}[]:,-&*!#|>'\"\n\t 0.e9a~?%@\\", max_size=8), st.text(max_size=5)))
    mutated = MANY_KEYS[:start] + piece + MANY_KEYS[start + length :]
    try:
        read = read_scenario(parse_yaml(mutated, "mutated.yaml"), Path())
    except InputError as error:
        if not error.where.startswith("mutated.yaml:"):
            raise
        return
    assert len(set(stages_of(read.deployment))) == len(stages_of(read.deployment))
    assert all(each.cluster for each in read.deployment.applications)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 10**6)
    | st.floats()
    | st.sampled_from(["a", "static", "ResNet-T", "x.yaml"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "file", "stages", "at_s", "deploy", "a"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from([*DEPLOYMENT_KEYS, *SCENARIO_KEYS]), VALUES)
@settings(max_examples=200)
def test_any_value_of_any_key_is_read_or_refused(key: str, value: object) -> None:
    content = parse_yaml(MANY_KEYS).mapping()
    declared = {name: each.content for name, each in content.items()} | {key: value}
    with contextlib.suppress(InputError):
        load_scenario(declared)
