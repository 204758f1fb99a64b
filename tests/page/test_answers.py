"""What the page answers in a process of its own, and what it does not."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sloop.app.application import SystemChoice
from sloop.app.load import load_scenario
from sloop.errors import InputError
from sloop.page.answers import answer
from sloop.page.questions import Asked, AskPlan, AskWhatIf, ShadowSystemSetup
from sloop.runlog import FileLog
from sloop.runlog.segments import segment_path
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems.replay import header_of
from tests.sim.scene import world

SCENARIO = Path(__file__).parents[2] / "examples/three/bursts.yaml"
RUN = "20261130T000000000Z"
SYSTEM = """
from pathlib import Path
from sloop.systems import build_system
Path({mark!r}).write_text("run")
print("a system that talks")
SYSTEM = build_system("elastic")
"""


def system_in(folder: Path) -> tuple[Path, Path]:
    """A system of a user that prints, and the file that says whether it ran."""
    folder.mkdir()
    file, mark = folder / "mine.py", folder / "mark"
    file.write_text(SYSTEM.format(mark=str(mark)))
    return file, mark


def recorded(folder: Path, system: str) -> Path:
    """The log of three seconds under a system, as a server writes it."""
    folder.mkdir()
    world = World.from_scenario(replace(load_scenario(SCENARIO), duration_s=3.0), SystemChoice(system))
    with FileLog(segment_path(folder, RUN, 1), header_of(world.setup(), origin="sim")) as log:
        simulate(world, [log], check_first=0)
    return folder


def process_of(module: str, setup: msgspec.Struct) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", module, str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(setup))
    process.stdin.close()
    return process


def test_a_file_of_who_asks_is_never_run(tmp_path: Path) -> None:
    log, (file, mark) = recorded(tmp_path / "log", "elastic"), system_in(tmp_path / "systems")
    rates = dict.fromkeys(("ocr", "photos", "text"), 1.0)
    questions = (AskPlan(rates, str(file)), AskWhatIf(60.0, [str(file)]), AskWhatIf(60.0, [{"name": str(file)}]))
    for question in questions:
        with pytest.raises(InputError, match="the page runs none but those that the server runs"):
            answer(Asked(str(log), question))
    assert not mark.exists()


def test_a_system_that_prints_spoils_no_answer(tmp_path: Path) -> None:
    file, mark = system_in(tmp_path / "systems")
    log = recorded(tmp_path / "log", str(file))
    with process_of("sloop.page.answers", Asked(str(log), AskWhatIf(60.0, [str(file)]))) as process:
        assert process.stdout is not None
        found: dict[str, Any] = msgspec.json.decode(process.stdout.read())
    assert [run["label"] for run in found["runs"]] == ["mine", "mine"]
    setup = ShadowSystemSetup(str(log), RUN, time.monotonic_ns() - 10**10, str(file), {})
    with process_of("sloop.page.shadow_system", setup) as process:
        assert process.stdout is not None
        told: dict[str, Any] = msgspec.json.decode(process.stdout.readline())
        process.kill()
    assert "error" not in told
    assert mark.exists()


def test_plans_and_other_systems_get_the_rows_and_sizes_that_came(tmp_path: Path) -> None:
    made = world(trace={"kind": "poisson", "rate": 20, "rows": 4, "sizes": [16, 512]})
    folder = tmp_path / "log"
    folder.mkdir()
    with FileLog(segment_path(folder, RUN, 1), header_of(made.setup(), origin="sim")) as log:
        simulate(made, [log], check_first=0)
    (stage,) = answer(Asked(str(folder), AskPlan({"scene": 10.0})))["stages"]
    assert (stage["rows"], stage["rate_rps"]) == (4.0, 40.0)
    run, other = answer(Asked(str(folder), AskWhatIf(60.0, ["early-drop"])))["runs"]
    assert run["rows"] == other["rows"] == 4 * run["requests"]
    assert [each["size"] for each in other["sizes"]] == [16, 512]


def test_an_answer_gives_way_to_the_server_also_where_sessions_share_the_processor() -> None:
    command = [sys.executable, "-m", "sloop.page.answers", str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        until_s = time.monotonic() + 60
        while os.sched_getscheduler(process.pid) != os.SCHED_IDLE:
            assert time.monotonic() < until_s
            assert process.poll() is None
            time.sleep(0.05)
        group = Path(f"/proc/{process.pid}/autogroup")
        assert not group.exists() or group.read_text().endswith("nice 19\n")
        process.kill()
