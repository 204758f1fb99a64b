"""Shared by every test: live tests share one worker, so that their servers never compete with each other; those of
fabrics in the kernel have another one. Property tests draw the same examples each time, so that a commit passes or
fails alike on every machine.

`make fuzz` draws others. The profile `few` draws at most ten for each test, whatever the test asks for: `make coverage`
uses it.

Garbage collection is rare here. Modules and tests stay until the end, and to look through them again and again finds
nothing; a test that needs a collection asks for it.
"""

import asyncio
import gc
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, settings

from tests.hosts import why_no_hosts
from tests.needed import is_missing
from tests.nvidia import why_no_gpu

# Machines differ in speed: no test fails because one is slow.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("same", settings.get_profile("random"), derandomize=True, database=None)
settings.register_profile("few", settings.get_profile("same"), max_examples=10)
settings.load_profile("same")

COMPARING = ("benchmarks", "sloop_systems")
"""Folders with tests that compare publications: where one of these is not there, the test is not collected."""

GARBAGE_MIN = 50_000
"""Objects with references after which the collector looks for garbage among the youngest ones. Python's 700 take a
thirtieth of the time of a simulation, and a sixth of that of collecting all tests."""
gc.set_threshold(GARBAGE_MIN, *gc.get_threshold()[1:])


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    path = collection_path
    may_miss = path.suffix == ".py" and any(folder in path.parts for folder in COMPARING)
    return True if may_miss and is_missing(path) else None


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    few = settings.get_profile("few").max_examples if settings.get_current_profile_name() == "few" else None
    for test in items:
        if few:
            _draw_at_most(few, test)
        if test.get_closest_marker("live"):
            is_fabric = test.get_closest_marker("needs_hosts") and "netnn" in test.path.parts
            test.add_marker(pytest.mark.xdist_group("fabric" if is_fabric else "live"))
            if "serve" in test.path.parts:
                test.add_marker("server")


def pytest_collection_finish() -> None:
    gc.freeze()


def _draw_at_most(examples: int, test: pytest.Item) -> None:
    """A profile does not override what a test itself declares, and Hypothesis has no public way to."""
    function = getattr(test, "obj")  # noqa: B009  # not every item has one
    function = getattr(function, "__func__", function)
    declared = getattr(function, "_hypothesis_internal_use_settings", None)
    if declared is not None and declared.max_examples > examples:
        function._hypothesis_internal_use_settings = settings(declared, max_examples=examples)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, on the event loop of the server or that of its fixture `event_loop`. It fails if
    an exception reaches the loop's handler while it runs."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await pyfuncitem.obj(**given)
        await asyncio.sleep(0)

    event_loop: Any = pyfuncitem.funcargs.get("event_loop", uvloop.new_event_loop)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(main())
    assert not unhandled
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_hosts") and (reason := why_no_hosts()):
        pytest.skip(reason)
    if item.get_closest_marker("needs_gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
