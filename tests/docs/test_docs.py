"""What the documents show works: links lead somewhere, files shown are valid, commands shown exist and parse."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sloop.app.load import load_deployment, load_scenario
from sloop.cli import main
from sloop.profile.profile import save_profile
from sloop.profile.published import RESNET_T
from sloop.sim.scenarios import run_scenario
from sloop.systems.setup import set_up
from tests.cli.conftest import save_small_model

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[str]:
    return [text for path in DOCUMENTS for kind, text in BLOCK.findall(path.read_text()) if kind == language]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    missing = [link for link in LINK.findall(document.read_text()) if not (document.parent / link).exists()]
    assert not missing, f"{document.name} links to {missing}: correct or remove these"


def shown_commands() -> list[str]:
    lines = [line.partition("#")[0].strip() for text in blocks("sh") for line in text.splitlines()]
    return sorted({part.strip() for line in lines for part in line.split("&&") if part.strip()})


@pytest.mark.parametrize("line", shown_commands())
def test_commands_parse(line: str) -> None:
    program, name, *arguments = shlex.split(line)
    if program == "make":
        assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"the Makefile has no {name!r}"
        return
    if program == "pip":
        assert arguments == ["."], f"{line}: packages are named in pyproject.toml"
        return
    if program == "curl":
        assert name.startswith("http://localhost:8000/v2/"), f"{line}: see test_first_hour.py"
        return
    if program == "python" and name.endswith(".py"):
        assert any(text.startswith(f"# {name}\n") for text in blocks("python")), f"no document shows {name}"
        return
    if program == "python":
        module = arguments[0] if name == "-m" else ""
        assert module.startswith("benchmarks."), f"{line}: only benchmarks are run as modules"
        assert find_spec(module) is not None, f"{line}: there is no module {module}"
        return
    assert program == "sloop", line
    command = main.get_command(click.Context(main), name)
    assert command is not None, line
    command.make_context(name, arguments)  # raises UsageError for an option that does not exist


def shown_files() -> list[str]:
    """Whole files; lists are of traces or links, which tests/workload/test_read.py reads."""
    return [text for text in blocks("yaml") if not text.startswith("- ")]


def write_shown_system(path: Path) -> None:
    (system,) = (text for text in blocks("python") if f'name="{path.stem}"' in text)
    assert len(system.splitlines()) < 65, "the page promises a small one"
    path.write_text(system)


@pytest.mark.parametrize("text", shown_files(), ids=lambda text: text.splitlines()[0])
def test_files_shown_are_valid(text: str, tmp_path: Path) -> None:
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    for model in re.findall(r"model: \./([^\s,}]+)", text):
        (tmp_path / model).write_bytes(b"")
        save_profile(RESNET_T, tmp_path / f"{model}.profile.json")
    for system in re.findall(r"name: \./(\S+\.py)", text):
        write_shown_system(tmp_path / system)
    for labels in re.findall(r"\./(\S+)\.txt", text):
        (tmp_path / f"{labels}.txt").write_text("zero\none\n")
    for application in re.findall(r"\./(\S+)\.yaml", text):
        declared = f"name: {application}\nslo_ms: 200\nstages: [{{name: a, profile: ResNet-T}}]\n"
        (tmp_path / f"{application}.yaml").write_text(declared)
    set_up(load_deployment(file))
    if re.search("^traces?:", text, re.MULTILINE):
        scenario = load_scenario(file)
        for choice in scenario.systems:
            assert run_scenario(scenario, choice).row.requests > 100


def test_the_model_repository_shown_becomes_the_application_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / "docs" / "triton-and-kserve.md").read_text()
    files = {block.partition("\n")[0]: block for kind, block in BLOCK.findall(text) if kind == "text"}
    monkeypatch.chdir(tmp_path)
    for name in ("reader", "find"):
        config = Path("models", name, "config.pbtxt")
        (config.parent / "1").mkdir(parents=True)
        config.write_text(files[f"# {config}"].partition("\n")[2])
    for name in ("find", "read"):
        Path("models", name, "1").mkdir(parents=True, exist_ok=True)
        save_small_model(Path("models", name, "1", "model.onnx"))
    result = CliRunner().invoke(main, ["import", "models"])
    assert result.exit_code == 0, result.output
    assert Path("app.yaml").read_text() == files["# app.yaml"].partition("\n")[2]


def test_the_advice_shown_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("sloop advise "))
    shown = next(block for kind, block in BLOCK.findall(text) if kind == "text" and block.startswith("rent "))
    result = CliRunner().invoke(main, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert printed[: len(shown.splitlines())] == shown.splitlines()
