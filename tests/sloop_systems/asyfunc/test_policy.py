"""Published parameters, and the policies that AsyFunc is compared with on the worked example of the specification
(section 2.12)."""

import pytest

from sloop.policies.scale.bodies import Bodies
from sloop.systems import SYSTEMS
from sloop.units import ms, s
from sloop_systems.asyfunc.policy import ByCapacity, OfflineBatch
from tests.asked import next_plan
from tests.policies.scale.test_bodies import groups_of, view


def test_published_parameters() -> None:
    """Sections 2.1 and 2.6 to 2.8: α, β, C_max, B_max, P; and what we decided where none is published."""
    assert SYSTEMS["asyfunc"].policies.scale == Bodies(
        alpha=0.8, beta=0.6, gamma=1.0, cores_max=16, batch_max=8, adapt_ns=s(10), period_ns=ms(500),
        bursts="shadows", objective="demand", counts_shadows=True,
    )  # fmt: skip


def test_what_it_is_compared_with() -> None:
    (group,) = groups_of(next_plan(ByCapacity(cores=4, batch_max=4), 0, view([], 100, 0)))
    assert (group.spec.cores, group.count, group.batch_max) == (4, 3, 4), "⌈100 / 40.4⌉"
    batch = OfflineBatch(batch_max=4)
    (first,) = groups_of(next_plan(batch, 0, view([], 100, 0)))
    (later,) = groups_of(next_plan(batch, s(10), view([], 200, 0)))
    assert (first.spec, first.batch_max) == (later.spec, later.batch_max), "chosen once"
    assert later.count == pytest.approx(2 * first.count, abs=1)
    (more,) = groups_of(next_plan(OfflineBatch(batch_max=4, prewarm=1.5), 0, view([], 100, 0)))
    assert more.count == pytest.approx(1.5 * first.count, abs=1)


def test_batch_is_cheap_until_something_arrives() -> None:
    """Alone, a request takes 99 ms on one core, 51 ms on two: the least core time is one core's."""
    batch = OfflineBatch(batch_max=4)
    (idle,) = groups_of(next_plan(batch, 0, view([], 0, 0)))
    assert (idle.spec.cores, idle.count, idle.batch_max) == (1, 1, 1)
    (busy,) = groups_of(next_plan(batch, s(10), view([], 100, 0)))
    assert busy == groups_of(next_plan(OfflineBatch(batch_max=4), 0, view([], 100, 0)))[0], "chosen by its rate"
