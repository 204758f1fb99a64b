"""Simulations for the systems of a server: each in a process of its own, which reads the server's log.

The server does not know the simulator. Whoever starts the server names the module of a process that answers questions
about a log (`Settings.answers`): it gets one as JSON on stdin, and writes its answer to stdout. It runs at the lowest
priority, and bounds its own time and memory.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from sloop.actions import RequestSimulation
from sloop.events import Simulated
from sloop.serve.processes import said_by
from sloop.vocabulary import SIMULATION_CORES, SimulatedSystem

_log: Final = logging.getLogger("sloop.simulations")


class Foretold(Struct, frozen=True):
    """What the process answers."""

    systems: tuple[SimulatedSystem, ...] = ()
    requests: int = 0
    cpu_s: float = 0.0
    error: str = ""


class SimulationProcesses:
    """Answers `RequestSimulation`s with the log in `folder`, by processes of `module`; without one, with an error."""

    def __init__(self, module: str, folder: Path) -> None:
        self._module, self._folder = module, folder
        self._running: dict[str, asyncio.Task[None]] = {}
        """By key of the version that has asked."""

    def request(self, asked: RequestSimulation, report: Callable[[Simulated], None]) -> None:
        """Simulate, and report the answer later, in the event loop. An earlier question of the same version ends."""
        before = self._running.pop(asked.application, None)
        if before is not None:
            before.cancel()
        self._running[asked.application] = asyncio.get_running_loop().create_task(self._simulate(asked, report))

    def close(self) -> None:
        """End all processes, without a report."""
        for simulation in self._running.values():
            simulation.cancel()

    async def _simulate(self, asked: RequestSimulation, report: Callable[[Simulated], None]) -> None:
        found = await self._foretold(asked)
        if found.error:
            _log.warning("%s: no simulation of the last %g s: %s", asked.application, asked.asks.last_s, found.error)
        report(Simulated(asked.number, found.systems, found.requests, found.cpu_s, found.error))

    async def _foretold(self, asked: RequestSimulation) -> Foretold:
        if not self._module:
            return Foretold(error="this server was started without a program that simulates (Settings.answers)")
        question = {"kind": "foretell", "application": asked.application, "asks": asked.asks}
        most_s = asked.asks.cpu_s_max
        payload = msgspec.json.encode({"log": str(self._folder), "question": question, "cpu_s_max": most_s})
        try:
            said, status = await said_by(self._module, payload, most_s / SIMULATION_CORES)
            return msgspec.json.decode(said, type=Foretold)
        except TimeoutError:
            return Foretold(error=f"it has not ended after {most_s / SIMULATION_CORES:g} s")
        except msgspec.MsgspecError:
            return Foretold(error=f"its process ended with {status}: it failed, or needed more than {most_s:g} s")
        except OSError as error:
            return Foretold(error=f"its process cannot be started: {error}")
