"""`sloop deploy` with a running server: versions come and go, what serves goes on serving, and every log replays."""

import asyncio
import json
import os
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from msgspec import structs

from sloop.actions import Rollout, VersionState
from sloop.app.load import load_application, load_deployment
from sloop.errors import InputError, MachineError
from sloop.events import Promoted, Removed
from sloop.runlog import read_log
from sloop.serve.control import deployer as module
from sloop.serve.control import orders
from sloop.serve.control.check_process import check_system, check_version
from sloop.serve.control.checks import check_weights
from sloop.serve.control.deployer import ENDED_KEPT, Deployer
from sloop.serve.control.memory import VersionMemory
from sloop.serve.control.orders import (
    ChangeSystem,
    Comparison,
    Deploy,
    Done,
    ListVersions,
    Order,
    find_server,
    is_served,
    send,
)
from sloop.serve.control.repository import ModelRepository
from sloop.serve.control.servables import servables_of
from sloop.serve.edge.service import Keys
from sloop.serve.node import spares
from sloop.serve.node.node import LiveNode
from sloop.serve.server import check_repository
from sloop.serve.weights.cache import WeightsCache
from sloop.serve.weights.sources import ModelSource
from sloop.systems.setup import set_up, weights_of
from sloop.vocabulary import Canary
from tests.serve.conftest import write_mlp
from tests.serve.edge.fakes import LoopThread
from tests.serve.test_server import Running, assert_replays, document, infer_body

pytestmark = pytest.mark.live

PYTHON_MODEL = """
import time
class Model:
    inputs = {{"x": ("FP32", (-1, 4))}}
    outputs = {{"y": ("FP32", (-1, 3))}}
    joins_rows = True
    def __init__(self, threads):
        {opens}
    def run(self, x):
        time.sleep({sleeps})
        return x[:, :3] * {factor}
"""


def python_model(path: Path, *, factor: float = 1.0, sleeps: float = 0.0, opens: str = "pass") -> Path:
    path.write_text(PYTHON_MODEL.format(factor=factor, sleeps=sleeps, opens=opens))
    return path


def named(name: str, *models: Path, **changes: Any) -> dict[str, object]:
    return document(*models) | {"name": name} | changes


def file_of(folder: Path, described: dict[str, object]) -> str:
    path = folder / f"{described['name']}-{time.monotonic_ns()}.yaml"
    path.write_text(yaml.safe_dump(described))
    return str(path)


@pytest.fixture(autouse=True)
def _checked_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are checked in a thread, which spares each check the start of a process; not in tests that ask for
    `check_process`."""
    if "check_process" not in request.fixturenames:
        monkeypatch.setattr(module, "checked", lambda order: asyncio.to_thread(check_version, order))


@pytest.fixture
def check_process() -> None:
    """Versions are checked in a process, as always outside these tests."""


@contextmanager
def serving(
    thread: LoopThread, folder: Path, *described: dict[str, object], spare_workers: int = 0
) -> Iterator[Running]:
    """A running server whose log replays when it has stopped."""
    with Running(thread, folder, *described, limits={"spare_workers": spare_workers}) as running:
        yield running
    assert running.server.driver.crash is None
    assert_replays(folder)


def order(running: Running, what: Order, tell: Callable[[str], None] = lambda _: None) -> Done:
    return send(find_server(running.folder), what, tell)


def versions(running: Running) -> list[tuple[str, str, str, float]]:
    return [
        (each.application, each.version, each.state, each.share) for each in order(running, ListVersions()).versions
    ]


def factor_of(running: Running, model: str, version: str = "") -> tuple[str, float]:
    """The version that answers, and by how much it multiplies."""
    path = f"/v2/models/{model}/versions/{version}/infer" if version else f"/v2/models/{model}/infer"
    status, text = running.ask("POST", path, infer_body(1))
    assert status == 200, text
    answer = json.loads(text)
    return answer["model_version"], answer["outputs"][0]["data"][0] / 0.5


@contextmanager
def asking(running: Running, model: str, threads: int = 3) -> Iterator[Counter[int]]:
    """Requests for a model, one after another in each thread; counts the status codes."""
    over, statuses = threading.Event(), Counter[int]()

    def ask() -> None:
        while not over.is_set():
            status, text = running.ask("POST", f"/v2/models/{model}/infer", infer_body(1))
            statuses[status] += 1
            assert status == 200, text
            over.wait(0.01)

    workers = [threading.Thread(target=ask) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield statuses
    finally:
        over.set()
        for worker in workers:
            worker.join(30)


def test_a_model_is_replaced_and_no_request_is_lost(thread: LoopThread, tmp_path: Path) -> None:
    models = [python_model(tmp_path / f"m{number}.py", factor=number) for number in (1, 2, 3)]
    with serving(thread, tmp_path / "state", named("demo", models[0])) as running:
        assert factor_of(running, "demo") == ("1", 1.0)
        with asking(running, "demo") as statuses:
            for number in (2, 3):
                told: list[str] = []
                done = order(running, Deploy(file_of(tmp_path, named("demo", models[number - 1]))), told.append)
                assert done.is_good
                (status,) = done.versions
                assert (status.version, status.state, status.share) == (str(number), "serving", 1.0)
                of = f"version {number} of 'demo'"
                assert told[0].startswith("checking ")
                steps = [f"{of} starts: {what}" for what in ("there is no plan yet", "0 of 1 replicas ready")]
                assert set(told[1:-1]) <= {*steps, f"{of} starts: 1 of 1 replicas ready"}
                assert told[-1] == f"{of} serves all requests"
                assert factor_of(running, "demo") == (str(number), number)
        assert statuses.keys() == {200}
        assert statuses[200] > 50
        deadline_s = time.monotonic() + 10
        while len(versions(running)) > 1 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert versions(running) == [("demo", "3", "serving", 1.0)]
        backend = running.server.backend
        assert isinstance(backend, LiveNode)
        stages = {stage for stage, _ in backend._servables}
        assert stages == {"demo@3/s0"}, "the models of retired versions are forgotten"


def test_a_version_that_is_deployed_under_load_takes_workers_that_wait(
    thread: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the first of them was killed before."""
    monkeypatch.setattr(spares, "SPARES_AFTER_S", 0.1)
    monkeypatch.setattr(spares, "HUMBLE_S_MAX", 2.0)
    models = [python_model(tmp_path / f"m{number}.py", factor=number) for number in (1, 2)]
    with serving(thread, tmp_path / "state", named("demo", models[0]), spare_workers=1) as running:
        backend = running.server.backend
        assert isinstance(backend, LiveNode)

        async def waiting(without: int = 0) -> int:
            async with asyncio.timeout(60):
                while without in backend.spares.pids() or not backend.spares.pids():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            return backend.spares.pids()[0]

        async def serving_pids() -> set[int | None]:
            return {backend.pid(replica) for replica in backend.workers}

        killed = thread.call(waiting())
        os.kill(killed, signal.SIGKILL)
        with asking(running, "demo") as statuses:
            ahead = thread.call(waiting(without=killed))
            order(running, Deploy(file_of(tmp_path, named("demo", models[1]))))
            assert ahead in thread.call(serving_pids())
            assert factor_of(running, "demo") == ("2", 2.0)
            another = thread.call(waiting(without=ahead))
        assert statuses.keys() == {200}
    assert not {str(ahead), str(another)} & set(os.listdir("/proc"))


def test_a_canary_gets_its_share_and_is_promoted(thread: LoopThread, tmp_path: Path) -> None:
    models = [python_model(tmp_path / f"m{number}.py", factor=number) for number in (1, 2)]
    with serving(thread, tmp_path / "state", named("demo", models[0])) as running:
        path = file_of(tmp_path, named("demo", models[1]))
        told: list[str] = []
        done = order(running, Deploy(path, canary=Canary(0.25)), told.append)
        assert told[-1] == "version 2 of 'demo' is a canary with 25 % of the requests"
        assert [(each.state, each.share) for each in done.versions] == [("canary", 0.25)]
        assert versions(running) == [("demo", "1", "serving", 0.75), ("demo", "2", "canary", 0.25)]
        listed = order(running, ListVersions())
        assert [each.compared for each in listed.versions] == [Comparison(0, None, 50)] * 2
        assert [each.model for each in listed.versions] == ["ready"] * 2
        assert listed.ended == ()
        found = Counter(factor_of(running, "demo") for _ in range(40))
        assert found == {("1", 1.0): 30, ("2", 2.0): 10}
        compared = [each.compared for each in order(running, ListVersions()).versions]
        assert compared == [Comparison(30, 1.0, 20), Comparison(10, 1.0, 40)]
        assert factor_of(running, "demo", "2") == ("2", 2.0)
        with pytest.raises(InputError, match="version 2 of 'demo' is a canary already") as caught:
            order(running, Deploy(path, canary=Canary(0.1)))
        assert "--promote demo" in caught.value.help
        done = order(running, Promoted("demo", ""))
        assert [(each.version, each.state) for each in done.versions] == [("2", "serving")]
        assert factor_of(running, "demo") == ("2", 2.0)
        with pytest.raises(InputError, match="no version of 'demo' is a canary"):
            order(running, Promoted("demo", ""))


def test_a_canary_is_removed_or_replaced_and_it_is_said_who_gets_its_requests(
    thread: LoopThread, tmp_path: Path, mlp: Path
) -> None:
    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        path = file_of(tmp_path, named("demo", mlp))
        order(running, Deploy(path, canary=Canary(0.25)))
        told: list[str] = []
        order(running, Removed("demo", "2"), told.append)
        assert told[0] == "version 2 of 'demo' gets no new requests; version 1 gets all"
        assert told[-1] == "version 2 of 'demo' has ended: it was removed"
        order(running, Deploy(path, canary=Canary(0.25)))
        order(running, Deploy(path), told.append)
        assert "note: version 3 of 'demo' is a canary; version 4 will replace it too" in told
        assert [each[1:] for each in versions(running) if each[2] == "serving"] == [("4", "serving", 1.0)]


def test_models_in_a_cache_stay_as_long_as_a_version_uses_them(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    """As `sloop pull` prints their paths. Another process may need the room at any time."""
    cache = WeightsCache(tmp_path / "cache", 10**9)
    first, second = (
        asyncio.run(cache.fetch(ModelSource.of(str(write_mlp(tmp_path / name, "n"))))) for name in ("1.onnx", "2.onnx")
    )

    def can_go(model: Path) -> bool:
        rows = cache.models._evictable(tmp_path)
        for row in rows:
            os.close(row.lock)
        return any(model.is_relative_to(row.folder) for row in rows)

    assert can_go(first)
    with serving(thread, tmp_path / "state", named("demo", first)) as running:
        assert not can_go(first)
        assert can_go(second)
        order(running, Deploy(file_of(tmp_path, named("demo", second))))
        assert not can_go(second)
        thread.until(lambda: can_go(first))
    assert can_go(second)


def test_the_only_version_that_serves_cannot_be_removed_while_another_starts(
    thread: LoopThread, tmp_path: Path, mlp: Path
) -> None:
    slow = python_model(tmp_path / "slow.py", opens="import time; time.sleep(2)")
    model = python_model(tmp_path / "model.py")
    with serving(thread, tmp_path / "state", named("demo", model)) as running:
        deploying = threading.Thread(target=order, args=(running, Deploy(file_of(tmp_path, named("demo", slow)))))
        deploying.start()
        while ("demo", "2", "starting", 0.0) not in versions(running):
            assert deploying.is_alive()
        with pytest.raises(InputError, match="version 1 of 'demo' is all that serves, and version 2 still starts"):
            order(running, Removed("demo", "1"))
        assert factor_of(running, "demo")[0] == "1"
        deploying.join()
        assert factor_of(running, "demo")[0] == "2"


def test_what_is_remembered_of_versions_that_have_ended_is_bounded(
    tmp_path: Path, mlp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = load_deployment(named("demo", mlp))
    driver = SimpleNamespace(on_rollout=lambda _: None, served=lambda _: None)
    service = SimpleNamespace(models={})
    unused: Any = None
    core, insight = SimpleNamespace(versions=lambda _: ()), SimpleNamespace(refused={})
    memory = VersionMemory(tmp_path, deployment)
    monkeypatch.setattr(memory, "write", lambda _: None)
    deployer = Deployer(deployment, core, driver, unused, unused, service, insight, memory)  # type: ignore[arg-type]
    for number in range(2, 3 * ENDED_KEPT):
        version = str(number)
        deployer._applications[f"demo@{version}"] = deployment.applications[0]
        for state in (VersionState.SERVING, VersionState.RETIRING, VersionState.RETIRED):
            driver.on_rollout(Rollout("demo", version, state, 0.0, "replaced"))
        assert deployer._last["demo", version].state is VersionState.RETIRED, "orders wait for it"
    assert len(deployer._last) == ENDED_KEPT


def test_a_canary_that_misses_deadlines_is_rolled_back(thread: LoopThread, tmp_path: Path) -> None:
    good, slow = (python_model(tmp_path / f"m{each}.py", sleeps=each) for each in (0, 0.3))
    with serving(thread, tmp_path / "state", named("demo", good, slo_ms=200)) as running:
        canary = Canary(0.5, requests_min=20)
        assert order(running, Deploy(file_of(tmp_path, named("demo", slow, slo_ms=200)), canary=canary)).is_good
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s and any(state == "canary" for _, _, state, _ in versions(running)):
            running.ask("POST", "/v2/models/demo/infer", infer_body(1))
        assert ("demo", "1", "serving", 1.0) in versions(running)
        decisions = json.loads(running.ask("GET", "/v2/sloop/decisions")[1])["decisions"]
        assert any("rolled back: " in each["why"] for each in decisions)
        assert factor_of(running, "demo")[0] == "1"


def test_a_version_whose_workers_die_is_given_up(thread: LoopThread, tmp_path: Path) -> None:
    """It opens twice, for the check, which also looks whether a new one gives the same answers."""
    good = python_model(tmp_path / "good.py")
    marker = tmp_path / "opened"
    marker.touch()
    opens = f"import os, pathlib; p = pathlib.Path({str(marker)!r}); len(p.read_text()) > len('opened') and os._exit(7)"
    opens += "; p.open('a').write('opened')"
    bad = python_model(tmp_path / "bad.py", opens=opens)
    with serving(thread, tmp_path / "state", named("demo", good)) as running:
        done = order(running, Deploy(file_of(tmp_path, named("demo", bad))))
        assert not done.is_good
        (status,) = done.versions
        assert status.state in ("retiring", "retired")
        assert "lost 3 times before one was ready: its process exited with 7" in status.why
        assert factor_of(running, "demo") == ("1", 1.0)


def test_applications_are_added_and_removed_while_others_serve(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    """From the fifth application on, plans are made by the planner process, which is started for it."""
    other = python_model(tmp_path / "other.py", factor=5)
    with serving(thread, tmp_path / "state", named("demo", mlp), named("second", mlp)) as running:
        with asking(running, "demo", threads=1) as statuses:
            for number in range(3, 7):
                done = order(running, Deploy(file_of(tmp_path, named(f"more{number}", other))))
                assert [each.state for each in done.versions] == ["serving"]
                assert factor_of(running, f"more{number}") == ("1", 5.0)
            assert running.server.planner.pid is not None
            done = order(running, Removed("more4"))
            assert [each.state for each in done.versions] == ["retired"]
            assert running.ask("POST", "/v2/models/more4/infer", infer_body(1))[0] == 404
            order(running, Deploy(file_of(tmp_path, named("more4", other))))
            assert factor_of(running, "more4") == ("2", 5.0), "the keys of a log are never used twice"
        assert statuses.keys() == {200}
        records = [record for _, record in read_log(running.folder)]
        assert sum(getattr(record, "restarted", False) for record in records) <= 1


def test_open_requests_of_a_removed_model_are_finished(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    slow = python_model(tmp_path / "slow.py", sleeps=0.5)
    with serving(thread, tmp_path / "state", named("demo", mlp), named("slow", slow)) as running:
        answers: list[int] = []

        def ask() -> None:
            answers.append(running.ask("POST", "/v2/models/slow/infer", infer_body(1))[0])

        workers = [threading.Thread(target=ask) for _ in range(6)]
        for worker in workers:
            worker.start()
        while running.server.driver.open_requests < 6:
            time.sleep(0.01)
        order(running, Removed("slow"))
        for worker in workers:
            worker.join(20)
        assert answers == [200] * 6
        with pytest.raises(InputError, match="'demo' is the only application of this server") as caught:
            order(running, Removed("demo"))
        assert "SIGTERM" in caught.value.help


def test_what_does_not_fit_is_refused_and_what_serves_goes_on(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    wide = write_mlp(tmp_path / "wide.onnx", "rows", width=5)
    renamed = write_mlp(tmp_path / "renamed.onnx", "rows", names=("x", "z"))
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    raises = python_model(tmp_path / "raises.py", opens="raise RuntimeError('no weights')")
    dies = python_model(tmp_path / "dies.py", opens="import os; os._exit(3)")
    faulty = python_model(tmp_path / "wrong.py")
    faulty.write_text(faulty.read_text().replace("return ", "return 1,"))
    unmeasured = [{"name": "s0", "variants": [{"name": "v", "model": str(mlp)}]}]
    cores = {"name": "static", "replicas": 1, "cores": 4000}
    refusals: list[tuple[dict[str, object], str]] = [
        (named("demo", wide), r"its inputs are x FP32\[-1, 5\]; those of version 1 of 'demo', which serves, are x"),
        (named("demo", renamed), r"its outputs are z FP32\[-1, 3\]; those of version 1"),
        (named("demo", mlp, limits={"rows": 2}), "it takes requests of at most 2 rows; version 1 .* takes 1024"),
        (named("demo", mlp, stages=unmeasured), "has no profile"),
        (named("demo", broken), "broken.onnx"),
        (named("demo", raises), "no weights"),
        (named("demo", dies), "the process that examined"),
        (named("demo", faulty), r"wrong\.py: 'run' returns 2 arrays; 1 are declared"),
        (named("demo", mlp, system="kpa"), "declares the system 'kpa', not 'static'"),
        (named("demo", mlp, system=cores), "which no node could hold"),
        (named("demo", mlp, slo_ms=-1), "slo_ms"),
        ({"name": "two", "applications": [named("demo", mlp)]}, "one application is needed here"),
    ]
    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        with asking(running, "demo", threads=1) as statuses:
            for described, says in refusals:
                with pytest.raises(InputError, match=says):
                    order(running, Deploy(file_of(tmp_path, described)))
            good = file_of(tmp_path, named("demo", mlp))
            with pytest.raises(InputError, match=r"nowhere\.yaml"):
                order(running, Deploy(str(tmp_path / "nowhere.yaml")))
            with pytest.raises(InputError, match="has, or had, a version '1'"):
                order(running, Deploy(good, version="1"))
            with pytest.raises(InputError, match="a name of letters"):
                order(running, Deploy(good, version="a/b"))
            with pytest.raises(InputError, match="the share of a canary is 1"):
                order(running, Deploy(good, canary=Canary(1.0)))
            with pytest.raises(InputError, match="no version that could serve the other requests"):
                order(running, Deploy(file_of(tmp_path, named("new", mlp)), canary=Canary(0.1)))
            for wrong in (Promoted("new", ""), Removed("new")):
                with pytest.raises(InputError, match="this server has no application 'new'"):
                    order(running, wrong)
            with pytest.raises(InputError, match="'demo' has no version '7'"):
                order(running, Removed("demo", "7"))
        assert statuses.keys() == {200}
        assert versions(running) == [("demo", "1", "serving", 1.0)]


@pytest.mark.usefixtures("check_process")
def test_a_version_has_the_name_that_it_is_given(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        done = order(running, Deploy(file_of(tmp_path, named("demo", mlp)), version="2026-11"))
        assert done.versions[0].version == "2026-11"
        assert factor_of(running, "demo")[0] == "2026-11"
        done = order(running, Deploy(file_of(tmp_path, named("demo", mlp))))
        assert done.versions[0].version == "2", "the next number"


# The control socket


def test_only_the_servers_own_user_may_open_the_socket(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    folder = tmp_path / ("a-very-long-name" * 8)  # longer than the name of a socket may be
    with serving(thread, folder, named("demo", mlp)) as running:
        path = folder / orders.CONTROL
        found = path.stat()
        assert stat.S_ISSOCK(found.st_mode)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert find_server(folder) == path
        with _connected(path) as sock:
            sock.sendall(b"nonsense\n")
            assert "the order cannot be read" in json.loads(sock.makefile("rb").readline())["what"]
        assert versions(running) == [("demo", "1", "serving", 1.0)]
    assert not path.exists()
    with pytest.raises(InputError, match="no server runs with this state folder"):
        find_server(folder)


@contextmanager
def _connected(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, orders._short(path) as name:
        sock.connect(name)
        yield sock


@pytest.mark.usefixtures("check_process")
def test_a_client_that_leaves_ends_the_check(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    marker = tmp_path / "checking"
    opens = f"import pathlib; pathlib.Path({str(marker)!r}).touch(); time.sleep(600)"
    slow = file_of(tmp_path, named("demo", python_model(tmp_path / "slow.py", opens=opens)))
    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        with _connected(running.folder / orders.CONTROL) as sock:
            sock.sendall(json.dumps({"type": "deploy", "file": slow}).encode() + b"\n")
            while not marker.exists():
                time.sleep(0.01)
        done = order(running, Deploy(file_of(tmp_path, named("demo", mlp))))
        assert done.is_good, "the next one need not wait for the check"
    found = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    assert not [path for path in found if path.exists() and os.fsencode(tmp_path) in path.read_bytes()]


def test_the_only_server_is_found(thread: LoopThread, tmp_path: Path, mlp: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="no server with a state folder in"):
        find_server(None)
    with serving(thread, tmp_path / ".sloop" / "one", named("demo", mlp)):
        assert find_server(None) == Path(".sloop/one/control")
        says = r"2 servers are running: \.sloop/one, \.sloop/two"
        with serving(thread, tmp_path / ".sloop" / "two", named("demo", mlp)), pytest.raises(InputError, match=says):
            find_server(None)
    stale = tmp_path / ".sloop" / "one" / "control"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))  # as a server leaves it that is killed
    assert not is_served(stale)
    with serving(thread, tmp_path / ".sloop" / "one", named("demo", mlp)):
        assert is_served(stale)


@pytest.mark.usefixtures("check_process")
def test_a_server_that_stops_breaks_the_connection(thread: LoopThread, tmp_path: Path, mlp: Path) -> None:
    opens = "time.sleep(600)"
    slow = file_of(tmp_path, named("demo", python_model(tmp_path / "slow.py", opens=opens)))
    errors: list[Exception] = []

    def deploy() -> None:
        try:
            order(running, Deploy(slow))
        except MachineError as error:
            errors.append(error)

    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        worker = threading.Thread(target=deploy)
        worker.start()
        time.sleep(0.5)
    worker.join(10)
    assert "the server closed the connection" in str(errors[0])


# Orders of clients: Triton's model repository


def test_clients_load_and_unload_models(thread: LoopThread, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    model = write_mlp(tmp_path / "model.onnx", "n")
    for name in ("words", "wrong"):
        described = named("words", model)
        (repository / f"{name}.yaml").write_text(yaml.safe_dump(described))
    keys = tmp_path / "keys"
    keys.write_text("phone other\nboss secret admin\n")
    settings = {"api_key_file": keys, "repository": repository}
    key, other = {"x-api-key": "secret"}, {"x-api-key": "other"}

    def ask(path: str, method: str = "POST", body: object = None) -> Any:
        status, text = running.ask(method, path, body, key)
        return status, json.loads(text)

    def index(**body: bool) -> dict[str, str]:
        _, found = ask("/v2/repository/index", body=body)
        return {each["name"]: each["state"] for each in found}

    with Running(thread, tmp_path / "state", named("demo", model), settings=settings) as running:
        assert "model_repository" in ask("/v2", "GET")[1]["extensions"]
        assert index() == {"demo": "READY", "words": "UNAVAILABLE", "wrong": "UNAVAILABLE"}
        assert running.ask("POST", "/v2/repository/models/words/load")[0] == 401
        assert running.ask("POST", "/v2/repository/models/words/load", headers=other)[0] == 403
        assert ask("/v2/repository/models/words/load") == (200, {})
        assert running.ask("POST", "/v2/repository/models/words/unload", headers=other)[0] == 403
        assert running.ask("POST", "/v2/models/words/infer", infer_body(1), other)[0] == 200
        assert index(ready=True) == {"demo": "READY", "words": "READY"}
        assert running.ask("POST", "/v2/models/words/infer", infer_body(1), key)[0] == 200
        for path, status, error in (
            ("none/load", 404, "the repository has no model 'none'; help: it has words and wrong"),
            ("../demo/load", 404, "the repository has no model '../demo'"),
            ("wrong/load", 400, "the application in it is called 'words', not 'wrong'"),
            ("wrong/unload", 400, "this server has no application 'wrong'"),
        ):
            found = ask(f"/v2/repository/models/{path}")
            assert (found[0], error in found[1]["error"]) == (status, True), found
        assert ask("/v2/repository/models/words/unload") == (200, {})
        assert index() == {"demo": "READY", "words": "UNAVAILABLE", "wrong": "UNAVAILABLE"}
        assert "is the only application" in ask("/v2/repository/models/demo/unload")[1]["error"]
        thread.look(running.server.insight.withdraw)
        assert ask("/v2/repository/models/words/load") == (200, {}), "it was told to stop, and serves on for a while"
        assert ask("/v2/models/words/ready", "GET")[0] == 503


async def test_orders_that_go_on_when_the_server_ends_are_answered(tmp_path: Path) -> None:
    (tmp_path / "words.yaml").touch()
    answers: list[bytes] = []

    class Slow:
        async def handle(self, order: object, tell: object) -> None:
            await asyncio.Event().wait()

    repository = ModelRepository(cast("Deployer", Slow()), tmp_path)
    repository.change("words", True, answers.append)
    await asyncio.sleep(0)
    await repository.close()
    (answer,) = map(json.loads, answers)
    assert tuple(answer[:2]) == (503, "dropped: the server is shutting down")


def test_without_a_repository_clients_only_see_models(thread: LoopThread, tmp_path: Path) -> None:
    with serving(thread, tmp_path, named("demo", write_mlp(tmp_path / "model.onnx", "n"))) as running:
        status, text = running.ask("POST", "/v2/repository/index")
        assert [(each["name"], each["version"], each["state"]) for each in json.loads(text)] == [("demo", "1", "READY")]
        for verb in ("load", "unload"):
            status, text = running.ask("POST", f"/v2/repository/models/demo/{verb}")
            assert (status, b"start it with --repository DIR" in text) == (403, True)
        assert "model_repository" not in json.loads(running.ask("GET", "/v2")[1])["extensions"]


def test_a_repository_that_no_key_may_use_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    for text, warnings in (("phone other admin\n", 0), ("phone other\nsecret\n", 1)):
        file.write_text(text)
        file.chmod(0o600)
        check_repository(tmp_path, Keys("given", file))
        assert len(caplog.records) == warnings
    told = caplog.records[0].getMessage()
    assert told.startswith("no client can load or unload models of --repository: no key has the role admin; write NAME")


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"repository": Path("/none")}, "is no folder"), ({"repository": Path("/")}, "clients need a key")],
)
def test_a_repository_is_a_folder_and_needs_a_key(
    thread: LoopThread, tmp_path: Path, settings: dict[str, Any], error: str
) -> None:
    with pytest.raises(InputError, match=error):
        Running(thread, tmp_path, named("demo", write_mlp(tmp_path / "model.onnx", "n")), settings=settings)


def test_weights_that_are_to_be_brought_to_nodes_come_from_a_store(mlp: Path, tmp_path: Path) -> None:
    declared = {
        "name": "a",
        "slo_ms": 100,
        "stages": [{"name": "only", "variants": [{"name": "small", "model": str(mlp), "profile": "YOLOv5s-S"}]}],
        "system": {"name": "hpa", "provision": "cheapest_start"},
    }
    (setup,) = set_up(load_application(declared)).applications
    models = servables_of(setup.application, tmp_path)
    with pytest.raises(InputError, match="brings 'small' to its nodes, but it was not fetched from a store") as raised:
        check_weights(setup, models)
    assert "name its model by URL" in str(raised.value.help)
    fetched = {key: structs.replace(model, source="http://store/a.onnx") for key, model in models.items()}
    check_weights(setup, fetched)
    assert fetched["only", "small"].weights == tuple(weights_of(setup.application).values()), "as the core calls them"
    (placed,) = set_up(load_application(declared | {"system": "hpa"})).applications
    check_weights(placed, models)


# Another system


@pytest.fixture
def _checked_systems_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `_checked_here`, for systems."""
    monkeypatch.setattr(module, "checked_system", lambda order: asyncio.to_thread(check_system, order))


def systems(running: Running) -> dict[str, str]:
    """By version, the system that decides for it."""
    return {each.version: each.system for each in order(running, ListVersions()).versions}


def test_another_system_decides_under_load_with_the_same_replicas(
    thread: LoopThread, tmp_path: Path, check_process: None
) -> None:
    model = python_model(tmp_path / "m.py", sleeps=0.002)
    with serving(thread, tmp_path / "state", named("demo", model)) as running:
        backend, journal = running.server.backend, running.server.journal
        assert isinstance(backend, LiveNode)
        assert journal is not None

        async def pids() -> dict[int, int | None]:
            return {int(worker): backend.pid(worker) for worker in backend.workers}

        assert systems(running) == {"1": "static (replicas 1, cores 0.5)"}
        before = thread.call(pids())
        with asking(running, "demo", threads=4) as statuses:
            told: list[str] = []
            done = order(running, ChangeSystem("demo", "static", {"cores": 1, "order": "fifo"}), told.append)
            assert [(each.version, each.system) for each in done.versions] == [("1", "static (cores 1, order fifo)")]
            assert told[0] == "checking static (cores 1, order fifo) for 'demo'"
            assert told[-1].endswith("decides for 'demo'; its replicas and open requests stay")
            order(running, ChangeSystem("", "elastic", {"order": "fifo"}))  # the only application
            assert thread.call(pids()).items() >= before.items(), "cores are resized in place"
            order(running, ChangeSystem("demo", "mixed"))  # its plans are made beside the event loop
            time.sleep(1.5)
            assert running.server.planner.pid is not None
            order(running, ChangeSystem("demo", "hpa", {"target": 0.6}))
            time.sleep(1.0)
        assert statuses.keys() == {200}
        assert statuses[200] > 100
        assert systems(running) == {"1": "hpa (target 0.6)"}
        assert journal._definitions()["demo"]["system"]["parameters"] == {"target": 0.6}, "the next segment has it"
        state = json.loads(running.ask("GET", "/v2/sloop/state")[1])
        assert [each["system"] for each in state["applications"]] == ["hpa (target 0.6)"]
        decisions = json.loads(running.ask("GET", "/v2/sloop/decisions?limit=200")[1])
        assert [each["kind"] for each in decisions["decisions"]].count("system") == 4


@pytest.mark.usefixtures("_checked_systems_here")
def test_all_versions_get_it_those_to_come_too_and_a_server_that_starts_again(
    thread: LoopThread, tmp_path: Path
) -> None:
    models = [python_model(tmp_path / f"m{number}.py", factor=number) for number in (1, 2, 3)]
    with serving(thread, tmp_path / "state", named("demo", models[0])) as running:
        order(running, Deploy(file_of(tmp_path, named("demo", models[1])), canary=Canary(0.5)))
        order(running, ChangeSystem("demo", "hpa", {"target": 0.6}))
        assert systems(running) == {"1": "hpa (target 0.6)", "2": "hpa (target 0.6)"}
        told: list[str] = []
        order(running, Deploy(file_of(tmp_path, named("demo", models[2]))), told.append)
        assert systems(running)["3"] == "hpa (target 0.6)"
        assert any("static" in line and "hpa" in line for line in told), "its file names another one"
    declared = load_deployment(named("demo", models[0]))
    memory = VersionMemory(tmp_path / "state", declared)
    memory.read()
    (application,) = memory.restored.deployment.applications
    assert (application.version, application.system.text) == ("3", "hpa (target 0.6)")


@pytest.mark.usefixtures("_checked_systems_here")
@pytest.mark.parametrize(
    ("system", "what"),
    [
        (ChangeSystem("demo", "hpaa"), "unknown system 'hpaa'"),
        (ChangeSystem("demo", "hpa", {"targett": 0.5}), "targett"),
        (ChangeSystem("demo", "static", {"cores": 4_000}), "4,?000 cores"),
        (ChangeSystem("demo", "headstart"), "cannot take over from 'static'"),
        (ChangeSystem("other", "hpa"), "no application 'other'"),
    ],
    ids=lambda each: each.system if isinstance(each, ChangeSystem) else "",
)
def test_a_system_that_cannot_decide_here_is_refused_and_the_old_one_goes_on(
    thread: LoopThread, tmp_path: Path, mlp: Path, system: ChangeSystem, what: str
) -> None:
    with serving(thread, tmp_path / "state", named("demo", mlp)) as running:
        with pytest.raises(InputError, match=what):
            order(running, system)
        assert systems(running) == {"1": "static (replicas 1, cores 0.5)"}
        assert factor_of(running, "demo")[0] == "1"
