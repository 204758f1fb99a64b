"""PALDIA: made-up loads, derived figures, cold starts, and its baselines in the simulator."""

from collections.abc import Sequence
from statistics import fmean

import pytest

from sloop.actions import StartReplica
from sloop.app.hardware import KINDS
from sloop.events import ReplicaStopped
from sloop.policies.scale.paldia import HardwareRule, Paldia
from sloop.profile.paldia import PALDIA_MODELS
from sloop.reproduce import REPRODUCTIONS, paldia
from sloop.reproduce.harness import Results
from sloop.reproduce.paldia import offline
from sloop.reproduce.paldia.runs import (
    OVERRIDES,
    SCHEMES,
    VISION,
    Found,
    PaldiaResult,
    PaldiaTrial,
    UsedHardware,
    model_of,
    policies_of,
    simulated_rows,
    wanted,
    world_of,
)
from sloop.reproduce.paldia.traces import AZURE_S, azure_rates, clumps, counts_of, twitter_rates, wiki_rates
from sloop.reproduce.rows import Row
from sloop.units import NS_PER_S, s
from sloop.vocabulary import ReplicaId, ReplicaSpec, Slot


def row_of(rows: Sequence[Row], metric: str) -> Row:
    return next(row for row in rows if row.metric.startswith(metric))


# Loads


def test_the_azure_like_load_has_the_published_peak_and_mean() -> None:
    for seed in range(3):
        rates = azure_rates(225.0, seed)
        assert len(rates) == AZURE_S
        assert max(rates) == 225.0
        assert fmean(rates) == pytest.approx(225 * 55 / 673, rel=1e-6)
        above = [rate for rate in rates if rate > 112.5]
        assert 26 <= len(above) <= 32, "seconds above half of the peak"
        assert 0.17 < sum(above) / sum(rates) < 0.24, "their part of the requests"


def test_the_other_loads() -> None:
    wiki = wiki_rates(170.0, 0)
    assert len(wiki) == 1500
    assert max(wiki) == pytest.approx(0.93 * 170)
    assert sum(rate > 0.6 * max(wiki) for rate in wiki) / len(wiki) == pytest.approx(16 / 24, abs=0.06)
    assert fmean(twitter_rates(92.0, 1)) == pytest.approx(92)


def test_requests_of_a_second_come_together() -> None:
    counts = counts_of("azure", 225.0, 2)
    times_ns = list(clumps("azure", 225.0, 2).times_ns())
    assert len(times_ns) == sum(counts)
    assert {time_ns % NS_PER_S for time_ns in times_ns} == {1_000_000}
    assert list(clumps("azure", 225.0, 2).counts_per_s()) == list(counts)
    assert counts != counts_of("azure", 225.0, 3)


# Offline


def test_the_derived_figures_are_reproduced() -> None:
    rows = [*offline.vector_rows(), *offline.executed_rows(), *offline.hysteresis_rows()]
    assert {row.verdict for row in rows} == {"reproduced"}
    assert len(rows) == 25 + 15 + 2
    assert {row.verdict for row in offline.random_rows(quick=True)} == {"reproduced"}


@pytest.mark.parametrize(("model", "choice", "kind", "first"), [
    ("ResNet50", "tolerance", "p2.xlarge", 57), ("BERT", "slo_first", "p3.2xlarge", 13),
    ("BERT", "slo_first", "m4.xlarge", 0),
])  # fmt: skip
def test_first_counts(model: str, choice: HardwareRule, kind: str, first: int) -> None:
    assert offline.first_count(model, choice, kind) == first


def test_workers_that_end_at_once_start_again() -> None:
    counts = [1, 500, 1, 500, 1, 500]
    at_once, kept = (offline.cold_starts("ResNet50", counts, keep_alive_s) for keep_alive_s in (0, 600))
    assert at_once == 1 + 3 * (kept - 1)
    assert kept > 1
    assert offline.cold_starts("ResNet50", [0, 1, 0, 1], 0) == 2
    assert offline.cold_starts("ResNet50", [0, 1, 0, 1], 600) == 1


# Runs


def test_trials_and_their_models() -> None:
    quick, full = (wanted(quick=quick) for quick in (True, False))
    assert {seeds for _, seeds in quick} == {1}
    assert {trial.model for trial, _ in full} == {*PALDIA_MODELS, *OVERRIDES}
    assert {trial for trial, _ in quick} < {trial for trial, _ in full}
    assert model_of("DPN92 on Twitter")[1] == "twitter"
    assert model_of("DPN92") == (PALDIA_MODELS["DPN92"], "azure")


def test_a_world_has_one_node_of_each_kind_on_demand() -> None:
    world = world_of(PaldiaTrial(model="BERT", scheme="molecule-cost"))
    kinds = [node.hardware for node in world.deployment.cluster]
    assert kinds == ["c6i.4xlarge", "g3s.xlarge", "p2.xlarge", "p3.2xlarge"], "the other CPUs are too slow for BERT"
    assert all(node.on_demand and node.usd_per_h for node in world.deployment.cluster)


def test_hardware_is_used_while_it_has_a_replica() -> None:
    sink = UsedHardware()
    gpu, cpu = (ReplicaSpec("m", "v", Slot(1.0, kind)) for kind in ("g3s.xlarge", "m4.xlarge"))
    for at_s, record in (
        (0, StartReplica(ReplicaId(1), cpu)),
        (10, StartReplica(ReplicaId(2), gpu)),
        (12, StartReplica(ReplicaId(3), gpu)),
        (15, ReplicaStopped(ReplicaId(1))),
        (20, ReplicaStopped(ReplicaId(2))),
    ):
        sink.append(s(at_s), record)
    assert sink.seconds(s(100)) == {"m4.xlarge": 15, "g3s.xlarge": 90}


@pytest.mark.slow
def test_molecule_in_the_simulator() -> None:
    """Both schemes on BERT, whose load is light: minding performance is on time, and costs a V100 all the time."""
    cheap, best = (PaldiaTrial(model="BERT", scheme=scheme).play() for scheme in SCHEMES[:2])
    assert 90 < cheap.compliance < best.compliance
    assert best.used_usd_per_h == pytest.approx(KINDS["p3.2xlarge"].usd_per_h, rel=0.01)
    assert cheap.used_usd_per_h <= cheap.usd_per_h < best.usd_per_h
    assert best.dearer == pytest.approx(100, abs=1)


def test_schemes_differ_in_choice_and_sharing() -> None:
    found = [policies_of(PaldiaTrial(model="BERT", scheme=scheme)).scale for scheme in SCHEMES]
    assert [(each.choice, each.sharing) for each in found if isinstance(each, Paldia)] == [
        ("isolated", "queue"),
        ("fastest", "queue"),
        ("isolated", "together"),
        ("fastest", "together"),
    ]
    again = policies_of(PaldiaTrial(model="BERT", scheme="infless-cost")).scale
    assert again is not found[2], "each run has its own memory"


# Rows


def result(trial: PaldiaTrial, compliance: float, p99_ms: float, usd_per_h: float) -> PaldiaResult:
    return PaldiaResult(
        violations=100 - compliance,
        cores=0.0,
        compliance=compliance,
        p99_ms=p99_ms,
        usd_per_h=usd_per_h,
        used_usd_per_h=usd_per_h,
        dearer=0.0,
        latencies_ms=tuple(p99_ms * percent / 99 for percent in range(1, 101)),
    )


def found_with(cheap: tuple[float, float, float], dear: tuple[float, float, float]) -> Found:
    played = {}
    for trial, seeds in wanted(quick=False):
        for seed in range(seeds):
            own = PaldiaTrial(model=trial.model, scheme=trial.scheme, seed=seed)
            played[own] = result(own, *(cheap if trial.scheme.endswith("cost") else dear))
    return Results(played)


def test_rows_of_figures_as_derived() -> None:
    rows = simulated_rows(found_with((94.0, 280.0, 0.46), (100.0, 67.0, 3.06)), quick=False)
    assert row_of(rows, "Molecule ($), compliance, mean of models").verdict == "reproduced"
    assert row_of(rows, "Molecule (P), P99").verdict == "reproduced"
    assert row_of(rows, "Molecule ($), cost while a replica").verdict == "reproduced"
    assert row_of(rows, "Molecule ($), VGG19, part of the P99 in queues").ours == pytest.approx(100 * (1 - 48 / 280))
    assert row_of(rows, "cost saved").ours == pytest.approx(100 * (1 - 0.46 / 3.06))


def test_rows_of_other_figures() -> None:
    rows = simulated_rows(found_with((99.9, 120.0, 1.5), (99.0, 100.0, 3.06)), quick=False)
    assert row_of(rows, "Molecule ($), compliance, mean of models").verdict == "off"
    assert row_of(rows, "Molecule ($), compliance, between").verdict == "off"
    assert row_of(rows, "Molecule (P), compliance, bound").verdict == "off"
    assert row_of(rows, "Molecule ($), ResNet50, P99").verdict == "off"
    assert row_of(rows, "Molecule ($), cost as billed").verdict == "off"
    assert row_of(rows, "Molecule (P), DPN92 on Twitter").verdict == "off"


def test_figures_show_both_schemes() -> None:
    found = found_with((94.0, 280.0, 0.46), (100.0, 67.0, 3.06))
    compliance = paldia.compliance_figure(found, quick=False)
    assert [len(series.y) for series in compliance.panels[0].series] == [len(VISION)] * 4
    assert "crosses the deadline at 70 %" in paldia.latency_figure(found).alt
    assert len(paldia.split_figure().panels[0].series) == 5
    assert len(paldia.trace_figure().panels) == 3


def test_it_is_registered() -> None:
    assert REPRODUCTIONS["paldia"] is paldia.reproduce
