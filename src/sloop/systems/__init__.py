"""Systems: published compositions of policies and the baselines they are compared with. One short file each."""

from collections.abc import Mapping
from typing import Any, Final

from sloop.policies.build import Where, known, nowhere
from sloop.systems.biscale import BISCALE
from sloop.systems.ds2 import DS2
from sloop.systems.early_drop import EARLY_DROP
from sloop.systems.fa2 import FA2
from sloop.systems.fa2_high import FA2_HIGH
from sloop.systems.fa2_low import FA2_LOW
from sloop.systems.fa2_single import FA2_SINGLE
from sloop.systems.grandslam import GRANDSLAM
from sloop.systems.hpa import HPA
from sloop.systems.inferline import INFERLINE
from sloop.systems.ipa import IPA
from sloop.systems.kpa import KPA
from sloop.systems.own import is_own, own_system
from sloop.systems.rim import RIM
from sloop.systems.sponge import SPONGE
from sloop.systems.static import STATIC
from sloop.systems.system import System
from sloop.systems.vertical_only import VERTICAL_ONLY
from sloop.systems.vpa import VPA

SYSTEMS: Final[Mapping[str, System]] = {
    system.name: system
    for system in (
        SPONGE,
        FA2,
        DS2,
        INFERLINE,
        GRANDSLAM,
        FA2_SINGLE,
        IPA,
        FA2_LOW,
        FA2_HIGH,
        RIM,
        BISCALE,
        VERTICAL_ONLY,
        EARLY_DROP,
        HPA,
        KPA,
        VPA,
        STATIC,
    )
}


def build_system(name: str, parameters: Mapping[str, Any] | None = None, *, where: Where = nowhere) -> System:
    """The system `name` with what a user wrote beside it, e.g. `build_system("sponge", {"margin": 0.9})`; a name that
    ends in `.py` is the path of a file with a `SYSTEM` of its own.

    Each call gives policies with a memory of their own. Raises `InputError` for an unknown system, parameter or policy
    (naming the nearest) and for values of the wrong type or out of range; `where` tells the place of a key.
    """
    system: System = own_system(name) if is_own(name) else known(SYSTEMS, name, what="system", where=where("name"))
    return system.fresh(parameters, where=where)
