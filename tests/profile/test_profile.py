"""Profiles: what they refuse, what they were measured for, what the published ones say."""

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from onnx import TensorProto, helper, numpy_helper, save

from sloop.errors import InputError, MachineError
from sloop.profile.profile import (
    COST_SPREAD_MAX,
    VERSION,
    Amdahl,
    Latency,
    LatencyTable,
    Profile,
    Quadratic,
    Region,
    Sample,
    SizeLatency,
    digest,
    digest_of_model,
    is_of,
    latency_between,
    likely,
    load_profile,
    path_beside,
    sample_of,
    save_profile,
    size_of_model,
)
from sloop.profile.published import PUBLISHED, RESNET18_HUMAN, RESNET_T, YOLOV5S_S
from sloop.sizes import GRID


def of_sizes(*sizes: int) -> tuple[SizeLatency, ...]:
    """2 ms and 0.1 ms for each element of a row."""
    return tuple(SizeLatency(size, Quadratic(0, size / 10, 2)) for size in sizes)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"max_batch": 0}, "max_batch is 0"),
        ({"sizes": of_sizes(64, 16)}, "the size 16 comes after 64"),
        ({"sizes": of_sizes(16, 16)}, "the size 16 is given twice"),
        ({"sizes": of_sizes(0, 16)}, "a size of 0; a size is at least 1"),
        ({"sizes": (SizeLatency(16, Amdahl(-9, 0, 0, 0)),)}, "latency_ms of size 16 is -0.5625 ms at batch 1"),
        ({"max_cores": 0.0}, "max_cores is 0"),
        ({"max_cores": float("inf")}, "max_cores is inf"),
        ({"load_s": -1.0}, "load_s is -1"),
        ({"memory_bytes": -1}, "memory_bytes is -1"),
        ({"memory_bytes": 5, "resize_bytes": 6}, "resize_bytes is 6"),
        ({"latency_ms": Amdahl(-9, 0, 0, 0)}, "latency_ms is"),
        ({"latency_ms": Amdahl(float("nan"), 0, 0, 0)}, "latency_ms is nan"),
    ],
)
def test_refuses_figures_out_of_range(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        structs.replace(RESNET_T, **change)


def test_region_is_declared_or_spanned_by_samples_or_cells() -> None:
    assert RESNET_T.region == Region(1, 8, 1, 8)
    assert structs.replace(RESNET_T, measured=None).region == Region(1, 8, 1, 8)
    assert RESNET18_HUMAN.region == Region(1, 16, 1, 32)
    assert YOLOV5S_S.region is None


def test_says_where_it_extrapolates() -> None:
    assert not RESNET_T.is_extrapolated(8, 8)
    assert RESNET_T.is_extrapolated(9, 8)
    assert RESNET_T.is_extrapolated(8, 0.5)
    assert not YOLOV5S_S.is_extrapolated(100, 100)
    samples = (Sample(1, 1, 5, 6, 10), Sample(4, 1, 9, 10, 10))
    quadratic = Profile(latency_ms=Quadratic(0, 1, 4), max_batch=8, max_cores=1, samples=samples)
    assert not quadratic.is_extrapolated(4, 2)  # cores do not enter
    assert quadratic.is_extrapolated(5, 1)


def test_between_and_beyond_sizes() -> None:
    profile = Profile(latency_ms=Quadratic(0, 10, 2), max_batch=8, max_cores=1, sizes=of_sizes(16, 64, 256))
    for size in (1, 8, 16, 40, 64, 100, 256, 1000):
        assert profile.latency_at(size, 4, 1) == pytest.approx(2 + 0.1 * 4 * size)
        assert profile.is_extrapolated(4, 1, size) == (not 16 <= size <= 256)
    assert profile.latency_at(0, 4, 1) == 42
    assert not profile.is_extrapolated(4, 1)
    assert profile.size_max == 1024


@pytest.mark.parametrize(
    ("values_ms", "size", "latency_ms"),
    [
        ((1, 10, 20), 5, 0.5),  # in proportion: the first slope would be below 0
        ((10, 10, 10), 5, 10),
        ((10, 8, 30), 30, 20),  # larger rows never take less
        ((10, 10, 30), 60, 30 + 20 * (1 + 40 / 30)),  # curving up: the parabola
        ((10, 30, 40), 60, 50),  # curving down: the last slope
    ],
)
def test_how_sizes_are_interpolated(values_ms: tuple[float, ...], size: int, latency_ms: float) -> None:
    assert latency_between((10, 20, 40), values_ms, size) == pytest.approx(latency_ms)


def test_attention_is_extrapolated_as_a_parabola() -> None:
    def truth(size: int) -> float:
        return 3 + 0.05 * size + 0.0004 * size * size

    sizes = (16, 64, 256)
    for size in (300, 1024):
        assert latency_between(sizes, [truth(each) for each in sizes], size) == pytest.approx(truth(size))


@given(
    st.lists(st.integers(1, 10**5), min_size=2, max_size=6, unique=True).map(sorted),
    st.lists(st.floats(0.01, 1e4), min_size=6, max_size=6),
    st.lists(st.integers(1, 4 * 10**5), min_size=2).map(sorted),
)
def test_larger_rows_never_take_less(sizes: list[int], values_ms: list[float], asked: list[int]) -> None:
    found = [latency_between(sizes, values_ms[: len(sizes)], size) for size in asked]
    assert found[0] > 0
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(found))


def test_classes_bound_how_much_the_cost_of_their_rows_differs() -> None:
    profile = Profile(latency_ms=Quadratic(0, 10, 2), max_batch=8, max_cores=1, sizes=of_sizes(16, 64, 512))
    bounds = profile.size_classes.bounds
    assert bounds[-1] == 512
    assert 8 < len(bounds) < 16, bounds
    for before, bound in itertools.pairwise((0, *bounds)):
        least, most = (profile.latency_at(size, 8, 1) for size in (before + 1, bound))
        assert most <= COST_SPREAD_MAX * least or bound == before + 1
    assert profile.size_classes.class_of(513) == 768
    flat = structs.replace(profile, sizes=tuple(SizeLatency(size, Quadratic(0, 1, 2)) for size in (16, 512)))
    assert flat.size_classes.bounds == (512,)
    assert RESNET_T.size_classes is GRID


def test_sizes_are_kept_in_the_file(tmp_path: Path) -> None:
    profile = structs.replace(RESNET_T, sizes=of_sizes(16, 64))
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile
    path = tmp_path / "p.json"
    path.write_text(path.read_text().replace('"size": 64', '"size": 16'))
    with pytest.raises(InputError, match=r"the size 16 is given twice.*\$\.profile"):
        load_profile(path)


def test_published_profiles_say_where_they_come_from() -> None:
    for name, profile in PUBLISHED.items():
        assert profile.source, name
        assert profile.hardware, name
        assert profile.date, name
    assert YOLOV5S_S.origin == "assumed"
    assert YOLOV5S_S.latency_ms.latency_ms(1, 8) == pytest.approx(50.5)
    assert YOLOV5S_S.latency_ms.latency_ms(10, 16) == pytest.approx(350.5)


def test_speaks_through_a_fit() -> None:
    assert RESNET18_HUMAN.latency_ms.latency_ms(16, 4) == 169.0
    assert int(RESNET18_HUMAN.with_fit("amdahl_whole_ms").latency_ms.latency_ms(10, 5)) == 91


TABLE = LatencyTable({1: {1: 40.0, 4: 16.0}, 5: {1: 120.0, 4: 48.0}})


def test_values() -> None:
    assert Quadratic(alpha=2, beta=3, gamma=5).latency_ms(4, 7) == 2 * 16 + 3 * 4 + 5
    assert Amdahl(gamma=8, epsilon=4, delta=3, eta=5).latency_ms(2, 4) == 8 * 2 / 4 + 4 / 4 + 3 * 2 + 5


@pytest.mark.parametrize(
    ("batch", "cores", "latency_ms"),
    [
        (1, 1, 40.0),
        (5, 4, 48.0),
        (1, 2, 24.0),  # Amdahl: 8 + 32/c
        (3, 1, 80.0),  # half-way between rows
        (3, 2, 48.0),
        (1, 8, 16.0),  # more cores than measured bring nothing
        (1, 0.5, 80.0),  # fewer cost in proportion
        (7, 1, 160.0),  # the last slope, 20 ms per request, goes on
    ],
)
def test_table_between_and_beyond_its_cells(batch: int, cores: float, latency_ms: float) -> None:
    assert TABLE.latency_ms(batch, cores) == pytest.approx(latency_ms)


def test_table_below_its_smallest_batch_and_with_one_row() -> None:
    table = LatencyTable({4: {2: 30.0}})
    assert table.latency_ms(1, 2) == 30.0
    assert table.latency_ms(8, 2) == 60.0


@pytest.mark.parametrize("table", [{}, {1: {}}, {0: {1: 1.0}}, {1: {0: 1.0}}, {1: {1: -1.0}}, {1: {1: float("nan")}}])
def test_invalid_tables_are_refused(table: dict[int, dict[float, float]]) -> None:
    with pytest.raises(ValueError, match="table"):
        LatencyTable(table)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5, unique=True),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 4.0, 16.0]), min_size=1, max_size=5, unique=True),
)
@settings(max_examples=100)
def test_a_monotone_table_gives_a_monotone_latency(batches: list[int], cores: list[float]) -> None:
    table = LatencyTable(
        {batch: {core: (3 * batch + 7) / core + batch**1.5 + 2 for core in cores} for batch in batches}
    )
    sizes = range(1, 50)
    for core in (0.1, 0.7, 1.0, 3.0, 20.0):
        row = [table.latency_ms(batch, core) for batch in sizes]
        assert all(high >= low - 1e-9 for low, high in itertools.pairwise(row))
    for batch in sizes:
        column = [table.latency_ms(batch, core) for core in (0.1, 0.25, 0.3, 1.0, 1.2, 4.0, 9.0, 30.0)]
        assert all(low >= high - 1e-9 for low, high in itertools.pairwise(column))


@pytest.mark.parametrize("form", [Quadratic(1, 2, 3), Amdahl(1, 2, 3, 4), TABLE])
def test_forms_survive_json(form: Latency) -> None:
    TABLE.latency_ms(2, 2)  # what it keeps for itself is not written
    raw = msgspec.json.encode(form)
    assert msgspec.json.decode(raw, type=Latency) == form
    assert msgspec.json.decode(raw)["form"] in ("quadratic", "amdahl", "table")


def test_a_cell_keeps_percentiles_and_equally_likely_durations() -> None:
    sample = sample_of(2, 0.5, [n * 1_000_000 for n in range(160, 0, -1)])
    assert (sample.batch, sample.cores, sample.p50_ms, sample.p99_ms, sample.n) == (2, 0.5, 80, 159, 160)
    assert sample.likely_ms[:3] == (1.8, 4.2, 6.8)  # of 1, 2 and half of 3; half of 3, 4 and 5; 6, 7 and half of 8
    assert len(sample.likely_ms) == 64
    assert sum(sample.likely_ms) / 64 == pytest.approx(80.5)


@given(st.lists(st.floats(0.01, 1e4), min_size=1, max_size=100), st.integers(1, 20))
def test_equally_likely_durations_keep_order_range_and_mean(values: list[float], count: int) -> None:
    values.sort()
    found = likely(values, count)
    assert sum(found) / count == pytest.approx(sum(values) / len(values))
    assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(found))
    assert values[0] * (1 - 1e-6) <= found[0]
    assert found[-1] <= values[-1] * (1 + 1e-6)


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
        (f'{{"version": {VERSION + 1}}}'.encode(), f"version {VERSION + 1}"),
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
    (tmp_path / "file").touch()  # nothing below it can be deleted either, as on a file system that is read-only
    with pytest.raises(MachineError, match="cannot write"):
        save_profile(RESNET_T, tmp_path / "no" / "p.json")
    with pytest.raises(MachineError, match="cannot write"):
        save_profile(RESNET_T, tmp_path / "file" / "p.json")
    with pytest.raises(InputError, match="cannot read"):
        load_profile(tmp_path / "none.json")


def test_a_list_of_numbers_takes_one_line_and_strings_stay_as_they_are(tmp_path: Path) -> None:
    sample = Sample(1, 1.0, 2.0, 3.0, 2, likely_ms=(2.0, 3.0))
    profile = structs.replace(RESNET_T, samples=(sample,), source="table [1,  2]")
    save_profile(profile, tmp_path / "p.json")
    assert '"likely_ms": [ 2.0, 3.0 ]' in (tmp_path / "p.json").read_text()
    assert load_profile(tmp_path / "p.json") == profile


def test_profile_matches_only_the_measured_model(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"abc")
    assert digest(tmp_path / "m.onnx").startswith("ba7816bf")
    assert is_of(RESNET_T, tmp_path / "m.onnx")  # nothing says otherwise
    assert is_of(structs.replace(RESNET_T, model_digest=digest(tmp_path / "m.onnx")), tmp_path / "m.onnx")
    assert not is_of(structs.replace(RESNET_T, model_digest="0"), tmp_path / "m.onnx")


def weights_apart(path: Path, value: float, *, constant: bool = False) -> None:
    """A model that adds a weight which lies in `weights.bin`."""
    tensor = numpy_helper.from_array(np.full(64, value, np.float32), "w")
    nodes = [helper.make_node("Add", ["x", "w"], ["y"])]
    if constant:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [64]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], [] if constant else [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.with_name("weights.bin").unlink(missing_ok=True)
    save(
        model,
        str(path),
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
        convert_attribute=constant,
    )


@pytest.mark.parametrize("constant", [False, True])
def test_weights_in_other_files_belong_to_the_model(tmp_path: Path, constant: bool) -> None:
    path = tmp_path / "m.onnx"
    weights_apart(path, 1.0, constant=constant)
    graph, profile = digest(path), structs.replace(RESNET_T, model_digest=digest_of_model(path))
    assert is_of(profile, path)
    assert profile.model_digest != graph
    weights_apart(path, 2.0, constant=constant)
    assert digest(path) == graph, "the graph is the same"
    assert not is_of(profile, path)
    weights_apart(path, 1.0, constant=constant)
    assert is_of(profile, path)
    (tmp_path / "weights.bin").unlink()
    assert not is_of(profile, path)


@pytest.mark.parametrize("constant", [False, True])
def test_the_size_of_a_model_is_that_of_all_its_files(tmp_path: Path, constant: bool) -> None:
    path = tmp_path / "m.onnx"
    weights_apart(path, 1.0, constant=constant)
    weights = tmp_path / "weights.bin"
    assert size_of_model(path) == path.stat().st_size + weights.stat().st_size > weights.stat().st_size == 256
    weights.unlink()
    assert size_of_model(path) == 0
    (tmp_path / "m.py").write_text("class Model: ...")
    assert size_of_model(tmp_path / "m.py") == size_of_model(tmp_path / "none.onnx") == 0
    (tmp_path / "broken.onnx").write_bytes(b"abc")
    assert size_of_model(tmp_path / "broken.onnx") == 3
    with pytest.raises(ValueError, match="weights_bytes is -1"):
        structs.replace(RESNET_T, weights_bytes=-1)


def test_a_model_without_other_files_has_the_digest_of_its_file(tmp_path: Path) -> None:
    for name, content in (("m.py", b"location"), ("m.onnx", b"no model with a location"), ("e.onnx", b"")):
        path = tmp_path / name
        path.write_bytes(content)
        assert digest_of_model(path) == digest(path)
    named = helper.make_model(helper.make_graph([], "location", [], []))
    save(named, str(tmp_path / "n.onnx"))
    assert digest_of_model(tmp_path / "n.onnx") == digest(tmp_path / "n.onnx")
