"""Text and numbers out of trace files: archives, counts, times, and mistakes with their lines."""

import bz2
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop.workload.parse import (
    Entry,
    MissingCounts,
    SourceText,
    Unit,
    after_gaps_ns,
    careful_counts,
    column_entries,
    instants_ns,
    quick_counts,
    read_folder,
    read_text,
    split_entries,
)

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
    with pytest.raises(InputError, match=r"the archive has 2 files: one/x\.txt, two/y\.txt"):
        read_text(path)
    with pytest.raises(InputError, match="no file called 'three' in the archive"):
        read_text(path, member="three")
    assert read_text(path, member="two").text == "2"


def test_folders_are_read_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    (tmp_path / "below").mkdir()
    assert {name: text.text for name, text in read_folder(tmp_path).items()} == {"a": "1"}
    with pytest.raises(InputError, match="neither a folder nor an archive"):
        read_folder(tmp_path / "a")


def test_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.workload.parse.BYTES_MAX", 5)
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"0" * 1_000_000))
    with pytest.raises(InputError, match="more than 5 bytes"):
        read_text(path)


def test_a_member_is_not_blamed_for_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sloop.workload.parse.BYTES_MAX", 5)
    path = pack(tmp_path / "a.zip", {"x.txt": "123", "y.txt": "456"})
    with pytest.raises(InputError, match="with the files before it more than 5 bytes") as caught:
        read_folder(path)
    assert caught.value.where == f"{path}!y.txt"
    assert read_text(path, member="y").text == "456"


@pytest.mark.parametrize("name", ["a.zip", "a.tbz2", ""])
def test_too_many_files_are_refused_and_none_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Files of an archive that are not asked for do not count."""
    monkeypatch.setattr("sloop.workload.parse.MEMBERS_MAX", 2)
    files = {f"in/{number}.txt": str(number) for number in range(3)}
    path = pack(tmp_path / (name or "a.zip"), files)
    path = path if name else tmp_path / "in"
    with pytest.raises(InputError, match="more than 2 files") as caught:
        read_folder(path)
    assert caught.value.where == str(path)
    if name:
        assert read_folder(path, member="in/2").keys() == {"2.txt"}
    monkeypatch.setattr("sloop.workload.parse.MEMBERS_MAX", 3)
    assert read_folder(path).keys() == {"0.txt", "1.txt", "2.txt"}


def test_missing_binary_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(InputError, match="cannot be read"):
        read_text(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"1\n2\n\xff\xfe")
    with pytest.raises(InputError, match=r"binary\.txt:3: not text"):
        read_text(tmp_path / "binary.txt")


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.sampled_from(["a.zip", "a.tbz2", "a.tar", "a.gz", "a.bz2", "a.xz", "a.txt"]))
def test_only_input_errors_escape(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    try:
        read_text(tmp_path / name)
    except InputError as error:
        assert error.where.startswith(str(tmp_path / name))  # noqa: PT017


MESSY = st.text(alphabet='0123456789 .,-+e_:\n\r\tTZnax#\x00\x0b\u0661"', max_size=40)


def counts_of(text: str, gaps: MissingCounts = MissingCounts.REFUSE) -> list[int]:
    return list(careful_counts(split_entries(SourceText(text, "t")), "t", gaps))


def instants_of(text: str, unit: Unit = Unit.S) -> list[int]:
    return list(instants_ns(split_entries(SourceText(text, "t")), "t", unit))


@settings(max_examples=300)
@given(MESSY)
def test_only_input_errors_escape_and_they_name_the_line(text: str) -> None:
    for read in (
        lambda: counts_of(text),
        lambda: counts_of(text, MissingCounts.FILL),
        lambda: instants_of(text),
        lambda: list(after_gaps_ns(split_entries(SourceText(text, "t")), "t", Unit.MS)),
        lambda: list(column_entries(SourceText(text, "t"), "", ("n",))),
        lambda: list(column_entries(SourceText(text, "t"), "x", ())),
    ):
        try:
            read()
        except InputError as error:
            assert error.where.startswith("t")  # noqa: PT017
            assert error.help  # noqa: PT017


@settings(max_examples=100)
@given(MESSY)
def test_the_quick_way_agrees_with_the_careful_one(text: str) -> None:
    quick = quick_counts(SourceText(text, "t"))
    if quick is not None:
        assert list(quick) == counts_of(text)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 1_000), min_size=1), st.sampled_from([" ", "\n", ", ", "\r\n", "  \t"]))
def test_clean_counts_are_read_the_quick_way(counts: list[int], between: str) -> None:
    text = SourceText(between.join(map(str, counts)), "t")
    assert counts_of(text.text) == counts
    if "," not in between:
        assert list(quick_counts(text) or ()) == counts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t: the trace is empty"),
        ("  \n\n", "t: the trace is empty"),
        ("1\n2\nthree\n", "t:3: 'three' is not a number"),
        ("1\n-2\n", "t:2: the count -2 is negative"),
        (
            "1\n2.5\n",
            "t:2: 2.5 is not a whole number of requests\nhelp: if these are mean rates, say `spread: poisson`",
        ),
        ("1\n\n3\n", "t:2: second 1 has no count\nhelp: put a number there, or say `gaps: fill`"),
        ("1 nan 3", "t:1: second 1 has no count"),
        ("1 1700000000", "t:1: 1700000000 requests in one second"),
        ("0x10", "t:1: '0x10' is not a number"),
        ("1_000", "t:1: '1_000' is not a number"),
    ],
)
def test_bad_counts(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        counts_of(text)
    assert message in str(caught.value)


def test_gaps_are_filled_with_the_count_before_when_asked() -> None:
    assert counts_of("# comment\n5\n\nnan\n7\n\n", MissingCounts.FILL) == [5, 5, 5, 7]
    with pytest.raises(InputError, match="t:1: the first count is missing"):
        counts_of("nan 3", MissingCounts.FILL)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t: the trace is empty"),
        ("1.5\nx\n", "t:2: 'x' is not a number"),
        ("1\n3\n2\n", "t:3: 2 is before the arrival above it\nhelp: sort the file by time"),
        ("-1\n", "t:1: the time -1 is negative"),
        ("1e30", "t:1: 1E+30 s is too late"),
        ("0001-01-01 00:00:00\n9999-01-01 00:00:00", "t:1: '0001-01-01' is not a number"),
        ("25:61:99", "t:1: '25:61:99' is not a date and time"),
    ],
)
def test_bad_instants(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        instants_of(text)
    assert message in str(caught.value)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10**17 - 1), min_size=1).map(sorted), st.sampled_from(list(Unit)))
def test_instants_are_exact(times_ns: list[int], unit: Unit) -> None:
    text = "\n".join(format(Decimal(at_ns).scaleb(-unit.exponent), "f") for at_ns in times_ns)
    assert instants_of(text, unit) == times_ns


def test_dates_and_epochs_start_at_the_first_arrival() -> None:
    cells = [Entry("2023-11-16 18:15:46.6805900", 2), Entry("2023-11-16T18:15:50.9951690Z", 3)]
    assert list(instants_ns(cells, "t", Unit.S)) == [0, 4_314_579_000]
    offset = [Entry("2023-11-16 18:00:00Z", 2), Entry("2023-11-16 20:00:01+02:00", 3)]
    assert list(instants_ns(offset, "t", Unit.S)) == [0, 1_000_000_000]
    assert instants_of("1700000000123 1700000000125", Unit.MS) == [0, 2_000_000]


def test_columns_are_found_by_name_candidate_or_being_alone() -> None:
    table = SourceText("Time, Count\n1,2\n3\n", "t")
    assert list(column_entries(table, "COUNT", ())) == [Entry("2", 2), Entry("", 3)]
    assert list(column_entries(table, "", ("when", "time"))) == [Entry("1", 2), Entry("3", 3)]
    assert list(column_entries(SourceText("x\n1\n", "t"), "", ())) == [Entry("1", 2)]
    blank = SourceText("count\n1\n\n2\n\n", "t")
    assert list(column_entries(blank, "", ())) == [Entry("1", 2), Entry("", 3), Entry("2", 4)]
    assert list(column_entries(SourceText("a,b\n1,2\n\n3,4\n", "t"), "a", ())) == [Entry("1", 2), Entry("3", 4)]
    with pytest.raises(InputError, match="no column 'cont'\nhelp: did you mean 'count'"):
        list(column_entries(table, "cont", ()))
    with pytest.raises(
        InputError, match="it is not clear which column to read\nhelp: name one as `column`: time, count"
    ):
        list(column_entries(table, "", ()))


def test_gaps_between_arrivals_add_up() -> None:
    assert list(after_gaps_ns([Entry("5", 1), Entry("0", 1), Entry("1e-6", 1)], "t", Unit.MS)) == [
        5_000_000,
        5_000_000,
        5_000_001,
    ]
    with pytest.raises(InputError, match="t:1: the gap -1 is negative"):
        list(after_gaps_ns([Entry("-1", 1)], "t", Unit.MS))


def test_a_trace_is_at_most_three_years_long() -> None:
    with pytest.raises(InputError, match="t:2: at 6e7 the trace is over 3 years long"):
        list(after_gaps_ns([Entry("6e7", 1), Entry("6e7", 2)], "t", Unit.S))
    with pytest.raises(InputError, match="t:3: at 2123-01-01 00:00:00 the trace is over 3 years long"):
        list(instants_ns([Entry("2023-01-01 00:00:00", 2), Entry("2123-01-01 00:00:00", 3)], "t", Unit.S))


def test_a_line_of_blanks_is_a_missing_count_on_both_paths() -> None:
    assert quick_counts(SourceText("1\n \n2\n", "t")) is None
    with pytest.raises(InputError, match="t:2: second 1 has no count"):
        counts_of("1\n \n2\n")
