import asyncio
import sys
import time
from collections.abc import Callable

import pytest

from sloop.load.alarm import Alarm, LoopTimer, TimerFd, alarm
from sloop.units import NS_PER_MS

Maker = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], Alarm]
MAKERS = [LoopTimer, alarm, *([TimerFd] if sys.platform == "linux" else [])]


@pytest.mark.parametrize("maker", MAKERS)
def test_rings_once_and_never_early(maker: Maker) -> None:
    async def ring_twice() -> list[int]:
        early_ns: list[int] = []
        rung = asyncio.Event()
        bell = maker(asyncio.get_running_loop(), rung.set)
        for after_ns in (2 * NS_PER_MS, -NS_PER_MS):
            at_ns = time.monotonic_ns() + after_ns
            bell.set(at_ns + 60 * 10**9)
            bell.set(at_ns)
            await asyncio.wait_for(rung.wait(), 5)
            early_ns.append(at_ns - time.monotonic_ns())
            rung.clear()
        await asyncio.sleep(0.005)
        assert not rung.is_set()
        bell.set(time.monotonic_ns() + NS_PER_MS)
        bell.close()
        await asyncio.sleep(0.005)
        assert not rung.is_set()
        return early_ns

    # asyncio itself may call a resolution of its clock early, which is a nanosecond on Linux.
    assert all(early_ns <= NS_PER_MS // 100 for early_ns in asyncio.run(ring_twice()))
