"""Opens what traces are kept in: plain files, .gz, .bz2, .zip and tar archives of any of these.

Promises text or bytes of bounded size, or an `InputError` that names the file and, in an archive, the member. Knows
nothing of what the text means.
"""

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Final, cast

from sloop.errors import InputError

BYTES_MAX: Final = 512 * 2**20
"""Decompressed; beyond it a file is refused rather than the machine's memory filled."""

MEMBERS_MAX: Final = 10_000

_TAR = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz")
_BROKEN: Final = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
    tarfile.TarError,
    ValueError,
    RuntimeError,
    NotImplementedError,
)


@dataclass(frozen=True, slots=True)
class Text:
    """Something readable and where it came from, for error messages."""

    text: str
    where: str


def read_text(path: Path, *, member: str = "") -> Text:
    """The text of a file, decompressed; in an archive that of `member`, or of the only file in it."""
    if not _is_archive(path):
        return _decoded(_plain_bytes(path), str(path))
    members = _members(path, prefix=member)
    if len(members) != 1:
        names = ", ".join(list(members)[:10])
        what = f"{len(members)} files to choose from: {names}" if members else f"no file called {member!r} in it"
        raise InputError(what, where=str(path), help="name one of its files as `member`")
    name, content = next(iter(members.items()))
    return _decoded(content, f"{path}!{name}")


def read_folder(path: Path, *, member: str = "") -> dict[str, Text]:
    """The files of a folder, or those of an archive whose names begin with `member`, by their last name."""
    if _is_archive(path):
        members = _members(path, prefix=member).items()
        return {name.rpartition("/")[2]: _decoded(content, f"{path}!{name}") for name, content in members}
    if not path.is_dir():
        raise InputError(
            "neither a folder nor an archive", where=str(path), help="name the folder that holds the files"
        )
    files = [child for child in sorted(path.iterdir())[:MEMBERS_MAX] if child.is_file()]
    return {child.name: _decoded(_plain_bytes(child), str(child)) for child in files}


def _is_archive(path: Path) -> bool:
    return path.name.lower().endswith((".zip", *_TAR))


def _plain_bytes(path: Path) -> bytes:
    with _explained(path), _opened(path) as file:
        return _bounded(file, BYTES_MAX, str(path))


def _opened(path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    if suffix == ".bz2":
        return bz2.open(path)
    if suffix == ".xz":
        return lzma.open(path)
    return path.open("rb")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of the file system and the decompressors become ours."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError("no such file", where=str(path), help="check the path and the folder it starts from") from None
    except _BROKEN as error:
        raise InputError(f"cannot be read: {error}", where=str(path), help="check the file and its rights") from None


def _bounded(file: IO[bytes], bytes_max: int, where: str) -> bytes:
    content = file.read(bytes_max + 1)
    if len(content) > bytes_max:
        raise InputError(f"more than {BYTES_MAX:,} bytes", where=where, help="cut it into smaller files")
    return content


def _members(path: Path, *, prefix: str) -> dict[str, bytes]:
    """The files of an archive whose names begin with `prefix`, hidden ones left out."""
    members: dict[str, bytes] = {}
    left = BYTES_MAX
    with _explained(path):
        walk = _zip_members(path) if path.name.lower().endswith(".zip") else _tar_members(path)
        for name, opened in islice(walk, MEMBERS_MAX):
            if name.startswith(prefix) and not _is_hidden(name):
                with opened() as file:
                    members[name] = _bounded(file, left, f"{path}!{name}")
                left -= len(members[name])
    return members


def _zip_members(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if not entry.is_dir():
                yield entry.filename, partial(archive.open, entry)


def _tar_members(path: Path) -> Iterator[tuple[str, Callable[[], IO[bytes]]]]:
    with tarfile.open(path) as archive:
        for entry in archive:
            if entry.isfile():
                yield entry.name, partial(_extracted, archive, entry)


def _extracted(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> IO[bytes]:
    file = archive.extractfile(entry)
    assert file is not None, f"{entry.name} is a regular file"
    return file


def _is_hidden(name: str) -> bool:
    return name.startswith("__MACOSX") or name.rpartition("/")[2].startswith(".")


def _decoded(content: bytes, where: str) -> Text:
    try:
        return Text(content.decode("utf-8-sig"), where)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError("not text", where=f"{where}:{line}", help="a trace is a UTF-8 text file") from None
