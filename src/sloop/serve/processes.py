"""Child processes of the server: how they are started and ended, and what each does first.

None outlives the server: the kernel kills them with it.
"""

import asyncio
import contextlib
import ctypes
import io
import os
import platform
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import BinaryIO, Final

from sloop.profile.threads import before_cores_are_known
from sloop.serve.stderr import pipe_of_child

SECRETS: Final = ("SLOOP_API_KEY",)
"""Variables that no child inherits: workers, planner and checks run models and systems, which may be anybody's code."""
LIBC: Final = ctypes.CDLL(None)
_prctl: Final = LIBC.prctl  # looked up here, because a forked child must not take the loader's lock
PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
SPARE: Final = "sloop spare"
"""The name of a worker process that does not serve yet."""
NICE: Final = 19
SLICE_NS: Final = 100_000
SCHED_SETATTR: Final = {"x86_64": 314, "aarch64": 274}
"""The number of the system call."""
ASIDE_NICE: Final = 10
"""A thread of this niceness gets a tenth of a core that another thread of its process wants for itself. With the lowest
priority it would get next to nothing, and what a busy worker loads would never be there."""
AUTOGROUP_TRIES: Final = 40
AUTOGROUP_RETRY_S: Final = 0.05
"""Linux refuses a change of an autogroup within 0.1 s of another one on the machine (sched(7))."""


def spawn(
    module: str,
    arguments: Sequence[object],
    fds: Sequence[int] = (),
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module ARGUMENTS` in a process group of its own. It inherits the file descriptors `fds`, and all
    variables but secrets, with those of `environment` in addition.

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
            env=without_secrets(os.environ) | before_cores_are_known(os.environ) | dict(environment or {}),
            pass_fds=fds,
            start_new_session=True,
        )
    finally:
        if output is not None:
            os.close(output)


async def said_by(module: str, question: bytes, timeout_s: float) -> tuple[bytes, int | None]:
    """What `python -m module PID` writes to stdout when it gets a question, and its exit status. TimeoutError if it
    takes longer. The process ends with this call, also if that is cancelled."""
    process = spawn(module, [os.getpid()], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    talk = asyncio.get_running_loop().run_in_executor(None, process.communicate, question)
    try:
        async with asyncio.timeout(timeout_s):
            said, _ = await asyncio.shield(talk)
    finally:
        if process.poll() is None:
            kill(process.pid)
        await asyncio.wait((talk,))
    return said, process.returncode


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process that may run code of users."""
    return {name: value for name, value in environment.items() if name not in SECRETS}


def kill(pid: int) -> None:
    """Kill a process that leads a process group, and all that it has started. Its end must still be awaited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def begin(parent: int, fds: Sequence[int]) -> None:
    """The first call of a child: it ends with the server, ignores signals meant for the server, shows what it prints at
    once, and does not pass the inherited file descriptors on to processes of its own."""
    die_with(parent)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    _ignore_signals()
    for fd in fds:
        if fd >= 0:
            os.set_inheritable(fd, False)


def own_stdout() -> BinaryIO:
    """The standard output for what this process answers; what libraries, models and systems print goes to stderr."""
    stdout = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return stdout


def fork() -> int:
    """Fork this process. Returns the child's id, and 0 in the child, which calls `begin_forked` and never returns.
    Raises `OSError`."""
    with warnings.catch_warnings():  # the child uses no lock that another thread may hold
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def begin_forked(parent: int, kept: int) -> None:
    """The first call of a forked child: it ends with its parent, ignores signals meant for the server, and keeps one
    file descriptor only: what its parent has locked or listens to is not its own."""
    signal.set_wakeup_fd(-1)  # it is the parent's
    _close_all_but(kept)
    die_with(parent)
    _ignore_signals()


def _ignore_signals() -> None:
    """Service managers signal every process of a group; the server stops its children itself after it has drained, and
    tells them when files are to be read again."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def set_name(name: str) -> None:
    """Set what `top` and `ps -o comm` show for this process: the first 15 bytes of `name`."""
    _prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _close_all_but(kept: int) -> None:
    """Close all file descriptors of this process but one; those of standard input, output and error lead to
    /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd > 2 and fd != kept:  # the standard ones
            with contextlib.suppress(OSError):  # of the list itself
                os.close(fd)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when the server dies, and exit if it has died already. The kernel
    takes the server for dead as soon as the *thread* that started this process has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)


# Priority


def set_priority(pid: int, *, humble: bool) -> bool:
    """Give a process the lowest priority, or the usual one. Returns whether the operating system has allowed it; Linux
    allows the usual one to root only.

    SCHED_IDLE gives way to other processes at once, but only to those of its own scheduling group. Each session is a
    group (`autogroup`), in which a lone process of the lowest priority weighs as much as a server: so the group gets
    the lowest priority too.
    """
    with contextlib.suppress(OSError):
        _autogroup(pid).write_text(str(NICE if humble else 0))
    with contextlib.suppress(OSError):
        policy = os.SCHED_IDLE if humble else os.SCHED_OTHER
        os.sched_setscheduler(pid, policy, os.sched_param(0))
        return True
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, NICE if humble else 0)
        return True
    return False


def be_nice(nice: int) -> None:
    """Lower the priority of this process, which leads a session, and that of the session, between which Linux divides
    CPU time first."""
    os.nice(nice)
    with contextlib.suppress(OSError):
        _autogroup(0).write_text(str(nice))


def stay_aside() -> None:
    """Let this process disturb others as little as possible while it computes at the lowest priority.

    It stays on one CPU, because wherever it moves, processes that wake there wait for up to a tick (4 ms). And it asks
    for slices of 0.1 ms, the shortest: Linux (6.12 and newer) lets a process finish its slice, of some 3 ms, before
    another one that has woken may run.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    call = SCHED_SETATTR.get(platform.machine())
    if call is not None:
        attributes = struct.pack("<IIQiIQQQ", 48, os.sched_getscheduler(0), 0, 0, 0, SLICE_NS, 0, 0)
        LIBC.syscall(call, 0, attributes, 0)


def run_aside(work: Callable[[], object]) -> None:
    """Do `work` in a thread that gives way to the others of this process, and wait for it; raises what it raises.
    Threads that it starts keep the low priority."""

    def work_aside() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ASIDE_NICE)
        work()

    _in_thread(work_aside)


def _in_thread(work: Callable[[], object]) -> None:
    """Do `work` in a thread, and wait for it; raises what it raises."""
    failures: list[BaseException] = []

    def note_failure() -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread that waits
            failures.append(error)

    thread = threading.Thread(target=note_failure, name="aside")
    thread.start()
    thread.join()
    for failure in failures:
        raise failure


def _autogroup(pid: int) -> Path:
    return Path(f"/proc/{pid or 'self'}/autogroup")


def prepare(module: str, *, humble: bool) -> None:
    """Import a module and call its `prepare`.

    If `humble`, a thread does it at the lowest priority and then ends, because Linux lets root alone raise a priority
    again. Only the session's autogroup has to be raised, which everybody may.
    """
    if not humble:
        import_module(module).prepare()
        return

    def work() -> None:
        set_priority(0, humble=True)
        stay_aside()
        import_module(module).prepare()

    try:
        _in_thread(work)
    finally:
        for _ in range(AUTOGROUP_TRIES):
            try:
                _autogroup(0).write_text("0")
                break
            except BlockingIOError:
                time.sleep(AUTOGROUP_RETRY_S)
            except OSError:
                break  # there are no autogroups


def main(arguments: Sequence[str]) -> None:
    """Entry point of a spare worker: its module, whether to prepare at the lowest priority, the process id of the
    parent, and the arguments of the module's `main`."""
    module, humble, parent, *others = arguments
    begin(int(parent), ())
    set_name(SPARE)
    prepare(module, humble=bool(int(humble)))
    import_module(module).main(others, is_spare=True)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(0)  # as a worker
