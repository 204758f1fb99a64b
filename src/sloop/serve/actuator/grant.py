"""What an actuator grants: the value between it, the backend and the worker."""

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class Grant:
    """Cores in effect, and what the process itself must do for that: threads to run on, share of time to work.

    `duty` is 1 where the machine withholds cores; a fall-back that cannot leaves it to the process to rest.
    """

    cores: float
    duty: float = 1.0

    @property
    def threads(self) -> int:
        """⌈cores⌉: more would wait for each other inside the quota, fewer would leave cores idle."""
        return max(1, ceil(self.cores - 1e-9))
