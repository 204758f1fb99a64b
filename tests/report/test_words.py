"""Phrases."""

from sloop.report.words import amount, difference, ids, target
from sloop.vocabulary import Group, Plan, ReplicaSpec, StagePlan


def test_amounts_and_ids() -> None:
    assert [amount(count, "core") for count in (0, 1, 2, 2.5)] == ["no core", "1 core", "2 cores", "2.5 cores"]
    assert ids("request", [3]) == "request 3"
    assert ids("request", [3, 4, 5]) == "requests 3, 4 and 5"
    assert ids("request", range(20)) == "requests 0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)"


def test_plans_in_words() -> None:
    one = StagePlan("a", (Group(ReplicaSpec("a", "v", 2.0, device="cuda:0", share=0.25), 3),), 8)
    assert target(Plan((one,), "")) == "a: 3 × v on 2 cores and 25% of cuda:0, batches up to 8"
    assert target(Plan((StagePlan("a", (), 1),), "")) == "a: no replica, batches up to 1"
    assert target(Plan((), "")) == "nothing"
    other = StagePlan("b", (), 1)
    assert difference(None, Plan((one,), "")) == "the first plan"
    assert difference(Plan((one,), "x"), Plan((one,), "y")) == "nothing changed"
    assert difference(Plan((one,), ""), Plan((one, other), "")) == "new: b"
