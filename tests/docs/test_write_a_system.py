"""The system that docs/write-a-system.md builds, in the simulator and in front of real workers."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sloop.app.load import load_application, load_scenario
from sloop.cli import main
from sloop.events import WorkerReady
from sloop.serve.protocols import Servable
from sloop.sim.scenarios import run_scenario
from sloop.systems.replay import header_of, rebuild, replay_log
from sloop.systems.setup import set_up
from sloop.systems.system import PROTOCOLS
from sloop.vocabulary import Outcome
from tests.docs.test_docs import ROOT, blocks, write_shown_system
from tests.serve.test_live import ECHO, TWO_CORES, check_each_ended_once, serving, text

PROFILE = {
    "latency_ms": {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 1},
    "max_batch": 8,
    "max_cores": 2,
    "load_s": 1,
    "memory_bytes": 1_000_000,
}


def test_it_does_better_than_a_fixed_number_of_replicas(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks("yaml") if "static" in block and "headroom.py" in block)
    (tmp_path / "headroom.yaml").write_text(shown)
    write_shown_system(tmp_path / "headroom.py")
    scenario = load_scenario(tmp_path / "headroom.yaml")
    own, static = (run_scenario(scenario, choice).row for choice in scenario.systems)
    assert (own.system, static.system) == ("headroom", "static")
    assert own.attainment > static.attainment


def test_the_mistake_shown_is_found_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (shown,) = (block for block in blocks("yaml") if block.endswith("system: {name: ./headroom.py}\n"))
    Path("app.yaml").write_text(shown)
    write_shown_system(Path("headroom.py"))
    command, _, output = next(block for block in blocks("console") if "--worlds" in block).partition("\n")
    arguments = command.removeprefix("$ sloop ").split()
    correct = CliRunner().invoke(main, arguments)
    assert (correct.exit_code, correct.stdout.splitlines()[-1]) == (0, "no world has shown a mistake of a policy")
    code, (change,) = Path("headroom.py").read_text(), blocks("diff")
    for lines in re.findall(r"(?:^-.*\n)+(?:^\+.*\n)+", change, re.MULTILINE):
        old, new = ("".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] == sign) for sign in "-+")
        assert old in code
        code = code.replace(old, new)
    Path("headroom.py").write_text(code)
    wrong = CliRunner().invoke(main, arguments)
    assert wrong.exit_code == 1
    printed = [line.rstrip() for line in wrong.stdout.splitlines()]
    assert [line for line in output.splitlines() if line.strip() != "…" and line not in printed] == []


def test_the_divide_policy_shown_cuts_all_alike(tmp_path: Path) -> None:
    (shown,) = (block for block in blocks("python") if "EqualPart" in block)
    own = "from sloop.api.systems import System, build_system\nfrom dataclasses import replace\n"
    policies = 'replace(build_system("static").policies, divide=EqualPart())'
    (tmp_path / "own.py").write_text(f'{shown}\n{own}SYSTEM = System("own", "system", "a test", {policies}, "any")\n')
    applications = [
        {"name": name, "slo_ms": 1000, "stages": [{"name": "s", "variants": [{"name": "v", "profile": PROFILE}]}]}
        for name in ("a", "b")
    ]
    described = {
        "name": "two",
        "applications": applications,
        "cluster": {"nodes": [{"hardware": "local", "count": 1, "cores": 4}]},
        "systems": [{"name": str(tmp_path / "own.py"), "replicas": 4}],
        "traces": {"a": {"kind": "poisson", "rate": 50}, "b": {"kind": "poisson", "rate": 50}},
        "duration_s": 40,
    }
    scenario = load_scenario(described)
    row = run_scenario(scenario, scenario.systems[0]).row
    assert row.rejected == pytest.approx(0.5 * row.requests, rel=0.02)
    assert row.served + row.rejected == row.requests


def test_the_methods_and_attributes_listed_are_those_of_the_protocols() -> None:
    text = (ROOT / "docs" / "write-a-system.md").read_text()
    listed = {
        (verb, protocol): set(re.findall(r"`(\w+)`", attributes))
        for verb, protocol, attributes in re.findall(r"^\| (\w+) \| `(\w+)` \| (`.*)$", text, re.MULTILINE)
    }
    protocols = [(verb, protocol) for verb, kinds in PROTOCOLS.items() for protocol in kinds]
    members = {(verb, protocol.__name__): _attributes(protocol) for verb, protocol in protocols}
    assert listed == members
    explained = set(re.findall(r"^\| `(?!sloop)(\w+\.\w+)` \|", text, re.MULTILINE))
    assert explained <= {f"{verb}.{name}" for (verb, _), names in members.items() for name in names}
    has_default = {f"{verb}.{name}" for verb, protocol in protocols for name in _properties(protocol)}
    assert has_default <= {*explained, "scale.period_ns"}, "each is explained"


def _attributes(protocol: Any) -> set[str]:
    return {name for name in (*dir(protocol), *protocol.__annotations__) if not name.startswith("_")}


def _properties(protocol: Any) -> set[str]:
    return {name for name, value in vars(protocol).items() if isinstance(value, property)}


def test_the_modules_listed_are_those_of_the_interface() -> None:
    listed = re.findall(r"\(\.\./src/(sloop/api/\w+\.py)\)", (ROOT / "docs" / "write-a-system.md").read_text())
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/sloop/api").glob("*.py")
    )


def test_a_policy_costs_no_simulator_and_no_runtime() -> None:
    """What is imported with the part of the interface that a policy needs."""
    script = "import sys, sloop.api.policies, sloop.api.solvers, sloop.api.systems; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert "sloop.policies.targets" in printed
    unwanted = ("sloop.sim", "sloop.serve", "sloop.report", "sloop.cli", "onnxruntime", "click", "sloop_systems")
    assert not [name for name in printed if name.startswith(unwanted)]


@pytest.mark.live
async def test_it_serves(tmp_path: Path) -> None:
    write_shown_system(tmp_path / "headroom.py")
    stages = [
        {"name": name, "after": after, "variants": [{"name": "v", "profile": PROFILE}]}
        for name, after in (("a", []), ("b", ["a"]))
    ]
    system = {"name": str(tmp_path / "headroom.py"), "busy": 0.9}
    described = {"name": "own", "slo_ms": 1000, "stages": stages, "system": system, "cluster": TWO_CORES}
    setup = set_up(load_application(described))

    model = Servable("fake:sleep:1:1", ECHO)
    async with serving(setup, model, model) as live:
        await live.until(WorkerReady, 2)
        for number in range(100):
            live.ask(text(b"%d" % number))
            await asyncio.sleep(0.003)
        await live.all_answered()
        assert check_each_ended_once(live)[Outcome.SERVED] == 100
        again = rebuild(header_of(setup, origin="live"))
        assert replay_log(list(live.log), again.core()).difference is None
