"""The suite that `sloop.testing` offers notices what is wrong with a system or a policy."""

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from sloop.core.protocols import BatchDecision, Drop, Forecast, Scale
from sloop.errors import SloopError
from sloop.policies.scale.static import Static
from sloop.systems import SYSTEMS
from sloop.testing import SystemSuite


def test_arguments_of_policies_need_no_pytest() -> None:
    script = "import sys, sloop.testing.views; print('pytest' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"


# Policies

CALLS = count(1)


class OtherKeys:
    def key(self, visit: Any) -> int:
        return next(CALLS)


class TooLarge:
    def decide(self, now_ns: int, queue: Any, device: Any) -> BatchDecision:
        return BatchDecision(device.batch_max + 1)


class Waits:
    def decide(self, now_ns: int, queue: Any, device: Any) -> BatchDecision:
        return BatchDecision(wait_until_ns=now_ns + 1)


class Spins:
    def decide(self, now_ns: int, queue: Any, device: Any) -> BatchDecision:
        return BatchDecision(wait_until_ns=now_ns)


class TakesFromTheQueue:
    def decide(self, now_ns: int, queue: Any, device: Any) -> BatchDecision:
        queue.visits.pop()
        return BatchDecision(1)


class OverlooksTheLast:
    """Takes turns, and takes the last replica only if no other is idle."""

    def choose(self, now_ns: int, idle: Any, last: int) -> int:
        later = [index for index, replica in enumerate(idle[:-1]) if replica.id > last]
        return later[0] if later else 0


class ChoosesNobody:
    def choose(self, now_ns: int, there: Any, last: Any) -> int:
        return len(there)


class Hopes(Drop):
    def is_hopeless(self, now_ns: int, visit: Any, cost_ns: int, full_ns: int = 0) -> bool:
        return now_ns % 2_000_000 == 0


class Refuses:
    def retry_after_ns(self, now_ns: int, request: Any, queued: int, drain_ns: int) -> int:
        return 1


class Foresees(Forecast):
    def demand_rps(self, now_ns: int, traffic: Any) -> float:
        return float("inf")


class Alternates(Scale):
    """Keeps something outside itself."""

    period_ns = 10**9

    def plan(self, now_ns: int, view: Any, memory: Any) -> Any:
        return Static(replicas=next(CALLS)).plan(now_ns, view, memory)


@pytest.mark.parametrize(
    ("verb", "policy", "told"),
    [
        ("order", OtherKeys, "depends on more than the visit"),
        ("batch", TooLarge, "may start"),
        ("batch", Waits, "waits for ever"),
        ("batch", Spins, "waits until a time that has passed"),
        ("batch", TakesFromTheQueue, "changed its arguments"),
        ("route", OverlooksTheLast, "get nothing"),
        ("route", ChoosesNobody, "it chooses number"),
        ("drop", Hopes, "no longer so"),
        ("admit", Refuses, "an empty server refuses"),
        ("forecast", Foresees, "foresees inf"),
        ("scale", Alternates, "plans otherwise"),
    ],
)
def test_a_policy_that_breaks_a_law_is_noticed(verb: str, policy: Callable[[], Any], told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        SystemSuite().test_a_policy_obeys_the_law_of_its_verb(verb, policy)


# Systems

SYSTEM = '''
import time
from dataclasses import dataclass, field, replace
from sloop.core.protocols import Scale
from sloop.policies.scale.static import Static
from sloop.systems import SYSTEMS
from sloop.systems.system import System

@dataclass(frozen=True, slots=True)
class Own(Scale):
    """Plans as `static` does."""

    count: int = 1
    """How many replicas of each stage."""
    period_ns: int = 10**9

    def plan(self, now_ns, view, memory):
        count = self.count
        plan, _ = Static(replicas=count).plan(now_ns, view, None)
        return plan, memory

policies = replace(SYSTEMS["static"].policies, scale=Own())
SYSTEM = System("own", "system", "a test", policies, "keeps to one kind of hardware")
'''
Check = Callable[[SystemSuite, str], None]


@pytest.mark.parametrize(
    ("old", "new", "check", "told"),
    [
        (', "keeps to one kind of hardware"', "", SystemSuite.test_it_reads_what_it_shows, "`mixed`"),
        ('"""How many replicas of each stage."""', "", SystemSuite.test_it_reads_what_it_shows, "docstring below"),
        ("count", "batch", SystemSuite.test_it_reads_what_it_shows, "called like a verb"),
        (
            "count = self.count",
            "count = 1 + time.perf_counter_ns() // 1000 % 3",
            SystemSuite.test_every_invariant_holds_in_random_worlds,
            "answers otherwise to the same arguments",
        ),
        (
            "count = self.count",
            "count = [][0]",
            SystemSuite.test_every_invariant_holds_in_random_deployments,
            "list index out of range",
        ),
        (
            "count = self.count",
            "count, memory = self.count, lambda: 1",
            SystemSuite.test_a_restored_core_decides_as_the_saved_one,
            "is the function",
        ),
        (
            "count = self.count",
            "count = 20 if view.demand_rps[view.stages[0].name] == 0 else 1",
            SystemSuite.test_a_plan_is_feasible_or_explained,
            "it plans less for more requests",
        ),
    ],
    ids=["mixed", "meaning", "verb", "clock", "exception", "state", "backwards"],
)
def test_a_system_that_breaks_a_promise_is_noticed(tmp_path: Path, old: str, new: str, check: Check, told: str) -> None:
    path = tmp_path / "own.py"
    path.write_text(SYSTEM)
    check(SystemSuite(), str(path))
    assert old in SYSTEM
    path.write_text(SYSTEM.replace(old, new))
    with pytest.raises((AssertionError, SloopError), match=told):
        check(SystemSuite(), str(path))


def test_one_name_of_each_scale_policy_is_tried_and_all_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(SystemSuite):
        package = "sloop"

    few = Own()._systems()
    assert "static" in few
    assert "early-drop" not in few
    monkeypatch.setenv("SLOOP_SUITE", "all")
    assert Own()._systems() == list(SYSTEMS.own)
