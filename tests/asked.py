"""Scaling policies that are asked again and again, each with what it remembered last."""

from typing import Any

from sloop.core.protocols import Scale
from sloop.core.views import ClusterView

_REMEMBERED: dict[int, tuple[Scale, Any]] = {}
"""By identity of the policy: the policy, so that its identity stays its own, and its memory."""


def next_plan(policy: Any, now_ns: int, view: ClusterView) -> Any:  # of any policy, which may be None
    """The plan of a policy that is given what it remembered when this was last asked of it."""
    _, memory = _REMEMBERED.get(id(policy), (policy, None))
    plan, memory = policy.plan(now_ns, view, memory)
    _REMEMBERED[id(policy)] = policy, memory
    return plan


def memory_of(policy: Scale) -> Any:  # of any policy
    """What the policy remembers after its last plan."""
    return _REMEMBERED[id(policy)][1]


def remember(policy: Scale, memory: object) -> None:
    """Let the policy remember this the next time."""
    _REMEMBERED[id(policy)] = policy, memory
