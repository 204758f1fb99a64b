"""Child processes of the server: how they are started and ended, and what each does first.

None outlives the server: on Linux the kernel kills them with it, elsewhere they exit when their socket closes.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Limits NumPy's thread pools, which would compete with models for cores."""
PR_SET_PDEATHSIG: Final = 1


def spawn(
    module: str,
    arguments: Sequence[object],
    fds: Sequence[int] = (),
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = 2,
) -> subprocess.Popen[bytes]:
    """Start `python -m module ARGUMENTS` in a process group of its own. It inherits the file descriptors `fds`.

    What it prints goes to stderr unless `stdout` says otherwise, so that libraries cannot write into the server's own
    output. (`asyncio` would fork the whole server, and call gRPC's handlers of forks.)
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=stdin,
        stdout=stdout,
        env=os.environ | ONE_THREAD,
        pass_fds=fds,
        start_new_session=True,
    )


def kill(pid: int) -> None:
    """Kill a process that leads a process group, and all that it has started. Its end must still be awaited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def begin(parent: int, fds: Sequence[int]) -> None:
    """The first call of a child: it ends with the server, ignores signals meant for the server, and does not pass the
    inherited file descriptors on to processes of its own."""
    die_with(parent)
    # Service managers signal every process of a group; the server stops its children itself after it has drained.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, False)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the server dies, and exit if it has died already.

    On systems other than Linux the process exits when its socket closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
