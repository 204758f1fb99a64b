"""IPA's program with the heaviest variant of every stage."""

from sloop.policies.scale.ipa import Ipa
from sloop.systems.fa2_high import FA2_HIGH
from sloop.systems.ipa import IPA


def test_it_differs_from_ipa_in_what_may_run() -> None:
    assert FA2_HIGH.policies.scale == Ipa(only="heaviest")
    assert FA2_HIGH.policies.forecast == IPA.policies.forecast
