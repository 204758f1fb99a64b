"""Answers of in-network inference to the test vectors: tables of `tests.sloop_systems.recorded`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from sloop_systems.netnn.emulator import Emulator, run_in_lanes
from sloop_systems.netnn.experiments.offline import flow_model, inputs, small_model
from sloop_systems.netnn.mapper import Fabric, place
from sloop_systems.netnn.network import FloatNetwork
from sloop_systems.netnn.program import compile_network
from sloop_systems.netnn.quantiser import quantise
from tests.sloop_systems.tables import Answers


def floats() -> FloatNetwork:
    """The small model of the test vectors before it was made of integers."""
    model = small_model()
    layers = (replace(own, weights=own.weights / 127.0, bias=own.bias / 1000.0, shift=0) for own in model.layers)
    return FloatNetwork(model.shape, tuple(layers))


def netnn_answers() -> Answers:
    """The test vectors through reference, mapper, program, emulated switches and quantiser."""
    found: Answers = []
    for model in (flow_model(), small_model()):
        for fabric in (Fabric(), Fabric(products_per_pass=4)):
            program = compile_network(model, fabric)
            found += [[layer.units for layer in place(model, fabric)], program.copies, program.time.latency_ns]
        found += [model.run(inputs(model, 6)), run_in_lanes(compile_network(model), inputs(model, 2), seed=1)[0]]
    verdicts, counts = Emulator(compile_network(small_model()), multiplier="shift-add").run(inputs(small_model(), 2))
    found += [[each.logits for each in verdicts], [(each.packets, each.operations) for each in counts.layers]]
    network = quantise(floats(), inputs(small_model(), 50))
    layers = [(layer.weights, layer.bias, layer.shift) for layer in network.layers]
    return [*found, layers, network.run(inputs(small_model(), 20))]


TABLES: Final[Mapping[str, Callable[[], Answers]]] = {"netnn": netnn_answers}
