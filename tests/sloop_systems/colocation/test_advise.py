"""`sloop advise` with published models that share devices."""

from pathlib import Path

from tests.cli.test_advise import APPLICATION, SHORT, answer, photos, run

__all__ = ["photos"]


def test_published_profiles_share_devices() -> None:
    models = ("resnet50-V100", "mobilenet_v2-V100")
    found = answer(*models, "--slo-ms", 300, "--rate", 60, *SHORT, "--system", "harbor")
    assert found["recommended"]["nodes"] == [{"hardware": "p3.2xlarge", "nodes": 1, "usd_per_h": 3.06}]
    places = {(each["node"], each["device"]) for each in found["placements"]}
    assert len(found["placements"]) == 2
    assert len(places) == 1
    shown = run(*models, "--slo-ms", 300, "--rate", 60, *SHORT, "--system", "harbor").stdout
    assert "of every application's requests" in shown
    assert "Application by application: harbor on 1 p3.2xlarge" in shown


def test_files_and_published_profiles_can_be_mixed(photos: Path) -> None:
    photos.write_text(APPLICATION.replace("hardware: c5.2xlarge}", "hardware: c5.2xlarge}, {hardware: p3.2xlarge}"))
    more = ["--rate", "photos=5", "--rate", "resnet50-V100=5", "--slo-ms", 100, *SHORT]
    found = answer(photos, "resnet50-V100", *more)
    slos = {each["application"]: each["slo_ms"] for each in found["closest"]["applications"]}
    assert slos == {"photos": 200, "resnet50-V100": 100}


def test_own_kinds_and_prices(tmp_path: Path) -> None:
    kinds = tmp_path / "kinds.yaml"
    kinds.write_text("- {name: box, cores: 12, devices: [V100], usd_per_h: 1.1}\n")
    found = answer("resnet50-V100", "--slo-ms", 200, "--rate", 20, *SHORT, "--kinds", kinds, "--system", "harbor")
    assert found["recommended"]["nodes"] == [{"hardware": "box", "nodes": 1, "usd_per_h": 1.1}]
    more = ["--price", "box=9", "--hardware", "box,p3.2xlarge", "--system", "harbor"]
    found = answer("resnet50-V100", "--slo-ms", 200, "--rate", 20, *SHORT, "--kinds", kinds, *more)
    assert [each["hardware"] for each in found["recommended"]["nodes"]] == ["p3.2xlarge"]
