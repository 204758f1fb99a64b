"""Systems: compositions of policies, one for each verb. Published ones and baselines are in the catalogue."""

from sloop.systems.catalogue import SYSTEMS, build_system

__all__ = ["SYSTEMS", "build_system"]
