"""`sloop check` tries the models of an application."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sloop.cli import main
from sloop.errors import MachineError

STAGE = """
import numpy as np

class Model:
    inputs = {{"x": ("FP32", (-1, {size}))}}
    outputs = {{"y": ("FP32", (-1, {size}))}}
    joins_rows = True

    def __init__(self, threads):
        pass

    {run}
"""
APPLICATION = """
name: app
slo_ms: 1000
stages:
  - {name: one, model: ./one.py, profile: {max_batch: 4, latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}}}
  - {name: two, after: [one], profile: ResNet-T}
cluster: {nodes: [{hardware: local, count: 1}]}
system: static
"""


def checked(folder: Path, run: str, size: int = -1) -> Result:
    (folder / "one.py").write_text(STAGE.format(run=run, size=size), encoding="utf-8")
    (folder / "app.yaml").write_text(APPLICATION, encoding="utf-8")
    return CliRunner().invoke(main, ["check", str(folder / "app.yaml"), "--json"])


@pytest.mark.parametrize("size", [-1, 3])
@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("def run(self, x): yield x", "'run' returns 'y' as generator, not as a NumPy array: write `return`"),
        ("async def run(self, x): yield x", "'run' returns 'y' as async_generator"),
        ("def run(self, x): pass", "'run' returns 'y' as NoneType, not as a NumPy array: it needs a `return`"),
        ("def run(self, x): return x.astype('f8')", "return y.astype(np.float32) (one.py:"),
        ("def run(self, x): return x.tolist()", "one.py:"),
        ("def run(self, x): return {'z': x}", "['y'] are declared"),
        ("def run(self, x): return x, x", "'run' returns 2 arrays; 1 are declared"),
        ("def run(self, x): return np.float64(1)", "'run' returns 'y' as float64, not as a NumPy array"),
        ("def run(self, x): return x[:0]", "0 rows of 'y' for 1 row of input"),
        ("def run(self, x): import not_there", "No module named 'not_there'"),
        ("def run(self, x): return np.no_such(x)", "has no attribute 'no_such'"),
        ("def run(self): return 1", "takes 1 positional argument but 2 were given"),
        ("run = __import__('functools').partial(lambda x: None)", "'run' returns 'y' as NoneType"),
        (
            "def run(self, x): __import__('os')._exit(3)",
            "one.py: the process that examined it ended with exit status 3",
        ),
    ],
)
def test_a_stage_that_fails_for_every_request_is_named(tmp_path: Path, run: str, says: str, size: int) -> None:
    result = checked(tmp_path, run, size)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert says in answer["stages"][0]["variants"][0]["fault"]
    assert answer["stages"][0]["variants"][0]["joins_rows"] is None
    assert answer["plan"]["feasible"], "the plan is shown all the same"
    assert answer["stages"][0]["variants"][0]["joins_rows"] is None, "it was not found out"


@pytest.mark.parametrize(
    "run",
    [
        "def run(self, x): return x",
        "async def run(self, x): return x",
        "def run(self, x): raise __import__('sloop').Refused('only cats')",
        "def run(self, x): return x.reshape(len(x), 5, 7)[:, 0]",
    ],
)
def test_a_stage_that_may_be_right_passes(tmp_path: Path, run: str) -> None:
    result = checked(tmp_path, run)
    assert result.exit_code == 0, result.stdout
    assert json.loads(result.stdout)["stages"][0]["variants"][0]["fault"] == ""


def test_a_panic_is_a_failure_like_others(tmp_path: Path) -> None:
    panic = "def run(self, x): raise type('PanicException', (BaseException,), {})('out of range')"
    fault = json.loads(checked(tmp_path, panic, 3).stdout)["stages"][0]["variants"][0]["fault"]
    assert "it fails on random inputs: PanicException: out of range" in fault


@pytest.mark.parametrize("size", [-1, 3])
def test_a_refusal_of_random_inputs_is_told(tmp_path: Path, size: int) -> None:
    checked(tmp_path, "def run(self, x): raise __import__('sloop').Refused('only cats')", size)
    text = " ".join(CliRunner().invoke(main, ["check", str(tmp_path / "app.yaml")]).stdout.split())
    assert "only cats; give it an `example(rows)` that it takes" in text


def test_a_failure_on_guessed_sizes_is_told(tmp_path: Path) -> None:
    checked(tmp_path, "def run(self, x): raise ValueError('an odd length')")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "app.yaml")])
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "one.py: it fails on random inputs (x [1, 16]): ValueError: an odd length (one.py:12)" in text
    assert "give it an `example(rows)`" in text


def in_a_row(folder: Path, run: str, after: str) -> Result:
    """Two stages without profiles, checked."""
    text = STAGE.format(run=run, size=3)
    (folder / "one.py").write_text(text, encoding="utf-8")
    (folder / "two.py").write_text(text.replace('"y"', '"z"').replace('"x"', '"y"'), encoding="utf-8")
    stages = f"stages: [{{name: scale, model: ./one.py}}, {{name: score, model: ./two.py{after}}}]"
    (folder / "app.yaml").write_text(f"name: app\nslo_ms: 100\n{stages}\n", encoding="utf-8")
    return CliRunner().invoke(main, ["check", str(folder / "app.yaml")])


def test_a_failed_trial_is_the_last_that_is_said(tmp_path: Path) -> None:
    result = in_a_row(tmp_path, "def run(self, x): raise ValueError('no')", ", after: scale")
    assert result.exit_code == 1
    assert "no plan yet" not in result.output
    assert "next:" not in result.output
    first, help_text, *others = result.stderr.splitlines()
    assert first == f"error: {tmp_path / 'one.py'}:12: it fails on random inputs: ValueError: no"
    assert help_text == "help: correct the file, or give it an `example(rows)`"
    assert [line.partition(":")[0] for line in others] == ["error", "help"], "the second stage's"
    assert result.output.splitlines()[-4:] == [first, help_text, *others]
    assert "ValueError" not in result.stdout


def test_what_clients_send_and_get_is_told(tmp_path: Path) -> None:
    joined = in_a_row(tmp_path, "def run(self, x): return x", ", after: scale").stdout.splitlines()
    assert "app takes x FP32[-1, 3] and answers z FP32[-1, 3]" in joined
    assert not [line for line in joined if "stages get" in line]
    apart = in_a_row(tmp_path, "def run(self, x): return x", "").stdout.splitlines()
    assert "app takes x FP32[-1, 3] and y FP32[-1, 3] and answers y FP32[-1, 3] and z FP32[-1, 3]" in apart
    assert "2 stages get the client's request: scale, score" in apart


def test_why_a_request_has_one_row_is_told(tmp_path: Path) -> None:
    stages = "[{name: find, profile: ResNet-T}, {name: read, after: [find], each: {mean: 2}, profile: ResNet-T}]"
    cluster = "cluster: {nodes: [{hardware: c5.4xlarge, count: 1}]}"
    (tmp_path / "app.yaml").write_text(f"name: app\nslo_ms: 8000\nstages: {stages}\n{cluster}\n", encoding="utf-8")
    lines = CliRunner().invoke(main, ["check", str(tmp_path / "app.yaml")]).stdout
    said = " ".join(lines.split())
    assert "app: a request has one row: the outputs of find decide for it as a whole which" in said


def test_what_this_machine_lacks_is_only_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise MachineError("no CUDA here", help="look for some")

    monkeypatch.setattr("sloop.cli.check.examine", lacks)
    result = checked(tmp_path, "def run(self, x): yield x")
    assert result.exit_code == 0
    text = CliRunner().invoke(main, ["check", str(tmp_path / "app.yaml")]).stdout
    assert "one.py was not tried: no CUDA here" in text


def test_nothing_is_written_beside_a_model(tmp_path: Path) -> None:
    checked(tmp_path, "def run(self, x): return x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["app.yaml", "one.py"]


def test_stages_that_do_not_fit_together_are_told_before_anything_is_measured(tmp_path: Path) -> None:
    text = STAGE.format(run="def run(self, x): return x", size=-1)
    (tmp_path / "one.py").write_text(text, encoding="utf-8")
    (tmp_path / "two.py").write_text(text.replace('"x"', '"in"').replace("FP32", "INT64"), encoding="utf-8")
    stages = "stages: [{name: one, model: ./one.py}, {name: two, after: [one], model: ./two.py}]"
    (tmp_path / "app.yaml").write_text(f"name: a\nslo_ms: 100\n{stages}\n", encoding="utf-8")
    for command in ("check", "serve"):
        result = CliRunner().invoke(main, [command, str(tmp_path / "app.yaml")])
        assert result.exit_code == 1
        assert "input 'in' of stage 'two' is INT64" in result.stderr
        assert "measuring" not in result.stderr
    assert not list(tmp_path.glob("*.profile.json"))


SYSTEM = """
from dataclasses import dataclass, replace

from sloop.core.protocols import Scale
from sloop.policies import targets
from sloop.systems import SYSTEMS
from sloop.systems.system import System
from sloop.vocabulary import Plan

@dataclass(frozen=True, slots=True)
class Own(Scale):
    is_quick = True
    period_ns: int = 1_000_000_000

    def plan(self, now_ns, view, memory):
        (stage,) = targets.on_one_kind(view).stages
        if {when}:
            raise KeyError(stage.name)
        belief = targets.belief_of(stage)
        return Plan((targets.equal_replicas(stage, belief, count=2, cores=1.0, batch_max=4),), why="two"), None

SYSTEM = System("own", "system", "a test", replace(SYSTEMS["static"].policies, scale=Own()))
"""


def in_worlds(folder: Path, when: str, *options: str) -> Result:
    (folder / "own.py").write_text(SYSTEM.format(when=when), encoding="utf-8")
    app = folder / "app.yaml"
    app.write_text(
        "name: app\nslo_ms: 800\nstages: [{name: one, profile: ResNet-T}]\nsystem: ./own.py\n"
        "cluster: {nodes: [{hardware: c5.4xlarge, count: 1}]}\n",
        encoding="utf-8",
    )
    return CliRunner().invoke(main, ["check", str(app), "--rate", "9", *options])


def test_worlds_show_a_policy_s_mistake_where_a_plan_shows_none(tmp_path: Path) -> None:
    rare = "2e9 < now_ns < 6e11 and not stage.replicas"
    assert in_worlds(tmp_path, rare).exit_code == 0
    found = in_worlds(tmp_path, rare, "--worlds", "12")
    assert found.exit_code == 1
    assert "12 random worlds: " in found.stdout
    assert re.search(r"KeyError: '(app@\d/)?one' \(own.py:18\)", found.stdout)
    again = re.search(r"play it again: sloop (check .*/app.yaml --rate 9 --worlds 1 --seed (\d+))", found.stdout)
    assert again is not None
    told = CliRunner().invoke(main, [*again[1].split(), "--json"])
    assert told.exit_code == 1
    worlds = json.loads(told.stdout)["worlds"]
    assert (worlds["worlds"], worlds["failures"][0]["seed"]) == (1, int(again[2]))


def test_worlds_without_a_mistake_are_counted(tmp_path: Path) -> None:
    found = in_worlds(tmp_path, "False", "--worlds", "3")
    assert found.exit_code == 0
    assert "no world has shown a mistake of a policy" in found.stdout
    assert "worlds" not in json.loads(in_worlds(tmp_path, "False", "--json").stdout)


def test_a_policy_that_cannot_plan_is_told_with_its_line(tmp_path: Path) -> None:
    found = in_worlds(tmp_path, "now_ns > 6e11")
    assert found.exit_code == 1
    assert found.stderr.startswith(f"error: {tmp_path / 'own.py'}:18: it cannot plan: KeyError: 'one'\n")
