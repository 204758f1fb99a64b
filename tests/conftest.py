"""Shared by every test: live tests share one worker, so that their servers never compete with each other; those of
fabrics in the kernel have another one. Property tests draw the same examples each time, so that a commit passes or
fails alike on every machine.

`make test FLAGS="-m hypothesis --hypothesis-profile=random"` draws others.
"""

import pytest
from hypothesis import HealthCheck, settings

from tests.hosts import why_no_hosts

# Machines differ in speed: no test fails because one is slow.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for test in items:
        if test.get_closest_marker("live"):
            is_fabric = test.get_closest_marker("needs_hosts") and "innet" in test.path.parts
            test.add_marker(pytest.mark.xdist_group("fabric" if is_fabric else "live"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_hosts") and (reason := why_no_hosts()):
        pytest.skip(reason)
