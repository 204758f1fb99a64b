"""The reader of published EC2 latencies: on an archive made here, and on the artefacts where they are."""

import io
import json
import tarfile
from pathlib import Path

import pytest

from benchmarks import ec2
from sloop.app.hardware import KINDS
from sloop.errors import InputError
from sloop_systems.comparison import data_folder

DATA = data_folder()
WITH_RIBBON = pytest.mark.skipif(not ec2.is_there(DATA), reason="the artefact of Ribbon is not there")
WITH_KAIROS = pytest.mark.skipif(not ec2.is_there(DATA, ec2.KAIROS), reason="the artefact of Kairos is not there")
MODELS = {ec2.RIBBON: ("candle", "dien", "mtwnd", "resnet", "vgg"), ec2.KAIROS: ("dien", "mtwnd", "ncf", "rm2", "wnd")}


def archive(data: Path, artefact: ec2.Artefact, lists: dict[str, list[float]]) -> Path:
    """An artefact with these lists of durations; returns the data folder."""
    path = data / artefact.folder / artefact.archive
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as files:
        for name, durations_ms in lists.items():
            content = json.dumps(durations_ms).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            files.addfile(member, io.BytesIO(content))
    return data


def test_a_profile_for_each_kind_with_a_cell_for_each_batch(tmp_path: Path) -> None:
    lists = {
        "logs/t3.xlarge/m_10_1.json": [3.0, 2.0, 1.0],
        "logs/t3.xlarge/m_20_1.json": [2.5, 2.5, 2.0],
        "logs/g4dn.xlarge/m_20_1.json": [1.0],
        "logs/t3.xlarge/other_10_1.json": [9.0],
        "logs/readme.txt": [],
    }
    found = ec2.profiles(archive(tmp_path, ec2.RIBBON, lists), "m")
    assert list(found) == ["g4dn.xlarge", "t3.xlarge"]
    t3 = found["t3.xlarge"]
    assert (t3.hardware, t3.max_batch, t3.max_cores, t3.accelerator) == ("t3.xlarge", 2, 4, "")
    assert t3.samples[0].likely_ms[0] == 1.0
    # A larger batch never takes less time: the 99th percentile of a batch of 2 is 2.5 ms, that of a batch of 1 is 3 ms.
    assert [t3.latency_ms.latency_ms(batch, 4) for batch in (1, 2)] == [3.0, 3.0]
    assert found["g4dn.xlarge"].accelerator == "T4"


def test_loading_and_inference_add_up_without_the_first(tmp_path: Path) -> None:
    lists = {
        "data/r5n.large/m_10_1.json": [500.0, 2.0, 3.0],
        "data/logs_load/r5n.large/m_10_1.json": [10.0, 1.0, 1.0],
    }
    found = ec2.profiles(archive(tmp_path, ec2.KAIROS, lists), "m", ec2.KAIROS)["r5n.large"]
    (sample,) = found.samples
    assert (sample.n, sample.p50_ms, sample.p99_ms) == (2, 3.0, 4.0)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the artefact is not there"):
        ec2.profiles(tmp_path, "resnet")
    data = archive(tmp_path, ec2.RIBBON, {"logs/t3.xlarge/m_10_1.json": [1.0]})
    with pytest.raises(InputError, match=r"Ribbon.* has no model 'n'"):
        ec2.profiles(data, "n")
    with pytest.raises(InputError, match="no experiment with 'n'"):
        ec2.deadline_ms(data, "n")
    assert not ec2.is_there(None)


@WITH_RIBBON
def test_all_published_models_are_complete() -> None:
    assert DATA is not None
    for model in MODELS[ec2.RIBBON]:
        found = ec2.profiles(DATA, model)
        assert len(found) == 8
        assert set(ec2.pool(DATA, model)) < set(found)
        assert {profile.max_batch for profile in found.values()} == {50}
        for kind, profile in found.items():
            assert [sample.batch for sample in profile.samples] == list(range(1, 51))
            assert min(sample.n for sample in profile.samples) >= 90
            assert profile.accelerator == ("T4" if kind.startswith("g4dn") else "")
            alone_ms = profile.latency_ms.latency_ms(1, profile.max_cores)
            assert alone_ms < ec2.deadline_ms(DATA, model)


@WITH_KAIROS
def test_kairos_measured_five_models_on_four_kinds() -> None:
    assert DATA is not None
    for model in MODELS[ec2.KAIROS]:
        found = ec2.profiles(DATA, model, ec2.KAIROS)
        assert list(found) == ["c5n.2xlarge", "g4dn.xlarge", "r5n.large", "t3.xlarge"]
        assert {profile.max_batch for profile in found.values()} == {100}


@WITH_RIBBON
def test_the_catalogue_has_the_published_prices() -> None:
    assert DATA is not None
    for kind, usd_per_h in ec2.prices(DATA).items():
        assert KINDS[kind].usd_per_h == pytest.approx(usd_per_h), kind
