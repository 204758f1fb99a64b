"""Child processes of the server: how they are started and ended, and what each does first.

None outlives the server: on Linux the kernel kills them with it, elsewhere they exit when their socket closes.
"""

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from sloop.serve.stderr import pipe_of_child

ONE_THREAD: Final = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Limits NumPy's thread pools, which would compete with models for cores."""
SECRETS: Final = ("SLOOP_API_KEY",)
"""Variables that no child inherits: workers, planner and checks run models and systems, which may be anybody's code."""
PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
SPARE: Final = "sloop spare"
"""The name of a worker process that does not serve yet."""
M_TRIM_THRESHOLD: Final = -1
M_MMAP_THRESHOLD: Final = -3
LARGE_BYTES: Final = 2**20


def spawn(
    module: str,
    arguments: Sequence[object],
    fds: Sequence[int] = (),
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module ARGUMENTS` in a process group of its own. It inherits the file descriptors `fds`.

    What it prints goes to stderr unless `stdout` says otherwise, so that libraries cannot write into the server's own
    output; see `sloop.serve.stderr`. (`asyncio` would fork the whole server, and call gRPC's handlers of forks.)
    """
    output = pipe_of_child()
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, arguments)],
            stdin=stdin,
            stdout=stdout if stdout is not None else output or 2,
            stderr=output,
            env=without_secrets(os.environ) | ONE_THREAD,
            pass_fds=fds,
            start_new_session=True,
        )
    finally:
        if output is not None:
            os.close(output)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that may run code of users."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def kill(pid: int) -> None:
    """Kill a process that leads a process group, and all that it has started. Its end must still be awaited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def return_large_memory() -> None:
    """Let large buffers go back to the system when they are freed, in this process and with glibc.

    glibc otherwise takes the first large buffer that is freed as a sign that more will follow, and puts those of up to
    32 MiB among small objects, where what they leave is lost: 64 MiB after some hundred large messages.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            mallopt(M_TRIM_THRESHOLD, 8 * LARGE_BYTES)


def begin(parent: int, fds: Sequence[int]) -> None:
    """The first call of a child: it ends with the server, ignores signals meant for the server, shows what it prints at
    once, and does not pass the inherited file descriptors on to processes of its own."""
    die_with(parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    # Service managers signal every process of a group; the server stops its children itself after it has drained.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, False)


def set_name(name: str) -> None:
    """Set what `top` and `ps -o comm` show for this process: the first 15 bytes of `name`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the server dies, and exit if it has died already.

    On systems other than Linux the process exits when its socket closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)
