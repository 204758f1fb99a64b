"""Send what is there."""

from collections.abc import Callable

import pytest

from sloop.core.protocols import Take
from sloop.policies.batch.work_conserving import WorkConserving
from sloop.vocabulary import Visit


@pytest.mark.parametrize(("waiting", "limit", "count"), [(1, 8, 1), (8, 8, 8), (20, 8, 8)])
def test_takes_all_up_to_the_limit(visit: Callable[..., Visit], waiting: int, limit: int, count: int) -> None:
    queue = [visit(number) for number in range(waiting)]
    assert WorkConserving().decide(0, queue, limit, range(limit + 1)) == Take(count=count)
