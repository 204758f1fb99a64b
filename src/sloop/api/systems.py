"""Systems: one policy for each verb; those that are installed, by name. `ONE_KIND` is what most say of
mixed clusters, `SIMULATED` where those run that know the future."""

from sloop.systems import SYSTEMS, build_system
from sloop.systems.catalogue import ONE_KIND
from sloop.systems.system import SIMULATED, System

__all__ = ["ONE_KIND", "SIMULATED", "SYSTEMS", "System", "build_system"]
