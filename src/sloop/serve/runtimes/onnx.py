"""ONNX Runtime on the CPU: one session per thread count, because a session's thread pool is fixed when it is made.

Threads must equal ⌈cores⌉: more threads than cores under a quota spend it on waiting for each other (Sponge
specification, section 7.1), so spinning is switched off too. Sessions cost memory: beyond `THREAD_COUNTS_MAX` of them
the least recently used goes. Sessions are those that profiles are measured with.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sloop.profile.model import open_session, signature_of
from sloop.serve.runtimes import THREAD_COUNTS_MAX, Array
from sloop.tensor import NUMPY_TYPES, Signature


class OnnxRuntime:
    """An ONNX model on the CPU."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._sessions: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._signature = Signature((), ())
        self._names: list[str] = []

    def load(self, threads: int) -> bool:
        """Make a session with `threads` intra-op threads; False where there is one."""
        if threads in self._sessions:
            return False
        session = open_session(self._path, threads)
        self._signature = signature_of(session, self._path)
        self._names = [port.name for port in self._signature.inputs]
        with self._lock:
            self._sessions[threads] = session
            while len(self._sessions) > THREAD_COUNTS_MAX:
                self._sessions.popitem(last=False)
        return True

    def warm(self, threads: int) -> None:
        """One pass over zeros, one row each: allocates what the first batch would otherwise wait for.

        Only where every dimension but the first is known; zeros of guessed shapes could be refused by a sound model.
        """
        feed = {}
        for port in self._signature.inputs:
            shape = [1 if place == 0 and size < 0 else size for place, size in enumerate(port.shape)]
            if port.datatype not in NUMPY_TYPES or -1 in shape:
                return
            feed[port.name] = np.zeros(shape, NUMPY_TYPES[port.datatype])
        self._sessions[threads].run(None, feed)

    def run(self, inputs: Sequence[Array], threads: int) -> tuple[Sequence[Array], int]:
        """Run on the session with the thread count nearest to `threads`, the smaller of two."""
        with self._lock:
            loaded = threads if threads in self._sessions else min(self._sessions, key=lambda n: (abs(n - threads), n))
            session = self._sessions[loaded]
            self._sessions.move_to_end(loaded)
        return session.run(None, dict(zip(self._names, inputs, strict=True))), loaded
