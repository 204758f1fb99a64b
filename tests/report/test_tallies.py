"""Estimate against outcome: `test_metrics` has the story; here, what was forgotten or never known."""

import pytest

from sloop.actions import StartBatch
from sloop.app.load import load_application
from sloop.report.holdings import Held
from sloop.report.tallies import Tallies
from sloop.systems.setup import beliefs_of
from sloop.units import ms
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, RequestId

QUICK = {"latency_ms": {"form": "quadratic", "alpha": 0, "beta": 10, "gamma": 0}, "max_batch": 2}


def test_batches_are_compared_once_and_only_where_something_was_believed() -> None:
    variants = [{"name": "v", "accuracy": 0.8, "profile": QUICK}, {"name": "w", "accuracy": 0.4, "profile": QUICK}]
    stages = [{"name": "a", "variants": variants}]
    application = load_application({"name": "x", "slo_ms": 9, "stages": stages, "system": "static"})
    tallies = Tallies(beliefs_of(application))
    held = {name: Held(ReplicaSpec("a", name, 1.0), 1_000_000, 0.0) for name in ("v", "w")}

    def batch(number: int, size: int) -> StartBatch:
        return StartBatch(BatchId(number), ReplicaId(0), "a", tuple(map(RequestId, range(size))))

    assert tallies.accuracy is None
    tallies.believe(0, batch(0, 1), held["v"])
    tallies.compare(ms(15), batch(0, 1), held["v"])
    tallies.believe(0, batch(1, 1), held["v"])
    tallies.forget(BatchId(1))
    tallies.believe(0, batch(2, 3), held["w"])  # beyond what is believed of
    tallies.compare(ms(15), batch(2, 3), held["w"])
    tallies.compare(ms(15), batch(3, 1), None)
    (error,) = tallies.service_errors()
    assert (error.variant, error.batches, error.believed_ms, error.actual_ms, error.mape) == ("v", 1, 10, 15, 0.5)
    assert tallies.accuracy == pytest.approx((0.8 + 3 * 0.4) / 4)
