"""A distribution that is not ours adds a system, a policy, a profile and a command, and is imported when it is used."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.cli.conftest import SERVED, save_small_model
from tests.docs.test_docs import blocks, write_shown_system

PROFILES = """\
from sloop.api.profiles import Profile, Quadratic

LAMP_DETECTOR = Profile(latency_ms=Quadratic(0.0, 20.0, 5.0), max_batch=8, max_cores=4, source="street")
ON_LAMP_POSTS = {"Moth-Detector@lamp-post": LAMP_DETECTOR}
"""
COMMAND = '''\
"""Say which street it is."""

import click


@click.command()
def street() -> None:
    click.echo("Elm Street")
'''
SCENARIO = """\
name: street
slo_ms: 600
stages: [{name: detect, profile: Lamp-Detector}]
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
system: {name: headroom, busy: 0.6}
trace: {kind: poisson, rate: 20}
duration_s: 20
"""


def shown_project() -> str:
    (text,) = (text for text in blocks("toml") if 'name = "street"' in text)
    return text


def install(folder: Path, project: str) -> None:
    """What an installer makes of a pyproject.toml: the metadata."""
    declared = tomllib.loads(project)["project"]
    info = folder / f"{declared['name']}-{declared['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    lines = [
        line
        for group, entries in declared["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder in which the distribution that docs/write-a-system.md shows is installed."""
    folder = tmp_path / "site"
    package = folder / "street"
    package.mkdir(parents=True)
    write_shown_system(package / "headroom.py")
    (package / "headroom.py").rename(package / "__init__.py")
    (package / "profiles.py").write_text(PROFILES)
    (package / "cli.py").write_text(COMMAND)
    install(folder, shown_project())
    return folder


def python(foreign: Path, *arguments: str, cwd: Path, code: int = 0) -> str:
    """What Python prints with the folder on its path: on stdout, or on stderr if it is to fail."""
    found = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(foreign)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == code, found.stdout + found.stderr
    return found.stderr if code else found.stdout


def sloop(foreign: Path, *arguments: str, cwd: Path, code: int = 0) -> str:
    return python(foreign, "-m", "sloop", *arguments, cwd=cwd, code=code)


def test_its_system_and_profile_are_simulated(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "street.yaml").write_text(SCENARIO)
    (run,) = json.loads(sloop(foreign, "simulate", "street.yaml", "--json", cwd=tmp_path))["runs"]
    assert run["system"] == "headroom"
    assert run["requests"] > 100
    assert run["served"] / run["requests"] > 0.9


def test_a_family_of_profiles_is_looked_in_for_names_that_match(foreign: Path, tmp_path: Path) -> None:
    for name in ("Moth-Detector", "Mole-Detector"):
        (tmp_path / f"{name}.yaml").write_text(
            SCENARIO.partition("trace:")[0].replace("Lamp-Detector", f"{name}@lamp-post")
        )
    assert "busy" in sloop(foreign, "check", "Moth-Detector.yaml", cwd=tmp_path)
    said = sloop(foreign, "check", "Mole-Detector.yaml", cwd=tmp_path, code=1)
    assert "no published profile 'Mole-Detector@lamp-post'" in said
    assert "Moth-Detector@lamp-post" in said, "the nearest"


def test_its_policy_is_an_option_of_other_systems_and_has_its_name(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "street.yaml").write_text(
        SCENARIO.replace("{name: headroom, busy: 0.6}", "{name: static, scale: headroom}")
    )
    (run,) = json.loads(sloop(foreign, "simulate", "street.yaml", "--json", cwd=tmp_path))["runs"]
    assert run["system"] == "static"
    shown = json.loads(sloop(foreign, "systems", "headroom", "--json", cwd=tmp_path))
    assert shown["slots"]["scale"] == {
        "name": "headroom",
        "busy": 0.7,
        "calm_ms": 20000.0,
        "hardware": "",
        "period_ms": 1000.0,
    }


def test_its_system_and_command_are_listed(foreign: Path, tmp_path: Path) -> None:
    assert "headroom" in [
        row["name"] for row in json.loads(sloop(foreign, "systems", "--json", cwd=tmp_path))["systems"]
    ]
    assert re.search("street +Say which street it is[.]", sloop(foreign, "--help", cwd=tmp_path))
    assert sloop(foreign, "street", cwd=tmp_path) == "Elm Street\n"


def test_it_passes_the_suite_of_every_system(foreign: Path, tmp_path: Path) -> None:
    (shown,) = (text for text in blocks("python") if "SystemSuite" in text)
    write_shown_system(tmp_path / "headroom.py")
    (tmp_path / "test_file.py").write_text(shown)
    (tmp_path / "test_package.py").write_text(shown.replace('systems = ("headroom.py",)', 'package = "street"'))
    printed = python(foreign, "-m", "pytest", "-p", "no:cacheprovider", "-v", cwd=tmp_path)
    assert "test_file.py::TestSuite::test_it_reads_what_it_shows[headroom.py] PASSED" in printed
    assert "test_package.py::TestSuite::test_a_policy_obeys_the_law_of_its_verb[scale.headroom] PASSED" in printed
    assert "18 passed" in printed


@pytest.mark.live
def test_its_system_serves_and_its_log_is_replayed(foreign: Path, tmp_path: Path) -> None:
    save_small_model(tmp_path / "tiny.onnx")
    (tmp_path / "tiny.yaml").write_text(SERVED.replace("system: static", "system: headroom"))
    command = [sys.executable, "-X", "importtime", "-m", "sloop", "serve", "tiny.yaml"]
    command += ["--http-port", "0", "--grpc-port", "0", "--json"]
    environment = os.environ | {"PYTHONPATH": str(foreign)}
    with (
        (tmp_path / "stderr").open("w+") as stderr,
        subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            where = json.loads(process.stdout.readline())
            with urlopen(f"{where['http']}/v2/models/tiny") as answer:
                assert answer.status == 200
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
        said = (tmp_path / "stderr").read_text()
        assert process.returncode == 0, said
    assert " sloop.serve.server\n" in said
    assert "sloop_systems" not in said
    header = next((tmp_path / where["log"]).glob("*.jsonl*")).read_bytes()
    assert b'"headroom"' in header
    replayed = sloop(foreign, "replay", where["log"], cwd=tmp_path)
    assert "every action equals the recorded one" in replayed


@pytest.mark.parametrize(
    ("command", "needless"),
    [
        (("check",), ("sloop.sim", "sloop.serve.edge", "importlib.metadata", "prometheus_client")),
        (("plan", "--rate", "20"), ("sloop.sim", "sloop.serve.edge", "prometheus_client")),
        (("simulate",), ("sloop.serve.edge", "prometheus_client")),
    ],
    ids=lambda each: each[0],
)
def test_commands_import_no_publication_that_the_application_does_not_name(
    tmp_path: Path, command: tuple[str, ...], needless: tuple[str, ...]
) -> None:
    of_no_system = SCENARIO.replace("system: {name: headroom, busy: 0.6}\n", "").replace("Lamp-Detector", "ResNet-T")
    (tmp_path / "app.yaml").write_text(of_no_system if command[0] == "simulate" else of_no_system.partition("trace")[0])
    arguments = [command[0], "app.yaml", *command[1:]]
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "sloop", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = [line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if "|" in line]
    assert "sloop.app.load" in modules
    assert not [name for name in modules if name.startswith(("sloop_systems", *needless))]


def test_nothing_is_imported_for_a_name_of_sloops_own(foreign: Path, tmp_path: Path) -> None:
    (tmp_path / "street.yaml").write_text(SCENARIO.replace("{name: headroom, busy: 0.6}", "static"))
    script = (
        "import sys; from pathlib import Path; from sloop.app.load import load_deployment\n"
        "from sloop.systems.setup import set_up; import sloop.cli.serve, sloop.plugins\n"
        "Path('app.yaml').write_text(Path('street.yaml').read_text().replace('Lamp-Detector', 'ResNet-T')"
        ".partition('trace')[0])\n"
        "set_up(load_deployment(Path('app.yaml')))\n"
        "print('street' in sys.modules, sloop.plugins.points.cache_info().currsize)"
    )
    assert python(foreign, "-c", script, cwd=tmp_path) == "False 0\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "1 / 0",
            "app.yaml:5: system: system 'headroom' of street 1.0 (street:SYSTEM) cannot be imported: ZeroDivisionError",
        ),
        ("SYSTEM = 3", "app.yaml:5: system: system 'headroom' of street 1.0: street:SYSTEM is a int, not a System"),
    ],
)
def test_one_that_is_broken_is_named(foreign: Path, tmp_path: Path, code: str, told: str) -> None:
    (foreign / "street" / "__init__.py").write_text(f"{code}\n")
    (tmp_path / "app.yaml").write_text(SCENARIO.replace("Lamp-Detector", "ResNet-T").partition("trace")[0])
    assert told in sloop(foreign, "check", "app.yaml", cwd=tmp_path, code=1)
    assert "Commands" in sloop(foreign, "--help", cwd=tmp_path)


def test_two_of_one_name_are_told_apart(foreign: Path, tmp_path: Path) -> None:
    install(foreign, shown_project().replace('name = "street"', 'name = "road"'))
    told = sloop(foreign, "systems", "headroom", cwd=tmp_path, code=1)
    assert "road 1.0 and street 1.0 each add a system 'headroom'\nhelp: uninstall all but one" in told.replace(
        "street 1.0 and road 1.0", "road 1.0 and street 1.0"
    )


def test_an_unknown_name_is_compared_with_those_of_distributions(foreign: Path, tmp_path: Path) -> None:
    assert "did you mean 'headroom'?" in sloop(foreign, "systems", "hedroom", cwd=tmp_path, code=1)


def test_an_editable_installation_that_is_older_than_its_project_is_told(foreign: Path, tmp_path: Path) -> None:
    project = tmp_path / "project folder"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        shown_project() + '\n[project.entry-points."sloop.runtimes"]\nlamp = "street:Lamp"\n'
    )
    record = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (foreign / "street-1.0.dist-info" / "direct_url.json").write_text(json.dumps(record))
    assert "headroom" in sloop(foreign, "systems", "headroom", cwd=tmp_path)
    renamed = shown_project().replace('headroom = "street:SYSTEM"', 'bedroom = "street:SYSTEM"')
    (project / "pyproject.toml").write_text(renamed)
    told = sloop(foreign, "systems", "bedroom", cwd=tmp_path, code=1)
    assert (
        "the installation of street in this environment is older than its pyproject.toml: it lacks system bedroom"
        in told
    )
    assert f"-m pip install --no-deps --editable {project}" in told
    (project / "pyproject.toml").write_text(shown_project().replace('"scale.headroom"', '"scale.later"'))
    write_shown_system(tmp_path / "headroom.py")
    assert "headroom.py was executed" in sloop(foreign, "systems", "./headroom.py", cwd=tmp_path)
    shutil.rmtree(project)
    assert "headroom" in sloop(foreign, "systems", "headroom", cwd=tmp_path)
