"""Profiles as files: whole or not at all, and refused with the field that is wrong."""

from pathlib import Path

import pytest
from msgspec import structs

from sloop.errors import InputError, MachineError
from sloop.profile import PUBLISHED, RESNET_T, Sample
from sloop.profile.store import digest, is_of, load_profile, path_beside, save_profile


@pytest.mark.parametrize("name", PUBLISHED)
def test_survives_its_file(name: str, tmp_path: Path) -> None:
    path = path_beside(tmp_path / "net.onnx")
    save_profile(PUBLISHED[name], path)
    assert path.name == "net.onnx.profile.json"
    assert load_profile(path) == PUBLISHED[name]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "not a profile"),
        (b"[1]", "not a profile"),
        (b"\xff", "not a profile"),
        (b'{"version": 7}', "version 7"),
        (b'{"version": 1}', "profile"),
        (b'{"version": 1, "profile": {"max_batch": 0}}', "not a profile"),
        (b"[" * 100_000, "not a profile"),
    ],
)
def test_refuses_files_that_are_no_profile(raw: bytes, what: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(raw)
    with pytest.raises(InputError, match=what):
        load_profile(tmp_path / "p.json")


def test_says_which_field_of_a_file_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save_profile(RESNET_T, path)
    path.write_text(path.read_text().replace('"max_batch": 16', '"max_batch": 0'))
    with pytest.raises(InputError, match=r"max_batch is 0.*\$\.profile"):
        load_profile(path)


def test_refuses_places_it_cannot_write_to_or_read_from(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot write"):
        save_profile(RESNET_T, tmp_path / "no" / "p.json")
    with pytest.raises(InputError, match="cannot read"):
        load_profile(tmp_path / "none.json")


def test_a_list_of_numbers_takes_one_line_and_strings_stay_as_they_are(tmp_path: Path) -> None:
    sample = Sample(1, 1.0, 2.0, 3.0, 2, likely_ms=(2.0, 3.0))
    profile = structs.replace(RESNET_T, samples=(sample,), source="table [1,  2]")
    save_profile(profile, tmp_path / "p.json")
    assert '"likely_ms": [ 2.0, 3.0 ]' in (tmp_path / "p.json").read_text()
    assert load_profile(tmp_path / "p.json") == profile


def test_knows_the_model_it_was_measured_on(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"abc")
    assert digest(tmp_path / "m.onnx").startswith("ba7816bf")
    assert is_of(RESNET_T, tmp_path / "m.onnx")  # nothing says otherwise
    assert is_of(structs.replace(RESNET_T, model_digest=digest(tmp_path / "m.onnx")), tmp_path / "m.onnx")
    assert not is_of(structs.replace(RESNET_T, model_digest="0"), tmp_path / "m.onnx")
