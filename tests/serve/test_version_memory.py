"""Versions that were deployed survive a restart: what is kept, what a new server makes of it, and a killed server."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
from msgspec import structs

from sloop.actions import VersionState
from sloop.app.application import Application, Deployment, SystemChoice
from sloop.app.load import load_application, load_deployment
from sloop.events import Removed
from sloop.serve.control import memory as module
from sloop.serve.control.check_process import CheckOrder, check_version
from sloop.serve.control.memory import VERSIONS, KeptVersion, VersionMemory
from sloop.serve.control.orders import Deploy, ListVersions, find_server, send
from sloop.systems.setup import definition_of, set_up
from sloop.vocabulary import Canary
from tests.serve.test_deploy import file_of, named, python_model
from tests.serve.test_server import infer_body, wait_until_ready

SERVING, CANARY = VersionState.SERVING, VersionState.CANARY


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    return [python_model(tmp_path / f"times_{factor}.py", factor=factor) for factor in (1, 2, 3)]


def kept(application: Application, version: str, state: VersionState = SERVING, **others: Any) -> KeptVersion:
    """A deployed version of an application."""
    (setup,) = set_up(application.qualified(version)).applications
    return KeptVersion(version, state, definition=definition_of(setup), **others)


def written(folder: Path, deployment: Deployment, versions: dict[str, list[KeptVersion]]) -> None:
    """What a server for this deployment leaves that had these versions at its end."""

    async def main() -> None:
        memory = VersionMemory(folder, deployment)
        memory.write({name: [] for name in versions})
        memory.write(versions)
        await memory.written()

    asyncio.run(main())


def read(folder: Path, deployment: Deployment, left_out: tuple[str, ...] = ()) -> VersionMemory:
    memory = VersionMemory(folder, deployment)
    memory.read(left_out)
    return memory


def served(memory: VersionMemory) -> list[tuple[str, str]]:
    return [(each.name, each.version) for each in memory.restored.deployment.applications]


def test_a_new_server_has_the_versions_of_the_one_before(
    tmp_path: Path, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    deployment = load_deployment(named("demo", models[0]))
    first, other = deployment.application, load_application(named("other", models[1]))
    assert served(read(tmp_path, deployment)) == [("demo", "1")]
    written(tmp_path, deployment, {"demo": [KeptVersion("1", SERVING)]})
    assert read(tmp_path, deployment).restored.deployment == deployment
    assert not caplog.text, "nothing differs"

    canary = kept(replace(first, slo_ms=900), "3", CANARY, canary=Canary(share=0.2))
    written(tmp_path, deployment, {"demo": [kept(first, "2"), canary], "other": [kept(other, "1")]})
    memory = read(tmp_path, deployment)
    assert served(memory) == [("demo", "2"), ("other", "1")]
    assert [(name, each.version, each.canary) for name, each in memory.restored.later] == [
        ("demo", "3", Canary(share=0.2))
    ]
    setup = set_up(memory.restored.deployment)
    assert [each.application.key for each in setup.applications] == ["demo@2", "other"]
    said = "version 2 of 'demo', version 3 of 'demo' with 20 % and version 1 of 'other'"
    assert [each.message.partition(": ")[2] for each in caplog.records] == [said]


def test_what_was_deployed_runs_under_the_system_of_the_new_command_line(tmp_path: Path, models: list[Path]) -> None:
    deployment = load_deployment(named("demo", models[0]))
    canary = kept(replace(deployment.application, slo_ms=900), "3", CANARY, canary=Canary(share=0.2))
    written(tmp_path, deployment, {"demo": [kept(deployment.application, "2"), canary]})
    memory, choice = read(tmp_path, deployment), SystemChoice("hpa")
    setup = set_up(memory.restored.deployment, choice)
    assert [each.application.system.name for each in setup.applications] == ["hpa"]
    ((_, later),) = memory.restored.later
    whole = msgspec.to_builtins(replace(setup.deployment, applications=(), lines={}), str_keys=True)
    found = check_version(CheckOrder("", "", {}, whole, str(tmp_path / "state"), later.definition))
    application, _, served = found.served()
    assert (application.system.name, served.version, application.slo_ms) == ("hpa", "3", 900)


def test_what_was_removed_stays_away(tmp_path: Path, models: list[Path], caplog: pytest.LogCaptureFixture) -> None:
    deployment = load_deployment((named("demo", models[0]), named("other", models[1])))
    written(tmp_path, deployment, {"demo": [KeptVersion("1", SERVING)], "other": []})
    assert served(read(tmp_path, deployment)) == [("demo", "1")]
    assert "'other' is removed" in caplog.text
    fewer = load_deployment(named("other", models[1]))
    assert served(read(tmp_path, fewer)) == [("other", "1")], "nothing else would be served"


def test_what_the_command_line_changes_is_served_as_it_says(
    tmp_path: Path, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    deployment = load_deployment(named("demo", models[0]))
    written(tmp_path, deployment, {"demo": [kept(deployment.application, "2")]})
    changed = load_deployment(named("demo", models[0], slo_ms=700))
    memory = read(tmp_path, changed)
    assert memory.restored.deployment == changed
    assert "'demo' is as the command line names it" in caplog.text
    both = load_deployment((named("demo", models[0]), named("more", models[1])))
    assert served(read(tmp_path, both)) == [("demo", "2"), ("more", "1")], "demo is declared as before"
    another = load_deployment(named("more", models[1]))
    assert served(read(tmp_path, another)) == [("more", "1")], "demo was on the command line, and is not any more"
    left_out = read(tmp_path, another, left_out=("demo",))
    assert served(left_out) == [("more", "1"), ("demo", "2")], "its model cannot be measured now"
    measured = deployment.application
    profile = measured.stages[0].variants[0].profile
    assert profile is not None
    again = replace(measured.stages[0].variants[0], profile=structs.replace(profile, max_batch=1))
    other_profile = replace(measured, stages=(replace(measured.stages[0], variants=(again,)),))
    assert served(read(tmp_path, replace(deployment, applications=(other_profile,)))) == [("demo", "2")]


DEEP = b'{"format":1,"named":' + b"[" * 100_000


@pytest.mark.parametrize("content", [b"", b"{", b'{"format":99,"named":{},"applications":{}}', b"\xff" * 100, DEEP])
def test_a_file_that_cannot_be_read_is_told_and_kept(
    tmp_path: Path, models: list[Path], content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = load_deployment(named("demo", models[0]))
    for number in (1, 2):
        (tmp_path / VERSIONS).write_bytes(content)

        async def main() -> None:
            memory = read(tmp_path, deployment)
            assert memory.restored.deployment == deployment
            memory.write({"demo": [KeptVersion("1", SERVING)]})
            await memory.written()

        asyncio.run(main())
        assert f"{VERSIONS} cannot be read" in caplog.text
        assert (tmp_path / f"versions-{number}.unread").read_bytes() == content
    assert served(read(tmp_path, deployment)) == [("demo", "1")]


def test_a_definition_that_describes_nothing_is_told(tmp_path: Path, models: list[Path]) -> None:
    deployment = load_deployment(named("demo", models[0]))
    written(tmp_path, deployment, {"demo": [KeptVersion("2", SERVING, definition={"stages": 3})]})
    assert read(tmp_path, deployment).restored.deployment == deployment


def test_definitions_of_other_versions_than_the_file_says_are_told(
    tmp_path: Path, models: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    deployment = load_deployment(named("demo", models[0]))
    second = kept(deployment.application, "2")
    bare = structs.replace(second, definition={**second.definition, "stages": []})  # type: ignore[dict-item]
    for versions in ({"demo": [second, second]}, {"other": [second]}, {"demo": [structs.replace(second, version="3")]}):
        written(tmp_path, deployment, versions)
        assert read(tmp_path, deployment).restored.deployment == deployment
    written(tmp_path, deployment, {"demo": [bare]})
    assert read(tmp_path, deployment).restored.deployment == deployment
    assert caplog.text.count("cannot be read") == 4


def test_a_file_that_cannot_be_written_is_told_once_and_written_when_it_can_be(
    tmp_path: Path, models: list[Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.02)
    in_the_way, deployment = tmp_path / f"{VERSIONS}.new", load_deployment(named("demo", models[0]))
    in_the_way.mkdir()

    async def main() -> None:
        memory = VersionMemory(tmp_path, deployment)
        for version in ("1", "2"):
            memory.write({"demo": [KeptVersion(version, SERVING)]})
            await memory.written()
            await asyncio.sleep(0.1)
        in_the_way.rmdir()
        while not (tmp_path / VERSIONS).exists():  # noqa: ASYNC110  # a file has no event
            await asyncio.sleep(0.01)

    asyncio.run(main())
    assert [each["version"] for each in json.loads((tmp_path / VERSIONS).read_text())["applications"]["demo"]] == ["2"]
    assert caplog.text.count("cannot be written") == 1


# A server


class Server:
    """`sloop serve` in a process, on a state folder."""

    def __init__(self, file: str, folder: Path) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "sloop", "serve", file, "--state", str(folder), "--json", "--no-profile"]
        command += ["--http-port", "0", "--grpc-port", "off", "--limits", "{spare_workers: 0}"]
        self._said = folder.parent / f"{folder.name}.said"
        with self._said.open("a") as said:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
        assert self.process.stdout is not None
        self.where = json.loads(self.process.stdout.readline())
        wait_until_ready(int(self.where["http"].rpartition(":")[2]))

    def said(self) -> str:
        return self._said.read_text()

    def order(self, order: Any) -> Any:
        return send(find_server(self.folder), order, lambda _: None)

    def versions(self) -> set[tuple[str, str, str]]:
        return {(each.application, each.version, each.state) for each in self.order(ListVersions()).versions}

    def answer(self, model: str) -> tuple[str, float]:
        """Which version answers, and by how much it multiplies."""
        body = json.dumps(infer_body(1)).encode()
        with urlopen(Request(f"{self.where['http']}/v2/models/{model}/infer", body), timeout=20) as answer:
            found = json.load(answer)
        return found["model_version"], found["outputs"][0]["data"][0] / 0.5

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


@contextmanager
def running(file: str, folder: Path) -> Iterator[Server]:
    server = Server(file, folder)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=10)


@pytest.mark.live
def test_a_server_that_was_killed_serves_again_what_was_deployed(tmp_path: Path, models: list[Path]) -> None:
    folder, file = tmp_path / "state", file_of(tmp_path, named("demo", models[0]))
    with running(file, folder) as server:
        assert server.answer("demo") == ("1", 1.0)
        server.order(Deploy(file_of(tmp_path, named("demo", models[1]))))
        server.order(Deploy(file_of(tmp_path, named("other", models[0]))))
        server.order(Deploy(file_of(tmp_path, named("other", models[2])), canary=Canary(share=0.5)))
        before = server.versions()
        assert before == {("demo", "2", "serving"), ("other", "1", "serving"), ("other", "2", "canary")}
        server.kill()
    (folder / "log").rename(tmp_path / "log")
    (folder / "log").mkdir()
    (folder / "log" / "events-1-1.jsonl").write_text('{"sloop":"0.0.1","format":1}\n')  # no log says what was deployed
    with running(file, folder) as server:
        assert "version 2 of 'demo'" in server.said()
        assert server.answer("demo") == ("2", 2.0)
        while len(server.versions()) < 3 or any(state == "starting" for _, _, state in server.versions()):
            assert server.process.poll() is None
        assert server.versions() == before
        assert {server.answer("other") for _ in range(40)} == {("1", 1.0), ("2", 3.0)}
        server.order(Removed("other", "1"))
        server.order(Removed("demo"))
        server.kill()
    with running(file, folder) as server:
        assert server.versions() == {("other", "2", "serving")}
        server.close()


@pytest.mark.live
def test_a_deployed_model_that_is_gone_does_not_keep_the_server_from_its_start(
    tmp_path: Path, models: list[Path]
) -> None:
    folder, file = tmp_path / "state", file_of(tmp_path, named("demo", models[0]))
    with running(file, folder) as server:
        server.order(Deploy(file_of(tmp_path, named("demo", models[1]))))
        server.kill()
    models[1].unlink()
    with running(file, folder) as server:
        assert "what was deployed before the restart cannot be served" in server.said()
        assert server.answer("demo") == ("1", 1.0)
        server.close()
    assert len(list(folder.glob("versions-*.unread"))) == 1


# Systems that were ordered


def test_a_system_that_was_ordered_is_that_of_the_next_server_unless_the_command_line_says_otherwise(
    tmp_path: Path, models: list[Path]
) -> None:
    deployment = load_deployment([named("demo", models[0]), named("other", models[1])])
    ordered = SystemChoice("hpa", {"target": 0.6}, path="--system")
    versions = {
        "demo": [KeptVersion("1", SERVING, ordered=ordered), KeptVersion("2", CANARY, Canary(0.1), ordered=ordered)],
        "other": [KeptVersion("1", SERVING)],
    }
    versions["demo"][1] = structs.replace(kept(deployment.by_name["demo"], "2", CANARY), ordered=ordered)

    def begun(first: SystemChoice | None, then: SystemChoice | None) -> dict[str, str]:
        """The systems of a server with --system `then`, after one with `first`."""

        async def main() -> None:
            memory = VersionMemory(tmp_path, deployment, first)
            memory.write(versions)
            await memory.written()

        asyncio.run(main())
        memory = VersionMemory(tmp_path, deployment, then)
        memory.read()
        setup = set_up(memory.restored.under(then))
        return {each.application.name: each.application.system.text for each in setup.applications}

    static, hpa = "static (replicas 1, cores 0.5)", "hpa (target 0.6)"
    assert begun(None, None) == {"demo": hpa, "other": static}
    choice = SystemChoice("kpa")
    assert begun(choice, choice) == {"demo": hpa, "other": "kpa"}, "the same command line"
    assert begun(None, choice) == {"demo": "kpa", "other": "kpa"}, "what it names now was named after the order"
    assert begun(choice, None) == {"demo": static, "other": static}


def test_the_other_versions_start_under_the_system_that_was_ordered(tmp_path: Path, models: list[Path]) -> None:
    deployment = load_deployment(named("demo", models[0]))
    ordered = SystemChoice("hpa", {"target": 0.6}, path="--system")
    described = msgspec.to_builtins(replace(deployment, applications=()), str_keys=True)
    (later,) = [kept(deployment.applications[0], "2", CANARY)]
    check = CheckOrder("demo.yaml", "", {}, described, str(tmp_path), later.definition, {"demo": ordered})
    application, _, _ = check_version(check).served()
    assert application.system.text == "hpa (target 0.6)"
