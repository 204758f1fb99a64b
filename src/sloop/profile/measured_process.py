"""Processes that measure a model: each gets one order, as a line of JSON, and answers with lines of JSON.

It loads its libraries, as a spare worker has before it gets a model, writes `READY` and waits for the order, so that
its parent can confine it to cores first. `RefusedModel` ends the answers of one that cannot run the model. Anything the
model prints goes to stderr, of which the parent shows the last line if the process dies.
"""

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import IO, Any, Final, TypeVar

import msgspec
from msgspec import Struct

from sloop.cuda import GpuPlace
from sloop.errors import InputError, MachineError, SloopError
from sloop.profile.examine import RefusedModel
from sloop.profile.model import onnx_runtime
from sloop.profile.threads import before_cores_are_known
from sloop.user_code import failure_of

READY: Final = b"ready"
SILENCE_S: Final = 600.0
"""A measured process that sends nothing for this long is killed."""
LAST_BYTES: Final = 4096
"""Bytes at the end of a dead process's stderr that are searched for the reason."""
PIPE_BYTES: Final = 1 << 16
ENDED_S: Final = 0.2
"""How soon the end of a process is noticed if its pipe stays open."""

Order = TypeVar("Order", bound=Struct)


class MeasuredProcess:
    """The parent's side of a process that measures `model` on so many `cores`."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", errors: IO[bytes], model: str, cores: float, silence_s: float
    ) -> None:
        self.pid = process.pid
        self.model, self.cores = model, cores
        self._process, self._errors, self._silence_s = process, errors, silence_s
        self._read = b""

    def order(self, order: Struct) -> None:
        """Tell it what to measure."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died; the missing answer reports it
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")

    def answers(self, kinds: Any) -> Iterator[Any]:  # noqa: ANN401  # a union of types
        """What it says, of these types. InputError if it has refused the model, ConnectionError at its end."""
        decoder = msgspec.json.Decoder(kinds | RefusedModel)
        while line := self.line():
            message = decoder.decode(line)
            if isinstance(message, RefusedModel):
                raise InputError(message.what, where=message.where or self.model, help=message.help)
            yield message
        raise ConnectionError("it ended")

    def line(self) -> bytes:
        """The next line of its stdout, or empty at the end, even if other processes that it started keep the pipe open.
        Kills a process that sends none for too long, and raises TimeoutError."""
        assert self._process.stdout is not None
        fd, until_s = self._process.stdout.fileno(), monotonic() + self._silence_s
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while b"\n" not in self._read:
            has_ended = self._process.poll() is not None
            part = os.read(fd, PIPE_BYTES) if (ready := poll.poll(0 if has_ended else 1e3 * ENDED_S)) else b""
            self._read += part
            if not part and (ready or has_ended):
                return b""
            if not part and monotonic() > until_s:
                self._process.kill()
                raise TimeoutError
        line, _, self._read = self._read.partition(b"\n")
        return line

    def died(self, when: str = "") -> MachineError:
        """What to say of its end."""
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        reason = f": {lines[-1][:300]}" if lines else ""
        help_text = "it may have run out of memory; measure smaller batches"
        when = when or f"on {self.cores:g} cores"
        return MachineError(f"the measured process ended {when} (exit status {code}){reason}", help=help_text)


@contextlib.contextmanager
def measured_process(
    module: str,
    model: str,
    cores: float,
    *,
    arguments: Sequence[str] = (),
    fds: Sequence[int] = (),
    silence_s: float = SILENCE_S,
    on: GpuPlace | None = None,
) -> Iterator[MeasuredProcess]:
    """A process of this module, ready for its order, with these file descriptors and a GPU if there is one. It is
    killed with the context. MachineError if it dies, or sends nothing for `silence_s`."""
    command, pipe = [sys.executable, "-P", "-m", module, *arguments], subprocess.PIPE
    with (
        tempfile.TemporaryFile() as errors,  # a pipe that nobody reads would block a model that prints
        subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=errors, env=environment(on), pass_fds=fds
        ) as process,
    ):
        made = MeasuredProcess(process, errors, model, cores, silence_s)
        try:
            if made.line() != READY:
                raise made.died("before it began")
            yield made
        except TimeoutError as error:
            what = f"{model}: loading it, or one pass, has taken more than {silence_s:g} s"
            raise MachineError(f"{what} on {cores:g} cores", help="measure smaller batches or inputs") from error
        except OSError as error:  # sockets and pipes close when the process dies
            raise made.died() from error
        finally:
            process.kill()


def environment(on: GpuPlace | None = None) -> dict[str, str]:
    """The environment variables of a measured process, with those for its GPU."""
    return {**os.environ, **before_cores_are_known(os.environ), **(on.variables if on else {})}


def answer_order(kind: type[Order], answers: Callable[[Order], Iterator[Struct]]) -> None:
    """The side of the process: wait for an order, and write what `answers` makes of it."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def write(line: bytes) -> None:
        out.write(line)
        out.flush()

    with contextlib.suppress(Exception):  # a model that needs it says what is wrong with it
        onnx_runtime()
    write(READY + b"\n")
    line = sys.stdin.buffer.readline()
    if not line:
        return
    try:
        for message in answers(msgspec.json.decode(line, type=kind)):
            write(msgspec.json.encode(message) + b"\n")
    except SloopError as error:
        refused = RefusedModel.of(error) if isinstance(error, InputError) else RefusedModel(error.what, "", error.help)
        write(msgspec.json.encode(refused) + b"\n")
    except Exception as error:
        failure = failure_of(error)
        sys.stderr.write(f"{failure.trace}\n{failure.detail}\n")  # the parent shows the last line
        sys.exit(1)
