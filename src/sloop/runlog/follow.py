"""Reads the log of a running server as it is written, segment after segment. Nothing here waits."""

import os
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from sloop.errors import InputError
from sloop.runlog import Header, Record
from sloop.runlog.segments import is_there, opened, segment_path, segments_in
from sloop.units import NS_PER_S

BEHIND_NS: Final = 2 * NS_PER_S
"""Records of a server are in its log at most this long after they happened, unless its disk is slow."""
LINES_MAX: Final = 20_000
"""The most records of one call, so that a reader that has fallen behind can do other work in between."""


class LogFollower:
    """Follows one run of a server in the folder of its log, from segment `number` on.

    A segment that was deleted before it was read is passed over. Records are read as soon as their line is whole, which
    is at most about a second after they happened.
    """

    def __init__(self, folder: Path, run: str, number: int = 1) -> None:
        self._folder, self._run = folder, run
        self.number = number
        """Of the segment that is read, or will be."""
        self.header: Header | None = None
        """Of the segment that is read; None until its beginning was read."""
        self._file: BinaryIO | None = None
        self._rest = b""
        """The beginning of a line whose end is not written yet."""
        self._has_next = False
        self._decode = msgspec.json.Decoder(tuple[int, Record]).decode

    def read(self, most: int = LINES_MAX) -> list[tuple[int, Record]]:
        """The records that were written since the last call, at most so many, all of the segment with `header`. Empty
        if there is nothing new: then the log has ended if its server has. Raises `InputError` for a damaged line."""
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        records: list[tuple[int, Record]] = []
        while len(records) < most and (line := self._line(self._file)):
            try:
                records.append(self._decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                where = str(segment_path(self._folder, self._run, self.number))
                raise InputError(f"not a record of a log: {error}", where=where, help="the file was changed") from error
        if records:
            return records
        if self._is_replaced(self._file):
            self.close()
            return self.read(most)
        # The next segment may be there a moment before the last records of this one.
        if self._has_next:
            self.close()
            self.number += 1
            return self.read(most)
        self._has_next = is_there(segment_path(self._folder, self._run, self.number + 1))
        return self.read(most) if self._has_next else []

    def _is_replaced(self, file: BinaryIO) -> bool:
        """Whether the segment has another file now: a server whose disk is full deletes a segment that it could not
        begin, and begins it again later."""
        try:
            there, here = segment_path(self._folder, self._run, self.number).stat(), os.fstat(file.fileno())
        except OSError:  # it was compressed, or deleted
            return False
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            self._file.close()
        self._file, self._rest, self._has_next, self.header = None, b"", False, None

    def _open(self) -> bool:
        """Open the segment, or the next that is there. False if none is, or its beginning is not written yet."""
        path = segment_path(self._folder, self._run, self.number)
        if not is_there(path):
            later = [segment.number for segment in segments_in(self._folder) if segment.run == self._run]
            if not (later := [number for number in later if number > self.number]):
                return False
            self.number = later[0]
            path = segment_path(self._folder, self._run, self.number)
        try:
            file = opened(path)
        except InputError:  # it was deleted a moment ago
            return False
        try:
            line = file.readline()
            header = msgspec.json.decode(line, type=Header) if line.endswith(b"\n") else None
            if header is not None and (not header.has_snapshot or file.readline().endswith(b"\n")):
                self._file, self.header = file, header
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"not a log's header: {error}", where=str(path), help="the file was changed") from error
        finally:
            if self._file is None:
                file.close()
        return self._file is not None

    def _line(self, file: BinaryIO) -> bytes:
        """The next whole line; empty if there is none yet."""
        line = file.readline()
        if not line.endswith(b"\n"):
            self._rest += line
            return b""
        whole, self._rest = self._rest + line, b""
        return whole
