from sloop.actions import ResizeReplica, StartBatch, StartReplica
from sloop.app.load import load_application
from sloop.report.assumptions import Assumptions
from sloop.vocabulary import BatchId, ReplicaId, ReplicaSpec, RequestId

AMDAHL = {"form": "amdahl", "gamma": 10, "epsilon": 0, "delta": 0, "eta": 1}


def assumptions(profile: object) -> Assumptions:
    return Assumptions(load_application({"name": "x", "slo_ms": 9, "stages": [{"name": "a", "profile": profile}]}))


def start(found: Assumptions, cores: float) -> None:
    found.append(0, StartReplica(ReplicaId(0), ReplicaSpec("a", "a", cores)))


def run(found: Assumptions, batch: int) -> None:
    requests = tuple(RequestId(index) for index in range(batch))
    found.append(0, StartBatch(BatchId(0), ReplicaId(0), "a", requests))


def test_an_assumed_profile_is_named_once_it_has_run() -> None:
    found = assumptions({"latency_ms": AMDAHL, "max_batch": 4, "source": "a guess"})
    start(found, 1)
    assert found.lines() == ()
    run(found, 1)
    run(found, 2)
    assert found.lines() == ("a/a: assumed profile (a guess)",)


def test_a_fitted_profile_within_its_measurements_is_no_assumption() -> None:
    found = assumptions("ResNet-T")
    start(found, 8)
    run(found, 8)
    assert found.lines() == ()


def test_what_lies_beyond_the_measurements_is_named_with_its_span() -> None:
    found = assumptions("ResNet-T")
    start(found, 8)
    run(found, 8)
    run(found, 12)
    found.append(1, ResizeReplica(ReplicaId(0), 16))
    run(found, 8)
    assert found.lines() == ("a/a: extrapolated to batch 8–12 on 8–16 cores, measured batch 1–8 on 1–8 cores",)
