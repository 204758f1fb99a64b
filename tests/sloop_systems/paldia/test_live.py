"""PALDIA on this machine: it switches between parts of it, and splits a burst."""

import asyncio
from collections.abc import Sequence

import pytest

from sloop.actions import StartBatch, StartWorker
from sloop.events import Finished, WorkerReady, WorkerStopped
from sloop.runlog import MemoryLog
from sloop.runlog.summary import RunSummary
from sloop.serve.protocols import Servable
from sloop.systems.replay import replay_log
from sloop.systems.setup import set_up
from sloop.tensor import Port, Signature
from tests.serve.test_live import ECHO, check_each_ended_once, serving, setup_of, text

pytestmark = pytest.mark.live
LETTER = Signature((Port("x", "UINT8", (-1, 1)),), (Port("x", "UINT8", (-1, 1)),))
"""Of one size: what rows of several sizes take would be learnt from the first batch, which is shorter than believed."""
ENVELOPES = {
    "kinds": [
        {"name": "small", "cores": 0.5, "usd_per_h": 0.02, "acquire_s": 0},
        {"name": "large", "cores": 1.5, "usd_per_h": 0.08, "acquire_s": 0},
    ],
    "nodes": [{"hardware": kind, "count": 0, "most": 1} for kind in ("small", "large")],
}


def kinds_of(log: MemoryLog, kind: type[WorkerReady | Finished]) -> list[str]:
    """The hardware of the replicas that became ready, or whose batches finished, in this order."""
    started = {record.worker: record.spec.slot.hardware for _, record in log if isinstance(record, StartWorker)}
    ids = [getattr(record, "worker", getattr(record, "replica", None)) for _, record in log if isinstance(record, kind)]
    return [started[id] for id in ids if id is not None]


@pytest.mark.parametrize("system", ["paldia", "molecule-cost"])
async def test_a_system_switches_between_parts_of_this_machine_as_the_load_changes(system: str) -> None:
    """A request is believed to take 20 ms on the small kind, so that at most 25 a second end within half the SLO there;
    `molecule-cost` looks at one batch alone, and stays on the small kind."""
    parameters = {"name": system, "period_ms": 100, "wait_limit": 1, "group_ms": 1000}
    latency_ms = {"form": "amdahl", "gamma": 10, "epsilon": 0, "delta": 0, "eta": 0}
    setup = setup_of(parameters, cluster=ENVELOPES, max_cores=1.5, latency_ms=latency_ms)

    async with serving(setup, Servable("fake:sleep:0:1", LETTER)) as live:
        await live.until(WorkerReady)

        async def until_ready(kinds: Sequence[str], pause_s: float) -> None:
            async with asyncio.timeout(60):
                while kinds_of(live.log, WorkerReady) != list(kinds):
                    live.ask(text(b"x"))
                    await asyncio.sleep(pause_s)

        await until_ready(["small"], 0.2)
        if system == "paldia":
            await until_ready(["small", "large"], 0.01)
            await until_ready(["small", "large", "small"], 0.2)
            await live.until(WorkerStopped, 2)
        for _ in range(20):
            live.ask(text(b"y"))
        await live.all_answered()
        check_each_ended_once(live)
        kinds = {"small", "large"} if system == "paldia" else {"small"}
        assert set(kinds_of(live.log, Finished)) == kinds
        summary = RunSummary(set_up(setup.application).parts(), nodes=setup.deployment.cluster).fold(live.log)
        rows = {row.hardware: row for row in summary.row(system=system, seed=None).nodes}
        assert set(rows) == kinds
        for kind, usd_per_h in {"small": 0.02, "large": 0.08}.items():
            if kind in kinds:
                assert rows[kind].usd == pytest.approx(rows[kind].held_s / 3600 * usd_per_h)
        replayed = replay_log(list(live.log), set_up(setup.application).core())
        assert replayed.difference is None


async def test_a_burst_on_replicas_that_share_all_cores_runs_as_the_split_says() -> None:
    """Beside one other batch each takes a quarter longer, beside two ten times as long: two of six run together."""
    law = {"form": "count", "factors": [1, 1.25, 10]}
    setup = setup_of({"name": "paldia", "initial_rps": 48}, sharing={"full_batch": 8, "law": law, "cores": 2})

    async with serving(setup, Servable("fake:sleep:20:0", ECHO)) as live:
        await live.until(WorkerReady, 2)
        slots = [record.spec.slot for _, record in live.log if isinstance(record, StartWorker)]
        assert [slot.is_capped for slot in slots] == [False, False]
        for number in range(48):
            live.ask(text(b"%d" % number))
        await live.all_answered()
        assert sum(check_each_ended_once(live).values()) == 48
        running, most = 0, 0
        for _, record in live.log:
            running += isinstance(record, StartBatch) - isinstance(record, Finished)
            most = max(most, running)
        assert most == 2
        replayed = replay_log(list(live.log), set_up(setup.application).core())
        assert replayed.difference is None
