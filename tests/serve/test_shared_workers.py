"""Workers of a server's backend that share all cores: streams through real processes, and what may go wrong."""

import os
import signal
from pathlib import Path

import pytest

from benchmarks.models import perceptron
from sloop.errors import InputError, MachineError
from sloop.profile.examine import examine
from sloop.profile.sharing import Contender, measure_sharing
from sloop.serve.shared_workers import SharedStream, shared_stream
from sloop.vocabulary import ReplicaId

pytestmark = pytest.mark.live

SHY = """
class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"y": ("FP32", (-1, 4))}
    joins_rows = True

    def __init__(self, threads):
        pass

    def run(self, x):
        if len(x) > 2:
            raise ValueError("at most two rows")
        return x
"""


def of(stream: SharedStream, *sizes: int) -> list[ReplicaId]:
    """Run a batch of each size, on a worker each; returns the workers whose batches have ended."""

    async def all_ended() -> list[ReplicaId]:
        for number, size in enumerate(sizes):
            stream.workers.run(ReplicaId(number), size)
        return [await stream.workers.ended() for _ in sizes]

    return stream.runner.run(all_ended())


def test_batches_run_back_to_back_on_as_many_workers_as_asked(tmp_path: Path) -> None:
    file = perceptron(tmp_path, width=16, layers=2)
    with shared_stream(examine(file), {}, 4, 3) as stream:
        assert sorted(of(stream, 4, 1, 2)) == [0, 1, 2]
        found = measure_sharing(Contender(file, 4, {}), together=3, seconds=0.01, passes=2, stream=stream)
    assert [count for count, _ in found.points] == [1.0, 2.0, 3.0]
    assert all(factor > 0 for _, factor in found.points)
    assert found.alone_ms > 0
    assert found.software.startswith("ONNX Runtime ")


def test_a_batch_that_the_model_does_not_take_is_an_error_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(SHY)
    with shared_stream(examine(tmp_path / "m.py"), {"x": (4,)}, 3, 2) as stream:
        assert stream.software() == ""
        with pytest.raises(InputError, match=r"a batch fails: .*at most two rows"):
            stream.mean_ns(1, 0.01)


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    with shared_stream(examine(perceptron(tmp_path, width=16, layers=2)), {}, 2, 2) as stream:
        pid = stream.workers.pid(ReplicaId(1))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(MachineError, match="of 2 has died"):
            stream.mean_ns(2, 60.0)


def test_a_model_that_does_not_load_ends_all_workers(tmp_path: Path) -> None:
    file = perceptron(tmp_path, width=16, layers=2)
    known = examine(file)
    file.write_bytes(b"no model")
    with pytest.raises(MachineError, match="worker 1 of 2 did not start"), shared_stream(known, {}, 2, 2):
        pass
