"""Systems of a server that ask the simulator: a process reads the server's log, and its answer is an event."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from sloop.actions import Decided, RequestSimulation
from sloop.app.load import load_deployment
from sloop.events import Simulated
from sloop.runlog import read_log
from sloop.serve.control.memory import VersionMemory
from sloop.serve.simulations import SimulationProcesses
from sloop.systems import build_system
from sloop.systems.setup import set_up
from sloop.vocabulary import SIMULATION_CORES, Simulation
from tests.serve.edge.fakes import LoopThread
from tests.serve.test_deploy import asking, named, python_model
from tests.serve.test_server import Running, assert_replays

pytestmark = pytest.mark.live

ANSWERS = "sloop.page.answers"
CPU_S_MAX = 30.0
OWN = f"""
from dataclasses import dataclass
from typing import ClassVar

from sloop.api.policies import Guidance, Overseer, Simulation
from sloop.api.systems import System, build_system

@dataclass(frozen=True, slots=True)
class Curious(Overseer):
    period_ns: ClassVar[int] = 10**9
    among: tuple[object, ...] = ({{"name": "static", "cores": 0.5}}, {{"name": "static", "cores": 1, "order": "fifo"}})
    last_s: float = 30.0

    def decide(self, now_ns, given, memory):
        if given.simulated is not None:
            why = f"{{[row.error or row.attainment for row in given.simulated.systems]}} {{given.simulated.error}}"
            return Guidance(given.choices[1], why), 4
        seen = min((memory or 0) + (given.ended > 0), 4)  # periods with requests: before the third, none may count
        is_due = seen == 3 and memory != 3
        return Guidance(asks=Simulation(self.last_s, self.among, {CPU_S_MAX}) if is_due else None), seen

SYSTEM = System("curious", "system", "a test", build_system("static").policies, "as its systems", overseer=Curious())
"""


@pytest.mark.timeout(400)
def test_an_overseer_in_a_file_asks_and_what_it_chooses_decides(thread: LoopThread, tmp_path: Path) -> None:
    own = tmp_path / "curious.py"
    own.write_text(OWN)
    assert list(build_system(str(own)).choices) == ["static (cores 0.5)", "static (cores 1, order fifo)"]
    model = python_model(tmp_path / "m.py")
    described = named("demo", model, system=str(own))
    with Running(
        thread, tmp_path / "state", described, limits={"spare_workers": 0}, settings={"answers": ANSWERS}
    ) as running:
        with asking(running, "demo") as statuses:
            deadline_s = time.monotonic() + CPU_S_MAX / SIMULATION_CORES  # the answer may take so long
            while time.monotonic() < deadline_s:
                state = json.loads(running.ask("GET", "/v2/sloop/decisions?limit=100")[1])
                if any(each.get("choice") for each in state["decisions"]) or has_chosen(running.folder):
                    break
                time.sleep(0.5)
            time.sleep(1.5)
        assert statuses.keys() == {200}
    records = [record for _, record in read_log(tmp_path / "state")]
    (asked,) = [record for record in records if isinstance(record, RequestSimulation)]
    (answer,) = [record for record in records if isinstance(record, Simulated)]
    assert (answer.number, answer.error, len(answer.systems)) == (asked.number, "", 2)
    assert answer.requests > 0
    assert 0 < answer.cpu_s < 30
    (told,) = [record for record in records if isinstance(record, Decided) and record.kind == "overseer"]
    assert told.choice == "static (cores 1, order fifo)"
    assert_replays(tmp_path / "state")
    deployment = load_deployment(described)
    memory = VersionMemory(tmp_path / "state", deployment)
    memory.read()
    assert memory.restored.ordered["demo"].path == deployment.system.path, "nobody has ordered it"
    again = set_up(memory.restored.under(None)).system
    assert list(again.choices) == [told.choice, "static (cores 0.5)"], "a server that starts again begins with it"
    assert again.policies is again.choices[told.choice]


def has_chosen(folder: Path) -> bool:
    return any(isinstance(record, Decided) and record.choice for _, record in read_log(folder))


def answer_of(processes: SimulationProcesses, asks: Simulation) -> Simulated:
    async def main() -> Simulated:
        found = asyncio.get_running_loop().create_future()
        processes.request(RequestSimulation(4, "demo", asks), found.set_result)
        made: Simulated = await found
        processes.close()
        return made

    return asyncio.run(main())


def test_whatever_happens_to_the_process_there_is_an_answer(tmp_path: Path) -> None:
    asks = Simulation(10.0, ("static", "hpa"), 20.0)
    assert "without a program that simulates" in answer_of(SimulationProcesses("", tmp_path), asks).error
    assert "there is no log in this folder" in answer_of(SimulationProcesses(ANSWERS, tmp_path), asks).error
    assert "its process ended with 1" in answer_of(SimulationProcesses("sloop.no_such_module", tmp_path), asks).error
    hurried = Simulation(10.0, ("static", "hpa"), 0.001)
    assert "it has not ended after 0.01 s" in answer_of(SimulationProcesses(ANSWERS, tmp_path), hurried).error


def test_a_new_question_of_the_same_version_ends_the_one_before(tmp_path: Path) -> None:
    async def main() -> list[Simulated]:
        processes, answers = SimulationProcesses(ANSWERS, tmp_path), list[Simulated]()
        for number in (1, 2):
            processes.request(RequestSimulation(number, "demo", Simulation(10.0, (), 20.0)), answers.append)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while not answers:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        processes.close()
        return answers

    assert [answer.number for answer in asyncio.run(main())] == [2]
