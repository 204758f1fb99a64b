"""The soak: how it judges what it saw, and a short one whose counts are exact."""

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.soak import CLIENTS, EXPECTED, FEATURES, SHARES, Sample, Wire, family, fitted, look, rows_of, send
from sloop.app.limits import ServerLimits
from sloop.serve.edge.bodies import BodyMemory
from sloop.serve.edge.inputs import InputValidator
from sloop.serve.edge.service import Model
from sloop.serve.protocols import RequestResult
from sloop.tensor import Port, Signature
from sloop.vocabulary import Outcome
from tests.serve.edge.fakes import FakeDriver, Gateway, LoopThread, make_service, rpc_server, web_server


@given(
    level=st.floats(1, 1e6), growth=st.floats(-0.001, 0.001), noise=st.floats(0, 0.05), seed=st.integers(0, 2**32 - 1)
)
def test_a_line_is_found_within_its_confidence(level: float, growth: float, noise: float, seed: int) -> None:
    """Ten half-widths: with so few blocks, one of twenty lines is outside of one."""
    times_s = np.arange(2000.0)
    values = level * (1 + growth * times_s + noise * np.random.default_rng(seed).normal(size=2000))
    slope = fitted(list(times_s), list(values))
    assert abs(slope.per_s - level * growth) <= 10 * slope.within_per_s + 1e-9 * level


def test_growth_is_told_from_noise_and_steps_down() -> None:
    times_s, noise = np.arange(3600.0), np.random.default_rng(1).normal(size=3600)
    flat = 100 + noise
    assert fitted(list(times_s), list(flat)).is_flat
    assert fitted(list(times_s), list(flat - times_s / 100)).is_flat
    assert not fitted(list(times_s), list(flat + times_s / 100)).is_flat
    assert fitted(list(times_s), list(100 + 0.0001 * times_s)).is_flat, "less than a hundredth an hour"
    assert fitted([1.0, 2.0], [5.0, 6.0]).is_flat, "too few to tell"


def test_the_table_has_a_row_for_each_quantity() -> None:
    memory = [{"edge": 60 * 2**20 + second * 2**18, "worker": 40 * 2**20} for second in range(200)]
    samples = [Sample(float(second), memory[second], 50, 3, second) for second in range(200)]
    rows = rows_of(samples)
    assert [(row[0], row[-1]) for row in rows] == [
        ("memory, MiB", False),
        ("of it edge", False),
        ("of it worker", True),
        ("descriptors", True),
        ("processes", True),
        ("state folder, MiB", None),
    ]
    assert str(rows[0][4]).startswith("+900 ± ")


def test_it_sees_this_process(tmp_path: Path) -> None:
    assert family(os.getpid())[0] == os.getpid()
    sample = look(os.getpid(), tmp_path)
    assert sample.processes >= 1
    assert sample.descriptors >= 3
    assert sum(sample.memory_bytes.values()) > 2**20
    assert sample.at_s <= time.monotonic()


@pytest.mark.live
def test_every_request_of_a_short_soak_ends_as_it_should_and_leaves_nothing() -> None:
    thread, gateway = LoopThread(), Gateway(FakeDriver())
    gateway.driver.respond = lambda tensors: RequestResult(Outcome.SERVED, {"y": tensors["x"]})
    bodies = BodyMemory(100_000)
    service = gateway.service = make_service(gateway, bodies=bodies)
    signature = Signature((Port("x", "FP32", (-1, 64)),), (Port("y", "FP32", (-1, 64)),), rows_max=8)
    service.add(Model("demo", 10**9, InputValidator(signature), service.models["demo"].limits))
    web, rpc = web_server(service), rpc_server(service, limits=ServerLimits(requests=64))
    ports = thread.serve(web), thread.serve(rpc)

    async def run() -> Counter[str]:
        return await send([Wire("demo", *ports) for _ in range(CLIENTS)], 1e6, 2000, seed=1)

    found = asyncio.run(run())
    assert set(found) == set(FEATURES)
    assert found.total() == 2000
    assert all(abs(found[kind] - 20 * share) < 100 for kind, share in zip(FEATURES, SHARES, strict=True))
    assert set(EXPECTED) == set(FEATURES)

    async def emptied() -> None:
        while rpc.listener.connections or web.listener.connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    thread.call(emptied())
    assert (bodies.held_bytes, rpc.open_calls) == (0, 0)
    thread.call(rpc.close(0.2))
    thread.call(web.close(0.2))
    thread.close()
