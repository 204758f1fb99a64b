import statistics as stdlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.units import NS_PER_MS, NS_PER_S, ms
from sloop.workload.link import BYTES_PER_MS_PER_MIB_S, Link, LinkFile, Lte, link_from, read_link

BUS = "saeid93__sponge/experiments/runner/notebooks/report_bus_0001.log"
SLAS = "saeid93__sponge/experiments/runner/notebooks/slas.csv"
LINE = "1450274031248 725 51.06 3.73 3263799 725\n"


def test_transfer_uses_the_second_it_begins_in_and_repeats() -> None:
    link = Link("test", (1_000.0, 500.0), "assumed: a test", rtt_ns=ms(3))
    assert link.transfer_ns(0, 100_000) == ms(103)
    assert link.transfer_ns(NS_PER_S + 7, 100_000) == ms(203)
    assert link.transfer_ns(2 * NS_PER_S, 100_000) == ms(103)
    assert link.elapsed_ms(100_000) == [103.0, 203.0]
    assert link.remaining_ms(100_000, 150.5) == [47, 0]


def test_an_outage_is_waited_out() -> None:
    link = Link("test", (0.0, 0.0, 1_000.0), "assumed: a test")
    assert link.transfer_ns(NS_PER_S // 2, 5_000) == ms(1_500 + 5)
    with pytest.raises(InputError, match="the link has no second with a bandwidth above 0"):
        Link("dead", (0.0, 0.0), "assumed: a test")


def test_the_published_remaining_slos(shared_data: Path) -> None:
    """Sponge specification 4.3: equal in all 3 × 600 values."""
    link = read_link(LinkFile(shared_data / BUS, rows_max=600))
    rows = [line.split(",") for line in (shared_data / SLAS).read_text().splitlines()[1:]]
    assert len(rows) == 3
    for size, *remaining_s in rows:
        assert link.remaining_ms(int(size) * 1024, 1_000.0) == [round(float(value) * 1_000) for value in remaining_s]


@pytest.mark.parametrize(
    ("kib", "expected"),
    [
        (100, [31, 36, 77, 116, 237, 762]),
        (200, [61, 72, 154, 231, 474, 525]),
        (284, [87, 103, 219, 329, 673, 326]),
        (500, [153, 181, 386, 579, 1185, 0]),
    ],
)
def test_table_of_transfer_times(shared_data: Path, kib: int, expected: list[int]) -> None:
    """Sponge specification 4.3: median, mean, p95, p99, max and the least remaining budget, in ms."""
    link = read_link(LinkFile(shared_data / BUS, rows_max=600))
    ranked = sorted(link.elapsed_ms(kib * 1024))
    found = [stdlib.median(ranked), stdlib.mean(ranked), ranked[569], ranked[593], ranked[-1]]
    assert [*map(round, found), min(link.remaining_ms(kib * 1024, 1_000.0))] == expected


def test_deepest_fades_of_the_bus_log(shared_data: Path) -> None:
    rates = list(read_link(shared_data / BUS).bytes_per_ms)
    assert len(rates) == 607
    assert sorted(range(607), key=rates.__getitem__)[:2] == [137, 387]
    assert (rates[137], rates[387]) == (432, 537)


def test_synthetic_link_has_the_statistics_of_the_specification() -> None:
    """Sponge specification 4.2: ACF 0.70/0.57/0.32/0.13 of the logarithm, p5 1.46, median 3.02, p95 6.1 MiB/s."""
    autocorrelations, quantiles = [], []
    for seed in range(100):
        rates = np.array(Lte().link(seed).bytes_per_ms) / BYTES_PER_MS_PER_MIB_S
        quantiles.append(np.sort(rates)[[30, 300, 570]])
        centred = np.log(rates) - np.log(rates).mean()
        autocorrelations.append([centred[lag:] @ centred[:-lag] / (centred @ centred) for lag in (1, 2, 5, 10)])
    assert np.mean(autocorrelations, axis=0) == pytest.approx([0.70, 0.57, 0.32, 0.13], abs=0.03)
    assert np.mean(quantiles, axis=0) == pytest.approx([1.46, 3.02, 6.1], rel=0.03)


def test_declared_links(tmp_path: Path) -> None:
    assert link_from({"kind": "constant", "mbps": 8}, seed=0, folder=tmp_path).transfer_ns(0, 1_000) == NS_PER_MS
    synthetic = link_from({"kind": "lte", "seconds": 5}, seed=1, folder=tmp_path)
    assert list(synthetic.bytes_per_ms) == list(Lte(seconds=5).link(1).bytes_per_ms)
    (tmp_path / "bus.log").write_text(LINE * 3)
    assert list(link_from({"file": "bus.log", "start_s": 1}, seed=0, folder=tmp_path).bytes_per_ms) == [4501.0] * 2
    (tmp_path / "5g.csv").write_text("carrier,throughput_mbps\nA,8\nB,16\nA,\nA,24\n")
    chosen = link_from({"file": "5g.csv", "only": {"carrier": "A"}}, seed=0, folder=tmp_path)
    assert list(chosen.bytes_per_ms) == [1_000.0, 3_000.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "a link has either `kind` or `file`"),
        ({"kind": "constnt"}, "did you mean 'constant'?"),
        ({"kind": "constant", "mbps": 0}, "link.mbps: must be a number above 0 and at most 1,000,000, not 0"),
        ({"kind": "lte", "secnds": 3}, "unknown key 'secnds'"),
        ({"file": "none.log"}, "no such file"),
        ({"file": "bus.log", "start_s": 9}, "start_s 9 is after the last of 1 rows"),
        ({"file": "short.log"}, "short.log:1: 3 entries instead of 6"),
        ({"file": "text.log"}, "text.log:2 bytes: 'many' is not a number"),
        ({"file": "empty.log"}, "no bandwidth to read"),
        ({"file": "5g.csv", "column": "mbps"}, "5g.csv:1: no column 'mbps'"),
        ({"file": "5g.csv", "only": "A"}, "link.only: must be a mapping (key: value), not 'A'"),
        ({"file": "5g.csv"}, "5g.csv:2: must be a number of at least 0 and at most 1,000,000, not -3"),
    ],
)
def test_bad_links(tmp_path: Path, spec: dict[str, object], message: str) -> None:
    (tmp_path / "bus.log").write_text(LINE)
    (tmp_path / "short.log").write_text("1 2 3\n")
    (tmp_path / "text.log").write_text(LINE + LINE.replace("3263799", "many"))
    (tmp_path / "empty.log").write_text("")
    (tmp_path / "5g.csv").write_text("a,throughput_mbps\n1,-3\n")
    with pytest.raises(InputError) as caught:
        link_from(spec, seed=0, folder=tmp_path)
    assert message in str(caught.value)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet='0123456789 .,-e\n"throughput_mbps', max_size=60))
def test_only_input_errors_escape(tmp_path: Path, text: str) -> None:
    path = tmp_path / "link"
    path.write_text(text)
    try:
        read_link(path)
    except InputError as error:
        assert error.where  # noqa: PT017
