"""The upper limit of throughput: a loop around ONNX Runtime with one thread and the best batch size.

python -m benchmarks.peers.bare MODEL.onnx BATCH_MAX SECONDS
"""

import subprocess
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from benchmarks.peers.environments import last_line
from benchmarks.peers.models import described
from benchmarks.peers.peer import Model, PeerFailed
from sloop.profile.model import open_session

SPARE_S: Final = 60.0
ROUNDS: Final = 3
"""Rounds over all batch sizes; the best counts, because a machine is slow now and then."""


class Limit(Struct, frozen=True):
    """The largest throughput of one thread."""

    rps: float
    batch: int
    """The batch size with the largest throughput."""
    rps_by_batch: dict[int, float]


def limit_of(model: Model, batch_max: int, seconds: float) -> Limit:
    """The limit, measured in its own process for `seconds` per batch size."""
    command = (sys.executable, "-m", "benchmarks.peers.bare", str(model.path), str(batch_max), f"{seconds:g}")
    done = subprocess.run(command, capture_output=True, timeout=SPARE_S + seconds * batch_max.bit_length(), check=False)
    if done.returncode:
        raise PeerFailed(last_line(done.stderr.decode()))
    return msgspec.json.decode(done.stdout, type=Limit)


def measure(model: Path, batch_max: int, seconds: float) -> Limit:
    served = described(model)
    session = open_session(model, 1)
    batches = [2**power for power in range(batch_max.bit_length())]
    found = dict.fromkeys(batches, 0.0)
    for batch in batches * ROUNDS:
        found[batch] = max(found[batch], _rate(partial(session.run, [served.output]), served, batch, seconds / ROUNDS))
    best = max(found, key=lambda batch: found[batch])
    return Limit(found[best], best, found)


def _rate(run: Callable[[dict[str, NDArray[np.float32]]], object], model: Model, batch: int, seconds: float) -> float:
    """Images per second with one batch size."""
    tensor = {model.input: np.ones((batch, *model.row), dtype=np.float32)}
    run(tensor)
    begun_s, passes = time.perf_counter(), 0
    while time.perf_counter() - begun_s < seconds:
        run(tensor)
        passes += 1
    return passes * batch / (time.perf_counter() - begun_s)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL.onnx")
    parser.add_argument("batch_max", type=int, metavar="BATCH_MAX", help="largest batch size")
    parser.add_argument("seconds", type=float, metavar="SECONDS", help="duration of the measurement per batch size")
    sys.stdout.buffer.write(msgspec.json.encode(measure(**vars(parser.parse_args()))))
