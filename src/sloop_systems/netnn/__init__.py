"""Inference inside the network: a small quantised neural network runs on programmable switches, one layer on each.

    network  = quantise("model.onnx", rows)          integers; `network.run(rows)` is the reference of all runners
    program  = compile_network(network, Fabric())    layers on leaf switches, neurons on pipelines, weights as tables
    verdicts = Emulator(program).run(rows)           a switch without multiplication, instruction by instruction

Words: a *unit* is a pipeline of a switch that computes some neurons of one layer. A *message* is one packet of inputs
(features or activations) to a layer. A *slot* is the part of a unit's registers that one inference uses; its *epoch*
counts the inferences that have used it. The *sink* is the host that gets the logits.

Slots, epochs and packets are internal to this package. Sources: Razavi et al., "Distributed Serving" and "NetNN"
(chapters P5 and P6 of Razavi's dissertation, TU Darmstadt 2024); what they leave open is decided in the specification.
"""
