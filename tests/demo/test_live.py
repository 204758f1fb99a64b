"""A live run leaves no server behind, and runs are counted over their own seconds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sloop.actions import StartWorker
from sloop.app.load import load_application, load_scenario
from sloop.demo.live import (
    ClientLoad,
    _listening,
    count_run,
    is_ready,
    schedule_start_ns,
    serve_and_load,
    serving,
)
from sloop.errors import MachineError
from sloop.events import WOKE
from sloop.runlog import Record, read_log
from sloop.runlog.summary import RunSummary, on_schedule_clock
from sloop.sim.scenarios import run_scenario
from sloop.sim.world import World
from sloop.units import ms, s
from sloop.vocabulary import ReplicaId, ReplicaSpec, Request, RequestId, Slot
from sloop.workload import trace_of
from tests.cli.conftest import save_small_model

APPLICATION = """\
name: tiny
slo_ms: 20000
stages:
  - name: only
    model: tiny.onnx
    profile: {latency_ms: {form: quadratic, alpha: 0, beta: 0.1, gamma: 1}, max_batch: 4}
system: static
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    save_small_model(tmp_path / "tiny.onnx")
    (tmp_path / "app.yaml").write_text(APPLICATION)
    return tmp_path / "app.yaml"


@pytest.mark.live
def test_clients_and_log_agree_and_the_server_is_gone(app: Path, tmp_path: Path) -> None:
    trace = trace_of([ms(20) * place for place in range(30)], duration_ns=s(1), name="x", provenance="assumed: a test")
    seen, log = serve_and_load(app, tmp_path / "state", ClientLoad(trace, None, 0, 20_000, seed=1))
    assert seen.ok == 30
    assert sum(second.served for second in RunSummary(load_application(app).graph).fold(read_log(log)).seconds()) == 30
    lock = (tmp_path / "state" / "lock").read_text().strip()
    assert not Path(f"/proc/{lock}").exists() or os.getpid() == int(lock)


@pytest.mark.live
def test_a_server_that_does_not_start_is_quoted(app: Path, tmp_path: Path) -> None:
    app.write_text(app.read_text().replace("system: static", "system: statik"))
    with pytest.raises(MachineError, match="unknown system 'statik'"), serving(app, tmp_path / "state"):
        pass


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import sys; sys.exit('no memory')", "the server did not start: it exited with status 1: no memory"),
        ("import os; os.kill(os.getpid(), 9)", "it was killed by signal SIGKILL and printed nothing"),
        ('print(\'{"http": "http://127.0.0.1:1"}\'); raise SystemExit(3)', "ready: it exited with status 3"),
    ],
)
def test_a_server_that_dies_is_explained(script: str, said: str, tmp_path: Path) -> None:
    stderr = tmp_path / "server.txt"
    with stderr.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=file)
    with process, pytest.raises(MachineError, match=said):
        _listening(process, stderr)


def test_nobody_is_not_ready() -> None:
    assert not is_ready("http://127.0.0.1:1")


SCENARIO = {
    "name": "x",
    "slo_ms": 500,
    "stages": [{"name": "a", "profile": "ResNet-T"}],
    "systems": [{"name": "static", "cores": 8}],
    "cluster": {"nodes": [{"hardware": "c5.4xlarge"}]},
    "trace": {"kind": "poisson", "rate": 30},
    "duration_s": 4,
}


def test_time_begins_with_the_schedule_and_what_came_before_is_kept_there() -> None:
    start = StartWorker(ReplicaId(0), ReplicaSpec("a", "a", Slot(1.0)))
    request = Request(RequestId(1), sent_ns=s(5), arrived_ns=s(5) + ms(40), deadline_ns=s(6))
    records: list[tuple[int, Record]] = [(0, WOKE), (ms(3), start), (s(5) + ms(40), request), (s(7), WOKE)]
    moved = list(on_schedule_clock(records, first_ns=ms(100)))
    assert [now_ns for now_ns, _ in moved] == [0, 0, ms(140), s(2) + ms(100)]
    assert moved[1][1] == start
    assert moved[2][1] == Request(RequestId(1), sent_ns=ms(100), arrived_ns=ms(140), deadline_ns=s(1) + ms(100))


def test_a_log_without_requests_gives_nothing() -> None:
    assert list(on_schedule_clock([(0, WOKE)], first_ns=0)) == []


def test_a_simulated_run_is_counted_over_its_own_seconds(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    log = tmp_path / "run.jsonl"
    simulated = run_scenario(scenario, scenario.systems[0], log=log)
    first_ns = next(World.from_scenario(scenario).trace.times_ns())
    counted = count_run(log, first_ns=first_ns, duration_s=4)
    assert counted.row.requests == simulated.row.requests
    assert counted.row.core_seconds == 8 * 4
    assert counted.row.p99_ms == simulated.row.p99_ms


def test_a_run_with_a_lead_is_counted_from_where_its_schedule_begins(tmp_path: Path) -> None:
    scenario = load_scenario(SCENARIO)
    log = tmp_path / "late.jsonl"
    run_scenario(scenario, scenario.systems[0], log=log, lead_ns=ms(700))
    first_ns = next(World.from_scenario(scenario).trace.times_ns())
    assert schedule_start_ns(log, first_ns=first_ns) == ms(700)
    assert count_run(log, first_ns=first_ns, duration_s=4).row.core_seconds == 8 * 4
