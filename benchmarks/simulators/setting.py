"""The parameters of the two queues, which all simulators share, and how each reports its duration.

`many-servers` is M/M/c: first come, first served, nothing dropped. In `batching`, a free server takes all that waits,
up to a batch, the urgent class first; a batch of b takes (FIXED + EACH · b) · noise, the noise exponential of mean 1.
Half of the requests are urgent. The utilisation of both is 0.8.

Imports only the standard library, because interpreters that have only another simulator installed read it too.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

MANY_SERVERS: Final = "many-servers"
BATCHING: Final = "batching"
LOAD: Final = 0.8
SERVICE_S: Final = 0.01
BATCH_MAX: Final = 8
FIXED_S: Final = 0.010
EACH_S: Final = 0.002


class Case(NamedTuple):
    """One run of one simulator."""

    queue: str
    requests: int
    servers: int
    busy: int
    """Servers that the load is meant for; the others only stand there."""
    seed: int
    style: str
    """One of the side's own ways to write the model."""
    waits: bool
    """Whether to take down how long requests waited; timed runs do not."""

    @property
    def rate_rps(self) -> float:
        """The rate at which requests arrive."""
        if self.queue == MANY_SERVERS:
            return LOAD * self.busy / SERVICE_S
        return LOAD * self.busy * BATCH_MAX / batch_s(BATCH_MAX)


Waits = Mapping[str, list[float]]
"""By class, in seconds; empty where none were taken down."""
Model = Callable[[Case], Waits]


def batch_s(size: int) -> float:
    """The mean duration of a batch."""
    return FIXED_S + EACH_S * size


def main(models: Mapping[tuple[str, str], Model], before: Model | None = None) -> None:
    """Run the model for the requested (queue, style), and print its duration on standard output.

    `before` does what a run does before its first request; it is timed separately.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--queue", choices=(MANY_SERVERS, BATCHING), default=MANY_SERVERS)
    parser.add_argument("--style", default="plain")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--servers", type=int, default=8)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--waits", action="store_true")
    given = parser.parse_args()
    case = Case(**{**vars(given), "busy": given.busy or given.servers})
    model = models[case.queue, case.style]
    begin_s = timed(before, case)[0] if before else 0.0
    taken_s, waits = timed(model, case)
    mean_ms = {name: 1e3 * sum(found) / len(found) for name, found in waits.items() if found}
    seen = {"taken_s": taken_s, "begin_s": begin_s, "peak_bytes": peak_bytes(), "mean_ms": mean_ms}
    json.dump(seen, sys.stdout)


def timed(model: Model, case: Case) -> tuple[float, Waits]:
    """Processor seconds of this process, which other processes hardly affect, and the model's result."""
    gc.collect()
    begin_s = time.process_time()
    waits = model(case)
    return time.process_time() - begin_s, waits


def peak_bytes() -> int:
    """The peak memory of this program; getrusage would include that of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
