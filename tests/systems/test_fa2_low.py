"""IPA's program with the lightest variant of every stage."""

from sloop.policies.scale.ipa import Ipa
from sloop.systems.fa2_low import FA2_LOW
from sloop.systems.ipa import IPA


def test_it_differs_from_ipa_in_what_may_run() -> None:
    assert FA2_LOW.policies.scale == Ipa(only="lightest")
    assert FA2_LOW.policies.forecast == IPA.policies.forecast
