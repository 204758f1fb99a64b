"""Application and scenario files: what they mean, and that every mistake is named with its file, line and key."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.app.application import Application
from sloop.app.hardware import local
from sloop.app.load import application_from_text, load_application, load_scenario, scenario_from_text
from sloop.errors import InputError
from sloop.profile import RESNET_T, Amdahl, Profile, Quadratic, Table
from sloop.profile.store import path_beside, save_profile

DEMO = """\
name: demo
slo_ms: 200
stages:
  - name: detect
    profile: ResNet-T
  - name: crop
    variants:
      - name: small
        accuracy: 69.8
        profile: {latency_ms: {form: amdahl, gamma: 36, epsilon: 5.5, delta: 0.9, eta: 15}, max_batch: 8, max_cores: 16}
      - name: large
        accuracy: 76.1
        profile:
          {latency_ms: {form: quadratic, alpha: 0.1, beta: 20, gamma: 9}, max_batch: 4, load_s: 5, memory_bytes: 1e8}
    after: [detect]
  - name: blur
    profile: {latency_ms: {table: {1: {1: 46.0, 2: 28.9}, 4: {1: 145, 2: 82}}}, max_batch: 4}
    after: detect
  - {name: join, profile: ResNet-T, after: [crop, blur]}
system: {name: sponge, margin: 0.9}
cluster:
  nodes:
    - {hardware: c5.4xlarge, count: 2}
    - {hardware: custom, name: box, cores: 12, devices: [T4, T4]}
"""


def test_reads_what_was_declared() -> None:
    app = application_from_text(DEMO)
    assert (app.name, app.slo_ns) == ("demo", 200_000_000)
    assert [stage.name for stage in app.order] == ["detect", "crop", "blur", "join"]
    assert [stage.name for stage in app.sources] == ["detect"]
    assert [stage.name for stage in app.sinks] == ["join"]
    assert app.successors["detect"] == ("crop", "blur")
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
    assert blur.latency_ms == Table({1: {1: 46.0, 2: 28.9}, 4: {1: 145, 2: 82}})
    assert (app.system.name, app.system.parameters) == ("sponge", {"margin": 0.9})
    assert [node.name for node in app.cluster] == ["c5.4xlarge-0", "c5.4xlarge-1", "box-0"]
    assert (app.cluster[0].cores, app.cluster[0].usd_per_h) == (16, 0.68)
    assert (app.cluster[2].cores, app.cluster[2].devices) == (12, ("T4-0", "T4-1"))


def test_locates_keys_and_the_nearest_above() -> None:
    app = application_from_text(DEMO, file="a.yaml")
    assert app.locate("system.margin") == "a.yaml:20"
    assert app.locate("system.nothing") == "a.yaml:20"
    assert app.locate("stages[1].variants[1].accuracy") == "a.yaml:12"
    assert app.locate("nowhere") == "a.yaml:1"


def test_one_local_node_unless_told_otherwise() -> None:
    app = load_application({"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}]})
    assert [(node.hardware, node.cores) for node in app.cluster] == [("local", local().cores)]
    assert app.system.name == "sponge"


def test_topological_order_does_not_need_the_files_order() -> None:
    stages = [{"name": "b", "profile": "ResNet-T", "after": ["a"]}, {"name": "a", "profile": "ResNet-T"}]
    app = load_application({"name": "x", "slo_ms": 1, "stages": stages})
    assert [stage.name for stage in app.order] == ["a", "b"]


def test_models_are_found_from_the_files_folder_with_the_profile_beside(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    save_profile(RESNET_T, path_beside(tmp_path / "net.onnx"))
    (tmp_path / "app.yaml").write_text("name: a\nslo_ms: 9\nstages: [{name: s, model: ./net.onnx}]\n")
    variant = load_application(tmp_path / "app.yaml").stages[0].variants[0]
    assert variant.model == str((tmp_path / "net.onnx").resolve())
    assert variant.profile == RESNET_T
    path_beside(tmp_path / "net.onnx").write_text("{}")
    with pytest.raises(InputError, match=r"app\.yaml:3: stages\[0\]\.model: the profile beside it"):
        load_application(tmp_path / "app.yaml")


def test_profile_from_a_file(tmp_path: Path) -> None:
    save_profile(RESNET_T, tmp_path / "p.json")
    (tmp_path / "app.yaml").write_text("name: a\nslo_ms: 9\nstages: [{name: s, profile: p.json}]\n")
    assert load_application(tmp_path / "app.yaml").stages[0].variants[0].profile == RESNET_T


def _wrong(old: str, new: str) -> InputError:
    assert old in DEMO, old
    with pytest.raises(InputError) as caught:
        application_from_text(DEMO.replace(old, new, 1), file="app.yaml")
    return caught.value


@pytest.mark.parametrize(
    ("old", "new", "where", "what", "help_text"),
    [
        ("slo_ms: 200", "slo_ns: 200", "app.yaml:2: slo_ns", "unknown key 'slo_ns'", "did you mean 'slo_ms'?"),
        ("slo_ms: 200", "slo_ms: fast", "app.yaml:2: slo_ms", "must be a number above 0, not 'fast'", ""),
        ("slo_ms: 200", "slo_ms: 0", "app.yaml:2: slo_ms", "not 0", ""),
        ("slo_ms: 200", "slo_ms: .nan", "app.yaml:2: slo_ms", "not nan", ""),
        ("slo_ms: 200", "slo_ms: true", "app.yaml:2: slo_ms", "not true", ""),
        ("slo_ms: 200", "slo_ms:", "app.yaml:2: slo_ms", "not empty", ""),
        ("slo_ms: 200\n", "", "app.yaml:1", "the key 'slo_ms' is missing", "add 'slo_ms:'"),
        ("name: demo", "name: de mo", "app.yaml:1: name", "must be a name", "URL"),
        ("name: demo", "name: 12", "app.yaml:1: name", "must be text, not 12", "quotes"),
        ("name: demo", "name: demo\nname: two", "app.yaml:2: name", "duplicate key 'name'", "line 1"),
        ("name: crop", "name: detect", "app.yaml:6: stages[1].name", "two stages are called 'detect'", "line 4"),
        ("name: large", "name: small", "app.yaml:11: stages[1].variants[1].name", "two variants", "line 8"),
        ("after: [detect]", "after: [detekt]", "app.yaml:15: stages[1].after[0]", "no stage", "did you mean 'detect'?"),
        ("after: [detect]", "after: [join]", "app.yaml:15: stages[1].after", "crop → join → crop", "remove"),
        ("after: [detect]", "after: [detect, detect]", "app.yaml:15: stages[1].after[1]", "named twice", ""),
        ("ResNet-T", "ResNet", "app.yaml:5: stages[0].profile", "no profile file", "did you mean 'ResNet-T'?"),
        ("profile: ResNet-T", "model: x.onnx", "app.yaml:5: stages[0].model", "no model file 'x.onnx'", "folder"),
        ("profile: ResNet-T", "accuracy: 1", "app.yaml:4: stages[0]", "neither 'model'", "add 'model:"),
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
        ("gamma: 36", "gamma: -360", "app.yaml:10: stages[1].variants[0].profile", "at batch 1", "latency_ms"),
        ("max_batch: 8", "max_batch: 8.5", "app.yaml:10:", "a whole number", ""),
        ("1: 46.0", "x: 46.0", "app.yaml:17:", "the cores 'x' must be a positive number", "rows are batches"),
        ("{1: 46.0, 2: 28.9}", "7", "app.yaml:17:", "a mapping of cores", ""),
        ("c5.4xlarge", "c5.4xlarg", "app.yaml:23: cluster.nodes[0].hardware", "unknown", "did you mean 'c5.4xlarge'?"),
        ("cores: 12, ", "", "app.yaml:24: cluster.nodes[1].hardware", "custom hardware needs 'cores'", "cores: 8"),
        ("count: 2", "count: 0", "app.yaml:23: cluster.nodes[0].count", "at least 1", ""),
        ("hardware: custom, name: box", "hardware: custom, name: c5.4xlarge", "app.yaml:22: ", "same name", "name"),
        ("slo_ms: 200", "slo_ms: {", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 2\tx: [", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 200\n[1]: 2", "app.yaml:3", "a key must be text", ""),
        ("slo_ms: 200", "slo_ms: 200\n1: 2", "app.yaml:3: 1", "the key 1 must be text", "quotes"),
    ],
)
def test_mistakes_are_named(old: str, new: str, where: str, what: str, help_text: str) -> None:
    error = _wrong(old, new)
    assert error.where.startswith(where), error
    assert what in error.what, error
    assert help_text in error.help, error


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read it"):
        load_application(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        load_application(tmp_path / "bytes.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    with pytest.raises(InputError, match=r"empty\.yaml:1: the file is empty"):
        load_application(tmp_path / "empty.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5000,
        "a: &a [*a]",
        "a: &a {b: *a}",
        "a: &a [1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}' if i else '*a'] * 9)}]\n" for i in range(9)),
        'a: "\\UFFFFFFFF"',
        "a: 2020-13-45",
        "a: 0b",
        f"a: {'9' * 5000}",
        "? [1]\n: 2",
        "<<: {a: 1}",
        "!!python/object:os.system {}",
        "a: !!int x",
        "a: !!float []",
        "\x00",
        "a: b: c",
        "---\na: 1\n---\nb: 2",
        "%YAML 9.9\n---\n{}",
        "null: 1",
    ],
)
def test_hostile_texts_are_refused(text: str) -> None:
    with pytest.raises(InputError):
        application_from_text(text)


SCENARIO = (
    DEMO.replace("system: {name: sponge, margin: 0.9}\n", "systems: [sponge, {name: static, cores: 16}]\n")
    + """\
trace: {kind: poisson, rate: 100}
duration_s: 600
seed: 7
truth:
  service: {ratio: 1.1}
  profile_error: 1.2
  resize: rescale
  cold_start: {start_s: 5, warm: false}
  network: {link: {kind: synthetic}, payload_kb: [100, 200], semantics: attach}
  failures: {mtbf_s: 3600}
"""
)


def test_reads_a_scenario() -> None:
    scenario = scenario_from_text(SCENARIO)
    assert scenario.application.name == "demo"
    assert scenario.trace == {"kind": "poisson", "rate": 100}
    assert (scenario.duration_ns, scenario.seed) == (600 * 10**9, 7)
    assert [(system.name, dict(system.parameters)) for system in scenario.systems] == [
        ("sponge", {}),
        ("static", {"cores": 16}),
    ]
    assert scenario.systems[1].path == "systems[1]"
    truth = scenario.truth
    assert (truth.service.ratio, truth.service.cv, truth.profile_error) == (1.1, 0.03, 1.2)
    assert (truth.resize_ms, truth.resize) == (50, "rescale")
    assert (truth.cold_start.start_s, truth.cold_start.jitter, truth.cold_start.warm) == (5, 0, False)
    assert truth.network is not None
    assert (truth.network.payload_kb, truth.network.semantics) == ((100, 200), "attach")
    assert truth.network.link == {"kind": "synthetic"}
    assert truth.failures is not None
    assert truth.failures.mtbf_s == 3600


def test_a_scenario_is_an_application_file(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCENARIO)
    (tmp_path / "t.csv").write_text("1\n")
    assert isinstance(load_application(tmp_path / "s.yaml"), Application)
    (tmp_path / "s.yaml").write_text(SCENARIO.replace("{kind: poisson, rate: 100}", "{file: t.csv, scale: 2}"))
    assert load_scenario(tmp_path / "s.yaml").trace["file"] == str((tmp_path / "t.csv").resolve())


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("{kind: poisson, rate: 100}", "{rate: 100}", "either 'kind' or 'file'"),
        ("{kind: poisson, rate: 100}", "{file: none.csv}", "no file 'none.csv'"),
        ("trace: {kind: poisson, rate: 100}\n", "", "the key 'trace' is missing"),
        ("seed: 7", "seed: -1", "must be a whole number"),
        ("seed: 7", "seed: 7\nsystem: sponge", "either 'system' or 'systems'"),
        ("ratio: 1.1", "ratio: 0", "must be a number above 0"),
        ("ratio: 1.1", "ration: 1.1", "unknown key 'ration'"),
        ("resize: rescale", "resize: now", "must be one of next_batch, rescale"),
        ("mtbf_s: 3600", "", "'mtbf_s' is missing"),
        ("link: {kind: synthetic}", "link: 4g.csv", "no file '4g.csv'"),
        ("warm: false", "warm: 1", "must be true or false"),
        ("payload_kb: [100, 200]", "payload_kb: []", "at least one payload"),
        ("systems: [sponge, {name: static, cores: 16}]", "systems: []", "at least one system"),
    ],
)
def test_wrong_scenarios_are_refused(old: str, new: str, what: str) -> None:
    assert old in SCENARIO
    with pytest.raises(InputError) as caught:
        scenario_from_text(SCENARIO.replace(old, new, 1))
    assert what in caught.value.what


@given(st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(InputError):
        application_from_text(text)


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_any_mutation_is_read_or_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(SCENARIO) - 1))
    length = data.draw(st.integers(0, 12))
    piece = data.draw(st.one_of(st.text("{}[]:,-&*!#|>'\"\n\t 0.e9a~?%@\\", max_size=8), st.text(max_size=5)))
    mutated = SCENARIO[:start] + piece + SCENARIO[start + length :]
    try:
        scenario = scenario_from_text(mutated)
    except InputError as error:
        assert error.where.startswith("<text>:")  # noqa: PT017  # both ways are right
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
@settings(max_examples=200, deadline=None)
def test_any_value_is_read_or_refused(key: str, content: object) -> None:
    base = {"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}], "trace": {"kind": "poisson"}}
    try:
        scenario = load_scenario({**base, key: content})
    except InputError as error:
        assert error.where  # noqa: PT017
    else:
        assert isinstance(scenario.application.stages[0].variants[0].profile, Profile)
