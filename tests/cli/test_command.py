"""What all commands share, and the group that they are in."""

import json
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console, RenderableType

from sloop import __version__
from sloop.cli import COMMANDS, main
from sloop.cli.command import (
    CommandOutput,
    Number,
    Rate,
    command,
    counts,
    facts,
    numbers,
    progress,
    rates_by_name,
    shape,
    table,
    trace_at,
)
from sloop.errors import InputError
from sloop.report.tables import Table
from sloop.units import s


@command("weigh", example="sloop weigh 3")
@click.argument("weight", type=int)
def weigh(weight: int) -> CommandOutput:
    """Weigh something."""
    if weight == 0:
        raise InputError("weight is 0", where="app.yaml:3 weight", help="use 1 or more")
    return CommandOutput({"weight": weight}, [f"weight {weight}"], exit_code=1 if weight > 9 else 0)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(weigh, arguments)


def test_json_is_one_object_on_stdout() -> None:
    result = run("3", "--json")
    assert json.loads(result.stdout) == {"weight": 3}
    assert result.exit_code == 0


def test_people_see_words() -> None:
    assert "weight" in run("3").stdout


def test_the_help_ends_with_an_example_and_knows_json() -> None:
    shown = run("--help").stdout
    assert "Weigh something." in shown
    assert "Example:\n    sloop weigh 3" in shown
    assert "--json" in shown


@pytest.mark.parametrize(
    ("arguments", "code"), [(["3"], 0), (["0"], 1), (["10"], 1), (["x"], 2), ([], 2), (["--no"], 2)]
)
def test_exit_codes(arguments: list[str], code: int) -> None:
    assert run(*arguments).exit_code == code


def test_an_error_says_where_what_and_the_fix_on_stderr() -> None:
    result = run("0")
    assert result.stdout == ""
    assert result.stderr == "error: app.yaml:3 weight: weight is 0\nhelp: use 1 or more\n"


def test_an_error_with_json_is_still_one_object_on_stdout() -> None:
    result = run("0", "--json")
    assert json.loads(result.stdout) == {"error": "app.yaml:3 weight: weight is 0", "help": "use 1 or more"}
    assert "error: " in result.stderr


def printed(part: RenderableType) -> list[str]:
    file = StringIO()
    Console(file=file, width=60).print(part)
    return [line.rstrip() for line in file.getvalue().split("\n") if line.strip()]


def test_a_title_stands_above_its_table_unbroken() -> None:
    title = "a title that is much longer than the table below it"
    lines = printed(table(Table(title, ("name",), (("[a]",), ("b",)))))
    assert lines[0] == title
    assert lines[-2].strip() == "[a]"


def test_facts_are_labels_and_what_belongs_to_them() -> None:
    assert printed(facts([("rate", "20 rps"), ("requests", "1,200")])) == ["rate       20 rps", "requests   1,200"]


def test_progress_stays_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", total=2) as advance:
        advance(1, "half")
        advance(2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("after_s", [0.0, 60.0])
def test_progress_ends_with_its_block_whether_it_was_drawn_or_not(
    after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sloop.cli.command.PROGRESS_AFTER_S", after_s)
    with pytest.raises(InputError), progress("working", total=1):
        raise InputError("it failed")
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_a_mapping_makes_a_trace() -> None:
    trace = trace_at("{kind: equal, rate: 10}", seed=1, duration_s=2)
    assert list(trace.times_ns()) == [s(0.1) * place for place in range(20)]


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "counts.csv").write_text("count\n3\n0\n5\n")
    assert list(trace_at(str(tmp_path / "counts.csv"), seed=1, duration_s=None).counts_per_s()) == [3, 0, 5]


def test_a_scenarios_trace_and_duration_are_taken(app: Path) -> None:
    app.write_text(app.read_text() + "trace: {kind: equal, rate: 5}\nduration_s: 3\n")
    assert sum(trace_at(str(app), seed=1, duration_s=None).counts_per_s()) == 15
    assert sum(trace_at(str(app), seed=1, duration_s=1).counts_per_s()) == 5


def test_a_scenario_of_several_applications_has_a_trace_of_each(app: Path) -> None:
    other = app.read_text().replace("name: demo", "name: other")
    (app.parent / "other.yaml").write_text(other)
    scenario = app.parent / "all.yaml"
    traces = "{demo: {kind: equal, rate: 5}, other: {kind: equal, rate: 7}}"
    scenario.write_text(f"name: all\napplications: [app.yaml, other.yaml]\ntraces: {traces}\nduration_s: 2\n")
    assert sum(trace_at(str(scenario), seed=1, duration_s=None, application="other").counts_per_s()) == 14
    with pytest.raises(InputError, match="it has 2 traces"):
        trace_at(str(scenario), seed=1, duration_s=None)
    with pytest.raises(InputError, match="no trace for 'othr'") as caught:
        trace_at(str(scenario), seed=1, duration_s=None, application="othr", option="--model")
    assert caught.value.help == "choose one with --model: demo or other"
    shown = CliRunner().invoke(main, ["trace", str(scenario), "--application", "demo", "--json"])
    assert json.loads(shown.stdout)["requests"] == 10


@pytest.mark.parametrize("source", ["{kind: poissn, rate: 1}", "{kind: [", "nowhere.txt", "nowhere.yaml", "{}"])
def test_what_is_no_trace_is_refused(source: str) -> None:
    with pytest.raises(InputError):
        trace_at(source, seed=1, duration_s=1)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e999", "x", "-1"])
def test_is_finite_and_in_its_range(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Number(min=0).convert(text, None, None)
    assert Number(min=0).convert("0.5", None, None) == 0.5
    with pytest.raises(click.BadParameter):
        Rate(max=10).convert(f"name={text}", None, None)


def test_rates_may_have_a_name() -> None:
    rate = Rate(max=10)
    assert [rate.convert(text, None, None) for text in ("5", "a=2.5", ("", 5.0))] == [("", 5), ("a", 2.5), ("", 5)]
    assert rates_by_name([("", 5), ("a", 2)]) == {"": 5, "a": 2}
    with pytest.raises(click.BadParameter, match="two rates for all applications"):
        rates_by_name([("", 5), ("", 2)])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_with_a_range_is_finite(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    floats = [param for param in command.params if isinstance(param.type, click.types.FloatParamType)]
    assert [param.name for param in floats if not isinstance(param.type, Number)] == []


def test_lists_are_read() -> None:
    assert numbers("0.5,1,2") == (0.5, 1.0, 2.0)
    assert counts("1,2,4") == (1, 2, 4)
    assert shape("data=3,224,224") == ("data", (3, 224, 224))


def test_numbers_are_finite() -> None:
    for text in ("nan", "1,inf"):
        with pytest.raises(click.BadParameter, match="write"):
            numbers(text)


@pytest.mark.parametrize("text", ["", "1,", "1,x", "1;2"])
def test_what_is_no_list_is_refused_with_an_example(text: str) -> None:
    for read in (numbers, counts, shape):
        with pytest.raises(click.BadParameter, match="write"):
            read(text)


SOLVERS_AND_PLOTS = {"highspy", "scipy", "matplotlib", "PIL", "pandas"}
"""Only a program that is solved needs `highspy`, and nothing in a default installation the others."""
HEAVY = SOLVERS_AND_PLOTS | {
    "numpy",
    "onnxruntime",
    "onnx",
    "httptools",
    "grpc",
    "rich",
    "msgspec",
    "asyncio",
    "yaml",
}


def test_help_lists_every_command_without_importing_one() -> None:
    script = "import sys; from sloop.cli import main; main(['--help'], standalone_mode=False); print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    listing, _, modules = shown.rstrip().rpartition("\n")
    assert all(f"\n  {name} " in listing for name in COMMANDS)
    assert not HEAVY & set(modules.split())


def test_no_command_imports_a_solver_before_it_solves() -> None:
    helps = "".join(f"main(['{name}', '--help'], standalone_mode=False); " for name in COMMANDS)
    script = f"import sys; from sloop.cli import main; {helps}print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    modules = set(shown.rstrip().rpartition("\n")[2].split())
    assert "sloop.systems" in modules
    assert not SOLVERS_AND_PLOTS & modules


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_with_an_example(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Example:\n    sloop {name}" in result.stdout
    assert "--json" in result.stdout


def test_an_unknown_command_is_wrong_use() -> None:
    assert CliRunner().invoke(main, ["serv"]).exit_code == 2


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"sloop, version {__version__}\n"
