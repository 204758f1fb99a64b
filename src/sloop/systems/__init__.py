"""Systems: compositions of policies, one for each verb. The catalogue has the published systems and the baselines."""

from sloop.systems.catalogue import SYSTEMS, build_system

__all__ = ["SYSTEMS", "build_system"]
