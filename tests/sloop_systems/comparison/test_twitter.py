"""The excerpts of the Twitter trace: the figures of their tables, and the synthetic trace that resembles them."""

import pickle
from pathlib import Path
from statistics import mean, variance

import pytest

from sloop.errors import InputError
from sloop.workload import Spread
from sloop_systems.comparison import data_folder, twitter

IPA_TABLE = {
    "bursty": (14_437, 12.03, 3, 34),
    "steady_low": (6_067, 5.06, 3, 8),
    "steady_high": (34_606, 28.84, 23, 34),
    "fluctuating": (19_837, 16.53, 3, 34),
}
"""IPA specification, section 4: requests, mean, least and most in a second."""
BISCALE_TABLE = {"video": (21_671, 32.8, 7, 62), "audio": (11_083, 16.8, 4, 32), "nlp": (4_514, 6.8, 2, 13)}
"""Biscale specification, section 4."""


@pytest.fixture
def data() -> Path:
    folder = data_folder()
    if folder is None or not (folder / twitter.FILE).is_file():
        pytest.skip("no Twitter trace here; set SLOOP_SHARED to the folder that holds data/")
    return folder


@pytest.mark.parametrize("name", IPA_TABLE)
def test_ipa_s_excerpts_are_those_of_the_table(name: str, data: Path) -> None:
    requests, mean_rps, least, most = IPA_TABLE[name]
    found = twitter.ipa(name, data)
    assert found.is_measured
    assert (len(found.counts), sum(found.counts)) == (1_200, requests)
    assert (round(mean(found.counts), 2), min(found.counts), max(found.counts)) == (mean_rps, least, most)


@pytest.mark.parametrize("pipeline", BISCALE_TABLE)
def test_biscale_s_slices_are_those_of_the_table(pipeline: str, data: Path) -> None:
    requests, mean_rps, least, most = BISCALE_TABLE[pipeline]
    found = twitter.biscale(pipeline, data)
    assert found.is_measured
    assert (len(found.counts), sum(found.counts)) == (660, requests)
    assert (round(mean(found.counts), 1), min(found.counts), max(found.counts)) == (mean_rps, least, most)


def test_days_to_train_and_to_test(data: Path) -> None:
    train, test = twitter.training(data), twitter.held_out(data)
    assert (len(train.counts), len(test.counts)) == (14 * 86_400, 7 * 86_400)
    assert (train.is_measured, test.is_measured) == (True, True)
    assert list(train.counts[:50]) != list(test.counts[:50])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_stand_in_comes_near_the_tables(seed: int) -> None:
    """Means of 20 s are printed to whole tweets, so a total is known to about 1 %; single seconds scatter more."""
    for name, (requests, _, least, most) in IPA_TABLE.items():
        found = twitter.ipa(name, None, seed=seed)
        assert not found.is_measured
        assert sum(found.counts) == pytest.approx(requests, rel=0.015)
        assert abs(min(found.counts) - least) <= 2
        assert abs(max(found.counts) - most) <= 4
    for pipeline, (requests, _, _, most) in BISCALE_TABLE.items():
        found = twitter.biscale(pipeline, None, seed=seed)
        assert len(found.counts) == 660
        assert sum(found.counts) == pytest.approx(requests, rel=0.015)
        assert max(found.counts) == pytest.approx(most, rel=0.1)


def test_the_stand_in_jumps_within_one_second() -> None:
    rates = twitter.biscale("video", None).counts
    assert max(rates[40:57]) <= 16
    assert list(rates[57:59]) == [30, 28]  # 132 and 124 tweets, divided by 4.384
    assert min(rates[80:340]) > 30


def test_the_stand_in_s_scatter() -> None:
    """Negative binomial, its variance 1.2 times its mean."""
    drawn = [count for seed in range(5) for count in twitter._stand_in(seed)[1_299_600]]
    assert mean(drawn) == pytest.approx(43.9, rel=0.01)
    assert variance(drawn) / mean(drawn) == pytest.approx(1.2, rel=0.08)


def test_made_up_days() -> None:
    days = twitter._days("a day", None, (0, 86_400), 3)
    assert not days.is_measured
    assert days.provenance.startswith("assumed")
    ranked = sorted(days.counts)
    assert 40 < ranked[len(ranked) // 2] < 110
    assert max(ranked) > 200, "bursts of 3 to 5 times the base"


def test_same_seed_same_counts() -> None:
    one, again, other = (twitter.ipa("bursty", None, seed=seed) for seed in (1, 1, 2))
    assert one.counts == again.counts
    assert one.counts != other.counts
    assert pickle.loads(pickle.dumps(one)) == one


def test_as_a_trace_of_arrivals(tmp_path: Path) -> None:
    excerpt = twitter.ipa("steady_low", tmp_path, seed=1)
    exact = excerpt.trace(spread=Spread.EARLY)
    assert sum(1 for _ in exact.times_ns()) == pytest.approx(sum(excerpt.counts), abs=3)  # few beyond the last second
    drawn = excerpt.trace(seed=4)
    assert sum(drawn.counts_per_s()) == pytest.approx(sum(excerpt.counts), rel=0.06)
    assert drawn.provenance == excerpt.provenance


def test_unknown_names() -> None:
    with pytest.raises(InputError, match="bursti"):
        twitter.ipa("bursti", None)
    with pytest.raises(InputError, match="film"):
        twitter.biscale("film", None)
