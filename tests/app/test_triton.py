"""Triton model repositories as applications: what is taken, and what is said of the rest."""

from pathlib import Path
from typing import Any

import pytest

from sloop.app.load import load_application, load_deployment
from sloop.app.triton import TritonRepository, is_repository, read_repository
from sloop.errors import InputError

ENSEMBLE = """\
platform: "ensemble"
max_batch_size: 4
input [ { name: "page" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "least" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "words" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "words.txt" } ]
ensemble_scheduling { step [
  { model_name: "read" model_version: 1
    input_map [ { key: "x" value: "line" }, { key: "limit" value: "least" } ]
    output_map { key: "y" value: "words" } },
  { model_name: "find" model_version: -1
    input_map { key: "x" value: "page" }
    output_map [ { key: "y" value: "line" }, { key: "z" value: "kind" } ] }
] }
"""


def add(folder: Path, name: str, config: str | None, *versions: int, file: str = "model.onnx") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    for version in versions:
        path = folder / name / str(version) / file
        path.parent.mkdir()
        path.touch()
    if config is not None:
        (folder / name / "config.pbtxt").write_text(config)


def read(folder: Path) -> tuple[dict[str, Any], TritonRepository]:
    """The only application, and all that was read."""
    found = read_repository(folder, 200)
    (application,) = found.applications
    assert isinstance(application.content, dict)
    return application.content, found


def test_an_onnx_file_is_enough(tmp_path: Path) -> None:
    add(tmp_path, "plain", None, 1, 2, 10)
    content, found = read(tmp_path)
    model = str(tmp_path / "plain" / "10" / "model.onnx")
    assert content == {"name": "plain", "slo_ms": 200, "stages": [{"name": "plain", "model": model}]}
    assert not found.notes
    assert is_repository(tmp_path / "plain")
    assert not is_repository(tmp_path / "plain" / "10")
    assert read(tmp_path / "plain")[0] == content


def test_what_is_taken_of_a_model(tmp_path: Path) -> None:
    config = """\
name: "digits"
backend: "onnxruntime"
max_batch_size: 16
output { name: "scores" data_type: TYPE_FP32 dims: 6 label_filename: "names.txt" }
default_model_filename: "net.onnx"
version_policy: { specific { versions: [ 1, 3, 7 ] } }
model_operations { op_library_filename: "lib.so" }
"""
    add(tmp_path, "digits", config, 1, 3, 4, file="net.onnx")
    content, found = read(tmp_path)
    folder = tmp_path / "digits"
    stage = {"name": "digits", "model": str(folder / "3" / "net.onnx"), "operators": [str(folder / "lib.so")]}
    assert content == {
        **{"name": "digits", "slo_ms": 200, "stages": [stage], "limits": {"rows": 16}},
        "labels": {"scores": str(folder / "names.txt")},
    }
    assert [note.partition("config.pbtxt:")[2].partition(" ")[0] for note in found.notes] == ["6:", "3:"]


def test_a_model_without_a_batch(tmp_path: Path) -> None:
    add(tmp_path, "flat", "max_batch_size: 0", 1)
    (stage,) = read(tmp_path)[0]["stages"]
    assert stage["batch"] is False


def test_a_folder_of_weights_beside_the_model(tmp_path: Path) -> None:
    add(tmp_path, "large", None, 1, file="model.onnx")
    (tmp_path / "large" / "1" / "model.onnx").unlink()
    (tmp_path / "large" / "1" / "model.onnx").mkdir()
    path = tmp_path / "large" / "1" / "model.onnx" / "model.onnx"
    path.touch()
    (stage,) = read(tmp_path)[0]["stages"]
    assert stage["model"] == str(path)


def test_all_that_is_not_taken_is_said(tmp_path: Path) -> None:
    config = """\
platform: "onnxruntime_onnx"
input { name: "x" data_type: TYPE_FP32 dims: 4
  reshape { shape: [ 2, 2 ] } }
instance_group [ { count: 2 kind: KIND_CPU },
  { count: 1 kind: KIND_GPU } ]
dynamic_batching { preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 100
  priority_levels: 2 }
optimization { graph { level: 1 } }
parameters { key: "intra_op_thread_count" value { string_value: "2" } }
response_cache { enable: true }
model_transaction_policy { decoupled: false }
colour: "red"
"""
    add(tmp_path, "wide", config, 1)
    said = {note.partition("config.pbtxt:")[2].split(": ")[0]: note for note in read(tmp_path)[1].notes}
    assert sorted(said, key=int) == [str(line) for line in (3, 4, 5, 6, 7, 8, 9, 10, 11, 13)]
    assert "`system: {name: static, replicas: 3}`" in said["4"]
    assert "instance_group[1].kind: a model runs on a GPU if" in said["5"]
    assert "dynamic_batching.max_queue_delay_microseconds: there is no fixed delay" in said["7"]
    assert "colour: unknown" in said["13"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ('backend: "python"', "1: backend: models of python are not run; rewrite it as a stage in Python"),
        ('\nplatform: "tensorrt_plan"', "2: platform: models of tensorrt are not run; a TensorRT engine"),
        ('platform: "pytorch_libtorch"', "1: platform: models of pytorch are not run; export it with torch.onnx"),
        ('backend: "mine"', "1: backend: models of mine are not run; export it as ONNX"),
        ("sequence_batching { }", "1: sequence_batching: not supported; no model keeps state"),
        ("model_transaction_policy { decoupled: true }", "decoupled: each request has one answer"),
        ("max_batch_size: -1", "1: max_batch_size: must be a whole number of at least 0, not -1"),
        ('max_batch_size: "8"', "1: max_batch_size: must be a whole number"),
        ('name: "a b"', "1: name: not a name here; use letters"),
        (
            'default_model_filename: "net.bin"',
            "1: default_model_filename: version 1 has no 'net.bin'; it has model.onnx",
        ),
        ("version_policy { specific { versions: 9 } }", "1: version_policy: no version to serve"),
        ('output { label_filename: "a" }', "1: output: the key 'name' is missing"),
        ('input { name: "x" dims: [ 1, "y" ] }', "1: input.dims[1]: must be a whole number"),
        ('input { name: "x" data_type: 1 }', "1: input.data_type: must be text"),
        ("input: [", "1: the end of the file cannot be read here"),
        ('platform: "ensemble"', "the key 'ensemble_scheduling' is missing"),
    ],
)
def test_a_model_that_cannot_be_taken_is_left_out(tmp_path: Path, config: str, says: str) -> None:
    add(tmp_path, "bad", config, 1)
    add(tmp_path, "good", None, 1)
    content, found = read(tmp_path)
    assert content["name"] == "good"
    (note,) = found.notes
    assert note.startswith(str(tmp_path / "bad" / "config.pbtxt"))
    assert says in note
    assert note.endswith("model 'bad' is left out")
    with pytest.raises(InputError, match="no model in it can be served") as caught:
        load_deployment(tmp_path / "bad")
    assert note in caught.value.help


@pytest.mark.parametrize(
    ("file", "backend"), [("model.py", "python"), ("model.plan", "tensorrt"), ("model.pt", "pytorch")]
)
def test_the_backend_follows_from_the_file(tmp_path: Path, file: str, backend: str) -> None:
    add(tmp_path, "other", None, 1, file=file)
    found = read_repository(tmp_path, 200)
    assert not found.applications
    assert f"other: models of {backend} are not run" in found.notes[0]


def test_an_ensemble_is_a_graph_of_stages(tmp_path: Path) -> None:
    add(tmp_path, "ocr", ENSEMBLE, 1)
    add(tmp_path, "find", "max_batch_size: 0", 1, 2)
    add(tmp_path, "read", None, 1, 2)
    content, found = read(tmp_path)
    read_stage, find_stage = content["stages"]
    assert find_stage == {
        **{"name": "find", "model": str(tmp_path / "find" / "2" / "model.onnx"), "batch": False},
        "inputs": {"x": "page"},
    }
    assert read_stage == {
        **{"name": "read", "model": str(tmp_path / "read" / "1" / "model.onnx"), "after": ["find"]},
        "inputs": {"x": "find.y", "limit": "least"},
    }
    assert content["outputs"] == {"words": "read.y"}
    assert content["labels"] == {"words": str(tmp_path / "ocr" / "words.txt")}
    assert content["limits"] == {"rows": 4}
    assert sum("served as a stage of 'ocr' only" in note for note in found.notes) == 2
    assert read(tmp_path / "ocr")[0] == content, "its neighbours are read for it"


def test_a_model_in_two_steps_and_labels_of_an_output_between_them(tmp_path: Path) -> None:
    config = """\
ensemble_scheduling { step [
  { model_name: "twice" input_map { key: "x" value: "a" } output_map { key: "y" value: "b" } },
  { model_name: "twice" input_map { key: "x" value: "b" } output_map { key: "y" value: "y" } } ] }
input { name: "a" }
output [ { name: "y" }, { name: "b" } ]
"""
    add(tmp_path, "e", config, 1)
    add(tmp_path, "twice", 'output { name: "y" label_filename: "l.txt" }', 1)
    content, _ = read(tmp_path)
    assert [stage["name"] for stage in content["stages"]] == ["twice-1", "twice-2"]
    assert content["outputs"] == {"y": "twice-2.y", "b": "twice-1.y"}
    assert content["labels"] == dict.fromkeys(("y", "b"), str(tmp_path / "twice" / "l.txt"))


OUTER = """\
platform: "ensemble"
input [ { name: "scan" }, { name: "limit" } ]
output [ { name: "text" }, { name: "raw" } ]
ensemble_scheduling { step [
  { model_name: "crop" input_map { key: "x" value: "scan" } output_map { key: "y" value: "part" } },
  { model_name: "ocr" input_map [ { key: "page" value: "part" }, { key: "least" value: "limit" } ]
    output_map { key: "words" value: "raw" } },
  { model_name: "fix" input_map { key: "x" value: "raw" } output_map { key: "y" value: "text" } } ] }
"""


def test_an_ensemble_within_another_gives_its_stages(tmp_path: Path) -> None:
    add(tmp_path, "scans", OUTER, 1)
    add(tmp_path, "ocr", ENSEMBLE, 1)
    for name in ("find", "read", "crop", "fix"):
        add(tmp_path, name, None, 1)
    found = read_repository(tmp_path, 200)
    by_name = {each.mapping()["name"].content: each.content for each in found.applications}
    assert list(by_name) == ["ocr", "scans"], "and no model alone"
    scans = by_name["scans"]
    assert isinstance(scans, dict)
    wiring = {each["name"]: (each.get("after"), each["inputs"]) for each in scans["stages"]}
    assert wiring == {
        "crop": (None, {"x": "scan"}),
        "ocr-read": (["ocr-find"], {"x": "ocr-find.y", "limit": "limit"}),
        "ocr-find": (["crop"], {"x": "crop.y"}),
        "fix": (["ocr-read"], {"x": "ocr-read.y"}),
    }
    assert scans["outputs"] == {"text": "fix.y", "raw": "ocr-read.y"}
    assert scans["labels"] == {"raw": str(tmp_path / "ocr" / "words.txt")}
    (tmp_path / "ocr" / "words.txt").write_text("a")
    load_deployment(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('key: "words"', 'key: "letters"', "ocr has no output 'letters'; it has words"),
        ('"crop"', '"scans"', "model_name: an ensemble that contains itself"),
    ],
)
def test_an_ensemble_with_a_wrong_one_within_is_left_out(tmp_path: Path, old: str, new: str, says: str) -> None:
    add(tmp_path, "scans", OUTER.replace(old, new), 1)
    add(tmp_path, "ocr", ENSEMBLE, 1)
    for name in ("find", "read", "crop", "fix"):
        add(tmp_path, name, None, 1)
    found = read_repository(tmp_path, 200)
    assert "scans" not in [each.mapping()["name"].content for each in found.applications]
    assert any(says in note and note.endswith("model 'scans' is left out") for note in found.notes), found.notes


def test_the_folder_of_one_model_is_an_application(tmp_path: Path) -> None:
    for name in ("one", "two"):
        add(tmp_path, name, None, 1)
    assert load_application(tmp_path / "one").name == "one"
    with pytest.raises(InputError, match="a repository of several applications: one and two"):
        load_application(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            'value: "page"',
            'value: "sheet"',
            "10: ensemble_scheduling.step[1].input_map.value: no step gives this tensor",
        ),
        (
            'name: "words"',
            'name: "text"',
            "4: output[0].name: no step gives this tensor; steps give words, line and kind",
        ),
        ('value: "kind"', 'value: "line"', "output_map[1].value: two steps give this tensor"),
        ('"find"', '"lost"', "9: ensemble_scheduling.step[1].model_name: the model of this step is missing"),
        ('"find"', '"ocr"', "model_name: an ensemble that contains itself"),
        ('"find"', '"../read"', "model_name: the model of this step is missing"),
        ("output_map { key", "outputs { key", "step[0]: the key 'output_map' is missing"),
        ("model_version: 1", "model_version: 5", "version 5 has no 'model.onnx'; there is no such folder"),
    ],
)
def test_an_ensemble_that_cannot_be_served_is_left_out(tmp_path: Path, old: str, new: str, says: str) -> None:
    add(tmp_path, "ocr", ENSEMBLE.replace(old, new), 1)
    for name in ("find", "read"):
        add(tmp_path, name, None, 1)
    found = read_repository(tmp_path, 200)
    assert [each.mapping()["name"].content for each in found.applications] == ["find", "read"]
    assert any(says in note and note.endswith("model 'ocr' is left out") for note in found.notes), found.notes


def test_a_repository_loads_like_model_files(tmp_path: Path) -> None:
    add(tmp_path, "flat", "max_batch_size: 0", 1)
    add(tmp_path, "plain", None, 1)
    deployment = load_deployment(tmp_path)
    assert deployment.name == "flat+plain"
    assert [each.name for each in deployment.applications] == ["flat", "plain"]
    assert {each.system.name for each in deployment.applications} == {"elastic"}
    file = deployment.applications[0].file
    assert file == str(tmp_path / "flat" / "config.pbtxt")
    assert load_application(file).name == "flat", "a server loads an application again from its file"
