"""The group itself; each command has its own file beside this one."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from sloop import __version__
from sloop.cli import COMMANDS, main

HEAVY = {
    "numpy",
    "scipy",
    "onnxruntime",
    "onnx",
    "matplotlib",
    "granian",
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
