"""Who may read what a server keeps: its user alone. A group, such as that of a program that ships logs, may be allowed
to read the logs.

The state folder has models, names of clients and, in the event log, what they have asked for. So it is closed whatever
the umask is. Whether a group may read the event log is decided once, when a server starts, by the rights of the folder:
new files in it get the same, so the processes that write them need not know the group.
"""

import contextlib
import grp
import logging
import os
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Final

from sloop.errors import InputError
from sloop.text import counted

NOBODY: Final = -1
"""No group (as in `chown`)."""
ANY_GROUP: Final = 2**32 - 1
"""The number, and those above, that no group can have."""
FOLDER: Final = 0o700
FILE: Final = 0o600
GROUP_FOLDER: Final = 0o750
GROUP_FILE: Final = 0o640

_log: Final = logging.getLogger("sloop.server")


def group_of(name: str) -> int:
    """The number of a group; `NOBODY` for an empty name. InputError if this process may not give it a file."""
    if not name:
        return NOBODY
    try:
        group = int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid
        if group >= ANY_GROUP:
            raise KeyError(name)
    except KeyError:
        raise InputError("there is no such group", where=f"--log-group {name}", help="see `getent group`") from None
    if os.geteuid() != 0 and group not in {os.getegid(), *os.getgroups()}:
        what = "the server's user is not in this group, so it cannot give it a file"
        fix = "add the user to the group (in systemd SupplementaryGroups=, in Kubernetes supplementalGroups)"
        raise InputError(what, where=f"--log-group {name}", help=fix)
    return group


def make_private(folder: Path, logs: str, group: int = NOBODY) -> None:
    """Make a state folder that only its owner may enter, and `group`, which can read the folder `logs` in it. What
    others could read until now is closed to them; that is logged once. OSError if the folder cannot be made."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(FOLDER)
    found = _close([folder / logs], group)
    with contextlib.suppress(FileNotFoundError):
        found += _close([file for file in (folder / logs).iterdir() if file.is_file()], group)
    if _is_for_more(folder):
        _warn_once("%s is not only a state folder, so others may still enter it: name one with --state", folder)
    else:
        if group != NOBODY:  # it may enter, but the rest is not for it
            found += _close([each for each in folder.iterdir() if each.name != logs], NOBODY)
        found += _close([folder.resolve()], group)  # it may be a link
    if found:
        what = "%s: others than its owner could read %s there; now they cannot (--log-group lets a group read logs)"
        _log.warning(what, folder, counted(found, "file or folder", "files or folders"))


def _is_for_more(folder: Path) -> bool:
    """Whether a folder is not only a state folder: one such as /tmp, the working folder, or one above it."""
    place = folder.resolve()
    return bool(folder.stat().st_mode & stat.S_ISVTX) or Path.cwd().is_relative_to(place)


def make_log_folder(folder: Path) -> None:
    """Make the folder of the event log, which whoever may read the state folder may read."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(FOLDER, parents=True)
        _share(folder, GROUP_FOLDER)


def make_log_file(file: Path) -> None:
    """Make a file, unless it is there, which whoever may read its folder may read."""
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE))
    _share(file, GROUP_FILE)


def _share(made: Path, mode: int) -> None:
    """Give what was just made to the group of its folder, if that group alone may read the folder."""
    around = made.parent.stat()
    if around.st_mode & stat.S_IRGRP and not around.st_mode & stat.S_IROTH:
        with contextlib.suppress(OSError):  # then the group cannot read it
            os.chown(made, -1, around.st_gid)
            made.chmod(mode)


def open_log(path: str, flags: int, group: int) -> int:
    """A descriptor of a log that may be anywhere. If there is none, it is made; the rights of one that was there stay:
    `logrotate` may have made it."""
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE)
    except FileExistsError:
        return os.open(path, flags | os.O_CREAT, FILE)  # a link may lead to a file that is not there
    if group != NOBODY:
        os.fchown(fd, -1, group)
        os.fchmod(fd, GROUP_FILE)
    return fd


def close_log(path: Path, group: int) -> None:
    """Close a log that was there before this server to others; that is logged."""
    if path.is_file() and _close([path.resolve()], group):
        _log.warning("%s: others than its owner could read it; now they cannot (--log-group)", path)


def _close(paths: Iterable[Path], group: int) -> int:
    """Take the rights of others away, and give the group its own. Returns how many others could read."""
    count = 0
    for path in paths:
        try:
            known = path.lstat()
            if not (stat.S_ISDIR(known.st_mode) or stat.S_ISREG(known.st_mode)):
                continue
            is_folder, is_shared = stat.S_ISDIR(known.st_mode), group != NOBODY
            mode = (GROUP_FOLDER if is_shared else FOLDER) if is_folder else GROUP_FILE if is_shared else FILE
            if stat.S_IMODE(known.st_mode) == mode and (not is_shared or known.st_gid == group):
                continue
            if is_shared:
                os.chown(path, -1, group)
            path.chmod(mode)
            count += bool(known.st_mode & 0o077 & ~mode)
        except FileNotFoundError:
            continue
        except OSError as error:
            what = "%s: others than the server's user may be able to read it, which cannot be changed: %s"
            _warn_once(what, path, error.strerror)
    return count


@cache
def _warn_once(what: str, *values: object) -> None:
    """A server looks at its folder before it measures models, and again when it locks it."""
    _log.warning(what, *values)
