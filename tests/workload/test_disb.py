import json

import pytest

from sloop.errors import InputError
from sloop.workload import disb
from sloop.workload.archive import Text


def workload(*clients: tuple[str, dict[str, object]], time: float = 2.0) -> Text:
    entries = [{"id": name, "load": load, "client": {"name": name}} for name, load in clients]
    return Text(json.dumps({"time": time, "tasks": entries}), "w.json")


Client = tuple[str, dict[str, object]]
PERIODIC: Client = ("steady", {"type": "periodic", "frequency": 2, "priority": 0})
TRACED: Client = ("traced", {"type": "trace", "trace": [0, 250, 9_000]})
CLOSED: Client = ("greedy", {"type": "continuous"})
POISSON: Client = ("random", {"type": "poisson", "frequency": 1_000})


def test_clients_are_merged_in_order_and_closed_loops_left_out() -> None:
    trace = disb.parse(workload(PERIODIC, TRACED, CLOSED), client="", seed=0)
    assert [at_ns // 1_000_000 for at_ns in trace.times_ns()] == [0, 0, 250, 500, 1_000, 1_500]
    assert trace.provenance.endswith("clients steady, traced, closed-loop clients left out: greedy")
    assert trace.duration_ns == 2_000_000_000


def test_one_client_alone_has_the_arrivals_it_has_in_company() -> None:
    alone = disb.parse(workload(PERIODIC, POISSON), client="random", seed=3).to_array()
    together = disb.parse(workload(POISSON, TRACED), client="", seed=3).to_array()
    assert set(alone) <= set(together)
    assert len(alone) == pytest.approx(2_000, rel=0.1)


@pytest.mark.parametrize(
    ("text", "client", "message"),
    [
        (workload(CLOSED), "", "only closed-loop (continuous) clients"),
        (workload(PERIODIC), "stead", "no client 'stead'\nhelp: did you mean 'steady'?"),
        (
            workload(("x", {"type": "priodic"})),
            "",
            "tasks[x]: unknown type of load 'priodic'\nhelp: did you mean 'periodic'?",
        ),
        (
            workload(("x", {"type": "periodic"})),
            "",
            "tasks[x].frequency: must be a number above 0 and at most 1e+07, not 0",
        ),
        (workload(("x", {"type": "trace"})), "", "tasks[x]: the trace is empty"),
        (workload(("x", {"type": "trace", "trace": [-1]})), "", "trace[0]: must be a number of at least 0, not -1"),
        (workload(("x", {"type": "trace", "trace": [2, 1]})), "", "the trace is not sorted"),
        (workload(PERIODIC, time=-1), "", "time: must be a number above 0 and at most 1e+07, not -1"),
        (workload(("x", {"type": "poisson", "frequency": 1e7}), time=1e7), "", "over 50,000,000 arrivals"),
        (Text('{"time": 1}', "w.json"), "", "not a DISB workload"),
        (Text('{"time": "1", "tasks": []}', "w.json"), "", "Expected `float`, got `str` - at `$.time`"),
    ],
)
def test_bad_workloads(text: Text, client: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        disb.parse(text, client=client, seed=0)
    assert message in str(caught.value)
    assert caught.value.where.startswith("w.json")
