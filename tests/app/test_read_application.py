"""Reading applications: what a file means, and that every mistake in one is named with file, line, key and fix."""

from pathlib import Path

import pytest
from msgspec import structs

from sloop.app.application import Estimates
from sloop.app.document import from_plain, parse
from sloop.app.hardware import local
from sloop.app.read_application import read_application
from sloop.errors import InputError
from sloop.profile import RESNET_T, Amdahl, Quadratic, Table
from sloop.profile.store import digest, path_beside, save_profile


def test_reads_what_was_declared(demo: str) -> None:
    app = read_application(parse(demo), Path())
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
    assert blur.latency_ms == Table({1: {1: 46.0, 2: 28.9}, 4: {1: 145, 2: 82}})
    assert (app.system.name, app.system.parameters) == ("sponge", {"margin": 0.9})
    assert app.estimates == Estimates(correct=False, margin=1.1)
    assert [node.name for node in app.cluster] == ["c5.4xlarge-0", "c5.4xlarge-1", "box-0"]
    assert (app.cluster[0].cores, app.cluster[0].usd_per_h) == (16, 0.68)
    assert (app.cluster[2].cores, app.cluster[2].devices) == (12, ("T4-0", "T4-1"))


def test_one_local_node_unless_told_otherwise() -> None:
    declared = {"name": "a", "slo_ms": 1, "stages": [{"name": "s", "profile": "ResNet-T"}]}
    app = read_application(from_plain(declared), Path())
    assert [(node.hardware, node.cores) for node in app.cluster] == [("local", local().cores)]
    assert app.system.name == "sponge"


def test_models_are_found_from_the_files_folder_with_the_profile_beside(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    save_profile(RESNET_T, path_beside(tmp_path / "net.onnx"))
    document = parse("name: a\nslo_ms: 9\nstages: [{name: s, model: ./net.onnx}]\n", "app.yaml")
    variant = read_application(document, tmp_path).stages[0].variants[0]
    assert variant.model == str((tmp_path / "net.onnx").resolve())
    assert variant.profile == RESNET_T
    path_beside(tmp_path / "net.onnx").write_text("{}")
    with pytest.raises(InputError, match=r"app\.yaml:3: stages\[0\]\.model: the profile beside it"):
        read_application(document, tmp_path)


def test_a_profile_of_another_version_of_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"old")
    save_profile(structs.replace(RESNET_T, model_digest=digest(model)), path_beside(model))
    document = parse("name: a\nslo_ms: 9\nstages: [{name: s, model: net.onnx}]\n", "app.yaml")
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
        ("c5.4xlarge", "c5.4xlarg", "app.yaml:24: cluster.nodes[0].hardware", "unknown", "did you mean 'c5.4xlarge'?"),
        ("cores: 12, ", "", "app.yaml:25: cluster.nodes[1].hardware", "custom hardware needs 'cores'", "cores: 8"),
        ("margin: 1.1", "margin: 0", "app.yaml:21: estimates.margin", "must be a number above 0 and at most 100", ""),
        ("count: 2", "count: 0", "app.yaml:24: cluster.nodes[0].count", "at least 1", ""),
        ("hardware: custom, name: box", "hardware: custom, name: c5.4xlarge", "app.yaml:23: ", "same name", "name"),
        ("slo_ms: 200", "slo_ms: {", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 2\tx: [", "app.yaml:", "not YAML", ""),
        ("slo_ms: 200", "slo_ms: 200\n[1]: 2", "app.yaml:3", "a key must be text", ""),
        ("slo_ms: 200", "slo_ms: 200\n1: 2", "app.yaml:3: 1", "the key 1 must be text", "quotes"),
    ],
)
def test_mistakes_are_named(old: str, new: str, where: str, what: str, help_text: str, demo: str) -> None:
    assert old in demo
    with pytest.raises(InputError) as caught:
        read_application(parse(demo.replace(old, new, 1), "app.yaml"), Path())
    error = caught.value
    assert error.where.startswith(where), error
    assert what in error.what, error
    assert help_text in error.help, error
