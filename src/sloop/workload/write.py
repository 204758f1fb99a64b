"""Traces as files that `read` reads back: counts per second, or every arrival in nanoseconds."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from sloop.errors import MachineError
from sloop.workload.trace import BLOCK_ARRIVALS, Trace


def write_counts(trace: Trace, path: Path) -> None:
    """One line a second: how many requests arrive in it. Read back with `format: counts`."""
    _write(path, (f"{count}\n" for count in trace.counts_per_s()))


def write_times(trace: Trace, path: Path) -> None:
    """One line an arrival: its offset in ns. Read back, exactly, with `format: timestamps, unit: ns`."""
    _write(path, (f"{at_ns}\n" for at_ns in trace.times_ns()))


def _write(path: Path, lines: Iterator[str]) -> None:
    try:
        with path.open("w", encoding="ascii") as file:
            while chunk := "".join(islice(lines, BLOCK_ARRIVALS)):
                file.write(chunk)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}", help="choose another place for the file") from None
