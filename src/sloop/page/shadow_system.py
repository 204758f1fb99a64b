"""A shadow system: a simulation that gets the requests of a server as they come, for as long as the server runs.

    python -m sloop.page.shadow_system PARENT < SETUP

The process follows the server's log. Its core has the applications and nodes of the server and another system; only
requests are taken from the log, everything else (starts, batches, failures) is simulated from the profiles. So it says
what that system would have running at this moment, and what it would cost, had it served from here on. It writes a line
of JSON each second. Nothing that it orders is carried out. When a version starts or stops serving, the simulation
begins anew with the versions that serve then.
"""

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

import msgspec

from sloop.actions import Rollout, VersionState
from sloop.app.application import SystemChoice
from sloop.errors import SloopError
from sloop.events import WOKE, Event
from sloop.page.answers import served_now
from sloop.page.picture import Picture, levels_of
from sloop.page.questions import PROCESS_BYTES_MAX, ShadowSystemRow, ShadowSystemSetup, ShadowSystemState
from sloop.report.explain.texts import plan_text
from sloop.runlog import Record, read_log
from sloop.runlog.fold import DeploymentState
from sloop.runlog.follow import BEHIND_NS, LogFollower
from sloop.runlog.segments import segments_in
from sloop.runlog.summary import shifted
from sloop.serve.processes import begin, own_stdout
from sloop.sim.engine import play
from sloop.sim.world import World
from sloop.systems.replay import header_of, require_all
from sloop.units import FOREVER_NS, NS_PER_S, to_s
from sloop.vocabulary import Request

READ_S: Final = 0.25
NICE: Final = 10
RECENT_S: Final = 60
"""Attainment and latency are those of so many seconds."""


class ShadowSystemTeller:
    """A sink that keeps the picture of the shadow system and writes it each second."""

    def __init__(self, picture: Picture, from_s: float, write: Callable[[bytes], object]) -> None:
        self._picture, self._from_s, self._write = picture, from_s, write
        self._next_ns = 0

    def append(self, now_ns: int, record: Record) -> None:
        """Add one record."""
        self._picture.append(now_ns, record)
        if now_ns >= self._next_ns:
            self._next_ns = now_ns + NS_PER_S
            self._write(msgspec.json.encode(self._state_at(to_s(now_ns))) + b"\n")

    def _state_at(self, now_s: float) -> ShadowSystemState:
        self._picture.changes()
        rows: dict[str, ShadowSystemRow] = {}
        for name, records in self._picture.state.applications.items():
            runs = [record.run for record in records if not record.has_ended]
            levels = levels_of(runs)
            plan = next((run.plan for run in runs if run.plan is not None), None)
            recent = self._picture.recent(name, RECENT_S)
            rows[name] = ShadowSystemRow(
                ready=levels.ready,
                starting=levels.starting,
                cores=levels.cores,
                usd_per_h=levels.usd_per_h,
                attainment=recent.attainment,
                p99_ms=recent.p99_ms,
                plan=plan_text(plan) if plan is not None else "",
                why=plan.why if plan is not None else "there is no plan yet",
            )
        return ShadowSystemState(self._from_s + now_s, rows)


class VersionsChanged(Exception):
    """The server serves other versions than those with which the simulation began."""


def requests_of(log: LogFollower, from_ns: int, clock: Callable[[], int]) -> Iterator[tuple[int, Event]]:
    """The requests in the log as they come, with `from_ns` as the new zero, and `WOKE` while none come, so that time
    goes on. `clock` returns the instant up to which the log is complete. VersionsChanged if a version starts or stops
    serving."""
    last_ns = 0
    while True:
        records = log.read()
        for now_ns, record in records:
            if now_ns < from_ns:
                continue
            if isinstance(record, Request):
                last_ns = max(last_ns, now_ns - from_ns)
                yield last_ns, shifted(record, from_ns)
            elif isinstance(record, Rollout) and record.state in (VersionState.SERVING, VersionState.RETIRED):
                raise VersionsChanged
        if not records:
            last_ns = max(last_ns + 1, clock() - from_ns)
            yield last_ns, WOKE
            time.sleep(READ_S)


def follow(setup: ShadowSystemSetup, write: Callable[[bytes], object]) -> None:
    """Simulate the other system until the server serves other versions (VersionsChanged). SloopError if the system
    cannot serve these applications."""
    folder = Path(setup.folder)
    newest = max(segment for segment in segments_in(folder) if segment.run == setup.run)
    begun = read_log(newest.path)
    require_all(begun, "a shadow system")
    choice = SystemChoice(setup.system, setup.parameters, path="shadow")
    from_ns = time.monotonic_ns() - setup.zero_ns - BEHIND_NS
    world = World(0, served_now(begun).under(choice), {}, FOREVER_NS)
    built = world.setup()
    fold = DeploymentState(built.parts(), nodes=world.deployment.cluster, start_ns=0)
    picture = Picture(header_of(built, origin="sim"), fold, 0.0)
    teller = ShadowSystemTeller(picture, to_s(from_ns), write)
    with closing(LogFollower(folder, setup.run, newest.number)) as log:
        ingress = requests_of(log, from_ns, lambda: time.monotonic_ns() - setup.zero_ns - BEHIND_NS)
        cluster = world.cluster()
        play(built.core(), cluster, ingress, until_ns=FOREVER_NS, appends=[teller.append, cluster.note])


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process."""
    (parent,) = arguments
    begin(int(parent), ())
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES_MAX, PROCESS_BYTES_MAX))
    setup = msgspec.json.decode(sys.stdin.buffer.read(), type=ShadowSystemSetup)
    said = own_stdout()

    def write(line: bytes) -> None:
        said.write(line)
        said.flush()

    try:
        while True:
            with suppress(VersionsChanged):
                follow(setup, write)
            time.sleep(to_s(BEHIND_NS))  # so that it does not see the same change again
    except SloopError as error:
        write(msgspec.json.encode(ShadowSystemState(0.0, error=error.what)) + b"\n")
    except MemoryError:
        write(msgspec.json.encode(ShadowSystemState(0.0, error="it needs too much memory")) + b"\n")
    except Exception as error:  # a user's system may raise anything
        write(msgspec.json.encode(ShadowSystemState(0.0, error=f"it raised {type(error).__name__}: {error}")) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
