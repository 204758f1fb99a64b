"""A model file on the CPU, ONNX or Python: one session per thread count, because a session's threads are fixed.

Threads must equal ⌈cores⌉: more threads than cores under a quota spend it on waiting for each other (Sponge
specification, section 7.1). Sessions cost memory: beyond `THREAD_COUNTS_MAX` of them the least recently used goes. They
are those that profiles are measured with (`sloop.profile.session`); for Python each is an object of the class `Model`.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from sloop.profile.session import Session, open_model, zeros
from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array


class FileRuntime:
    """A model file, opened for as many threads as are asked for."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._names: list[str] = []

    def load(self, threads: int) -> bool:
        """Make a session for `threads` threads; False where there is one."""
        if threads in self._sessions:
            return False
        session = open_model(self._path, threads)
        self._names = [port.name for port in session.signature.inputs]
        with self._lock:
            self._sessions[threads] = session
            while len(self._sessions) > THREAD_COUNTS_MAX:
                self._sessions.popitem(last=False)
        return True

    def warm(self, threads: int) -> None:
        """One pass over the model's example or a row of zeros: takes what the first batch would otherwise wait for.

        Zeros only where every dimension but the first is known; those of guessed shapes could be refused by a sound
        model.
        """
        session = self._sessions[threads]
        feed = session.example(1) or zeros(session.signature)
        if feed is not None:
            session.run(feed)

    def run(self, inputs: Sequence[Array], threads: int) -> tuple[Sequence[Array], int]:
        """Run on the session with the thread count nearest to `threads`, the smaller of two."""
        with self._lock:
            loaded = threads if threads in self._sessions else min(self._sessions, key=lambda n: (abs(n - threads), n))
            session = self._sessions[loaded]
            self._sessions.move_to_end(loaded)
        return session.run(dict(zip(self._names, inputs, strict=True))), loaded
