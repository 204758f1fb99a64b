"""Inference inside the network, computed: Table P5.1, the latency claims, and Table P6.1 by executing the program.

The first paper (P5) calculates mini-AlexNet on seven switches; the second (P6) runs the flow model on emulated ones and
counts. Neither measures a latency, and neither says how many operations a switch computes in one pass: that constant
is explicit here, `A`, with the values from which on the claims hold.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from sloop.api.models import FLOAT, parse_onnx
from sloop_systems.comparison.rows import Claim, Row, bounded, compare, contradicted
from sloop_systems.netnn.emulator import Emulator, Faults, InferenceEnding, LayerCounts, run_in_lanes
from sloop_systems.netnn.mapper import Fabric, FabricTime, memory_bytes, time_of
from sloop_systems.netnn.network import SIGNED, Convolution, Dense, FloatNetwork, Ints, Layer, Network
from sloop_systems.netnn.program import Program, compile_network

Style = Literal["paper", "strict"]

PACKETS_PER_S: Final = 1.5e9
"""Of one pipeline of a Tofino 2."""
PIPELINES: Final = 4
PAPER_FABRIC: Final = Fabric(sends_windows=False)
"""P5 sends the input in segments."""
OPERATIONS_AT: Final = (1, 8, 10, 20, 32, 64)
"""Operations of one pass for which the latencies were derived."""
OPERATIONS: Final = 10
"""Of one pass, if nothing else is said: "few tens", the least that is a ten."""
CLAIMED_SLOWEST_MS: Final = 1.0
CLAIMED_TOTAL_MS: Final = 2.0
CLAIMED_SPEEDUP: Final = 2.0


# mini-AlexNet, by shapes alone


def mini_alexnet(weights: NDArray[Any] | None = None) -> Network | FloatNetwork:
    """mini-AlexNet for 32 × 32 × 3 inputs: with zeros, or with floats repeated from `weights`."""

    def values(*shape: int) -> NDArray[Any]:
        return np.zeros(shape, np.int8) if weights is None else np.resize(weights, shape)

    filters, channels, layers = (64, 192, 384), 3, list[Layer]()
    for place, count in enumerate(filters, start=1):
        layers.append(Convolution(f"conv{place}", values(count, 3, 3, channels), values(count), pool=(2, 2)))
        channels = count
    for place, (neurons, inputs) in enumerate(((4096, 1536), (2048, 4096), (10, 2048)), start=1):
        layers.append(Dense(f"fc{place}", values(neurons, inputs), values(neurons)))
    found = (32, 32, 3), tuple(layers)
    return Network(*found, SIGNED) if weights is None else FloatNetwork(*found)


@cache
def alexnet() -> Network:
    """mini-AlexNet with weights of zero: only its shapes matter to costs and times."""
    found = mini_alexnet()
    assert isinstance(found, Network)
    return found


@dataclass(frozen=True)
class LayerCost:
    """One row of Table P5.1."""

    name: str
    parameters: int
    operations: int
    memory_bytes: int


def costs(network: Network, style: Style) -> tuple[LayerCost, ...]:
    """Table P5.1 for all layers with weights. `strict`: products and additions of each output, biases not counted.

    `paper`: operations as they are printed. The first convolution has an addition more for each output, and a dense
    layer has one addition less altogether instead of one less for each neuron.
    """
    found = [LayerCost("input", 0, 0, network.input_count)]
    for place, (layer, shape) in enumerate(zip(network.layers, network.shapes, strict=False)):
        products = 2 * int(layer.weights[0].size)
        if isinstance(layer, Convolution):
            rows, columns = (shape[axis] - layer.weights.shape[1 + axis] + 1 for axis in (0, 1))
            outputs = rows * columns * layer.neurons
            operations = outputs * (products - (0 if style == "paper" and place == 0 else 1))
        else:
            operations = layer.neurons * products - (1 if style == "paper" else layer.neurons)
        parameters = int(layer.weights.size + layer.bias.size)
        found.append(LayerCost(layer.name, parameters, operations, memory_bytes(layer, shape)))
    return tuple(found)


def latencies_ms(operations_per_pass: float) -> tuple[float, float]:
    """The paper's model, a bound on throughput alone: the slowest layer and the sum, if a pass computes so much."""
    each = [
        cost.operations / PIPELINES / operations_per_pass / PACKETS_PER_S * 1e3 for cost in costs(alexnet(), "paper")
    ]
    return max(each), sum(each)


def operations_needed(place: int, limit_ms: float) -> float:
    """The operations of one pass with which the slowest layer (`place` 0) or the sum (1) takes `limit_ms`."""
    low, high = 0.001, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if latencies_ms(middle)[place] > limit_ms else (low, middle)
    return high


# The flow model of P6


def drawn(places: int, of: int) -> NDArray[np.uint64]:
    """The integers of the specification's test models (section 9.1)."""
    mask = np.uint64(2**32 - 1)
    value = ((np.arange(places, dtype=np.uint64) + np.uint64(1)) * np.uint64(2654435761) + np.uint64(of * 40503)) & mask
    value ^= value >> np.uint64(15)
    value = value * np.uint64(2246822519) & mask
    return np.asarray(value ^ (value >> np.uint64(13)), np.uint64)


def vector_model(
    length: int, convolutions: Sequence[tuple[int, int, int]], dense: Sequence[int], shifts: Sequence[int]
) -> Network:
    """A model of the test vectors: filters, kernel and pool of each convolution, neurons of each dense layer."""
    shape, layers = (length, 1, 1), list[Layer]()

    def parameters(count: int, *rest: int) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        label = len(layers) + 1
        weights = drawn(count * int(np.prod(rest)), label).astype(np.int64) % 255 - 127
        bias = drawn(count, 100 + label).astype(np.int64) % 2001 - 1000
        return weights.astype(np.int8).reshape(count, *rest), bias.astype(np.int32)

    for filters, kernel, pool in convolutions:
        made = parameters(filters, kernel, 1, shape[2])
        layers.append(Convolution(f"Conv{len(layers) + 1}", *made, shifts[len(layers)], pool=(pool, 1)))
        shape = layers[-1].output_shape(shape)
    for place, neurons in enumerate(dense, start=1):
        made = parameters(neurons, int(np.prod(shape)))
        layers.append(Dense(f"Dense{place}", *made, shifts[len(layers)] if place < len(dense) else 0))
        shape = (1, 1, neurons)
    return Network((length, 1, 1), tuple(layers))


@cache
def flow_model() -> Network:
    """NetNN's model for flows, with the weights of the test vectors."""
    return vector_model(814, [(32, 5, 5), (64, 5, 5)], [50, 100, 1], [4, 10, 11, 7])


@cache
def small_model() -> Network:
    """The small model of the test vectors."""
    return vector_model(60, [(10, 4, 3), (6, 3, 2)], [7, 5, 1], [3, 7, 8, 7])


def inputs(network: Network, count: int) -> Ints:
    """The first rows of the test vectors."""
    places = network.input_count
    return np.array([(drawn(places, 1000 + row) & np.uint64(1)).astype(np.int64) for row in range(count)])


# Rows

TABLE_5: Final = {
    "input": (0, 0, 3_072),
    "conv1": (1_792, 3_110_400, 16_192),
    "conv2": (110_784, 37_347_648, 117_696),
    "conv3": (663_939, 21_227_520, 665_475),
    "fc1": (6_295_552, 12_582_911, 6_299_648),
    "fc2": (8_390_656, 16_777_215, 8_392_704),
    "fc3": (20_490, 40_959, 20_500),
    "total": (15_483_213, 91_086_653, 15_515_287),
}
"""Table P5.1 as printed: parameters, operations, bytes."""
COUNTED: Final = "which additions are counted, by this column"
STRICT_OPERATIONS: Final = (3_052_800, 37_347_648, 21_227_520, 12_578_816, 16_775_168, 40_950)
TABLE_6: Final = {
    "Conv1": (3240, 644, 1296),
    "Conv2": (2592, 38_895, 5680),
    "Dense1": (496, 3159, 13),
    "Dense2": (4, 4950, 25),
    "Dense3": (1, 378, 1),
}
"""Table P6.1 as printed: packets, operations of a packet, bytes."""
INFERRED: Final = "what counts as an operation, 14 for each product, by this table"
PER_UNIT: Final = (511_920, 6_046_573, 390_117, 19_725, 1_509)
"""Operations of one unit for one inference, derived."""
PASS_TIMES: Final = {
    4: (66.46, 317.8, 327.3, 5),
    5: (53.24, 253.9, 263.5, 5),
    10: (26.78, 127.4, 136.9, 6),
    20: (13.56, 64.3, 73.8, 6),
}
"""Products of a pass → derived work of conv2, sum of units, latency, all in µs, and slots to saturate."""


def _total(table: Sequence[LayerCost]) -> LayerCost:
    return LayerCost(
        "total",
        sum(cost.parameters for cost in table),
        sum(cost.operations for cost in table),
        sum(cost.memory_bytes for cost in table),
    )


def cost_rows() -> list[Row]:
    """Table P5.1: operations by the paper's own convention, parameters and bytes as they are."""
    network = alexnet()
    strict, paper = costs(network, "strict"), costs(network, "paper")
    rows = []
    by_shape = 384 * (3 * 3 * 192 + 1)
    excess = TABLE_5["conv3"][0] - by_shape
    why = f"conv3 has 384 filters of 3 × 3 × 192 and a bias for each, which are {by_shape:,} parameters"
    for exact, printed in zip((*strict, _total(strict)), (*paper, _total(paper)), strict=True):
        parameters, operations, size = TABLE_5[exact.name]
        if not operations:  # the input computes nothing
            continue
        for what, unit, published, ours, fitted in (
            ("parameters", "", parameters, exact.parameters, ""),
            ("operations", "", operations, printed.operations, COUNTED),
            ("weights and activations", "bytes", size, exact.memory_bytes, ""),
        ):
            claim = Claim("Table P5.1", f"{what}, {exact.name}", unit, known="exact", paper=published, fitted=fitted)
            if exact.name in {"conv3", "total"} and not fitted:
                rows.append(contradicted(claim, [ours], other=published - excess, why=why))
            else:
                rows.append(compare(claim, [ours]))
    for cost, derived in zip(strict[1:], STRICT_OPERATIONS, strict=True):
        metric = f"operations, {cost.name}, products and additions of each output"
        rows.append(compare(Claim("Table P5.1", metric, "", known="exact", derived=derived), [cost.operations]))
    program = compile_network(network, PAPER_FABRIC)
    switches = 1 + len({leaf for group in program.groups for leaf, _ in group})
    largest = max(placement.memory_bytes for placement in program.placements)
    share = Claim("Table P5.1", "largest layer, of a switch's 200 MB", "%", paper=10, computed=True)
    return [
        *rows,
        compare(Claim("Table P5.1", "switches", "", known="exact", paper=7), [switches]),
        bounded(share, [100 * largest / PAPER_FABRIC.memory_bytes], at_most=10),
    ]


def latency_rows() -> list[Row]:
    """The latency claims of P5, by the paper's model and with recirculation."""
    rows = []
    for place, (what, limit, derived, whole) in enumerate(
        (("slowest layer", CLAIMED_SLOWEST_MS, 6.2246, 7), ("all layers", CLAIMED_TOTAL_MS, 7.5906, 8))
    ):
        ours = latencies_ms(OPERATIONS)[place]
        note = f"published without A, the operations of one pass; here {OPERATIONS}, and it holds from {whole} on"
        rows.append(
            bounded(Claim("P5 latency", what, "ms", paper=limit, note=note, computed=True), [ours], at_most=limit)
        )
        needed = operations_needed(place, limit)
        metric = f"A from which on {what} take less than {limit:g} ms"
        rows.append(compare(Claim("P5 latency", metric, "", known="exact", derived=derived), [needed]))
        claim = Claim("P5 latency", f"{metric}, whole", "", known="exact", derived=whole)
        rows.append(compare(claim, [float(np.ceil(needed))]))
    derived_ms = ((6.225, 15.18), (0.778, 1.898), (0.622, 1.518), (0.311, 0.759), (0.195, 0.474), (0.097, 0.237))
    for at, pair in zip(OPERATIONS_AT, derived_ms, strict=True):
        for what, derived, ours in zip(("slowest layer", "all layers"), pair, latencies_ms(at), strict=True):
            rows.append(compare(Claim("P5 latency", f"{what}, A = {at}", "ms", known="exact", derived=derived), [ours]))
    return [*rows, *_recirculation_rows()]


@cache
def _products() -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Per layer of mini-AlexNet, the products that each message makes one unit compute."""
    program = compile_network(alexnet(), Fabric())
    return tuple((layer.name, layer.products_in_order) for layer in program.layers)


def recirculating(clones: int = 1) -> FabricTime:
    """The time of mini-AlexNet if a recirculation takes the time of a pass, and `clones` share a packet's products."""
    return time_of(Fabric(clones=clones), _products())


def pass_needed_ns() -> float:
    """The time of a pass with which mini-AlexNet takes 2 ms if each packet recirculates alone."""
    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        latency_ns = time_of(Fabric(pass_ns=middle), _products()).latency_ns
        low, high = (middle, high) if latency_ns < CLAIMED_TOTAL_MS * 1e6 else (low, middle)
    return low


def _recirculation_rows() -> list[Row]:
    """What the same claims are worth if a recirculation takes the time of a pass, which the papers leave out."""
    alone = recirculating().latency_ns / 1e6
    times = {clones: recirculating(clones) for clones in range(1, 100)}
    clones = next(g for g, found in times.items() if found.latency_ns < CLAIMED_TOTAL_MS * 1e6)
    slowest = next(g for g, found in times.items() if max(layer.unit_ns for layer in found.layers) < 1e6)
    note = (
        f"with passes of {PAPER_FABRIC.pass_ns:g} ns, which the paper does not state; the claim needs passes of at "
        f"most {pass_needed_ns():.1f} ns, or {clones} clones that share a packet's products, or recirculation that "
        "costs throughput alone, as the paper counts it"
    )
    whole = "derived with 169 windows of conv2, of which 144 are in complete pooling cells and are computed"
    published = Claim("P5 latency", "all layers, each packet recirculates alone", "ms", paper=CLAIMED_TOTAL_MS,
                      note=note, computed=True)  # fmt: skip
    return [
        bounded(published, [alone], at_most=CLAIMED_TOTAL_MS),
        compare(_ours("P5 latency", "clones with which the slowest layer is below 1 ms", "", 14), [slowest]),
        compare(_ours("P5 latency", "clones with which all layers are below 2 ms", "", 18, whole), [clones],
                similar=True),
    ]  # fmt: skip


def _ours(experiment: str, metric: str, unit: str, derived: float, note: str = "") -> Claim:
    """What the specification derives from times that we assumed, or what our own programs should agree on."""
    return Claim(experiment, metric, unit, "exact", derived=derived, note=note, itself=True)


def runtime_rows(runs: int = 15) -> list[Row]:
    """mini-AlexNet on this CPU, one core, batch 1: CPU time, measured, beside the modelled switches."""
    taken_ms = median(_measured_ms(runs))
    modelled_ms = latencies_ms(OPERATIONS)[1]
    ratio = taken_ms / modelled_ms
    note = f"measured {taken_ms:.2f} ms here (FP32, one core), modelled {modelled_ms:.2f} ms with A = {OPERATIONS}; "
    note += "published against figures of another paper"
    claim = Claim(
        "P5 latency", "a CPU over the modelled switches", "×", "text", CLAIMED_SPEEDUP, note=note, computed=True
    )
    return [bounded(claim, [ratio], at_least=CLAIMED_SPEEDUP)]


def _measured_ms(runs: int) -> list[float]:
    import onnxruntime as ort  # type: ignore[import-untyped]  # noqa: PLC0415  # slow to import

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    network = mini_alexnet(np.linspace(-0.05, 0.05, 997, dtype=np.float32))
    content = _onnx_of(network).SerializeToString()
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    row = np.ones((1, 3, 32, 32), np.float32)
    found = []
    for _ in range(runs + 3):
        started_ns = time.process_time_ns()  # of one thread: other processes on this machine do not matter
        session.run(None, {"input": row})
        found.append((time.process_time_ns() - started_ns) / 1e6)
    return found[3:]


def _onnx_of(network: Network | FloatNetwork) -> Any:  # noqa: ANN401  # a message, whose fields have no static types
    """An ONNX message of a network whose values do not matter, so that channels need no order."""
    model = parse_onnx(b"", "an empty model")
    model.ir_version = 8
    model.opset_import.add().MergeFromString(b"\x10\x0d")  # version 13, of a message that is described without it
    graph = model.graph
    graph.name = "timed"
    port = graph.input.add(name="input").type.tensor_type
    port.elem_type = FLOAT
    for size in (1, network.shape[2], *network.shape[:2]):
        port.shape.dim.add(dim_value=size)
    current = "input"

    def node(operator: str, *constants: NDArray[Any], **attributes: list[int]) -> None:
        nonlocal current
        names = [f"c{len(graph.initializer) + place}" for place in range(len(constants))]
        for name, value in zip(names, constants, strict=True):
            raw = np.ascontiguousarray(value, np.float32).tobytes()
            graph.initializer.add(name=name, dims=value.shape, data_type=FLOAT, raw_data=raw)
        made = graph.node.add(op_type=operator, input=[current, *names], output=[f"n{len(graph.node)}"])
        for key, ints in attributes.items():
            made.attribute.add(name=key, ints=ints).MergeFromString(b"\xa0\x01\x07")  # of kind INTS
        current = made.output[0]

    for layer in network.layers:
        if isinstance(layer, Convolution):
            node("Conv", np.moveaxis(layer.weights, -1, 1), layer.bias)
            node("Relu")
            node("MaxPool", kernel_shape=list(layer.pool), strides=list(layer.pool))
            continue
        if layer is network.layers[3]:
            node("Flatten")
        node("Gemm", layer.weights.T, layer.bias)
        if layer is not network.layers[-1]:
            node("Relu")
    graph.output.add(name=current)
    return model


def time_rows() -> list[Row]:
    """Modelled latency and throughput of the flow model, derived; the papers give none."""
    rows = []
    for products, (work, units, latency, slots) in PASS_TIMES.items():
        found = compile_network(flow_model(), Fabric(products_per_pass=products)).time
        for what, unit, derived, ours in (
            ("work of conv2", "µs", work, found.bottleneck.work_ns / 1e3),
            ("all units", "µs", units, sum(layer.unit_ns for layer in found.layers) / 1e3),
            ("one inference", "µs", latency, found.latency_ns / 1e3),
            ("slots to saturate", "", slots, found.slots_to_saturate),
        ):
            metric = f"{what}, {products} products a pass"
            rows.append(compare(_ours("flow model, modelled time", metric, unit, derived), [ours]))
    return rows


def execution_rows(counts: Sequence[LayerCounts], program: Program) -> list[Row]:
    """Table P6.1 from an executed inference, and what was derived beside it."""
    rows = []
    for place, layer in enumerate(counts):
        packets, operations, cells = TABLE_6[layer.name]
        sources = program.layers[place].sources if place >= len(counts) - 2 else 1
        note = f"copies of one sender; the units receive {layer.packets} together" if sources > 1 else "copies received"
        ours = (layer.packets // sources, layer.operations_max, layer.memory_cells)
        for what, unit, published, found, said, fitted in (
            ("packets", "", packets, ours[0], note, "that those of one sender count" if sources > 1 else ""),
            ("operations of a packet", "", operations, ours[1], "most expensive one, executed", INFERRED),
            ("memory", "bytes", cells, ours[2], "", "that register cells of activations count, of one slot"),
        ):
            claim = Claim("Table P6.1", f"{what}, {layer.name}", unit, "exact", published, note=said, fitted=fitted)
            rows.append(compare(claim, [found]))
        claim = Claim("Table P6.1", f"operations of one unit, {layer.name}", "", known="exact", derived=PER_UNIT[place])
        rows.append(compare(claim, [layer.operations / len(program.layers[place].units)]))
    total = Claim("Table P6.1", "copies of one inference", "", "exact", derived=6348, note="the column's sum is 6,333")
    units = [1, *(len(layer.units) for layer in program.layers)]
    links = 2 + sum(before * after for before, after in pairwise(units))  # with those of client and server
    return [
        *rows,
        compare(total, [sum(layer.packets for layer in counts)]),
        compare(Claim("Table P6.1", "emulated switches", "", known="exact", paper=18), [sum(units)]),
        compare(Claim("Table P6.1", "links between them", "", known="exact", derived=58), [links]),
        compare(Claim("Table P6.1", "parameters", "", "exact", derived=114_947), [flow_model().parameters]),
    ]


def executed() -> tuple[tuple[LayerCounts, ...], int, Program]:
    """One inference of the flow model packet by packet, by shifts and adds: counts, logit, program."""
    program = compile_network(flow_model())
    (verdict,), counts = Emulator(program, multiplier="shift-add").run(inputs(flow_model(), 1))
    assert verdict.logits is not None
    return counts.layers, verdict.logits[0], program


VECTORS: Final = (
    ("NetNN-flow", flow_model, (857, -1070, 2246, -1054)),
    ("small", small_model, (5804, 5746, 5155, 5359)),
)


def agreement_rows(*, quick: bool) -> list[Row]:
    """Test vectors, the emulator beside the reference, random order, losses."""
    rows = []
    for name, model, logits in VECTORS:
        found = model().run(inputs(model(), len(logits))).ravel().tolist()
        equal = sum(ours == derived for ours, derived in zip(found, logits, strict=True))
        rows.append(compare(Claim("runners", f"test vectors, {name}", "of 4", "exact", derived=4), [equal]))
    for name, model, count in (
        ("NetNN-flow", flow_model, 4 if quick else 20),
        ("small", small_model, 200 if quick else 1000),
    ):
        rows_given = inputs(model(), count)
        logits_found, _ = run_in_lanes(compile_network(model()), rows_given, seed=1, duplicates=0.2)
        equal = int((logits_found == model().run(rows_given)).all(axis=1).sum())
        metric = f"emulator equals reference, {name}, random order, 20 % duplicates"
        rows.append(compare(_ours("runners", metric, f"of {count}", count), [equal]))
    return [*rows, *([] if quick else [_alexnet_row()]), *_loss_rows(20 if quick else 300)]


ALEXNET_SHIFTS: Final = (8, 10, 11, 11, 11, 0)
"""With weights of up to 40, they leave a tenth to a half of the activations positive."""


def random_alexnet() -> Network:
    """mini-AlexNet with weights drawn as those of the test vectors, but smaller."""
    layers = []
    for place, (layer, shift) in enumerate(zip(alexnet().layers, ALEXNET_SHIFTS, strict=True), start=1):
        weights = drawn(layer.weights.size, place).astype(np.int64) % 81 - 40
        bias = drawn(layer.bias.size, 100 + place).astype(np.int64) % 1001 - 500
        shaped = weights.astype(np.int8).reshape(layer.weights.shape)
        layers.append(replace(layer, weights=shaped, bias=bias.astype(np.int32), shift=shift))
    return Network(alexnet().shape, tuple(layers), SIGNED)


def _alexnet_row() -> Row:
    """All of mini-AlexNet on emulated switches, which the paper only calculates."""
    network = random_alexnet()
    row = drawn(network.input_count, 1000).astype(np.int64) % 255 - 127
    found, counts = run_in_lanes(compile_network(network, PAPER_FABRIC), row[None])
    equal = int((found == network.run(row)).all())
    note = f"{sum(layer.packets for layer in counts):,} copies; {network.products:,} products"
    return compare(_ours("runners", "emulator equals reference, mini-AlexNet", "of 1", 1, note), [equal])


def _loss_rows(count: int) -> list[Row]:
    """One copy of each inference is lost."""
    network = small_model()
    program = compile_network(network, Fabric(units=2))
    copies = sum(program.copies) + 1
    given = inputs(network, count)
    lost = frozenset((row, row * 37 % copies) for row in range(count))
    verdicts, counts = Emulator(program, seed=1, faults=Faults(lost=lost), timeout_ns=60_000).run(given)
    pairs = zip(verdicts, network.run(given).tolist(), strict=True)
    wrong = sum(verdict.logits not in {None, tuple(logits)} for verdict, logits in pairs)
    aborted = counts.endings.get(InferenceEnding.ABORTED, 0)
    note = f"{aborted} of {count} inferences aborted, {count - aborted} did not need the copy"
    claim = Claim(
        "runners", f"wrong verdicts, one copy lost in each of {count} inferences", "", note=note, computed=True
    )
    return [bounded(claim, [wrong], at_most=0)]
