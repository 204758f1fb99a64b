"""The Sponge system: published parameters, and its recommended variants one line away."""

from sloop.policies.batch.slack import Slack
from sloop.policies.drop.age import Age
from sloop.policies.order.edf import Edf
from sloop.policies.scale.sponge import Sponge
from sloop.systems import build_system


def test_published_parameters() -> None:
    policies = build_system("sponge").policies
    assert policies.order == Edf()
    assert policies.drop == Age(limit=1)
    assert policies.scale == Sponge(
        planning_set="rate", criterion="burst", budget="clmax", margin=0.9, batch_max=16, period_ns=1_000_000_000
    )


def test_variants_are_parameters() -> None:
    written = {
        "margin": 0.95,
        "budget": "per_batch",
        "cores": [0.25, 0.5, 1, 2],
        "batch": "slack",
        "drop": {"limit": 3},
    }
    policies = build_system("sponge", written).policies
    assert policies.scale == Sponge(margin=0.95, budget="per_batch", cores=(0.25, 0.5, 1, 2))
    assert (policies.batch, policies.drop) == (Slack(), Age(limit=3))
