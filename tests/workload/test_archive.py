import bz2
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.workload import archive
from sloop.workload.archive import read_folder, read_text

PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".txt": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def pack(path: Path, files: dict[str, str]) -> Path:
    """An archive of the kind that the name says."""
    for name, text in files.items():
        (path.parent / name).parent.mkdir(exist_ok=True)
        (path.parent / name).write_text(text)
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as zipped:
            for name in files:
                zipped.write(path.parent / name, name)
    else:
        with tarfile.open(path, "w:bz2") as tarred:
            for name in files:
                tarred.add(path.parent / name, name)
    return path


@pytest.mark.parametrize("suffix", PACKED)
def test_reads_compressed_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_bytes(PACKED[suffix](b"\xef\xbb\xbf1 2 3\n"))
    assert read_text(path).text == "1 2 3\n"


@pytest.mark.parametrize("name", ["a.zip", "a.tbz2", "a.tar.bz2"])
def test_reads_archives(tmp_path: Path, name: str) -> None:
    path = pack(tmp_path / name, {"trace.txt": "1 2", ".hidden": "x"})
    assert read_text(path).text == "1 2"
    assert read_text(path).where == f"{path}!trace.txt"
    assert read_folder(path).keys() == {"trace.txt"}


def test_says_which_members_there_are(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.zip", {"one/x.txt": "1", "two/y.txt": "2"})
    with pytest.raises(InputError, match=r"2 files to choose from: one/x\.txt, two/y\.txt"):
        read_text(path)
    with pytest.raises(InputError, match="no file called 'three' in it"):
        read_text(path, member="three")
    assert read_text(path, member="two").text == "2"


def test_folders_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "below").mkdir()
    assert {name: text.text for name, text in read_folder(tmp_path).items()} == {"a": "1"}
    with pytest.raises(InputError, match="neither a folder nor an archive"):
        read_folder(tmp_path / "a")


def test_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "BYTES_MAX", 5)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 1_000_000))
    with pytest.raises(InputError, match="more than 5 bytes"):
        read_text(path)


def test_missing_binary_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"1\n2\n\xff\xfe")
    with pytest.raises(InputError, match=r"binary\.txt:3: not text"):
        read_text(tmp_path / "binary.txt")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(["a.zip", "a.tbz2", "a.tar", "a.gz", "a.bz2", "a.xz", "a.txt"]))
def test_only_input_errors_escape(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        read_text(tmp_path / name)
    except InputError as error:
        assert error.where.startswith(str(tmp_path / name))  # noqa: PT017
