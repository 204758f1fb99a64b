"""The kernel's answers are the reference's, bit for bit, whatever the order; losses give none; and nothing remains."""

import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from sloop.errors import InputError, MachineError
from sloop.machine import usable_cpus
from sloop_systems.netnn import namespaces
from sloop_systems.netnn.bpf import arithmetic_beyond_switches
from sloop_systems.netnn.emulator import FlowVerdict, InferenceEnding
from sloop_systems.netnn.mapper import Fabric, NoCapacity
from sloop_systems.netnn.namespaces import Namespace
from sloop_systems.netnn.network import BYTES, SIGNED, Dense, Ints, Network
from sloop_systems.netnn.packets import Packet, packets_of
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.xdp import XdpFabric, why_no_xdp
from sloop_systems.netnn.xdp_layout import AT_RUNNING, STALLED_NS
from tests.sloop_systems.netnn.kernel import loaded_programs, translated
from tests.sloop_systems.netnn.models import flow_model, model, picture_model, rows_of, small_model

pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]


@pytest.fixture(autouse=True)
def _kernel_runs_programs() -> None:
    if reason := why_no_xdp():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def small() -> Iterator[XdpFabric]:
    if reason := why_no_xdp():
        pytest.skip(reason)
    with XdpFabric(compile_network(small_model()), faults=True) as fabric:
        yield fabric


def total(fabric: XdpFabric, counter: str) -> int:
    return sum(counted.get(counter, 0) for name, counted in fabric.counters().items() if name != "features")


def wrong(verdicts: Sequence[FlowVerdict], expected: Ints) -> list[int]:
    """Rows whose verdict is another than the reference's; an aborted one has none."""
    assert len(verdicts) == len(expected)
    return [
        row
        for row, (verdict, logits) in enumerate(zip(verdicts, expected, strict=True))
        if verdict.logits is not None and list(verdict.logits) != logits.tolist()
    ]


def aborted(verdicts: Sequence[FlowVerdict]) -> int:
    return sum(verdict.logits is None for verdict in verdicts)


def check(fabric: XdpFabric, network: Network, rows: Ints) -> list[FlowVerdict]:
    verdicts = fabric.run(rows, timeout_s=30)
    assert not wrong(verdicts, network.run(rows))
    assert not aborted(verdicts)
    return verdicts


def alike(seed: int) -> Network:
    """A network that differs from the small model in weights only."""
    return model(60, [(10, 4, 3), (6, 3, 2)], [7, 5, 1], [3, 7, 8, 7], seed=seed)


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_the_vectors_of_the_specification(small: XdpFabric) -> None:
    verdicts = small.run(rows_of(small_model(), 4), timeout_s=30)
    logits = [verdict.logits for verdict in verdicts if verdict.logits is not None]
    assert logits == [(5804,), (5746,), (5155,), (5359,)]
    assert {verdict.version for verdict in verdicts} == {1}


@pytest.mark.slow
def test_fifty_flows_of_the_flow_model_equal_the_reference() -> None:
    network = flow_model()
    with XdpFabric(compile_network(network)) as fabric:
        verdicts = check(fabric, network, rows_of(network, 50))
        counted = fabric.counters()
    first = [verdict.logits for verdict in verdicts[:4] if verdict.logits is not None]
    assert first == [(857,), (-1070,), (2246,), (-1054,)]
    layers = ("conv1", "conv2", "dense1")
    received = [sum(counted[f"{layer}.{unit}"]["packets"] for unit in range(4)) for layer in layers]
    assert received == [50 * copies for copies in (3240, 2592, 496)]
    assert counted["dense2.0"]["packets"] + counted["dense3.0"]["packets"] == 50 * (4 + 4)


SEGMENTS = Fabric(sends_windows=False, payload_bytes=7)
WIDE = model(60, [(20, 4, 3), (40, 3, 2)], [70, 2], [3, 8, 9], seed=6)
SPLIT = model(40, [(32, 3, 2), (32, 3, 2)], [20, 1], [3, 9, 9])


@pytest.mark.parametrize(
    ("network", "fabric"),
    [
        pytest.param(model(41, [(5, 3, 2)], [13, 7, 3], [5, 8, 8], seed=3), Fabric(), id="three classes"),
        pytest.param(model(30, [(2, 4, 1), (3, 2, 4)], [5, 1], [4, 6, 8]), Fabric(slots=1), id="one slot"),
        pytest.param(picture_model(), Fabric(), id="two dimensions"),
        pytest.param(picture_model(5, 1, BYTES), Fabric(), id="bytes"),
        pytest.param(picture_model(20, 2, SIGNED), Fabric(), id="negative inputs"),
        pytest.param(picture_model(3, 3, SIGNED), SEGMENTS, id="segments with negative inputs"),
        pytest.param(small_model(), SEGMENTS, id="segments"),
        pytest.param(model(50, [], [30, 40], [6, 0], seed=5), Fabric(payload_bytes=3), id="dense, many parts"),
        pytest.param(WIDE, Fabric(payload_bytes=4), id="convolutions, many parts"),
        pytest.param(SPLIT, Fabric(leaves=32, units=16), id="16 units"),
    ],
)
def test_other_models_equal_the_reference(network: Network, fabric: Fabric) -> None:
    drawn, inputs = np.random.default_rng(1), network.inputs
    rows = drawn.integers(inputs.low, inputs.high + 1, (40, network.input_count))
    rows[0], rows[1] = inputs.low, inputs.high
    with XdpFabric(compile_network(network, fabric)) as built:
        check(built, network, rows)


def set_faults(fabric: XdpFabric, *, loss: float = 0.0, duplication: float = 0.0, seed: int = 1) -> None:
    """From now on, each unit loses packets that it receives, and sends its own twice, with these probabilities."""
    for number, unit in enumerate(unit for units in fabric._units for unit in units):
        fabric._write_faults(unit, loss, duplication, seed + number, lose=-1)


def test_order_and_duplicates_change_nothing(small: XdpFabric) -> None:
    network, drawn = small_model(), np.random.default_rng(7)
    rows = rows_of(network, 256)
    before = total(small, "duplicates")
    set_faults(small, duplication=0.2, seed=3)
    try:
        for _ in range(4):
            order = [*range(57), *drawn.choice(57, 12, replace=False)]
            small.set_order(drawn.permutation(order).tolist())
            check(small, network, rows)
    finally:
        small.set_order(None)
        set_faults(small)
    assert total(small, "duplicates") - before > 4 * 256 * 12 * 4  # those of the first layer, and more after it


def test_a_run_that_is_interrupted_ends_soon_and_leaves_the_fabric_usable(small: XdpFabric) -> None:
    network, requester = small_model(), small._requester
    endless = threading.Thread(target=lambda: small.run(rows_of(network, 20_000), timeout_s=30))
    endless.start()
    until(lambda: bool(requester._begun))
    requester._cancelled = True  # what Ctrl-C does
    endless.join(60)
    assert not endless.is_alive()
    check(small, network, rows_of(network, 8))


def test_256_requests_at_once_share_eight_slots(small: XdpFabric) -> None:
    network = small_model()
    check(small, network, rows_of(network, 256))
    assert small.counters()["features"]["refused"] == 0


def test_300_losses_of_one_packet_give_no_wrong_verdict(small: XdpFabric) -> None:
    network, drawn = small_model(), np.random.default_rng(11)
    rows = rows_of(network, 2)
    expected, lost_before, without = network.run(rows), total(small, "lost"), 0
    messages = [57, 19 * 4, 8 * 4, 4, 4]
    for _ in range(300):
        layer = int(drawn.integers(5))
        unit = int(drawn.integers(4 if layer < 4 else 1))
        small.lose(layer, unit, int(drawn.integers(messages[layer])))
        verdicts = small.run(rows, timeout_s=0.02, at_once=1)
        assert not wrong(verdicts, expected)
        without += aborted(verdicts)
    set_faults(small)
    assert total(small, "lost") - lost_before > 250  # some units were not reached after an abort
    assert without > 200  # no window needs some messages: their loss costs nothing
    check(small, network, rows_of(network, 32))


def test_a_lost_message_that_no_window_needs_costs_nothing(small: XdpFabric) -> None:
    network = small_model()
    rows, before = rows_of(network, 1), total(small, "lost")
    assert not len(compile_network(network).layers[1].completes[-1])
    for unit in range(4):
        small.lose(1, unit, 19 * 4 - 1)  # in order, the last position comes last
        check(small, network, rows)
    assert total(small, "lost") - before == 4


def test_many_losses_give_no_wrong_verdict(small: XdpFabric) -> None:
    network = small_model()
    rows = rows_of(network, 64)
    set_faults(small, loss=0.001, duplication=0.1, seed=5)
    verdicts = small.run(rows, timeout_s=0.05)
    set_faults(small)
    assert not wrong(verdicts, network.run(rows))
    endings = {(verdict.ending, verdict.version) for verdict in verdicts if verdict.logits is None}
    assert endings == {(InferenceEnding.ABORTED, None)}
    check(small, network, rows)


def test_packets_of_another_epoch_or_version_and_malformed_ones_are_counted_and_dropped(small: XdpFabric) -> None:
    network = small_model()
    rows = rows_of(network, 16)
    check(small, network, rows)
    program = compile_network(network)
    old = packets_of(program, rows[0], 1 << program.slot_bits)
    strange = [packet.build() for packet in packets_of(compile_network(network, version=9), rows[0], 2**31 - 8)]
    good = packets_of(program, rows[0], (2**31 - 8) + 7)[0]
    fields = {name: getattr(good, name) for name in Packet.__slots__}
    bad = [
        Packet(**(fields | change)).build()
        for change in (
            {"position": 57},
            {"source": 1},
            {"part": 1},
            {"cell": 3},
            {"label": 3},
            {"values": (1, 0, 1)},
            {"values": (1, 0, 1, 2)},
            {"values": (1, 0, 1, -1)},
        )
    ]
    bad += [b"\x4e\x02" + good.build()[2:], b""]
    before = small.counters()["conv1.2"]
    small.send(0, 2, [packet.build() for packet in old])
    small.send(0, 2, strange)
    small.send(0, 2, bad)

    def growth(counter: str) -> int:
        return small.counters()["conv1.2"][counter] - before[counter]

    until(lambda: growth("malformed") >= len(bad))
    assert growth("malformed") == len(bad)
    assert growth("stale") + growth("duplicates") >= len(old)
    assert growth("unversioned") == len(strange)
    check(small, network, rows)


def test_weights_are_swapped_under_load_and_each_verdict_has_the_version_of_all_its_layers() -> None:
    networks = {version: alike(version) for version in (1, 2, 3)}
    rows = rows_of(networks[1], 64)
    results: list[list[FlowVerdict]] = []
    over = threading.Event()
    with XdpFabric(compile_network(networks[1])) as fabric:

        def served() -> int:
            return fabric.counters()["dense3.0"]["sent"]

        def request() -> None:
            while not over.is_set():
                results.append(fabric.run(rows, timeout_s=30))

        load = threading.Thread(target=request)
        load.start()
        try:
            for version in (2, 3):
                enough = served() + 100
                until(lambda enough=enough: served() > enough)  # type: ignore[misc]
                fabric.swap(compile_network(networks[version], version=version))
            enough = served() + 100
            until(lambda: served() > enough)
        finally:
            over.set()
            load.join()
        with pytest.raises(InputError, match="version 3 of the weights is in use"):
            fabric.swap(compile_network(networks[3], version=3))
        with pytest.raises(InputError, match="differs in more than its weights"):
            fabric.swap(compile_network(model(60, [(10, 4, 3)], [1], [3]), version=4))
        check(fabric, networks[3], rows[:8])
    expected = {version: network.run(rows) for version, network in networks.items()}
    verdicts = [verdict for result in results for verdict in result]
    assert not aborted(verdicts)
    assert {verdict.version for verdict in verdicts} == {1, 2, 3}
    for verdict in verdicts:
        assert verdict.version is not None
        assert verdict.logits == tuple(expected[verdict.version][verdict.row].tolist()), verdict


def test_features_of_an_old_epoch_are_refused_and_a_lost_generating_packet_is_replaced(small: XdpFabric) -> None:
    network = small_model()
    rows = rows_of(network, 8)
    check(small, network, rows)
    refused = small.counters()["features"]["refused"]
    small._begin(1 << 3, rows[0])  # the slot's first epoch, long ago
    until(lambda: small.counters()["features"]["refused"] == refused + 1)
    registers = bytearray(small._feature_maps.registers.read(0))
    struct.pack_into("<Q", registers, AT_RUNNING, 1)  # as if that packet had been lost in its last pass
    small._feature_maps.registers.write(0, bytes(registers))
    time.sleep(STALLED_NS / 1e9)
    check(small, network, rows)


def test_nothing_that_runs_multiplies(small: XdpFabric) -> None:
    programs = small.programs()
    assert len(programs) == 4 + 17
    for name, program in programs.items():
        assert not arithmetic_beyond_switches(program.code), name
        assert not arithmetic_beyond_switches(translated(program)), f"{name}, with the kernel's look-ups"


def test_several_fabrics_run_side_by_side(small: XdpFabric) -> None:
    network = alike(8)
    with XdpFabric(compile_network(network)) as other:
        results: dict[int, list[FlowVerdict]] = {}
        rows = rows_of(network, 64)
        threads = [
            threading.Thread(target=lambda at=at, fabric=fabric: results.update({at: fabric.run(rows, timeout_s=30)}))
            for at, fabric in enumerate((small, other))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for at, one in enumerate((small_model(), network)):
        assert not wrong(results[at], one.run(rows))
        assert not aborted(results[at])


def test_packets_from_another_cpu_at_the_same_time_cause_no_wrong_verdict() -> None:
    """They carry the same row, so that whatever is made of them has to be its logits; some are of epochs to come."""
    network = small_model()
    program, rows = compile_network(network), np.repeat(rows_of(network, 1), 64, axis=0)
    drawn, over = np.random.default_rng(5), threading.Event()
    with XdpFabric(program, cpu=usable_cpus()[-1]) as fabric:

        def disturb() -> None:
            os.sched_setaffinity(0, {usable_cpus()[0]})
            while not over.is_set():
                epoch = max(fabric._requester._epochs) + int(drawn.integers(3))
                for slot in range(program.slots):
                    inference = epoch << program.slot_bits | slot
                    contents = [packet.build() for packet in packets_of(program, rows[0], inference)]
                    fabric.send(0, int(drawn.integers(4)), [contents[at] for at in drawn.permutation(len(contents))])

        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        try:
            verdicts = [verdict for _ in range(20) for verdict in fabric.run(rows, timeout_s=0.05)]
        finally:
            over.set()
            disturbing.join()
    assert not wrong(verdicts, np.repeat(network.run(rows[:1]), len(verdicts), axis=0))
    assert aborted(verdicts) < len(verdicts)


CHILD = """
import sys
from sloop_systems.netnn.namespaces import Namespace
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.xdp import XdpFabric
from tests.sloop_systems.netnn.models import rows_of, small_model
with XdpFabric(compile_network(small_model())) as fabric:
    fabric._units[0][0].node.namespace.connect(Namespace("own", own=True), ("wire", sys.argv[1]))
    print(fabric.run(rows_of(small_model(), 1), timeout_s=30)[0].logits[0], flush=True)
    fabric.run(rows_of(small_model(), 1000000), timeout_s=30)
"""


def test_nothing_is_left_of_a_process_that_was_killed() -> None:
    """A device here, whose other end is in a namespace of the process, shows when that namespace is gone."""
    name = f"slx{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", CHILD, name], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"5804\n"
            mine = f"sl{process.pid}."
            assert name in dict(socket.if_nameindex()).values()
            assert sum(each.startswith(mine) for each in loaded_programs().values()) == 21
        finally:
            process.send_signal(signal.SIGKILL)
    until(lambda: name not in dict(socket.if_nameindex()).values())
    until(lambda: not any(each.startswith(mine) for each in loaded_programs().values()))


def test_what_does_not_fit_is_refused_before_anything_is_built(small: XdpFabric) -> None:
    wide = Dense("wide", np.ones((1000, 8000), np.int8), np.zeros(1000, np.int32))
    last = Dense("last", np.ones((1, 1000), np.int8), np.zeros(1, np.int32))
    with pytest.raises(NoCapacity, match=r"layer 'wide': its tables need [\d,]+ bytes on each unit"):
        XdpFabric(compile_network(Network((8000, 1, 1), (wide, last))))
    with pytest.raises(
        NoCapacity, match="layer 'dense1': it has 501 neurons on each unit; a program of the kernel has 500"
    ):
        XdpFabric(compile_network(model(8, [], [2001, 1], [0])))
    with pytest.raises(MachineError, match="the fabric is not open"):
        XdpFabric(compile_network(small_model())).run(rows_of(small_model(), 1))
    with pytest.raises(InputError, match="rows have 59 values"):
        small.run(np.zeros((1, 59), np.int64))
    with pytest.raises(InputError, match="a feature is 2"):
        small.run(np.full((1, 60), 2))
    with pytest.raises(InputError, match="without faults"), XdpFabric(compile_network(small_model())) as plain:
        plain.lose(0, 0, 1)


def test_without_rights_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def unshare(self, *_: object) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(namespaces, "_libc", Refusing())
    with pytest.raises(MachineError, match=r"(?s)cannot unshare a network namespace.*needs root"):
        Namespace("denied")
