"""The control socket of a server: the orders of `sloop deploy`, how a server receives and how a client sends them.

The socket is a file in the server's state folder that only the server's own user may open (0600). It is never a network
port: a model or a system may be a Python file, so whoever may deploy may run code as the server's user.

One order per connection. Client and server exchange lines of JSON: the client sends an `Order`, the server answers with
any number of texts, which say what happens now, and one `Done` or `Failed`.
"""

import asyncio
import contextlib
import logging
import os
import socket
from asyncio import StreamReader
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from sloop.errors import InputError, MachineError, SloopError
from sloop.events import Promoted, Removed
from sloop.vocabulary import Canary

CONTROL: Final = "control"
"""The name of the socket in the state folder."""
LINE_BYTES_MAX: Final = 1 << 20
ORDERS_MAX: Final = 64
"""Connections that wait to be accepted."""

_log: Final = logging.getLogger("sloop.control")


class Deploy(Struct, frozen=True, tag="deploy"):
    """Start the application in `file`, or a new version of it beside the one that serves."""

    file: str
    """Absolute path."""
    version: str = ""
    """The name of the version; empty for the next number."""
    canary: Canary | None = None
    application: str = ""
    """The name that the application in the file must have; empty for any."""


class ChangeSystem(Struct, frozen=True, tag="system"):
    """Let another system decide for an application: for all its versions that start or serve, and for those that are
    deployed later."""

    application: str
    system: str
    """Its name, or the absolute path of its file."""
    parameters: dict[str, Any] = {}  # msgspec copies the empty dict for each instance


class ListVersions(Struct, frozen=True, tag="list"):
    """List all versions of all applications."""


Order = Deploy | Promoted | Removed | ChangeSystem | ListVersions
"""`Promoted` and `Removed` are the core's own events. An empty version in `Promoted` means the canary."""


class Comparison(Struct, frozen=True):
    """How a version does while it is compared with another: a canary, or the version that serves the others."""

    requests: int
    """Requests that have ended since the comparison began."""
    attainment: float | None
    """None before the first has ended."""
    missing: int
    """How many more must end until the canary can be judged."""


class VersionStatus(Struct, frozen=True, omit_defaults=True):
    """A version of an application: its state in its rollout, and the fraction of the requests that it gets."""

    application: str
    version: str
    state: str
    share: float
    why: str = ""
    model: str = ""
    """Whether it answers requests now: `ready`, `resting`, `starting`, `waiting` (for cores). Empty if it has ended."""
    system: str = ""
    """The system that decides for it, with the parameters that were declared. Empty if it has ended."""
    compared: Comparison | None = None


class Done(Struct, frozen=True, tag="done"):
    """The order was carried out, or was given up for a reason that is no mistake of the user (`is_good` False)."""

    versions: tuple[VersionStatus, ...]
    is_good: bool = True
    ended: tuple[VersionStatus, ...] = ()
    """For `ListVersions`: the version of each application that ended last."""


class Failed(Struct, frozen=True, tag="failed"):
    """The order was refused, and everything serves as before; or a check that it needs has failed: the fields of a
    `SloopError`."""

    what: str
    help: str


Tell = Callable[[str], None]
"""Reports progress."""
CarryOut = Callable[[Order, Tell], Coroutine[None, None, Done]]
"""Carries out an order. Raises `SloopError` to refuse it."""


class ControlSocket:
    """The server's end: passes each order to `handle`. Orders of several clients run at the same time.

    If the client disconnects, `handle` is cancelled.
    """

    def __init__(self, handle: CarryOut) -> None:
        self._handle = handle
        self._path: Path | None = None
        self._listener: socket.socket | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._encode = msgspec.json.Encoder().encode
        self._decode = msgspec.json.Decoder(Order).decode

    def start(self, folder: Path) -> None:
        """Listen in `folder`, which this server has locked. Raises `MachineError` if that is impossible."""
        self._path = path = folder / CONTROL
        try:
            self._listener = _listening(path)
        except OSError as error:
            what = f"{path}: the control socket cannot be opened: {error.strerror or error}"
            raise MachineError(what, help="name another folder with --state") from error
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    async def close(self) -> None:
        """Stop listening, and drop all orders."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for work in self._open:
            work.cancel()
        if self._open:
            await asyncio.wait(self._open)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client has left
            sock, _ = listener.accept()
            sock.setblocking(False)
            work = asyncio.get_running_loop().create_task(self._serve(sock))
            self._open.add(work)
            work.add_done_callback(partial(self._leave, sock))

    def _leave(self, sock: socket.socket, work: asyncio.Task[None]) -> None:
        self._open.discard(work)
        sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=LINE_BYTES_MAX)

        def send(reply: str | Done | Failed) -> None:
            if not writer.is_closing():
                writer.write(self._encode(reply) + b"\n")

        try:
            order = self._decode(await reader.readline())
            with contextlib.suppress(asyncio.CancelledError):
                send(await self._answer(order, reader, send))
        except SloopError as error:
            send(Failed(str(error.args[0]), error.help))
        except (msgspec.DecodeError, ValueError) as error:
            send(Failed(f"the order cannot be read: {error}", "use the `sloop deploy` of the server's own version"))
        except Exception as error:
            _log.exception("an order failed")
            send(Failed(f"the server failed on this order: {error!r}", "see its messages, and report it"))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _answer(self, order: Order, reader: StreamReader, tell: Tell) -> Done:
        """What `handle` returns. Cancels it if the client leaves."""
        work = asyncio.ensure_future(self._handle(order, tell))
        left = asyncio.ensure_future(reader.read())
        try:
            await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            work.cancel()
            await asyncio.wait((work, left))
        return work.result()


def _listening(path: Path) -> socket.socket:
    """A socket that listens at `path`, which only this user may open."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()  # left by a server that was killed; the folder's lock is ours
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        with _short(path) as name:
            made.bind(name)
    finally:
        os.umask(before)
    made.listen(ORDERS_MAX)
    made.setblocking(False)
    return made


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A short name of a socket's path: the operating system allows a hundred characters or so."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        link = Path(f"/proc/self/fd/{folder}")
        yield str(link / path.name) if link.exists() else str(path)
    finally:
        os.close(folder)


# The client's end


def find_server(folder: Path | None) -> Path:
    """The control socket of the server with this state folder; without a folder, of the only server in `.sloop`.

    InputError if there is none, or more than one.
    """
    if folder is not None:
        path = folder / CONTROL
        if not is_served(path):
            what = "no server runs with this state folder"
            raise InputError(what, where=str(folder), help="start one with `sloop serve`, or name its --state folder")
        return path
    found = [path for path in sorted(Path(".sloop").glob(f"*/{CONTROL}")) if is_served(path)]
    if len(found) == 1:
        return found[0]
    if not found:
        what = f"no server with a state folder in {Path('.sloop').absolute()} is running"
        raise InputError(what, help="name its state folder with --server")
    names = ", ".join(str(path.parent) for path in found)
    raise InputError(f"{len(found)} servers are running: {names}", help="name one with --server")


def is_served(path: Path) -> bool:
    """Whether a server listens at this socket."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, _short(path) as name:
        probe.connect(name)
        return True
    return False


def send(path: Path, order: Order, tell: Tell) -> Done:
    """Send an order to the server at this socket, and wait until it is carried out.

    Raises `InputError` with the server's reason if it refuses, and `MachineError` if the connection breaks.
    """
    decode = msgspec.json.Decoder(str | Done | Failed).decode
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, _short(path) as name:
            sock.connect(name)
            sock.sendall(msgspec.json.encode(order) + b"\n")
            for line in sock.makefile("rb"):
                reply = decode(line)
                if isinstance(reply, Done):
                    return reply
                if isinstance(reply, Failed):
                    raise InputError(reply.what, help=reply.help)
                tell(reply)
    except (OSError, msgspec.DecodeError) as error:
        what = f"{path}: the connection to the server is broken: {error}"
        raise MachineError(what, help="is it still running? See its messages") from error
    raise MachineError(f"{path}: the server closed the connection", help="see its messages")
