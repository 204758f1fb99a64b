"""Models without a profile or an application file: `sloop serve` measures them first, the other commands say so."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from sloop.app.application import Deployment
from sloop.app.load import load_deployment
from sloop.cli import main
from sloop.cli import serve as module
from sloop.cli.command import with_open_sizes
from sloop.errors import InputError, MachineError
from sloop.profile.examine import UNDECLARED, ExaminedModel, examine
from sloop.profile.measure import first_profile, kept_profile
from sloop.profile.profile import (
    FirstProfile,
    Joining,
    Profile,
    Quadratic,
    Sample,
    digest,
    load_profile,
    path_beside,
    save_profile,
)
from sloop.profile.published import RESNET_T
from sloop.serve.control.loading import UnloadedModel, loadable
from sloop.serve.control.servables import COPIES
from sloop.serve.copies import ExaminedModels
from sloop.systems.setup import set_up
from tests.onnx_graphs import save_model


def first_profiles_of(deployment: Deployment, state: Path) -> tuple[dict[Path, FirstProfile], dict[str, UnloadedModel]]:
    return module.first_profiles(deployment, None, state, {}, ExaminedModels(state / COPIES))


def run(*arguments: object, typed: str = "") -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments], input=typed)


def open_model(path: Path) -> Path:
    """A sum over a sequence of any length."""
    size = "float[batch, sequence, 2]"
    return save_model(path, f"({size} a, {size} b) => ({size} y) {{ y = Add(a, b) }}")


@pytest.mark.live
def test_a_model_file_is_measured_and_served(model: Path) -> None:
    command = [sys.executable, "-m", "sloop", "serve", "tiny.onnx", "--http-port", "0", "--grpc-port", "0", "--json"]
    with subprocess.Popen(
        command, cwd=model.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with urlopen(f"{said['http']}/v2/models/tiny") as answer:
            assert json.loads(answer.read())["inputs"][0]["name"] == "x"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    kept = path_beside(model)
    assert said["profiles"] == [{"model": str(model), "profile": str(kept)}]
    assert "tiny.onnx has no profile: it is tried, then measured for about 10 s" in errors
    assert f"this short profile is kept in {kept}; `sloop profile {model}` makes a full one" in errors
    profile = load_profile(kept)
    assert (profile.origin, profile.source.partition(":")[0]) == ("measured", "a short measurement")
    (application,) = load_deployment(model).applications
    assert said["slo_ms"] == {"tiny": application.slo_ms}
    assert application.system.name == "elastic"


@pytest.mark.live
def test_it_ends_in_order_when_told_while_a_model_is_measured(model: Path) -> None:
    command = [sys.executable, "-m", "sloop", "serve", "tiny.onnx", "--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen(command, cwd=model.parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "measured for" in next(line for line in process.stderr if "no profile" in line)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "stopping before the start is over" in process.stderr.read()
    assert not path_beside(model).exists()


@pytest.mark.parametrize("written", [False, True])
def test_it_is_refused_with_no_profile_and_by_commands_that_touch_nothing(model: Path, *, written: bool) -> None:
    app = model
    if written:
        app = model.with_name("app.yaml")
        app.write_text("name: app\nslo_ms: 90\nstages: [{name: only, model: tiny.onnx}]\n")
    for arguments in (["serve", app, "--no-profile"], ["plan", app, "--rate", "1"]):
        result = run(*arguments)
        assert result.exit_code == 1
        assert "has no profile, so its speed is unknown" in result.stderr
        assert f"measure it with `sloop profile {model}`; `sloop serve` measures a model briefly" in result.stderr
    assert not path_beside(model).exists()


@pytest.mark.parametrize("written", [False, True])
def test_without_it_check_says_what_it_can_and_which_command_is_next(model: Path, *, written: bool) -> None:
    app = model
    if written:
        app = model.with_name("app.yaml")
        app.write_text("name: app\nslo_ms: 90\nstages: [{name: only, model: tiny.onnx}]\n")
    result = run("check", app)
    assert result.exit_code == 0, result.stderr
    shown = " ".join(result.stdout.split())
    assert ("deadline 90 ms" if written else "a deadline by its speed") in shown
    assert "requests may share a forward pass" in shown
    assert f"no plan yet: tiny.onnx has no profile next: `sloop serve {app}`" in shown
    assert json.loads(run("check", app, "--json").stdout)["plan"] is None
    assert not path_beside(model).exists()
    if written:
        app.write_text(app.read_text() + "system: elastik\n")
        assert "did you mean 'elastic'?" in run("check", app).stderr


def test_a_wrong_system_is_told_before_anything_is_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measures(*_: object, **__: object) -> None:
        raise AssertionError("nothing is worth measuring")

    monkeypatch.setattr(module, "first_profile", measures)
    result = run("serve", model, "--system", "elastik")
    assert result.exit_code == 1
    assert "did you mean 'elastic'?" in result.stderr
    app = model.with_name("app.yaml")
    app.write_text("name: app\nslo_ms: 90\nstages: [{name: only, model: tiny.onnx}]\nsystem: {name: static, core: 1}\n")
    assert "app.yaml:4: system.core: unknown key 'core'" in run("serve", app).stderr


def test_a_model_file_is_planned_and_checked_with_a_derived_or_a_given_deadline(model: Path) -> None:
    save_profile(structs.replace(RESNET_T, model_digest=digest(model)), path_beside(model))
    shown = run("plan", model, "--rate", "1").stdout
    assert (
        "tiny: its deadline is 300 ms (5 × 57.48 ms, the planned time of one request on 1 core, rounded up)"
        in " ".join(shown.split())
    )
    assert json.loads(run("check", model, "--slo-ms", "400", "--json").stdout)["slo_ms"] == 400
    app = model.with_name("app.yaml")
    app.write_text("name: app\nslo_ms: 90\nstages: [{name: only, model: tiny.onnx}]\n")
    assert run("check", app, "--slo-ms", "400").exit_code == 2, "the file declares its deadline"


def test_what_is_measured_is_kept_in_the_state_folder_if_the_models_cannot_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saves(
        profile: Profile, path: Path, joining: Joining | None
    ) -> None:  # root may write everywhere, so that a mode does not help
        if path.parent == model.parent:
            raise MachineError("read-only")
        save_profile(profile, path, joining)

    monkeypatch.setattr("sloop.profile.measure.save_profile", saves)
    measured = structs.replace(RESNET_T, model_digest=digest(model))
    monkeypatch.setattr("sloop.profile.measure.measure_briefly", lambda *_, **__: measured)
    state = tmp_path / "state"
    assert kept_profile(model, state) is None
    first = first_profile(model, examine(model), {}, state)
    assert first.file.parent == state / "profiles"
    assert kept_profile(model, state) == first
    found, left_out = first_profiles_of(load_deployment(model), state)
    assert found == {model: first}, "it is not measured again"
    assert not left_out
    model.write_bytes(model.read_bytes() + b"\x00")
    assert kept_profile(model, state) is None, "the model has changed"


def test_only_models_without_a_profile_get_one(model: Path) -> None:
    other = model.with_name("other.onnx")
    other.write_bytes(model.read_bytes())
    app = model.with_name("app.yaml")
    variants = "[{name: a, model: tiny.onnx}, {name: b, model: other.onnx, profile: ResNet18-human}]"
    stages = f"[{{name: s, variants: {variants}}}, {{name: t, after: s, model: tiny.onnx}}]"
    app.write_text(f"name: app\nslo_ms: 900\nstages: {stages}\n")
    deployment = load_deployment(app)
    assert deployment.without_profile == (model,)
    first = first_of(model)
    (made,) = deployment.with_profiles({model: first}).applications
    assert [variant.profile and variant.profile.source for stage in made.stages for variant in stage.variants] == [
        first.profile.source,
        made.by_name["s"].variant("b").profile.source,  # type: ignore[union-attr]  # it has one
        first.profile.source,
    ]
    assert made.by_name["t"].variant("t").file_on("local") == str(path_beside(model))
    assert deployment.with_profiles({model: first}).without_profile == ()


def first_of(model: Path) -> FirstProfile:
    return FirstProfile(model, RESNET_T, path_beside(model))


# Open dimensions


def test_without_a_terminal_the_error_is_the_option_to_give(tmp_path: Path) -> None:
    path = open_model(tmp_path / "m.onnx")
    for command in (["profile", path], ["serve", path]):
        result = run(*command)
        assert result.exit_code == 1
        assert f"error: {path}: besides its first dimension, the size of sequence is open" in result.stderr
        assert "help: give the shape of one row, for example: --shape a=128,2 --shape b=128,2" in result.stderr


def test_on_a_terminal_a_size_is_asked_for_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = open_model(tmp_path / "m.onnx")
    monkeypatch.setattr("sloop.cli.command.is_terminal", lambda: True)
    command = ["profile", path, "--batches", "1", "--cores", "1", "--seconds", "0.01", "--passes", "1", "--alone"]
    result = run(*command, typed="0\n7\n")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("sequence (of a and b) [128]:") == 2, "0 is no size"
    assert load_profile(path_beside(path)).shapes == {"a": (7, 2), "b": (7, 2)}
    assert "measured with rows of a 7 × 2 and b 7 × 2" in result.stdout
    again = run(*command)
    assert (again.exit_code, "sequence" in again.stderr) == (0, False)
    known = examine(path)
    given: dict[str, tuple[int, ...]] = {"a": (5, 2), "b": (5, 2)}
    assert with_open_sizes(path, known, given) == given, "what is given is not asked for"


def test_sizes_that_the_model_does_not_accept_are_not_an_example(tmp_path: Path) -> None:
    graph = "(float[b, k] x) => (float[b, m, 97] y) { y = Reshape(x, s) }"
    result = run("serve", save_model(tmp_path / "graph.onnx", graph, {"s": np.array([0, -1, 97])}))
    assert result.exit_code == 1
    assert "the size of k is open; it fails on random inputs (x [1, 16]): " in result.stderr
    assert "Reshape" in result.stderr
    assert "help: give the shape of one row that it takes, in place of: --shape x=16" in result.stderr


def test_sizes_of_inputs_without_rows_are_taken_and_said(tmp_path: Path) -> None:
    """Edges are indices of nodes, of which a batch of one has one."""
    graph = "(float[n, 4] nodes, int64[2, e] edges) => (float[2, e, 4] read) { read = Gather(nodes, edges) }"
    path = save_model(tmp_path / "graph.onnx", graph)
    result = run("profile", path, "--cores", "1", "--seconds", "0.01", "--passes", "1", "--alone")
    assert result.exit_code == 0, result.stderr
    assert "sizes of inputs without rows are unknown; it is measured with --shape edges=2,1" in result.stderr
    found = load_profile(path_beside(path))
    assert (found.shapes, found.max_batch) == ({"edges": (2, 1)}, 1)


# Names


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mein Modell (1).onnx", "mein-Modell-1"),
        ("模型.onnx", "model"),
        ("[red]x[b].onnx", "red-x-b"),
        ("a'b\"c$(d).onnx", "a-b-c-d"),
        ("-rf.onnx", "rf"),
        (f"{'n' * 150}.onnx", "n" * 100),
    ],
)
def test_an_application_is_called_like_its_file_in_letters_of_a_url(file: str, name: str, model: Path) -> None:
    odd = model.with_name(file)
    odd.write_bytes(model.read_bytes())
    save_profile(structs.replace(RESNET_T, model_digest=digest(model)), path_beside(odd))
    (application,) = load_deployment(odd).applications
    assert application.name == name
    shown = run("check", odd)
    assert shown.exit_code == 0, shown.stderr
    path_beside(odd).unlink()
    refused = run("plan", odd, "--rate", "1").stderr
    assert f"{odd}: stages[0]: {name}/{name} has no profile" in refused


def test_names_that_no_program_can_pass_on_are_refused(model: Path) -> None:
    odd = model.parent / b"bad\xff.onnx".decode("utf-8", "surrogateescape")
    odd.write_bytes(model.read_bytes())
    for command in ("profile", "serve", "check"):
        result = run(command, odd)
        assert result.exit_code == 1
        assert "its name is not valid UTF-8" in result.stderr


def test_two_models_are_two_applications(model: Path) -> None:
    for name in ("one", "two"):
        path = model.with_name(f"{name}.onnx")
        path.write_bytes(model.read_bytes())
        save_profile(structs.replace(RESNET_T, model_digest=digest(model)), path_beside(path))
    deployment = load_deployment([model.with_name("one.onnx"), model.with_name("two.onnx")])
    assert [each.name for each in deployment.applications] == ["one", "two"]
    assert {each.system.name for each in deployment.applications} == {"elastic"}
    with pytest.raises(InputError, match="there is no such file"):
        load_deployment(model.with_name("three.onnx"))
    assert np.isclose(deployment.applications[0].slo_ms, 300)


@pytest.mark.parametrize(("models", "each_s"), [(1, 10.0), (2, 5.0), (4, 3.0)])
def test_several_models_share_the_time(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: int, each_s: float
) -> None:
    given: list[float] = []

    def briefly(*_: object, seconds: float, **__: object) -> Profile:
        given.append(seconds)
        return RESNET_T

    monkeypatch.setattr("sloop.profile.measure.measure_briefly", briefly)
    paths = [model.with_name(f"m{number}.onnx") for number in range(models)]
    for path in paths:
        path.write_bytes(model.read_bytes())
    found, _ = first_profiles_of(load_deployment(paths), tmp_path / "state")
    assert list(found) == paths
    assert given == [each_s] * models


def test_a_model_is_examined_once_before_it_is_measured_and_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"m{number}.onnx" for number in range(2)]
    for name in names:
        model.with_name(name).write_bytes(model.read_bytes())
    app = model.with_name("app.yaml")
    app.write_text(
        "name: app\nslo_ms: 90\nstages:\n- {name: a, model: m0.onnx}\n- {name: b, model: m1.onnx, after: a}\n"
    )
    examined: list[str] = []

    def counted(path: Path, *given: Any, **options: Any) -> ExaminedModel:
        examined.append(path.name)
        return examine(path, *given, **options)

    monkeypatch.setattr("sloop.serve.copies.examine", counted)
    monkeypatch.setattr("sloop.profile.measure.measure_briefly", lambda *_, **__: RESNET_T)
    state = tmp_path / "state"
    models = ExaminedModels(state / COPIES)
    deployment = load_deployment(app)
    found, _ = module.first_profiles(deployment, None, state, {}, models)
    assert [path.name for path in found] == examined == names
    loadable(set_up(deployment.with_profiles(found)), state, models)
    assert examined == names, "nor again before it is served"


def test_a_model_of_several_that_cannot_be_measured_is_left_out(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("raise ValueError('no weights')")
    monkeypatch.setattr("sloop.profile.measure.measure_briefly", lambda *_, **__: RESNET_T)
    found, left_out = first_profiles_of(load_deployment([model, bad]), tmp_path / "state")
    assert list(found) == [model]
    assert {name: "no weights" in each.why for name, each in left_out.items()} == {"bad": True}
    with pytest.raises(InputError, match="no weights"):
        first_profiles_of(load_deployment([bad]), tmp_path / "state")


def test_each_model_gets_the_shapes_of_its_own_inputs(tmp_path: Path, model: Path) -> None:
    path = open_model(tmp_path / "m.onnx")
    shapes: dict[str, tuple[int, ...]] = {"a": (5, 2), "b": (5, 2), "x": (4,)}
    assert module._divided(shapes, {path: UNDECLARED, model: UNDECLARED}, ExaminedModels(tmp_path)) == {
        path: {"a": (5, 2), "b": (5, 2)},
        model: {"x": (4,)},
    }
    alone = module._divided(shapes, {path: UNDECLARED}, ExaminedModels(tmp_path))
    assert alone == {path: shapes}, "an only model refuses what it does not have"
    result = run("serve", path, model, "--shape", "c=1")
    assert result.exit_code == 2
    assert "no model has an input of that name" in result.stderr


def test_the_time_and_the_rate_that_are_told_are_both_medians() -> None:
    samples = (Sample(1, 1, p50_ms=2.0, p99_ms=9.0, n=10), Sample(8, 2, p50_ms=8.0, p99_ms=20.0, n=10))
    made = Profile(latency_ms=Quadratic(0, 1, 2.5), max_batch=8, max_cores=2, samples=samples)
    assert module._speed(made) == (
        "2 ms for 1 row on 1 core, or at most 1,000 rows/s in batches of 8 on 2 cores (medians; 3.5 ms is the planned "
        "time of the first, for slower runs too)"
    )
