"""The present tense of a log."""

from sloop.report.situation import Situation
from sloop.runlog import Record
from sloop.units import ms
from sloop.vocabulary import Life, ReplicaId, RequestId


def at(story: list[tuple[int, Record]], at_ms: float) -> Situation:
    now = Situation()
    for now_ns, record in story:
        if now_ns <= ms(at_ms):
            now.append(now_ns, record)
    return now


def test_the_story_as_it_went(story: list[tuple[int, Record]]) -> None:
    first = at(story, 20)
    assert (first.count(Life.STARTING), first.replicas[ReplicaId(0)].step) == (1, "loading")
    second = at(story, 130)
    assert (list(second.waiting), list(second.open)) == ([2, 3], [1, 2, 3])
    assert second.batches[0].batch.requests == (RequestId(1),)  # type: ignore[index]
    third = at(story, 1100)
    assert third.plan is not None
    assert (third.plan.why, third.plan_ns, third.replicas[ReplicaId(0)].cores) == ("demand doubled", ms(1000), 4.0)
    assert at(story, 1200).waiting == {5: ms(1200)}
    assert at(story, 1800).count(Life.DRAINING) == 1
    last = at(story, 9999)
    assert (last.replicas, last.batches, last.open, last.waiting) == ({}, {}, {}, {})
    assert [(second.start_s, second.arrivals, second.missed) for second in last.lately] == [(0, 4, 3), (1, 2, 2)]
