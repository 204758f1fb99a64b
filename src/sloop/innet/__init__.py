"""Inference inside the network: a small quantised network, a layer on each programmable switch, activations as packets.

    network  = quantise("model.onnx", rows)          integers; `network.run(rows)` is the reference of all runners
    program  = compile_network(network, Fabric())    layers on leaf switches, neurons on pipelines, weights as tables
    verdicts = Emulator(program).run(rows)           a switch without multiplication, instruction by instruction

Register slots, epochs and packets stay inside this package. Sources: Razavi et al., "Distributed Serving" and "NetNN"
(chapters P5 and P6 of Razavi's dissertation, TU Darmstadt 2024); what they leave open is decided in the specification.
"""
