"""Loading applications, their profiles, and scenarios: what a file means, and the place and fix of every mistake."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sloop.app.application import Application, Estimates
from sloop.app.document import parse_yaml
from sloop.app.hardware import local
from sloop.app.load import load_application, load_scenario, read_application, read_scenario, usual_slo_ms
from sloop.app.scenario import ColdStartTruth, Scenario, ServiceTruth, Truth
from sloop.app.stages import read_latency, read_profile
from sloop.errors import InputError
from sloop.options import as_value
from sloop.profile.profile import (
    Amdahl,
    Latency,
    LatencyTable,
    Profile,
    Quadratic,
    Region,
    SizeLatency,
    Startup,
    digest,
    path_beside,
    save_profile,
)
from sloop.profile.published import RESNET18_HUMAN, RESNET_T
from sloop.units import GIB
from sloop.vocabulary import Device
from tests.app.conftest import application_from_text, scenario_from_text


def test_a_scenario_is_an_application_file(tmp_path: Path, scenario_text: str) -> None:
    (tmp_path / "s.yaml").write_text(scenario_text)
    (tmp_path / "t.csv").write_text("1\n")
    assert isinstance(load_application(tmp_path / "s.yaml"), Application)
    (tmp_path / "s.yaml").write_text(scenario_text.replace("{kind: poisson, rate: 100}", "{file: t.csv, scale: 2}"))
    trace = load_scenario(tmp_path / "s.yaml").traces["demo"]
    assert isinstance(trace, Mapping)
    assert trace["file"] == str((tmp_path / "t.csv").resolve())


def test_the_world_of_a_scenario_is_checked_although_only_its_application_is_used(
    tmp_path: Path, scenario_text: str
) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(scenario_text.replace("rate: 100", "rte: 100"))
    with pytest.raises(InputError, match=r"s\.yaml:\d+: trace\.rte: unknown key 'rte'\nhelp: did you mean 'rate'"):
        load_application(file)


@given(st.text(max_size=200))
@settings(max_examples=300)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(InputError):
        application_from_text(text)


@given(data=st.data())
@settings(max_examples=150)
def test_any_mutation_is_read_or_refused(scenario_text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(scenario_text) - 1))
    length = data.draw(st.integers(0, 12))
    piece = data.draw(st.one_of(st.text("{}[]:,-&*!#|>'\"\n\t 0.e9a~?%@\\", max_size=8), st.text(max_size=5)))
    mutated = scenario_text[:start] + piece + scenario_text[start + length :]
    try:
        scenario = scenario_from_text(mutated)
    except InputError as error:
        assert error.where.startswith("<text>:")  # noqa: PT017  # both are right
    else:
        assert scenario.application.order


WORDS = ["name", "slo_ms", "stages", "system", "cluster", "trace", "truth", "profile", "latency_ms", "table", "form"]
CONTENT = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.sampled_from(WORDS)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(WORDS), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@given(st.sampled_from(["name", "slo_ms", "stages", "system", "cluster", "trace", "truth", "seed"]), CONTENT)
@settings(max_examples=200)
def test_any_value_is_read_or_refused(key: str, content: object) -> None:
    base = {"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}], "trace": {"kind": "poisson"}}
    try:
        scenario = load_scenario({**base, key: content})
    except InputError as error:
        assert error.where  # noqa: PT017
    else:
        assert isinstance(scenario.application.stages[0].variants[0].profile, Profile)


# Applications


def test_reads_what_was_declared(demo: str) -> None:
    app = read_application(parse_yaml(demo), Path())
    assert (app.name, app.slo_ns) == ("demo", 200_000_000)
    assert [stage.name for stage in app.order] == ["detect", "crop", "blur", "join"]
    assert app.graph.entries == ("detect",)
    assert {path.stages for path in app.paths} == {("detect", "crop", "join"), ("detect", "blur", "join")}
    assert app.stages[0].variants[0].profile is RESNET_T
    small, large = app.by_name["crop"].variants
    assert (small.accuracy, large.name) == (69.8, "large")
    assert small.profile is not None
    assert large.profile is not None
    assert small.profile.latency_ms == Amdahl(36, 5.5, 0.9, 15)
    assert large.profile.latency_ms == Quadratic(0.1, 20, 9)
    assert (large.profile.load_s, large.profile.memory_bytes, large.profile.max_cores) == (5, 100_000_000, 1)
    assert large.profile.origin == "assumed"
    blur = app.by_name["blur"].variants[0].profile
    assert blur is not None
    assert blur.latency_ms == LatencyTable({1: {1: 46.0, 2: 28.9}, 4: {1: 145, 2: 82}})
    assert (app.system.name, app.system.parameters) == ("elastic", {"margin": 0.9})
    assert app.estimates == Estimates(correct=False, margin=1.1)
    assert [node.name for node in app.cluster] == ["c5.4xlarge-0", "c5.4xlarge-1", "box-0"]
    assert (app.cluster[0].cores, app.cluster[0].usd_per_h) == (16, 0.68)
    assert (app.cluster[2].hardware, app.cluster[2].cores) == ("box", 12), "a custom group's name is its kind"
    assert app.cluster[2].devices == (Device("T4-0", "T4", 16 * GIB), Device("T4-1", "T4", 16 * GIB))
    assert app.accelerators == {"c5.4xlarge": set(), "box": {"T4"}}


def test_one_local_node_unless_told_otherwise() -> None:
    declared = {"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}]}
    app = read_application(as_value(declared), Path())
    assert [(node.hardware, node.cores) for node in app.cluster] == [("local", local().cores)]
    assert app.system.name == "elastic"


def test_models_are_found_from_the_files_folder_with_the_profile_beside(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    save_profile(RESNET_T, path_beside(tmp_path / "net.onnx"))
    document = parse_yaml("name: a\nslo_ms: 9\nstages: [{name: s, model: ./net.onnx}]\n", "app.yaml")
    variant = read_application(document, tmp_path).stages[0].variants[0]
    assert variant.model == str((tmp_path / "net.onnx").resolve())
    assert variant.profile == RESNET_T
    path_beside(tmp_path / "net.onnx").write_text("{}")
    with pytest.raises(
        InputError, match=r"app\.yaml:3: stages\[0\]\.model: its profile 'net\.onnx\.profile\.json' is unusable"
    ):
        read_application(document, tmp_path)


def test_what_is_named_is_what_is_opened_also_if_it_is_a_link(tmp_path: Path) -> None:
    """The folder behind it is switched, as Kubernetes does, and the profile lies beside the name."""
    for number in "12":
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "net.onnx").write_bytes(number.encode())
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "net.onnx").symlink_to("..data/net.onnx")
    (tmp_path / "apps").mkdir()
    save_profile(
        structs.replace(RESNET_T, model_digest=digest(tmp_path / "net.onnx")), path_beside(tmp_path / "net.onnx")
    )
    document = parse_yaml("name: a\nslo_ms: 9\nstages: [{name: s, model: ../net.onnx}]\n", "app.yaml")
    variant = read_application(document, tmp_path / "apps").stages[0].variants[0]
    assert variant.model == str(tmp_path / "net.onnx")
    assert variant.file_on("") == str(path_beside(tmp_path / "net.onnx"))
    (tmp_path / "new").symlink_to("..2")
    (tmp_path / "new").rename(tmp_path / "..data")
    with pytest.raises(InputError, match="another version of this model"):
        read_application(document, tmp_path / "apps")


def test_dots_that_lead_back_from_a_link_are_kept(tmp_path: Path) -> None:
    (tmp_path / "far" / "apps").mkdir(parents=True)
    (tmp_path / "far" / "net.onnx").write_bytes(b"")
    (tmp_path / "apps").symlink_to(tmp_path / "far" / "apps")
    inline = "profile: {latency_ms: {form: quadratic, alpha: 0, beta: 1, gamma: 1}, max_batch: 1}"
    document = parse_yaml(f"name: a\nslo_ms: 9\nstages: [{{name: s, model: ../net.onnx, {inline}}}]\n", "app.yaml")
    variant = read_application(document, tmp_path / "apps").stages[0].variants[0]
    assert variant.model is not None
    assert Path(variant.model).samefile(tmp_path / "far" / "net.onnx")


def test_a_profile_of_another_version_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"old")
    save_profile(structs.replace(RESNET_T, model_digest=digest(model)), path_beside(model))
    document = parse_yaml("name: a\nslo_ms: 9\nstages: [{name: s, model: net.onnx}]\n", "app.yaml")
    assert read_application(document, tmp_path).stages[0].variants[0].profile is not None
    model.write_bytes(b"new")
    with pytest.raises(InputError, match="another version of this model\nhelp: measure it again"):
        read_application(document, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "where", "what", "help_text"),
    [
        ("slo_ms: 200", "slo_ns: 200", "app.yaml:2: slo_ns", "unknown key 'slo_ns'", "did you mean 'slo_ms'?"),
        ("slo_ms: 200", "slo_ms: fast", "app.yaml:2: slo_ms", "must be a number above 0, not 'fast'", ""),
        ("slo_ms: 200", "slo_ms: 0", "app.yaml:2: slo_ms", "not 0", ""),
        ("slo_ms: 200", "slo_ms: .nan", "app.yaml:2: slo_ms", "not nan", ""),
        ("slo_ms: 200", "slo_ms: true", "app.yaml:2: slo_ms", "not true", ""),
        ("slo_ms: 200", "slo_ms:", "app.yaml:2: slo_ms", "it has no value", ""),
        ("slo_ms: 200\n", "", "app.yaml:1", "the key 'slo_ms' is missing", "add 'slo_ms:'"),
        ("name: demo", "name: de mo", "app.yaml:1: name", "must be a name", "URL"),
        ("name: demo", "name: 12", "app.yaml:1: name", "must be text, not 12", "quotes"),
        ("name: demo", "name: demo\nname: two", "app.yaml:2: name", "duplicate key 'name'", "line 1"),
        ("name: crop", "name: detect", "app.yaml:6: stages[1].name", "two stages are called 'detect'", "line 4"),
        ("name: large", "name: [small]", "app.yaml:11: stages[1].variants[1].name", "must be text, not a list", ""),
        ("name: large", "name: small", "app.yaml:11: stages[1].variants[1].name", "two variants", "line 8"),
        ("after: [detect]", "after: [detekt]", "app.yaml:15: stages[1].after[0]", "no stage", "did you mean 'detect'?"),
        ("after: [detect]", "after: [join]", "app.yaml:15: stages[1].after", "crop → join → crop", "remove"),
        ("after: [detect]", "after: [detect, detect]", "app.yaml:15: stages[1].after[1]", "named twice", ""),
        ("ResNet-T", "ResNet", "app.yaml:5: stages[0].profile", "no profile file", "did you mean 'ResNet-T'?"),
        ("profile: ResNet-T", "model: x.onnx", "app.yaml:5: stages[0].model", "no model file 'x.onnx'", "folder"),
        ("profile: ResNet-T", "accuracy: 1", "app.yaml:4: stages[0]", "neither a 'model'", "add 'model:"),
        ("    variants", "    model: x\n    variants", "app.yaml:7: stages[1].model", "not both", "variant"),
        (
            "form: amdahl",
            "form: amdal",
            "app.yaml:10: stages[1].variants[0].profile.latency_ms.form",
            "one of",
            "amdahl",
        ),
        (
            "form: amdahl, ",
            "",
            "app.yaml:10: stages[1].variants[0].profile.latency_ms",
            "'form' is missing",
            "quadratic",
        ),
        ("epsilon: 5.5, ", "", "app.yaml:10:", "the key 'epsilon' is missing", ""),
        ("gamma: 36", "gamma: -360", "app.yaml:10: stages[1].variants[0].profile", "at batch 1", ""),
        ("gamma: 36", "gamma: 1e300", "app.yaml:10: ", "latency_ms.gamma: must be a number of at least", ""),
        ("max_batch: 8", "max_batch: 8.5", "app.yaml:10:", "a whole number", ""),
        ("1: 46.0", "x: 46.0", "app.yaml:17:", "the cores 'x' must be a positive number", "rows are batches"),
        ("{1: 46.0, 2: 28.9}", "7", "app.yaml:17:", "a mapping of cores", ""),
        ("c5.4xlarge", "c5.4xlarg", "app.yaml:24: cluster.nodes[0].hardware", "unknown", "did you mean 'c5.4xlarge'?"),
        ("cores: 12, ", "", "app.yaml:25: cluster.nodes[1].hardware", "custom hardware needs 'cores'", "cores: 8"),
        ("margin: 1.1", "margin: 0", "app.yaml:21: estimates.margin", "must be a number above 0 and at most 100", ""),
        ("count: 2", "count: 0", "app.yaml:24: cluster.nodes[0].count", "a group of no nodes", "`most: 4`"),
        ("count: 2", "count: 2, most: 1", "app.yaml:24: cluster.nodes[0].most", "less than `count`, 2", "raise 'most'"),
        ("[T4, T4]", "[T5]", "app.yaml:25: cluster.nodes[1].devices", "unknown accelerator 'T5'", "{kind: T5, "),
        ("[T4, T4]", "[{kind: A}]", "app.yaml:25: cluster.nodes[1].devices[0]", "'memory_gib' is missing", ""),
        (
            "[T4, T4]",
            "[{kind: A, memory_gib: 1, name: x}, {kind: B, memory_gib: 1, name: x}]",
            "app.yaml:25: cluster.nodes[1].devices[1]",
            "two devices are called 'x'",
            "unique",
        ),
        ("hardware: custom, name: box", "hardware: c5.4xlarge, name: c5.4xlarge", "app.yaml:23: ", "same name", "name"),
        ("name: box", "name: c5.4xlarge", "app.yaml:25: cluster.nodes[1].name", "a known kind of hardware", "its kind"),
        ("slo_ms: 200", "slo_ms: {", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 2\tx: [", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 200\n[1]: 2", "app.yaml:3", "a key must be text", ""),
        ("slo_ms: 200", "slo_ms: 200\n1: 2", "app.yaml:3: 1", "the key 1 must be text", "quotes"),
    ],
)
def test_mistakes_are_named(old: str, new: str, where: str, what: str, help_text: str, demo: str) -> None:
    assert old in demo
    with pytest.raises(InputError) as caught:
        read_application(parse_yaml(demo.replace(old, new, 1), "app.yaml"), Path())
    error = caught.value
    assert error.where.startswith(where), error
    assert what in error.what, error
    assert help_text in error.help, error


# Profiles


TABLE = LatencyTable({1: {0.5: 90.0, 1: 46.0}, 4: {1: 145.0}})


@pytest.mark.parametrize(
    ("text", "latency"),
    [
        ("{form: quadratic, alpha: 1, beta: 2, gamma: 3}", Quadratic(1, 2, 3)),
        ("{quadratic: {alpha: 1, beta: 2, gamma: 3}}", Quadratic(1, 2, 3)),
        ("{form: amdahl, gamma: 1, epsilon: 2, delta: 3, eta: -4e-1}", Amdahl(1, 2, 3, -0.4)),
        ("{amdahl: {gamma: 1, epsilon: 2, delta: 3, eta: 4}}", Amdahl(1, 2, 3, 4)),
        ("{form: table, table: {1: {0.5: 90, 1: 46}, 4: {1: 145}}}", TABLE),
        ("{form: table, 1: {0.5: 90, 1: 46}, 4: {1: 145}}", TABLE),
        ("{table: {1: {0.5: 90, 1: 46}, 4: {1: 145}}}", TABLE),
    ],
)
def test_ways_to_write_a_form(text: str, latency: Latency) -> None:
    assert read_latency(parse_yaml(text)) == latency


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("7", "must be a form of latency"),
        ("{}", "must be a form of latency"),
        ("{form: spline}", "must be one of quadratic, amdahl, table"),
        ("{alpha: 1}", "the key 'form' is missing"),
        ("{amdahl: 7}", "must be a mapping"),
        ("{form: quadratic, alpha: 1, beta: 2, gamma: .inf}", "gamma: must be a number"),
        ("{form: quadratic, alpha: 1, beta: 2, gama: 3}", "unknown key 'gama'"),
        ("{form: table}", "must be a table {batch: {cores: ms}}"),
        ("{form: table, table: {}}", "must be a table {batch: {cores: ms}}"),
        ("{form: table, table: {1.5: {1: 1}}}", "the batch 1.5 must be a whole number"),
        ("{form: table, table: {1: {-1: 1}}}", "the cores -1 must be a positive number"),
        ("{form: table, table: {1: {1: 0}}}", "must be a number above 0"),
    ],
)
def test_forms_that_are_wrong(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        read_latency(parse_yaml(text))
    assert what in caught.value.what


def test_by_name_and_by_file(tmp_path: Path) -> None:
    assert read_profile(parse_yaml("ResNet18-human"), tmp_path) is RESNET18_HUMAN
    save_profile(RESNET_T, tmp_path / "p.json")
    assert read_profile(parse_yaml("p.json"), tmp_path) == RESNET_T
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"<text>:1: .*not a profile"):
        read_profile(parse_yaml("bad.json"), tmp_path)
    with pytest.raises(InputError, match="no profile file"):
        read_profile(parse_yaml("x" * 5000), tmp_path)


def test_inline_with_its_provenance() -> None:
    text = """
    latency_ms: {table: {1: {1: 46.0, 2: 28.9}}}
    max_batch: 2
    hardware: a box
    origin: published
    source: a paper
    software: PyTorch
    date: 2024-04-22
    """
    profile = read_profile(parse_yaml(text), Path())
    assert (profile.max_cores, profile.region) == (2.0, Region(1, 1, 1, 2))
    assert (profile.hardware, profile.origin, profile.source) == ("a box", "published", "a paper")
    assert (profile.software, profile.date) == ("PyTorch", "2024-04-22")


def inline(text: str) -> Profile:
    latency = "latency_ms: {form: amdahl, gamma: 1, epsilon: 2, delta: 3, eta: 4}"
    return read_profile(parse_yaml(f"{latency}\nmax_batch: 2\n{text}", "a.yaml"), Path())


def test_inline_with_the_parts_of_its_start() -> None:
    profile = inline("startup: {process_s: 1, weights_s: 14.138, first_batch_s: 1.206}\nweights_bytes: 11408e6")
    assert profile.startup == Startup(1.0, 14.138, 1.206)
    assert profile.load_s == pytest.approx(16.344)
    assert profile.weights_bytes == 11_408_000_000
    assert inline("startup: {weights_s: 2}\nload_s: 2").startup == Startup(0.0, 2.0, 0.0)
    assert inline("load_s: 2").startup is None
    assert inline("startup: {weights_s: 2, send_s: 0.5}").startup == Startup(0.0, 2.0, 0.0, 0.5)
    assert inline("startup: {weights_s: 2, send_s: 0.5}").load_s == 2.5
    for wrong, what in (
        ("startup: {weights_s: 2}\nload_s: 3", r"a.yaml:4: load_s: is 3, but the parts under `startup` sum to 2"),
        ("startup: {weights_s: -2}", r"a.yaml:3: startup.weights_s: must be a number of at least 0"),
        ("startup: {weight_s: 2}", r"a.yaml:3: startup.weight_s: unknown key 'weight_s'"),
        ("weights_bytes: -1", r"a.yaml:3: weights_bytes: must be a whole number of at least 0"),
    ):
        with pytest.raises(InputError, match=what):
            inline(wrong)


def test_inline_with_several_sizes() -> None:
    latency = "latency_ms: {quadratic: {alpha: 0, beta: 4, gamma: 1}}"
    sizes = inline(f"sizes: [{{size: 16, {latency}}}, {{size: 64, {latency}}}]").sizes
    assert sizes == tuple(SizeLatency(size, Quadratic(0, 4, 1)) for size in (16, 64))
    for wrong, message in (
        ("{16: 3}", "must be a list"),
        ("[16]", "must be a size with its latency"),
        ("[{size: 16}]", "'latency_ms' is missing"),
        (f"[{{size: 0.5, {latency}}}]", "must be a whole number of at least 1"),
        (f"[{{size: 64, {latency}}}, {{size: 16, {latency}}}]", "the size 16 comes after 64"),
    ):
        with pytest.raises(InputError, match=message):
            inline(f"sizes: {wrong}")


def test_inline_without_provenance_is_assumed_where_it_stands() -> None:
    text = "\nlatency_ms: {form: amdahl, gamma: 1, epsilon: 2, delta: 3, eta: 4}\nmax_batch: 2"
    profile = read_profile(parse_yaml(text, "a.yaml"), Path())
    assert (profile.origin, profile.source, profile.max_cores) == ("assumed", "a.yaml:2", 16.0)


# Scenarios


def read_text(text: str) -> Scenario:
    return read_scenario(parse_yaml(text), Path())


def test_reads_a_scenario(scenario_text: str) -> None:
    scenario = read_text(scenario_text)
    assert scenario.application.name == "demo"
    assert scenario.traces == {"demo": {"kind": "poisson", "rate": 100}}
    assert (scenario.duration_ns, scenario.seed) == (600 * 10**9, 7)
    assert [(system.name, dict(system.parameters)) for system in scenario.systems] == [
        ("elastic", {}),
        ("static", {"cores": 16}),
    ]
    assert scenario.systems[1].path == "systems[1]"
    truth = scenario.truth
    assert (truth.service.ratio, truth.service.cv, truth.profile_error) == (1.1, None, 1.2)
    assert (truth.resize_ms, truth.resize) == (50, "rescale")
    assert (truth.cold_start.start_s, truth.cold_start.jitter, truth.cold_start.warm) == (5, 0, False)
    assert truth.network is not None
    assert (truth.network.payload_kb, truth.network.semantics) == ((100, 200), "attach")
    assert truth.network.link == {"kind": "lte"}
    assert truth.failures is not None
    assert truth.failures.mtbf_s == 3600


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("{kind: poisson, rate: 100}", "{rate: 100}", "either `kind` or `file`"),
        ("{kind: poisson, rate: 100}", "{file: none.csv}", "no file 'none.csv'"),
        ("trace: {kind: poisson, rate: 100}\n", "", "the key 'trace' is missing"),
        ("rate: 100", "rte: 100", "unknown key 'rte'"),
        ("rate: 100", "rate: 100 rps", "must be a number of at least 0"),
        ("kind: poisson", "kind: poison", "unknown kind of trace 'poison'"),
        ("kind: lte", "kind: 4g", "unknown kind of link '4g'"),
        ("kind: lte", "kind: lte, secnds: 6", "unknown key 'secnds'"),
        ("seed: 7", "seed: -1", "must be a whole number"),
        ("seed: 7", "seed: 7\nsystem: elastic", "either 'system' or 'systems'"),
        ("ratio: 1.1", "ratio: 0", "must be a number above 0"),
        ("ratio: 1.1", "ration: 1.1", "unknown key 'ration'"),
        ("resize: rescale", "resize: now", "must be one of next_batch, rescale"),
        ("mtbf_s: 3600", "", "nothing fails: give mtbf_s"),
        ("link: {kind: lte}", "link: 4g.csv", "no file '4g.csv'"),
        ("warm: false", "warm: 1", "must be true or false"),
        ("payload_kb: [100, 200]", "payload_kb: []", "at least one payload"),
        ("link: {kind: lte}, payload_kb: [100, 200], semantics: attach", "", "network: neither `link`"),
        ("link: {kind: lte}", "topology: {store_mbps: 0}", "topology.store_mbps: must be a number above 0"),
        ("link: {kind: lte}", "topology: {}", "topology: the key 'store_mbps' is missing"),
        ("link: {kind: lte}", "topology: {store_mbps: 1, store: mine}", "must be one of shared, per_node"),
        ("link: {kind: lte}", "topology: {store_mbps: 1, leaf: 5}", "unknown key 'leaf'"),
        ("link: {kind: lte}", "topology: {store_mbps: 1, leaf_mbps: 5}", "leaf_mbps: has no effect without"),
        (
            "link: {kind: lte}",
            "topology: {store_mbps: 1}",
            "topology: the size of the weights of detect/detect is unknown on",
        ),
        ("systems: [elastic, {name: static, cores: 16}]", "systems: []", "at least one system"),
    ],
)
def test_wrong_scenarios_are_refused(old: str, new: str, what: str, scenario_text: str) -> None:
    assert old in scenario_text
    with pytest.raises(InputError) as caught:
        read_text(scenario_text.replace(old, new, 1))
    assert what in caught.value.what


GRAPH = """\
name: graph
slo_ms: 200
stages:
  - {name: a, profile: ResNet-T}
  - {name: b, after: a, each: boxes, profile: ResNet-T}
  - {name: c, after: a, when: {output: kind, is: 1}, profile: ResNet-T}
  - {name: d, after: a, when: {output: kind, is: 2}, profile: ResNet-T}
  - {name: e, after: a, when: {output: kind, is: [1]}, profile: ResNet-T}
trace: {kind: poisson, rate: 1}
truth:
"""


def truth_of(text: str) -> Truth:
    return read_text(f"{GRAPH}  {text}\n").truth


def test_what_requests_do_in_a_graph_is_part_of_the_truth() -> None:
    assert (truth_of("{}").fan_out, truth_of("{}").shares) == ({}, {})
    assert truth_of("fan_out: {b: 3}").fan_out == {"b": (3,)}
    assert truth_of("fan_out: {b: [0, 1, 1, 2000]}").fan_out == {"b": (0, 1, 1, 2000)}
    assert truth_of("shares: {c: 0.8, d: 0, e: 0.8}").shares == {"c": 0.8, "d": 0.0, "e": 0.8}


@pytest.mark.parametrize(
    ("text", "where", "what", "help"),
    [
        ("fan_out: {c: 3}", "truth.fan_out.c", "unknown key 'c'", "known here: b"),
        ("fan_out: 3", "truth.fan_out", "must be a mapping", ""),
        ("fan_out: {b: []}", "truth.fan_out.b", "must be at least one number of parts", ""),
        (
            "fan_out: {b: -1}",
            "truth.fan_out.b",
            "must be a whole number of at least 0 and at most 1,000,000, not -1",
            "",
        ),
        ("fan_out: {b: [1, 2.5]}", "truth.fan_out.b[1]", "must be a whole number", ""),
        ("shares: {b: 0.5}", "truth.shares.b", "unknown key 'b'", "known here: c, d, e"),
        ("shares: {c: 1.5}", "truth.shares.c", "must be a number of at least 0 and at most 1, not 1.5", ""),
        (
            "shares: {c: 0.8, d: 0.3}",
            "truth.shares.d",
            "the shares of the branches after 'a' sum to more than 1",
            "exclude each other",
        ),
    ],
)
def test_a_truth_that_does_not_fit_the_graph_is_refused(text: str, where: str, what: str, help: str) -> None:
    with pytest.raises(InputError) as caught:
        truth_of(text)
    assert caught.value.where.endswith(f":11: {where}")
    assert what in caught.value.what
    assert help in caught.value.help


@pytest.mark.parametrize(("truth", "key"), [("fan_out: {detect: 3}", "each"), ("shares: {crop: 0.3}", "when")])
def test_a_truth_about_branches_of_a_graph_without_any_is_refused(truth: str, key: str, scenario_text: str) -> None:
    with pytest.raises(InputError, match=f"no stage has `{key}`"):
        read_text(scenario_text.replace("truth:\n", f"truth:\n  {truth}\n"))


# Defaults


def test_defaults() -> None:
    stages = [{"name": "s", "profile": "ResNet-T"}]
    scenario = load_scenario({"name": "a", "slo_ms": 1, "stages": stages, "trace": {"kind": "poisson", "rate": 1}})
    assert scenario.truth == Truth()
    assert scenario.truth.service == ServiceTruth(ratio=None, cv=None)
    assert scenario.truth.cold_start == ColdStartTruth(start_s=None, jitter=0, warm=True)
    assert (scenario.truth.profile_error, scenario.truth.resize_ms, scenario.truth.resize) == (1, 50, "next_batch")
    assert scenario.truth.network is None
    assert scenario.truth.failures is None
    assert (scenario.duration_ns, scenario.seed) == (60 * 10**9, 0)
    assert [system.name for system in scenario.systems] == ["elastic"]


@pytest.mark.parametrize(
    ("single_ms", "slo_ms"),
    [(0.01, 50), (10, 50), (10.1, 75), (17, 100), (19, 100), (21, 150), (199, 1000), (2001, 15_000)],
)
def test_the_usual_deadline_is_a_round_multiple_of_the_time_of_a_request(single_ms: float, slo_ms: float) -> None:
    assert usual_slo_ms(single_ms) == pytest.approx(slo_ms)
