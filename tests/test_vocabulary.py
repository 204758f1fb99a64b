import msgspec

from sloop.vocabulary import Group, Plan, ReplicaSpec, Request, RequestId, StagePlan


def plan(why: str, count: int) -> Plan:
    groups = (Group(ReplicaSpec("detect", "small", cores=2), count),)
    return Plan((StagePlan("detect", groups, batch_max=4),), why)


def test_a_requests_budget_runs_from_when_the_client_began_to_send() -> None:
    request = Request(RequestId(1), sent_ns=100, arrived_ns=160, deadline_ns=300)
    assert request.slo_ns == 200
    assert request.elapsed_ns == 60


def test_a_request_is_written_to_the_log_as_the_event_of_its_arrival() -> None:
    request = Request(RequestId(1), sent_ns=100, arrived_ns=160, deadline_ns=300)
    row = msgspec.json.encode(request)
    assert msgspec.json.decode(row)["type"] == "arrived"
    assert msgspec.json.decode(row, type=Request) == request


def test_reasons_do_not_make_plans_differ() -> None:
    assert plan("demand fell", 2).same_target(plan("nothing changed", 2))
    assert not plan("demand fell", 2).same_target(plan("demand fell", 3))
    assert not plan("demand fell", 2).same_target(None)
