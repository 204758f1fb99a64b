"""The ground floor: units of time, tolerance and quantiles, texts, random streams, machine, tensors, vocabulary."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sloop import units
from sloop.events import Finished
from sloop.streams import stream
from sloop.tensor import ITEM_BYTES, NUMPY_TYPES, Port, Signature
from sloop.text import arrows, counted, host_and_port, in_ms, in_s, listed, number, numbered, quoted, shortened
from sloop.units import at_least, ms, quantile, rank, round_down, round_up, s
from sloop.vocabulary import BatchId, Group, LayerSet, Plan, ReplicaId, ReplicaSpec, Request, RequestId, Slot, StagePlan


def test_edges_convert_to_integer_nanoseconds() -> None:
    assert units.ms(2.5) == 2_500_000
    assert units.s(0.1) == 100_000_000
    assert isinstance(units.ms(0.3), int)


def test_rounds_to_nearest_rather_than_down() -> None:
    assert units.ms(0.1 + 0.2) == 300_000
    assert units.s(0.6 / 0.1) == 6 * units.NS_PER_S


@given(st.integers(0, 10**15))
def test_float_units_read_back(value_ns: int) -> None:
    assert units.ms(units.to_ms(value_ns)) == value_ns
    assert units.s(units.to_s(value_ns)) == value_ns


def test_forever_is_later_than_any_sum_of_instants_and_fits_64_bits() -> None:
    assert units.s(290 * 365.25 * 86_400) < units.FOREVER_NS
    assert 2.5 * units.LONGEST_NS < units.FOREVER_NS
    assert units.FOREVER_NS.bit_length() == 63


def test_comparisons_ignore_rounding_and_nothing_more() -> None:
    assert 0.1 + 0.2 != 0.3
    assert at_least(0.3, 0.1 + 0.2)
    assert not at_least(0.3, 0.300001)
    assert round_up(0.6 / 0.1) == 6
    assert round_up(6.000001) == 7
    assert math.floor(0.3 / 0.1) == 2
    assert round_down(0.3 / 0.1) == 3
    assert round_down(2.999999) == 2


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.01, 1), (0.011, 2), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_a_quantile_is_the_smallest_value_with_that_share_at_or_below(share: float, expected: int) -> None:
    assert quantile(range(1, 101), share) == expected


def test_quantiles_agree_with_numpy_where_products_are_exact() -> None:
    random = stream(1, "quantiles")
    for count in range(1, 60):
        values = sorted(random.random() for _ in range(count))
        for share in (0.25, 0.5, 0.75, 1.0):
            assert quantile(values, share) == np.quantile(values, share, method="inverted_cdf")


def test_a_rank_does_not_suffer_from_the_error_of_its_product() -> None:
    assert math.ceil(0.07 * 100) == 8  # 7.000000000000001
    assert rank(0.07, 100) == 6
    for hundreds in range(1, 200):
        assert rank(0.99, 100 * hundreds) == 99 * hundreds - 1


def test_one_value_is_every_quantile() -> None:
    assert {quantile([3.0], share) for share in (0.0, 0.5, 0.99, 1.0)} == {3.0}
    with pytest.raises(AssertionError, match="the quantile of no values is undefined"):
        rank(0.5, 0)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (0, "0"), (12.0, "12"), (1 / 3, "0.3333"), (39.916, "39.92"), (1234, "1,234"), (1234.5, "1,234"),
        (2_000_000, "2,000,000"), (float("inf"), "∞"), (float("-inf"), "-∞"), (float("nan"), "–"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_or_are_whole(value: float, written: str) -> None:
    assert number(value) == written


def test_counts_agree_with_their_nouns() -> None:
    assert [counted(n, "core") for n in (0, 0.5, 1, 12)] == ["0 cores", "0.5 cores", "1 core", "12 cores"]
    assert counted(2, "batch", "batches") == "2 batches"


def test_addresses_are_written_as_urls_have_them() -> None:
    hosts = "box", "10.0.0.1", "fd00::1"
    assert [host_and_port(host, 80) for host in hosts] == ["box:80", "10.0.0.1:80", "[fd00::1]:80"]


def test_durations_name_their_unit() -> None:
    assert in_ms(ms(12.34)) == "12.3 ms"
    assert in_ms(ms(12.34), 0) == "12 ms"
    assert in_s(s(2.5)) == "2.5 s"


def test_lists() -> None:
    assert [listed("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert listed(["a", "b"], "or") == "a or b"
    assert arrows(["detect", "read"]) == "detect → read"


def test_long_lists_of_ids_are_shortened() -> None:
    assert numbered("request", [3]) == "request 3"
    assert numbered("request", [3, 4, 5]) == "requests 3, 4 and 5"
    assert numbered("request", range(20)) == "requests 0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)"


def test_values_in_errors_stay_short() -> None:
    assert shortened("abcdef", 4) == "abc…"
    assert quoted("abcdef", 4) == "'abc…'"
    assert quoted("abc") == "'abc'"
    assert quoted([1, 2]) == "[1, 2]"
    assert quoted("a\nb") == r"'a\nb'"
    assert len(quoted(list(range(1000)))) == 60
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted(deep) == "… (nested too deeply)"


GOLDEN = 3_064_177_563
"""The first 32 bits of `arrivals` in world 1: were they to change, so would every figure we have published."""


def test_same_seed_and_name_give_the_same_draws_on_every_machine() -> None:
    assert [stream(7, "service").getrandbits(32) for _ in range(2)] == [stream(7, "service").getrandbits(32)] * 2
    assert stream(1, "arrivals").getrandbits(32) == GOLDEN


def test_streams_do_not_share_draws() -> None:
    names = ["arrivals", "service", "network", "failure"]
    first = {(seed, name): stream(seed, name).random() for seed in range(20) for name in names}
    assert len(set(first.values())) == len(first)


def test_a_new_consumer_never_shifts_an_old_one() -> None:
    alone = [stream(3, "service").random() for _ in range(1)]
    stream(3, "newcomer").random()
    assert [stream(3, "service").random()] == alone


def test_every_numpy_type_is_little_endian_and_as_long_as_it_says() -> None:
    for name, dtype in NUMPY_TYPES.items():
        assert np.ones(1, dtype).tobytes()[0] != 0 or name.startswith("FP"), name
        assert dtype.itemsize == ITEM_BYTES[name]
    assert np.array([1.0], NUMPY_TYPES["FP32"]).tobytes() == b"\x00\x00\x80\x3f"
    assert ITEM_BYTES.keys() - NUMPY_TYPES.keys() == {"BF16"}


def test_a_batch_is_fixed_where_an_inputs_first_dimension_is() -> None:
    open_one, fixed, scalar = Port("x", "FP32", (-1, 3)), Port("m", "FP32", (4, 3)), Port("k", "INT64", ())
    assert Signature((open_one, scalar), (fixed,)).fixed_batch is None
    assert Signature((open_one, scalar, fixed), ()).fixed_batch == 4


def plan(why: str, count: int) -> Plan:
    groups = (Group(ReplicaSpec("detect", "small", Slot(2)), count),)
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


def test_a_finished_batch_names_the_visits_that_continue() -> None:
    visits = ["a", "b", "c"]
    plain = Finished(BatchId(1), ReplicaId(0), 7)
    assert list(plain.continuing(visits)) == [("a", ()), ("b", ()), ("c", ())]
    graph = Finished(BatchId(1), ReplicaId(0), 7, ((1, 0), (), (0, 3)), faults=(1,))
    assert list(graph.continuing(visits)) == [("a", (1, 0)), ("c", (0, 3))]
    with pytest.raises(ValueError, match="longer"):
        list(graph.continuing(["a"]))


def test_the_log_leaves_out_what_a_finished_batch_does_not_say() -> None:
    written = msgspec.json.encode(Finished(BatchId(1), ReplicaId(0), 7))
    assert written == b'{"type":"finished","batch":1,"replica":0,"service_ns":7}'
    assert msgspec.json.decode(written, type=Finished) == Finished(BatchId(1), ReplicaId(0), 7)


def test_a_set_of_layers_says_what_is_in_it() -> None:
    assert LayerSet(1, 3).positions(5) == [1, 2]
    assert LayerSet(1, 3).others.positions(5) == [0, 3, 4]
    assert LayerSet(1, 3).others.others == LayerSet(1, 3)
    assert LayerSet(0, 5).others.positions(5) == []


def test_a_log_says_which_layers_are_meant() -> None:
    for layers in (LayerSet(1, 3), LayerSet(1, 3).others):
        assert msgspec.json.decode(msgspec.json.encode(layers), type=LayerSet) == layers
    assert msgspec.json.encode(LayerSet(1, 3).others) == b"[1,3,true]"
