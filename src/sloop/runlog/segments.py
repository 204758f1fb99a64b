"""The files of a server's log: segments of one run after the other, of which closed ones are compressed.

A segment is `events-RUN-NUMBER.jsonl`, `.jsonl.gz` when it is compressed. RUN is the date of the run's start, or if
the clock was set back since the run before, a date just after that one's: names sort by age, whatever the clock says.
"""

import gzip
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, cast

from sloop.errors import InputError

FOLDER: Final = "log"
"""The folder of the segments in a server's state folder."""
NAME: Final = re.compile(r"events-(?P<run>[0-9TZ]+)-(?P<number>\d{6,})\.jsonl(?P<gz>\.gz)?")
PART: Final = ".part"
"""The end of the name of a file that is not finished."""
ROOM_BYTES_MIN: Final = 2**20
"""So much must be free for a log to go on."""


class LogSegment(NamedTuple):
    """One file of a log. Sorted by age."""

    run: str
    number: int
    path: Path


def segment_path(folder: Path, run: str, number: int) -> Path:
    """The file of a segment that is not compressed."""
    return folder / f"events-{run}-{number:06d}.jsonl"


def next_run(folder: Path, now: datetime) -> str:
    """The name of a run that begins now: it sorts after those of all runs that have segments in the folder."""
    last = max((segment.run for segment in segments_in(folder)), default="")
    if (name := _name_of(now)) > last:
        return name
    try:
        return _name_of(datetime.strptime(last, "%Y%m%dT%H%M%S%fZ").replace(tzinfo=UTC) + timedelta(milliseconds=1))
    except (ValueError, OverflowError):  # somebody else's name
        return f"{last}0"


def _name_of(date: datetime) -> str:
    return f"{date:%Y%m%dT%H%M%S%f}"[:-3] + "Z"


def has_room(folder: Path) -> bool:
    """Whether a log in this folder can go on."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return False
    return there.f_bavail * there.f_frsize >= ROOM_BYTES_MIN


def segments_in(folder: Path) -> list[LogSegment]:
    """All segments in a folder, the oldest first. One that is just being compressed is there once."""
    found: dict[tuple[str, int], LogSegment] = {}
    for name in sorted(os.listdir(folder)):
        match = NAME.fullmatch(name)
        if match:
            key = match["run"], int(match["number"])
            found.setdefault(key, LogSegment(*key, folder / name))  # sorted: the plain file comes first
    return sorted(found.values())


def segment_of(path: Path) -> LogSegment | None:
    """The segment in a file; None for a file with another name."""
    match = NAME.fullmatch(path.name)
    return LogSegment(match["run"], int(match["number"]), path) if match else None


def compressed_path(path: Path) -> Path:
    """The file of a segment when it is compressed."""
    return path.with_name(f"{path.name}.gz")


def is_there(path: Path) -> bool:
    """Whether a segment exists, compressed or not."""
    return path.exists() or compressed_path(path).exists()


def opened(path: Path) -> BinaryIO:
    """A file of a log, opened for reading, whether it is compressed or not. InputError if it cannot be read.

    A server may compress the file between a look into the folder and now."""
    if path.suffix != ".gz" and not path.exists() and is_there(path):
        path = compressed_path(path)
    try:
        return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", where=str(path), help="name an event log") from error
