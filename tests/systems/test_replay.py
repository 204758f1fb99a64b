"""TODOC."""

from pathlib import Path

import pytest

from sloop.actions import End, StartReplica
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.events import WOKE, Event, Finished, ReplicaReady
from sloop.runlog import EVENTS, FileLog, Header, MemoryLog, Record, read_log
from sloop.systems.replay import header_of, rebuild, replay_log
from sloop.systems.setup import Setup, set_up
from sloop.units import ms
from sloop.vocabulary import BatchId, Outcome, ReplicaId, Request, RequestId

TABLE = {"form": "table", "table": {1: {1: 10.0, 2.5: 5.0}, 4: {1: 30.0, 2.5: 12.0}}}
VARIANT = {"name": "v", "accuracy": 71, "profile": {"latency_ms": TABLE, "max_batch": 4}}
DECLARED = {
    "name": "two",
    "slo_ms": 100,
    "stages": [
        {"name": "a", "profile": "ResNet-T"},
        {
            "name": "b",
            "after": ["a"],
            "variants": [{"name": "v", "accuracy": 71, "profile": {"latency_ms": TABLE, "max_batch": 4}}],
        },
    ],
    "system": {"name": "static", "cores": 2, "drop": {"limit": 3}},
    "cluster": {"nodes": [{"hardware": "c5.4xlarge", "count": 2}]},
}


def setup() -> Setup:
    return set_up(load_application(DECLARED))


def recorded() -> list[tuple[int, Record]]:
    """One request through both stages, as a driver would log it."""
    core, log = setup().core(), MemoryLog()
    steps: list[tuple[int, Event]] = [
        (0, WOKE),
        (ms(1), ReplicaReady(ReplicaId(0))),
        (ms(1), ReplicaReady(ReplicaId(1))),
        (ms(2), Request(RequestId(0), ms(1), ms(2), ms(101))),
        (ms(32), Finished(BatchId(0), ReplicaId(0), ms(30))),
        (ms(40), Finished(BatchId(1), ReplicaId(1), ms(8))),
    ]
    for now_ns, event in steps:
        log.append(now_ns, event)
        for action in core.handle(now_ns, event):
            log.append(now_ns, action)
    assert log.records[-1][1] == End(RequestId(0), Outcome.SERVED)
    return log.records


def test_a_header_through_a_file_gives_the_same_application(tmp_path: Path) -> None:
    header = header_of(setup(), origin="sim", seed=7)
    with FileLog(tmp_path / "run.jsonl", header):
        pass
    again = rebuild(read_log(tmp_path / "run.jsonl").header)
    first = setup()
    assert again.application.stages == first.application.stages
    assert again.application.cluster == first.application.cluster
    assert again.application.system.parameters == first.application.system.parameters
    assert again.system.slots == first.system.slots


def test_a_replay_of_an_honest_recording_finds_no_difference() -> None:
    played = replay_log(recorded(), setup().core())
    assert played.difference is None
    assert played.events == 6
    assert played.actions == sum(
        not isinstance(record, (type(WOKE), Request, Finished, ReplicaReady)) for _, record in recorded()
    )


@pytest.mark.parametrize("together", [False, True])
def test_a_replay_tells_together_what_a_live_driver_told_together(together: bool) -> None:
    core, log = setup().core(), MemoryLog()
    begun = [record for record in recorded() if record[0] < ms(2)]
    for now_ns, record in begun:
        if isinstance(record, EVENTS):
            core.handle(now_ns, record)
    pair = [Request(RequestId(id), ms(1), ms(2), ms(901)) for id in (0, 1)]
    for place, request in enumerate(pair):
        log.append(ms(2), request)
        for action in core.handle(ms(2), request, together and place == 0):
            log.append(ms(2), action)
    assert replay_log([*begun, *log], setup().core(), together=together).difference is None
    assert replay_log([*begun, *log], setup().core(), together=not together).difference is not None


def test_a_log_that_begins_with_an_answer_is_refused() -> None:
    with pytest.raises(InputError, match="begins with an action"):
        replay_log(recorded()[1:], setup().core())


def test_a_changed_action_is_found_where_it_is() -> None:
    records = recorded()
    place = next(index for index, (_, record) in enumerate(records) if isinstance(record, StartReplica))
    now_ns, start = records[place]
    assert isinstance(start, StartReplica)
    records[place] = (now_ns, StartReplica(ReplicaId(9), start.spec))
    difference = replay_log(records, setup().core()).difference
    assert difference is not None
    assert difference.record == place + 1
    assert difference.recorded["replica"] == 9
    assert difference.replayed is not None
    assert difference.replayed["replica"] == 0


@pytest.mark.parametrize("dropped", [-1, 1])
def test_a_missing_action_is_found_unless_the_log_was_cut_there(dropped: int) -> None:
    records = recorded()
    del records[dropped]
    assert (replay_log(records, setup().core()).difference is None) == (dropped == -1)


def test_another_system_answers_differently() -> None:
    other = set_up(load_application(DECLARED | {"system": {"name": "static", "cores": 1}}))
    assert replay_log(recorded(), other.core()).difference is not None


def test_a_header_that_describes_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="does not describe an application"):
        rebuild(Header(origin="sim", application={"name": "x"}, system="static"))
