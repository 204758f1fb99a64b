"""Profiles as files: JSON with a version, written whole or not at all.

Promises that what is loaded equals what was saved, and that a file which is no profile is refused with the field that
is wrong. Knows nothing of how profiles come about.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from sloop.errors import InputError, MachineError
from sloop.profile.profile import Profile

VERSION = 1
SUFFIX = ".profile.json"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    profile: Profile


LIST: Final = re.compile(rb"\[\n[\d\s.,e+-]+\]")
"""A list of numbers, spread over lines, which no string can be."""


def in_one_line(found: re.Match[bytes]) -> bytes:
    """A list without the line breaks that JSON's pretty form puts between numbers."""
    return b" ".join(found[0].split())


class _Version(msgspec.Struct, frozen=True):
    version: int


def path_beside(model_path: Path) -> Path:
    """Where a model's profile is kept unless told otherwise: beside it."""
    return model_path.with_name(model_path.name + SUFFIX)


def digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_of(profile: Profile, model_path: Path) -> bool:
    """Whether the profile may be that of this model file: False where it was measured on other contents."""
    return not profile.model_digest or profile.model_digest == digest(model_path)


def save_profile(profile: Profile, path: Path) -> None:
    """Write the profile. MachineError where the file cannot be written."""
    raw = LIST.sub(in_one_line, msgspec.json.format(msgspec.json.encode(_File(VERSION, profile)), indent=1))
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(raw + b"\n")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        help_text = "give a path in a folder you can write to"
        raise MachineError(f"cannot write the profile {str(path)!r}: {error.strerror}", help=help_text) from error


def load_profile(path: Path) -> Profile:
    """Read a profile. InputError where there is none, or it is not a profile of this version."""
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        raise InputError("cannot read the profile", where=str(path), help="check the path") from error
    again = "make it anew with `sloop profile MODEL`"
    try:
        version = msgspec.json.decode(raw, type=_Version).version
        if version == VERSION:
            return msgspec.json.decode(raw, type=_File).profile
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise InputError(f"not a profile: {error}", where=str(path), help=again) from error
    raise InputError(f"a profile of version {version}; this sloop reads {VERSION}", where=str(path), help=again)
