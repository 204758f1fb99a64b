"""What a shadow takes from the log of a server, and what it makes of it."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from sloop.actions import Rollout, VersionState
from sloop.app.application import SystemChoice
from sloop.app.load import load_deployment, load_scenario
from sloop.errors import InputError
from sloop.events import WOKE
from sloop.page import shadow_system
from sloop.page.picture import Picture
from sloop.page.questions import ShadowSystemSetup, ShadowSystemState
from sloop.page.shadow_system import ShadowSystemTeller, VersionsChanged, follow, requests_of
from sloop.runlog import FileLog, MemoryLog, read_log
from sloop.runlog.follow import LogFollower
from sloop.runlog.segments import segment_path
from sloop.sim.run import simulate
from sloop.sim.world import World
from sloop.systems.replay import beginning_of, header_of
from sloop.systems.setup import set_up
from sloop.vocabulary import Request

SCENARIO = Path(__file__).parents[2] / "examples/three/bursts.yaml"
RUN = "20261130T000000000Z"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MemoryLog, World]:
    """The log of a run of six seconds, as a server writes it."""
    folder = tmp_path_factory.mktemp("log")
    world = World.from_scenario(replace(load_scenario(SCENARIO), duration_s=6.0), SystemChoice("elastic"))
    memory = MemoryLog()
    with FileLog(segment_path(folder, RUN, 1), header_of(world.setup(), origin="sim")) as log:
        simulate(world, [log, memory], check_first=0)
    return folder, memory, world


@pytest.fixture
def log(recorded: tuple[Path, MemoryLog, World]) -> Iterator[LogFollower]:
    with closing(LogFollower(recorded[0], RUN)) as follower:
        yield follower


def test_requests_come_with_a_new_zero_and_time_passes_without_them(
    recorded: tuple[Path, MemoryLog, World], log: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_system, "READ_S", 0.0)
    from_ns = 2 * 10**9
    sent = [(at, one) for at, one in recorded[1] if isinstance(one, Request) and at >= from_ns]
    times = iter(range(10 * 10**9, 20 * 10**9, 10**9))
    events = list(islice(requests_of(log, from_ns, lambda: next(times)), len(sent) + 3))
    came = [(at, event) for at, event in events if isinstance(event, Request)]
    assert [at for at, _ in came] == [at - from_ns for at, _ in sent]
    for (_, event), (_, request) in zip(came, sent, strict=True):
        assert (event.id, event.application, event.slo_ns) == (request.id, request.application, request.slo_ns)
        assert event.sent_ns == request.sent_ns - from_ns
    assert [at for at, _ in events[-3:]] == [8 * 10**9, 9 * 10**9, 10 * 10**9]
    assert [at for at, _ in events] == sorted(at for at, _ in events)


def test_another_version_that_serves_lets_it_begin_anew(
    recorded: tuple[Path, MemoryLog, World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow_system, "READ_S", 0.0)
    header, second = header_of(recorded[2].setup(), origin="sim"), 10**9
    with FileLog(segment_path(tmp_path, RUN, 1), header) as written, closing(LogFollower(tmp_path, RUN)) as log:
        written.append(second, Rollout("restore", "2", VersionState.SERVING, 1.0, "before it began"))
        written.append(3 * second, Rollout("restore", "3", VersionState.STARTING, 0.0, "not yet"))
        written.flush()
        events = requests_of(log, 2 * second, lambda: 4 * second)
        assert next(events) == (2 * second, WOKE)
        written.append(5 * second, Rollout("restore", "3", VersionState.SERVING, 1.0, "it is ready"))
        written.flush()
        with pytest.raises(VersionsChanged):
            next(events)


def test_what_it_tells_is_the_state_of_the_run_that_it_has_played(recorded: tuple[Path, MemoryLog, World]) -> None:
    folder, memory, _ = recorded
    log, said = read_log(segment_path(folder, RUN, 1)), list[bytes]()
    fold = beginning_of(log).fold
    teller = ShadowSystemTeller(Picture(log.header, fold, 0.0), 100.0, said.append)
    for now_ns, record in memory:
        teller.append(now_ns, record)
    told = [msgspec.json.decode(line, type=ShadowSystemState) for line in said]
    assert [round(each.at_s) for each in told][:4] == [100, 101, 102, 103]
    for name, row in told[-1].applications.items():
        (version,) = fold.applications[name]
        assert row.cores == pytest.approx(version.run.cost.cores)
        assert row.plan.startswith(name)
        assert row.attainment is not None


def test_a_sample_of_the_requests_is_not_enough_for_a_shadow(
    recorded: tuple[Path, MemoryLog, World], tmp_path: Path
) -> None:
    header = msgspec.structs.replace(header_of(recorded[2].setup(), origin="sim"), sample=0.1)
    with FileLog(segment_path(tmp_path, RUN, 1), header):
        pass
    setup = ShadowSystemSetup(str(tmp_path), RUN, 0, "static", {})
    with pytest.raises(InputError, match="a shadow system needs all requests"):
        follow(setup, lambda _: None)


def test_shadows_are_declared_by_an_application_or_a_deployment() -> None:
    latency = {"form": "amdahl", "gamma": 1, "epsilon": 1, "delta": 0, "eta": 1}
    profile = {"latency_ms": latency, "max_batch": 8, "max_cores": 2, "load_s": 1, "memory_bytes": 1_000_000}
    one = {"name": "one", "slo_ms": 100, "stages": [{"name": "only", "variants": [{"name": "v", "profile": profile}]}]}
    shadows = load_deployment({**one, "shadow": ["static", {"name": "hpa", "target": 0.5}]}).shadows
    assert [(choice.name, choice.parameters) for choice in shadows] == [("static", {}), ("hpa", {"target": 0.5})]
    several = {"name": "all", "applications": [{**one, "shadow": "static"}], "shadow": ["hpa"]}
    assert [choice.name for choice in load_deployment(several).shadows] == ["hpa", "static"]
    with pytest.raises(InputError, match="unknown system 'nonsense'"):
        set_up(load_deployment({**one, "shadow": ["static", "nonsense"]}))
    with pytest.raises(InputError, match="at most 4 systems"):
        load_deployment({**one, "shadow": list("abcde")})
