"""What the documents show works: links lead somewhere, files shown are valid, commands shown exist and parse.

An example that needs a publication's folder says so in its first line (```yaml needs=sloop_systems.sponge), and is
skipped where that folder is not there; so is a link into the folder.
"""

import re
import shlex
from importlib.util import find_spec
from os.path import normpath
from pathlib import Path
from typing import Any

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
from tests.needed import folders

ROOT = Path(__file__).resolve().parents[2]
PUBLICATIONS = [ROOT / "src" / "sloop_systems", ROOT / "tests" / "sloop_systems"]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: needs=[\w.]+)?\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"^```\w+ needs=([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\S.*)$", re.MULTILINE)
INFO = re.compile(r"\w+(?: needs=sloop_systems\.(\w+))?")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language: str) -> list[str]:
    return [text for path in DOCUMENTS for kind, text in BLOCK.findall(path.read_text()) if kind == language]


def needed() -> dict[str, str]:
    """What each block needs that names a publication's folder."""
    return {text: module for path in DOCUMENTS for module, text in NEEDS.findall(path.read_text())}


def wrong_fences(text: str) -> list[str]:
    """First lines of blocks that nothing here reads, or that need a folder that nobody knows: it would not be missed.
    A copy without a publication's folder, which is no clone, does not know it either."""
    found = [(line, INFO.fullmatch(line)) for line in FENCE.findall(text)]
    is_clone = (ROOT / ".git").exists()
    return [line for line, info in found if not info or (is_clone and info[1] and info[1] not in folders())]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_blocks_need_exists(document: Path) -> None:
    wrong = wrong_fences(document.read_text())
    assert not wrong, f"{document.name}: {wrong}: write LANGUAGE or LANGUAGE needs=sloop_systems.FOLDER"


@pytest.mark.parametrize(
    "info", ["sh need=sloop_systems.comparison", "sh needs=comparison", "sh needs=sloop_systems.comparson"]
)
def test_a_wrong_need_is_noticed(info: str) -> None:
    assert wrong_fences(f"```sh\nls\n```\n```{info}\nls\n```\n") == [info] or not (ROOT / ".git").exists()
    assert wrong_fences("```sh needs=sloop_systems.comparison\nls\n```\n") == []


def skipped_without(text: str, module: str) -> Any:
    """A case that is skipped if the module that it needs, if any, is not there."""
    is_there = not module or (find_spec(module.partition(".")[0]) and find_spec(module))
    return pytest.param(text, marks=[] if is_there else pytest.mark.skip(reason=f"needs {module}"))


def is_gone(path: Path) -> bool:
    """Whether the path is in a publication's folder that is not there."""
    packages = [folder for folder in PUBLICATIONS if path.is_relative_to(folder)]
    return any(not Path(folder, *path.relative_to(folder).parts[:1]).exists() for folder in packages)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    targets = {link: Path(normpath(document.parent / link)) for link in LINK.findall(document.read_text())}
    missing = [link for link, path in targets.items() if not (path.exists() or is_gone(path))]
    assert not missing, f"{document.name} links to {missing}: correct or remove these"


def shown_commands() -> list[Any]:
    needs = needed()
    lines = {line.partition("#")[0]: needs.get(text, "") for text in blocks("sh") for line in text.splitlines()}
    found = {part.strip(): module for line, module in lines.items() for part in line.split("&&") if part.strip()}
    return [skipped_without(line, module) for line, module in sorted(found.items())]


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


def shown_files() -> list[Any]:
    """Whole files; lists are of traces or links, which tests/workload/test_read.py reads."""
    needs = needed()
    return [skipped_without(text, needs.get(text, "")) for text in blocks("yaml") if not text.startswith("- ")]


def write_shown_system(path: Path) -> None:
    (system,) = (text for text in blocks("python") if f'name="{path.stem}"' in text)
    assert len(system.splitlines()) < 61, "the page promises a small one"
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


@pytest.mark.skipif(not (PUBLICATIONS[0] / "colocation").is_dir(), reason="its published profiles are not here")
def test_the_advice_shown_is_what_the_command_prints() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("sloop advise "))
    shown = next(block for kind, block in BLOCK.findall(text) if kind == "text" and block.startswith("rent "))
    (module,) = [module for text, module in needed().items() if line in text]
    pytest.importorskip(module, reason=f"needs {module}")
    result = CliRunner().invoke(main, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    printed = [line.rstrip() for line in result.stdout.splitlines()]
    assert printed[: len(shown.splitlines())] == shown.splitlines()
