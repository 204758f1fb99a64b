"""Plays random schedules on all CPU cores for a given time. See `python -m tests.dst.soak --help`.

A schedule that breaks an invariant is shrunk, and printed with the command that plays it again.
"""

import argparse
import gc
import logging
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count
from math import ceil
from typing import Final, TextIO

from msgspec import Struct

from sloop.machine import capacity
from sloop.text import counted
from tests.dst.schedules import Schedule, kind_of, play, schedule_of, shrink

CHUNK: Final = 16
"""Schedules that a process plays before it reports."""
KINDS_MAX: Final = 3
"""Of so many kinds of failures one schedule is shrunk; to shrink one may take a minute."""
FAILURES_MAX: Final = 200
"""After so many failures no further schedule is played."""

Play = Callable[[Schedule], object]


class PlayedChunk(Struct, frozen=True):
    """What some schedules came to."""

    schedules: int
    requests: int
    faults: int
    failures: dict[int, str]
    """By seed, the kind of failure."""
    met: dict[str, int] = {}  # msgspec creates a new dict for each instance
    """By what has come about (`RemoteCluster.met`), how often."""


def play_chunk(seeds: Sequence[int]) -> PlayedChunk:
    """Play the schedules of these seeds, whatever fails."""
    gc.disable()  # it would take a tenth of the time; what is left of a schedule is collected here
    requests, faults, failures, met = 0, 0, dict[int, str](), Counter[str]()
    for seed in seeds:
        schedule = schedule_of(seed)
        try:
            played = play(schedule)
        except Exception as error:  # whatever the core raises is a bug
            failures[seed] = kind_of(error)
        else:
            requests += played.requests
            faults += played.faults
            met.update(played.met)
    gc.collect()
    return PlayedChunk(len(seeds), requests, faults, failures, met)


class Soak:
    """The totals of a run, and its progress on one line."""

    def __init__(self, minutes: float, out: TextIO) -> None:
        self._began_s, self._until_s, self._out = time.monotonic(), time.monotonic() + 60 * minutes, out
        self.schedules = self.requests = self.faults = 0
        self.failures: dict[int, str] = {}
        self.met: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        """Whether no further schedule is to be played."""
        return time.monotonic() >= self._until_s or len(self.failures) >= FAILURES_MAX

    def add(self, chunk: PlayedChunk) -> None:
        """Count what a process has played."""
        self.schedules += chunk.schedules
        self.requests += chunk.requests
        self.faults += chunk.faults
        self.failures |= chunk.failures
        self.met.update(chunk.met)
        if self._out.isatty():
            left_s = max(0, round(self._until_s - time.monotonic()))
            self._out.write(f"\r{self.summary()}, {left_s // 60}:{left_s % 60:02} left ")
            self._out.flush()

    def summary(self) -> str:
        """The totals in one line."""
        per_h = self.schedules * 3600 / max(1e-9, time.monotonic() - self._began_s)
        return (
            f"{self.schedules:,} schedules with {self.requests:,} requests and {self.faults:,} faults, "
            f"{per_h:,.0f} schedules an hour, {counted(len(self.failures), 'failure')}"
        )


def soak(seed: int, minutes: float, processes: int, out: TextIO) -> int:
    """Play the schedules of this seed and the next ones until the time is over. Returns 1 if one failed."""
    made, chunks = Soak(minutes, out), _chunks(seed)
    with ProcessPoolExecutor(processes) as pool:
        running: set[Future[PlayedChunk]] = {pool.submit(play_chunk, next(chunks)) for _ in range(2 * processes)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                made.add(each.result())
            if not made.is_over:
                running |= {pool.submit(play_chunk, next(chunks)) for _ in done}
            else:
                running = {each for each in running if not each.cancel()}
    out.write(f"{chr(13) if out.isatty() else ''}{made.summary()}\n")
    out.write("".join(f"{times:9,} {what}\n" for what, times in sorted(made.met.items())))
    kinds = Counter(made.failures.values())
    for kind, times in kinds.most_common(KINDS_MAX):
        first = min(seed for seed, other in made.failures.items() if other == kind)
        out.write(f"\n{counted(times, 'schedule')} failed with {kind}\n")
        report(schedule_of(first), out)
    return 1 if kinds else 0


def _chunks(seed: int) -> Iterator[Sequence[int]]:
    for begin in count(seed, CHUNK):
        yield range(begin, begin + CHUNK)


def report(schedule: Schedule, out: TextIO, run_it: Play = play) -> None:
    """Shrink a schedule that fails, and print what is left, how it fails, and how to play it again."""
    size = counted(len(schedule.operations), "operation")
    out.write(f"seed {schedule.scene.seed} fails; leaving out what is not needed of its {size}\n")
    replay(shrink(schedule, run_it), out, run_it)


def replay(schedule: Schedule, out: TextIO, run_it: Play = play) -> int:
    """Print a schedule, play it, and print how it fails. Returns 1 if it does."""
    out.write(f"{schedule}\n")
    try:
        run_it(schedule)
    except Exception as error:  # whatever the core raises is a bug
        out.write(f"{''.join(traceback.format_tb(error.__traceback__)[-2:])}{type(error).__name__}: {error}\n")
        numbers = ",".join(map(str, schedule.numbers))
        out.write(f"reproduce with: python -m tests.dst.soak --schedule {schedule.scene.seed} --only {numbers}\n")
        return 1
    out.write("every invariant held\n")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Play schedules until the time is over, or one of them. Returns 1 if an invariant was broken, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.dst.soak", description="Play random schedules of requests, faults and changes."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument(
        "--minutes", type=float, default=1.0, help="start no schedule after so many minutes (default: 1)"
    )
    parser.add_argument("--processes", type=int, default=ceil(capacity().cores), help="default: one for each CPU core")
    parser.add_argument("--schedule", type=int, metavar="SEED", help="play one schedule, that of SEED, and end")
    parser.add_argument("--only", help="with --schedule: only the operations with these numbers, as 3,17,40")
    options = parser.parse_args(arguments)
    if options.only is not None and (options.schedule is None or not re.fullmatch(r"\d+(,\d+)*", options.only)):
        parser.error("--only needs --schedule SEED, and numbers such as 3,17,40")
    if options.schedule is None:
        return soak(options.seed, options.minutes, max(1, options.processes), sys.stderr)
    schedule = schedule_of(options.schedule)
    if options.only:
        schedule = schedule.only([int(number) for number in options.only.split(",")])
    return replay(schedule, sys.stderr)


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # simulated nodes are lost all the time
    sys.exit(main())
