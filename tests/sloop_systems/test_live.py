"""Systems for several models in front of real workers, through a surge: replicas start, stop, change size and variant,
and no request is lost or answered twice."""

import asyncio
from collections import Counter
from typing import Any

import pytest
import uvloop

from sloop.actions import ResizeWorker, StartWorker, StopWorker
from sloop.app.load import load_application
from sloop.events import WorkerReady
from sloop.serve.dataflow import wire
from sloop.serve.protocols import Servable
from sloop.sim.checkers import Checkers, Rules
from sloop.systems import SYSTEMS as INSTALLED
from sloop.systems.replay import replay_log
from sloop.systems.setup import Setup, set_up
from sloop.tensor import Port, Signature
from sloop.vocabulary import Outcome
from tests.serve.test_live import TWO_CORES, Live, check_each_ended_once, live_driver, text

DIGITS = Signature((Port("x", "UINT8", (-1, 3)),), (Port("x", "UINT8", (-1, 3)),))
"""Rows of one size, so that all may share a batch."""
pytestmark = pytest.mark.live

TIMES = {"light": (2, 1), "heavy": (12, 6)}
"""Milliseconds for a batch and for each of its rows, on any cores."""
AMDAHL = {"form": "amdahl"}
STAGES = ("first", "second")
SYSTEMS: dict[str, dict[str, Any]] = {
    "biscale": {"unit": 0.25, "cores_max": 4, "batch_max": 4, "settle": 2, "period_ms": 300, "variant": "heavy"},
    "fa2": {"cores": 0.25, "batch_max": 1, "period_ms": 500, "forecast": {"window_ms": 500}, "variant": "heavy"},
    "ipa": {
        "unit": 0.25,
        "threshold_rps": 1,
        "period_ms": 500,
        "batch_max": 1,
        "beta": 8.0,
        "forecast": {"name": "last", "window_ms": 500},
    },
}


SERVERS_MAX = 4
"""What a policy sees of a surge depends on where its periods begin, and on how busy the machine is. A server that
answered one surge with other moves has the replicas for the next surge too, so each try needs a fresh one."""


def setup_for(system: str) -> Setup:
    # Biscale resizes in place only if more cores bring a lot; the others need a plan that fits the machine.
    by_cores = 0.5 if system == "biscale" else 0.1
    variants = [
        {
            "name": name,
            "accuracy": accuracy,
            "profile": {
                "latency_ms": {
                    "form": "amdahl",
                    "gamma": each * by_cores,
                    "epsilon": fixed * by_cores,
                    "delta": each,
                    "eta": fixed,
                },
                "max_batch": 4,
                "max_cores": 1,
                "load_s": 0.3,
                "memory_bytes": 1_000_000,
            },
        }
        for (name, (fixed, each)), accuracy in zip(TIMES.items(), (70, 90), strict=True)
    ]
    stages = [
        {"name": name, "after": [STAGES[place - 1]] if place else [], "variants": variants}
        for place, name in enumerate(STAGES)
    ]
    choice = {"name": system, "drop": "never", **SYSTEMS[system]}
    return set_up(
        load_application({"name": "live", "slo_ms": 400, "stages": stages, "system": choice, "cluster": TWO_CORES})
    )


async def surge(live: Live) -> None:
    """A second of little, two of much, and two of little."""
    number = 0
    for seconds, rate_rps in ((1.0, 8), (2.0, 60), (2.0, 8)):
        for _ in range(round(seconds * rate_rps)):
            live.ask(text(b"%03d" % number))
            number += 1
            await asyncio.sleep(1 / rate_rps)


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name in INSTALLED])
def test_a_surge_loses_nothing(system: str) -> None:
    for _ in range(SERVERS_MAX):
        made = uvloop.run(moves_in_a_surge(system))
        if made[system_moves(system)]:
            return
    pytest.fail(f"{SERVERS_MAX} servers met a surge, and none of them made {system}'s move: the last made {made}")


async def moves_in_a_surge(system: str) -> Counter[str]:
    """What became of a fresh server's replicas in a surge that it came through without a loss."""
    setup = setup_for(system)
    models = {
        (stage, name): Servable(f"fake:sleep:{fixed}:{each}", DIGITS)
        for stage in STAGES
        for name, (fixed, each) in TIMES.items()
    }
    wiring = wire(setup.application.graph, {key: model.signature for key, model in models.items()})
    async with live_driver(setup, models, wiring) as live:
        await live.until(WorkerReady, 2)
        await surge(live)
        await live.all_answered()
        outcomes = check_each_ended_once(live)
        assert outcomes[Outcome.FAILED] == outcomes[Outcome.DROPPED] == outcomes[Outcome.REJECTED] == 0
        for number, [ended] in live.answers.items():
            assert bytes(ended.outputs["x"].data) == b"%03d" % number
        checkers = Checkers([Rules(setup.application, setup.system.policies.order)], setup.deployment.cluster)
        for now_ns, record in live.log:
            checkers.append(now_ns, record)
        replayed = replay_log(list(live.log), set_up(setup.application).core())
        assert replayed.difference is None
        return moved(live)


def system_moves(system: str) -> str:
    """What a system must have done in a surge."""
    return {"biscale": "resized", "fa2": "stopped", "ipa": "light"}[system]


def moved(live: Live) -> Counter[str]:
    """What became of replicas, by kind, and how many of each variant were started."""
    kinds = {StartWorker: "started", StopWorker: "stopped", ResizeWorker: "resized"}
    found = Counter(kinds[type(record)] for _, record in live.log if type(record) in kinds)
    return found + Counter(record.spec.variant for _, record in live.log if isinstance(record, StartWorker))
