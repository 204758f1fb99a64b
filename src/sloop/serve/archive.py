"""Compresses the closed segments of a log and deletes the oldest.

The server starts it as a process whenever it has closed a segment, because compressing within the server, even in a
thread, would take the interpreter lock and a core from requests. Files are replaced as a whole; a process that dies
leaves at most an unfinished file, which the next one removes.
"""

import contextlib
import gzip
import os
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from sloop.runlog.segments import PART, LogSegment, compressed_path, segment_of, segments_in
from sloop.serve.private import make_log_file

LEVEL: Final = 3
"""Of gzip: the records of a segment shrink to a tenth, at some 100 MB/s. Level 9 takes eight times as long for a
twentieth less."""
NICE: Final = 19


def archive(folder: Path, active: Path, bytes_max: int, age_s: float, now_s: float) -> None:
    """Compress the segments before the file `active`, then delete the oldest until all together have at most
    `bytes_max` bytes and none was written to more than `age_s` seconds ago (0: whatever its age)."""
    for part in folder.glob(f"*.gz{PART}"):
        part.unlink(missing_ok=True)
    for segment in _before(folder, active):
        _compress(segment.path)
    for path in expired(_before(folder, active), bytes_max - _size(active), age_s, now_s):
        path.unlink(missing_ok=True)


def _before(folder: Path, active: Path) -> list[LogSegment]:
    """The closed segments. Those after the active one have begun since this process was started."""
    last = segment_of(active)
    assert last is not None, active
    return [segment for segment in segments_in(folder) if segment[:2] < last[:2]]


def expired(closed: Iterable[LogSegment], bytes_max: int, age_s: float, now_s: float) -> list[Path]:
    """Which of these segments, the oldest first, must go so that the others have at most `bytes_max` bytes and none of
    them was written to more than `age_s` seconds ago. None is younger than those after it, even if the clock was set
    back between them."""
    rest = list(closed)
    sizes = [_size(segment.path) for segment in rest]
    written_s = list(accumulate((_written_s(segment.path) for segment in reversed(rest)), min))[::-1]
    total, gone = sum(sizes), []
    for segment, size, last_s in zip(rest, sizes, written_s, strict=True):
        is_old = age_s > 0 and now_s - last_s > age_s
        if total <= bytes_max and not is_old:
            break
        total -= size
        gone.append(segment.path)
    return gone


def _compress(path: Path) -> None:
    """Replace a file by a compressed one. If that is not possible, it stays as it is."""
    if path.suffix == ".gz":
        return
    compressed = compressed_path(path)
    part = path.with_name(f"{compressed.name}{PART}")
    try:
        make_log_file(part)
        with path.open("rb") as source, gzip.open(part, "wb", compresslevel=LEVEL) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        written = path.stat()
        os.utime(part, ns=(written.st_atime_ns, written.st_mtime_ns))
        part.replace(compressed)
        path.unlink()
    except OSError:  # no room, or the file has been deleted
        with contextlib.suppress(OSError):
            part.unlink()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def main(arguments: Sequence[str]) -> None:
    """Entry point of the process: the active segment, bytes, seconds."""
    active, bytes_max, age_s = arguments
    os.nice(NICE)
    archive(Path(active).parent, Path(active), int(bytes_max), float(age_s), time.time())


if __name__ == "__main__":
    main(sys.argv[1:])
