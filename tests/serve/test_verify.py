"""Requests that shared a forward pass are run again, alone, while their worker idles."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sloop.profile.model import NOTHING
from sloop.serve.messages import Run, WorkerDiffers
from sloop.serve.verify import SAMPLES_MAX, Verification
from sloop.tensor import Port, Signature
from tests.serve.rig import run_of
from tests.serve.test_worker import A, Server, values

PORT = Port("y", "FP32", (-1, 2))
SIGNATURE = Signature((Port("x", "FP32", (-1, 2)),), (PORT,))
Array = np.ndarray[Any, np.dtype[Any]]


def apart(given: Sequence[Array]) -> list[Array]:
    return [given[0] * 2]


def mixing(given: Sequence[Array]) -> list[Array]:
    return [given[0] - given[0].min()]


def by_size(given: Sequence[Array]) -> list[Array]:
    """Kernels for other numbers of rows add in another order: here the difference is large, but not a neighbour's."""
    return [given[0] * np.float32(1 + len(given[0]) / 10)]


ROWS = np.array([[1, 2], [3, 4], [-5, 6], [7, 8]], np.float32)


def shared(verification: Verification, model: Any, rows: Sequence[int] = (1, 2, 1)) -> None:
    verification.note(rows, [ROWS], model([ROWS]))


@pytest.mark.parametrize("model", [apart, by_size])
def test_rows_that_never_meet_differ_in_nothing(model: Any) -> None:
    verification = Verification([PORT], first=100, share=0)
    shared(verification, model)
    assert [verification.check(model) for _ in range(3)] == [""] * 3
    assert not verification.is_waiting


def test_a_neighbours_influence_is_found() -> None:
    verification = Verification([PORT], first=100, share=0)
    shared(verification, mixing)
    assert verification.check(mixing) == ("output 'y' of a request beside 3 other rows differs from its output alone")


@pytest.mark.parametrize(("second", "differs"), [(mixing, True), (apart, False)])
def test_only_outputs_that_were_computed_are_compared(second: Any, *, differs: bool) -> None:
    verification = Verification([PORT, Port("z", "FP32", (-1, 2))], first=100, share=0)
    verification.note([1, 2, 1], [ROWS], [NOTHING, *second([ROWS])])

    def both(given: Sequence[Array]) -> list[Array]:
        return [*mixing(given), *second(given)]

    assert bool(verification.check(both)) == differs


def test_the_first_requests_and_then_a_share_are_verified() -> None:
    verification, checked = Verification([PORT], first=5, share=0.25), []
    for _ in range(8):
        shared(verification, apart)
        kept = 0
        while verification.is_waiting:
            kept += 1
            assert verification.check(apart) == ""
        checked.append(kept)
    assert checked[:2] == [3, 2]
    assert sum(checked[2:]) == pytest.approx(0.25 * 3 * 6, abs=1)


def test_nothing_is_kept_where_nothing_is_verified() -> None:
    verification = Verification([PORT], first=0, share=0)
    shared(verification, mixing)
    assert not verification.is_waiting


def test_what_waits_is_bounded() -> None:
    verification = Verification([PORT], first=1000, share=0)
    for _ in range(10):
        shared(verification, apart)
    kept = 0
    while verification.is_waiting:
        kept += 1
        verification.check(apart)
    assert kept == SAMPLES_MAX


STAGE = """
class Model:
    inputs = {"x": ("FP32", (-1, 2))}; outputs = {"y": ("FP32", (-1, 2))}
    joins_rows = True
    def __init__(self, threads): pass
    def run(self, x): return %s
"""


def order() -> Run:
    return run_of([[values(ROWS[:1])], [values(ROWS[1:3])], [values(ROWS[3:])]])


def test_a_worker_that_finds_a_difference_says_so_and_joins_no_more(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(STAGE % "x - x.min()")
    with Server(str(tmp_path / "m.py"), SIGNATURE, verify_first=100) as server:
        server.run(order())
        assert "differs from its output alone" in server.hear(WorkerDiffers).why
        done = server.run(order())
        assert done.blocks[0] == server.run(run_of([[values(ROWS[:1])]])).blocks[0], "as alone"


def test_a_lack_of_memory_is_no_difference(tmp_path: Path) -> None:
    fails = "x if len(x) == 4 or x.max() < 1 else fails(x[0, 0] == 1)"  # it is warmed with values below 1
    text = STAGE % fails + "def fails(is_short):\n    raise MemoryError() if is_short else ValueError('no')\n"
    (tmp_path / "m.py").write_text(text)
    with Server(str(tmp_path / "m.py"), SIGNATURE, verify_first=100) as server:
        server.run(order())
        # The first of the three requests lacks memory, the second fails.
        assert "fails alone: ValueError: no" in server.hear(WorkerDiffers).why


def test_a_worker_that_is_told_joins_no_more(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(STAGE % "x - x.min()")
    with Server(str(tmp_path / "m.py"), SIGNATURE) as server:
        joined = server.run(order()).blocks[0]
        server.channel.tell(WorkerDiffers(A, "another one has found a difference"))
        assert server.run(order()).blocks[0] != joined
