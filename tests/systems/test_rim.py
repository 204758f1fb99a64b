"""RIM: the same replicas always, variants give way."""

from sloop.policies.scale.ipa import Ipa
from sloop.systems.ipa import IPA
from sloop.systems.rim import RIM


def test_it_differs_from_ipa_in_its_replicas() -> None:
    assert RIM.policies.scale == Ipa(replicas=4)
    assert RIM.policies.forecast == IPA.policies.forecast
