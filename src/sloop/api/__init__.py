"""The interface for systems that are not part of sloop: what docs/write-a-system.md lists, and nothing else.

This module has what all of them need: plans, nodes, requests and their ids; units of time; errors; texts for reasons;
checks of parameters. It imports no other module of the interface, and each of those only what it needs:

- `sloop.api.policies`: protocols of policies, what they see, and policies to take over;
- `sloop.api.solvers`: optimisation and queueing for policies;
- `sloop.api.devices`: how batches that share a device slow each other down;
- `sloop.api.systems`: systems, and those that are installed;
- `sloop.api.profiles`: profiles of models, fits and kinds of hardware;
- `sloop.api.models`: ONNX files, tensors, models that are opened, the machine;
- `sloop.api.experiments`: applications, traces, truths, simulated worlds, their records and summaries;
- `sloop.api.reports`: figures, tables and pages;
- `sloop.api.commands`: helpers for commands of one's own.
"""

from sloop.errors import InputError, MachineError
from sloop.options import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    OutOfRange,
    PositiveFloat,
    PositiveInt,
    Range,
    Value,
    check_range,
    check_ranges,
    read_options,
)
from sloop.text import arrows, counted, in_ms, in_s, listed, number, quoted
from sloop.units import (
    FOREVER_NS,
    GIB,
    NS_PER_MS,
    NS_PER_S,
    ROUNDING,
    WIDE_ROUNDING,
    at_least,
    interpolated_quantile,
    ms,
    quantile,
    round_down,
    round_up,
    s,
    to_ms,
    to_s,
)
from sloop.vocabulary import (
    CLIENTS_MAX,
    LINK_MBPS,
    STORE,
    STORE_MBPS,
    BatchId,
    Device,
    Group,
    LayerSet,
    Life,
    ModelWeights,
    Node,
    NodeState,
    Outcome,
    Path,
    Plan,
    ReplicaId,
    ReplicaSpec,
    Request,
    RequestId,
    Shape,
    Slot,
    StagePlan,
    TransferId,
    Visit,
    Worker,
)

__all__ = [
    "CLIENTS_MAX",
    "FOREVER_NS",
    "GIB",
    "LINK_MBPS",
    "NS_PER_MS",
    "NS_PER_S",
    "ROUNDING",
    "STORE",
    "STORE_MBPS",
    "WIDE_ROUNDING",
    "BatchId",
    "Device",
    "Fraction",
    "Group",
    "InputError",
    "LayerSet",
    "Life",
    "MachineError",
    "ModelWeights",
    "Node",
    "NodeState",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OutOfRange",
    "Outcome",
    "Path",
    "Plan",
    "PositiveFloat",
    "PositiveInt",
    "Range",
    "ReplicaId",
    "ReplicaSpec",
    "Request",
    "RequestId",
    "Shape",
    "Slot",
    "StagePlan",
    "TransferId",
    "Value",
    "Visit",
    "Worker",
    "arrows",
    "at_least",
    "check_range",
    "check_ranges",
    "counted",
    "in_ms",
    "in_s",
    "interpolated_quantile",
    "listed",
    "ms",
    "number",
    "quantile",
    "quoted",
    "read_options",
    "round_down",
    "round_up",
    "s",
    "to_ms",
    "to_s",
]
