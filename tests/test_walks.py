"""A reader who wants to know how a replica starts, or how `mixed` plans, has to open few files and learn few names."""

import pytest

from tests.walks import ENTRIES_OF_A_START, FILES_OF_A_START, NAMES_OF_MIXED, plans, starts


@pytest.mark.parametrize("provision", ["as_placed", "cheapest_start"])
def test_a_start_enters_few_files(provision: str) -> None:
    walks = starts(provision)
    assert walks, "replicas start"
    for walk in walks:
        entries = walk.entries()
        assert {"sloop.core.control", "sloop.core.provision"} <= entries.keys()
        assert len(entries) <= FILES_OF_A_START, entries
        assert max(entries.values()) <= ENTRIES_OF_A_START, entries


def test_a_tick_of_mixed_uses_few_names_of_other_modules() -> None:
    names = max((walk.names() for walk in plans()), key=len)
    assert {("sloop.solvers.mixed", "cheapest"), ("sloop.policies.targets", "usable")} <= names
    assert len(names) <= NAMES_OF_MIXED, sorted(names)
