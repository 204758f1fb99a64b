"""Cold start: how long passes between the order to start a replica and its readiness.

`start_ns`, spread evenly by ± `jitter` (a fraction), drawn from stream `cold_start`. In a warm world what is ordered in
its first instant is ready in it, as a cluster is that has been up for long.
Must not know why a replica is started.
"""

from sloop.streams import stream

STEP = "loading"
"""What a start is reported to be busy with; the simulator does not tell its steps apart."""


class ColdStart:
    """The world's start-up times."""

    def __init__(self, seed: int, *, start_ns: int, jitter: float = 0.0, warm: bool = True) -> None:
        self._start_ns = start_ns
        self._jitter = jitter
        self._warm = warm
        self._random = stream(seed, "cold_start")

    def draw_ns(self, now_ns: int) -> int:
        """How long the start ordered now takes."""
        if self._warm and now_ns == 0:
            return 0
        return round(self._start_ns * (1.0 + self._jitter * (2.0 * self._random.random() - 1.0)))
