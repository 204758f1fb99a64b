"""The fabric of emulated switches: bit for bit the reference, in any order, with duplicates, losses and swaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sloop.errors import InputError
from sloop_systems.netnn.emulator import Emulator, Faults, InferenceEnding, run_in_lanes
from sloop_systems.netnn.mapper import Fabric, NoCapacity
from sloop_systems.netnn.network import SIGNED, Convolution, Dense, Network, classify
from sloop_systems.netnn.packets import packets_of
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.switch import Multiplier
from tests.sloop_systems.netnn.models import flow_model, model, picture_model, rows_of, small_model, tiny_model

RANDOM_ORDER = Faults(duplicates=0.2, jitter_ns=100_000)
LONG_NS = 1e9
TWO_UNITS = Fabric(units=2)
"""With fewer packets than four, for tests of hundreds of inferences."""


def dense_model() -> Network:
    return model(40, [], [5, 3], [6])


MODELS = {
    "small": small_model(),
    "odd filters": model(31, [(5, 4, 3), (2, 3, 1)], [13, 7, 2], [3, 8, 8, 8]),
    "one layer": model(19, [], [1], []),
    "dense": dense_model(),
    "picture": picture_model(inputs=SIGNED),
}


def inputs_of(network: Network, count: int) -> np.ndarray:
    low, high = network.inputs.low, network.inputs.high
    return np.random.default_rng(count).integers(low, high + 1, (count, network.input_count))


@pytest.mark.parametrize("fabric", [Fabric(), Fabric(payload_bytes=3), Fabric(sends_windows=False), Fabric(units=3)])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_reference_on_thousands_of_inputs(name: str, fabric: Fabric) -> None:
    network = MODELS[name]
    rows = inputs_of(network, 256)
    logits, _ = run_in_lanes(compile_network(network, fabric), rows, seed=1, duplicates=0.2)
    assert (logits == network.run(rows)).all()


@pytest.mark.parametrize("multiplier", ["shift-add", "lut16"])
def test_equals_the_reference_on_the_flow_model(multiplier: Multiplier) -> None:
    rows = rows_of(flow_model(), 20)
    logits, _ = run_in_lanes(compile_network(flow_model()), rows, seed=2, duplicates=0.2, multiplier=multiplier)
    assert (logits == flow_model().run(rows)).all()


def test_rows_in_chunks_and_none() -> None:
    network, program = tiny_model(), compile_network(tiny_model())
    rows = rows_of(network, 600)
    logits, counts = run_in_lanes(program, rows, seed=3, duplicates=0.1)
    assert (logits == network.run(rows)).all()
    assert counts[0].packets > 600 * program.copies[0]
    for none in (rows[:0], np.zeros((0, 0), int)):
        assert run_in_lanes(program, none)[0].shape == network.run(none).shape == (0, 1)
        assert Emulator(program).run(none)[0] == []


def test_sixteen_units_a_layer() -> None:
    rows = rows_of(small_model(), 30)
    program = compile_network(small_model(), Fabric(units=16, leaves=32))
    logits, _ = run_in_lanes(program, rows)
    assert (logits == small_model().run(rows)).all()
    assert program.copies == (912, 4864, 2048, 256, 16)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_network_equals_the_reference(data: st.DataObject) -> None:
    length = data.draw(st.integers(12, 30), "length")
    convolutions = []
    left = length
    for _ in range(data.draw(st.integers(0, 2), "convolutions")):
        kernel, pool = data.draw(st.integers(1, 3), "kernel"), data.draw(st.integers(1, 3), "pool")
        if (left - kernel + 1) // pool < 1:
            break
        left = (left - kernel + 1) // pool
        convolutions.append((data.draw(st.integers(1, 7), "filters"), kernel, pool))
    dense = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "dense")
    shifts = [data.draw(st.integers(2, 9), "shift") for _ in range(len(convolutions) + len(dense) - 1)]
    network = model(length, convolutions, dense, shifts, data.draw(st.integers(0, 50), "weights"))
    fabric = Fabric(units=data.draw(st.sampled_from([1, 3, 4]), "units"), payload_bytes=data.draw(st.integers(1, 70)))
    rows = rows_of(network, 5)
    seed = data.draw(st.integers(0, 9), "order")
    logits, _ = run_in_lanes(compile_network(network, fabric), rows, seed=seed, duplicates=0.2)
    assert (logits == network.run(rows)).all()


# Table P6.1


@pytest.mark.timeout(300)
def test_the_table_by_execution() -> None:
    """Copies, operations of the most expensive packet, register cells: 5.4 of the specification, packet by packet."""
    emulator = Emulator(compile_network(flow_model()), multiplier="shift-add")
    (verdict,), counts = emulator.run(rows_of(flow_model(), 1))
    assert verdict.logits == (857,)
    assert [layer.packets for layer in counts.layers] == [3240, 2592, 496, 16, 4]
    assert [layer.operations_max for layer in counts.layers] == [644, 38_895, 3_159, 4_950, 378]
    assert [layer.memory_cells for layer in counts.layers] == [1296, 5680, 13, 25, 1]
    per_unit = [511_920, 6_046_573, 390_117, 19_725, 1_509]
    assert [layer.operations for layer in counts.layers] == [4 * each for each in per_unit[:-1]] + per_unit[-1:]
    assert [len(units) for units in emulator.pipelines] == [4, 4, 4, 4, 1]


def test_sums_of_operations_do_not_depend_on_the_order() -> None:
    program = compile_network(small_model())
    rows = rows_of(small_model(), 1)
    _, in_order = run_in_lanes(program, rows, multiplier="shift-add")
    _, shuffled = run_in_lanes(program, rows, multiplier="shift-add", seed=1)
    assert [layer.operations for layer in in_order] == [layer.operations for layer in shuffled]
    assert shuffled[1].operations_max > in_order[1].operations_max  # one packet completed several windows
    assert shuffled[0].operations_max == in_order[0].operations_max


# Order, duplicates, slots


@pytest.mark.parametrize(("seed", "count"), [(0, 256), (1, 40), (2, 40)])
def test_random_order_and_duplicates_on_eight_slots(seed: int, count: int) -> None:
    rows = rows_of(tiny_model(), count)
    emulator = Emulator(compile_network(tiny_model(), TWO_UNITS), seed=seed, faults=RANDOM_ORDER, timeout_ns=LONG_NS)
    verdicts, counts = emulator.run(rows)
    assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in tiny_model().run(rows).tolist()]
    assert counts.duplicated > 5 * count
    assert counts.endings == {InferenceEnding.VERDICT: count}


def test_one_seed_is_one_run() -> None:
    def run(seed: int) -> list[float]:
        faults = Faults(loss=0.01, duplicates=0.1, jitter_ns=5000)
        emulator = Emulator(compile_network(tiny_model()), seed=seed, faults=faults)
        return [verdict.end_ns for verdict in emulator.run(rows_of(tiny_model(), 20))[0]]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_rows_without_a_slot_are_turned_away_and_counted() -> None:
    emulator = Emulator(compile_network(tiny_model(), TWO_UNITS), waiting_max=10)
    rows = rows_of(tiny_model(), 256)
    verdicts, counts = emulator.run(rows)
    assert counts.endings == {InferenceEnding.VERDICT: 18, InferenceEnding.NO_SLOT: 238}
    for verdict, logits in zip(verdicts, tiny_model().run(rows), strict=True):
        assert verdict.logits == (None if verdict.ending is InferenceEnding.NO_SLOT else tuple(logits))


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 10**6),
    st.floats(0, 0.02),
    st.floats(0, 0.5),
    st.sampled_from([0, 500, 50_000]),
    st.sampled_from([1, 2, 8]),
)
def test_never_a_wrong_verdict(seed: int, loss: float, duplicates: float, jitter_ns: float, slots: int) -> None:
    """Whatever happens to packets, also around time-outs that are much too short, a verdict is the reference's."""
    program = compile_network(tiny_model(), Fabric(slots=slots, units=2))
    faults = Faults(loss=loss, duplicates=duplicates, jitter_ns=jitter_ns)
    emulator = Emulator(program, seed=seed, faults=faults, timeout_ns=30_000)
    rows = rows_of(tiny_model(), 16)
    verdicts, counts = emulator.run(rows)
    for verdict, logits in zip(verdicts, tiny_model().run(rows), strict=True):
        assert verdict.logits in {None, tuple(logits)}
    assert sum(counts.endings.values()) == 16


# Loss


def test_each_of_three_hundred_lost_packets() -> None:
    """One copy of each inference is lost: it is aborted, or nobody needed the copy. The slot serves the next one."""
    network = tiny_model()
    program = compile_network(network, Fabric(slots=2, units=2))
    copies = sum(program.copies) + 1
    rows = rows_of(network, 300)
    lost = frozenset((row, row % copies) for row in range(300))
    emulator = Emulator(program, faults=Faults(lost=lost), timeout_ns=50_000)
    verdicts, counts = emulator.run(rows)
    assert counts.lost == 300
    expected = [tuple(logits) for logits in network.run(rows).tolist()]
    assert all(verdict.logits in {None, logits} for verdict, logits in zip(verdicts, expected, strict=True))
    assert counts.endings[InferenceEnding.ABORTED] > 200
    healthy = emulator.run(rows[:20])[0]  # the same slots, now without losses
    assert [verdict.logits for verdict in healthy] == expected[:20]


def test_a_lost_copy_that_no_window_needs() -> None:
    """The second convolution is sent 10 positions and its windows read 7 of them."""
    network = model(32, [(4, 3, 3), (3, 3, 5)], [1], [3, 8])
    program = compile_network(network, Fabric(units=1))
    second = program.layers[1]
    needless = [message for message, windows in enumerate(second.completes) if not len(windows)]
    assert (second.messages, needless) == (10, [7, 8, 9])
    rows = rows_of(network, second.messages)
    lost = frozenset((row, program.copies[0] + row) for row in range(second.messages))
    verdicts, _ = Emulator(program, faults=Faults(lost=lost), timeout_ns=50_000).run(rows)
    for verdict, logits in zip(verdicts, network.run(rows), strict=True):
        assert verdict.logits == (tuple(logits) if verdict.row in needless else None)


def test_rows_of_the_flow_model_that_nobody_needs() -> None:
    """The second convolution is sent 162 rows, and its windows read 0 to 158."""
    second = compile_network(flow_model()).layers[1]
    needless = [message // 4 for message, windows in enumerate(second.completes) if not len(windows)]
    assert needless == [row for row in (159, 160, 161) for _ in range(4)]


def test_packets_of_an_older_epoch_change_nothing() -> None:
    network = tiny_model()
    program = compile_network(network, Fabric(slots=1))
    first, second, other = rows_of(network, 3)
    emulator = Emulator(program, timeout_ns=LONG_NS)
    emulator.run(first)
    emulator.submit(second, emulator.now_ns)
    for packet in packets_of(program, other, 0):
        for unit in range(4):
            for after_ns in (0, 1_500, 2_500, 3_000):
                emulator.inject(packet.build(), unit, emulator.now_ns + after_ns)
    verdicts = emulator.drain()
    assert verdicts[1].logits == tuple(network.run(second)[0])
    assert emulator.counts.layers[0].drops["old epoch"] > 0


def test_packets_that_are_none_are_counted_and_dropped() -> None:
    network = tiny_model()
    program = compile_network(network)
    emulator = Emulator(program)
    rows = rows_of(network, 8)
    good = packets_of(program, rows[0], 0)[0].build()
    for content in (
        b"",
        b"\x00" * 4,
        b"\x00" * 60,
        good[:17],
        good[:4] + b"\xc8" + good[5:],
        good[:4] + b"\x04" + good[5:],
    ):
        emulator.inject(content, 0)
    emulator.inject(good[:2] + b"\x00\x09" + good[4:], 1)
    emulator.inject(good, 99)
    verdicts, counts = emulator.run(rows)
    assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in network.run(rows).tolist()]
    assert counts.unroutable == 4
    assert counts.layers[0].drops == {"malformed": 2, "unknown version": 1}
    assert counts.sink_drops == {"malformed": 1}


# Weights under load


def test_weights_change_under_load() -> None:
    """No inference mixes versions: each verdict is that of the network of its version."""
    networks = {version: tiny_model(version) for version in (1, 2, 3)}
    programs = {version: compile_network(network, TWO_UNITS, version=version) for version, network in networks.items()}
    rows = rows_of(networks[1], 120)
    emulator = Emulator(programs[1], faults=RANDOM_ORDER, timeout_ns=LONG_NS)
    for row, values in enumerate(rows):
        emulator.submit(values, row * 2_000.0)
    emulator.swap(programs[2], 2_000_001.0)
    emulator.swap(programs[3], 4_000_001.0)
    verdicts = emulator.drain()
    found = [verdict.version for verdict in verdicts]
    assert all(version is not None and found.count(version) > 10 for version in (1, 2, 3))
    for verdict, values in zip(verdicts, rows, strict=True):
        assert verdict.version is not None
        assert verdict.logits == tuple(networks[verdict.version].run(values)[0])
    assert emulator.versions == (3,)
    assert emulator.pipelines[0][0].versions == (3,)


def test_old_weights_stay_while_an_inference_uses_them() -> None:
    network = tiny_model()
    emulator = Emulator(compile_network(network))
    emulator.submit(rows_of(network, 1)[0], 0.0)
    emulator.swap(compile_network(tiny_model(2), version=2), 100.0)
    seen: list[tuple[int, ...]] = []
    emulator._at(101.0, lambda: seen.append(emulator.versions))
    (verdict,) = emulator.drain()
    assert seen == [(1, 2)]
    assert (verdict.version, emulator.versions) == (1, (2,))


@pytest.mark.parametrize(
    ("network", "version", "message"),
    [
        (small_model(), 2, "the new program has other layers, fabric or inputs"),
        (tiny_model(3), 1, "version 1 of the weights is in use"),
    ],
)
def test_swaps_that_cannot_be(network: Network, version: int, message: str) -> None:
    emulator = Emulator(compile_network(tiny_model()))
    with pytest.raises(InputError, match=message):
        emulator.swap(compile_network(network, version=version))


def test_a_swap_needs_room_for_both_weights() -> None:
    emulator = Emulator(compile_network(small_model(), Fabric(memory_bytes=600)))
    with pytest.raises(
        NoCapacity, match="layer 'dense1': with old and new weights it needs 870 bytes, and its leaves have 600"
    ):
        emulator.swap(compile_network(small_model(), Fabric(memory_bytes=600), version=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda program: Emulator(program, timeout_ns=0), "timeout_ms must be a time above 0 ms"),
        (
            lambda program: Emulator(program, faults=Faults(loss=1.5)),
            "loss must be a number of at least 0 and at most 1",
        ),
        (lambda program: Emulator(program).run(np.zeros((1, 11), int)), "rows have 11 values"),
        (lambda program: Emulator(program).run(np.full((1, 12), 2)), "a feature is 2; the network takes 0 to 1"),
    ],
)
def test_wrong_use(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=message):
        make(compile_network(tiny_model()))


def test_windows_in_padding_alone() -> None:
    """They read no input, and are computed all the same."""
    first, last = model(10, [(3, 2, 1)], [2], [3]).layers
    padded = Convolution("conv2", np.ones((2, 1, 1, 3), np.int8), np.array([5, 40]), 1, padding=(2, 0, 1, 0))
    network = Network((10, 1, 1), (first, padded, Dense("dense1", np.ones((1, 24), np.int8), last.bias[:1])))
    rows = rows_of(network, 3)
    for fabric in (Fabric(), Fabric(sends_windows=False)):
        verdicts, _ = Emulator(compile_network(network, fabric)).run(rows)
        assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in network.run(rows).tolist()]


def test_layers_of_other_kinds_in_one_network() -> None:
    """A convolution without pooling whose windows do not fit into a packet, and more classes than a RESULT holds."""
    draw = np.random.default_rng(0)
    weights = draw.integers(-127, 128, (3, 6, 1, 2)).astype(np.int8)
    first = Convolution("conv1", weights, np.arange(3, dtype=np.int32), 6)
    last = Dense("dense1", draw.integers(-127, 128, (75, 27)).astype(np.int8), np.arange(75, dtype=np.int32))
    network = Network((14, 1, 2), (first, last), SIGNED)
    program = compile_network(network, Fabric(payload_bytes=8))
    assert program.result_parts == 10
    rows = inputs_of(network, 6)
    verdicts, _ = Emulator(program, faults=RANDOM_ORDER, timeout_ns=LONG_NS).run(rows)
    assert [verdict.logits for verdict in verdicts] == [tuple(logits) for logits in network.run(rows).tolist()]
    logits = np.array([verdict.logits for verdict in verdicts])
    assert classify(logits).tolist() == network.run(rows).argmax(axis=1).tolist()
