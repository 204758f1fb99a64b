"""Let every request in.

Right where a drop policy sheds load later. Fails under overload without one: see `drop.never`.
"""

from dataclasses import dataclass

from sloop.vocabulary import Request


@dataclass(frozen=True, slots=True)
class Open:
    """Never refuses."""

    def retry_after_ns(self, now_ns: int, request: Request, queued: int, drain_ns: int) -> int:
        return 0
