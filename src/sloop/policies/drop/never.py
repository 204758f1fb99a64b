"""Give nothing up: every request that was let in is executed.

Fails under overload: the queue grows without bound and in the end every answer is late.
"""

from dataclasses import dataclass

from sloop.vocabulary import Visit


@dataclass(frozen=True, slots=True)
class Never:
    """Nothing is hopeless."""

    def is_hopeless(self, now_ns: int, visit: Visit, cost_ns: int, full_ns: int = 0) -> bool:
        return False
