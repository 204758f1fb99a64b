"""Shared by every test: live tests share one worker, so that their servers never compete with each other."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for test in items:
        if test.get_closest_marker("live"):
            test.add_marker(pytest.mark.xdist_group("live"))
