"""Systems: one policy for each verb; those that are installed, by name."""

from sloop.systems import SYSTEMS, build_system
from sloop.systems.system import System

__all__ = ["SYSTEMS", "System", "build_system"]
