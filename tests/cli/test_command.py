import json

import click
import pytest
from click.testing import CliRunner, Result

from sloop.cli.command import Answer, command
from sloop.errors import InputError


@command("weigh", example="sloop weigh 3")
@click.argument("weight", type=int)
def weigh(weight: int) -> Answer:
    """Weigh something."""
    if weight == 0:
        raise InputError("weight is 0", where="app.yaml:3 weight", help="use 1 or more")
    return Answer({"weight": weight}, [f"weight {weight}"], exit_code=1 if weight > 9 else 0)


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
