"""Nodes, views and models for tests of provision policies."""

from collections.abc import Sequence

from hypothesis import strategies as st
from msgspec import structs

from sloop.core.protocols import Provision
from sloop.core.views import DeviceView, NodeView, Provisioning, ProvisionInput, Site, StartCosts, WeightsView
from sloop.policies.place import BestFit
from sloop.profile.estimate import Estimate
from sloop.profile.profile import LayerBlock, LayerProfile, ParametricLatency, Profile, Quadratic
from sloop.vocabulary import Device, ModelWeights, Node, ReplicaSpec, Slot, TransferId

COSTS = StartCosts(ModelWeights("t5", 10))
SPEC = ReplicaSpec("only", "t5", Slot(1.0, "gpu", "A10"))
BELIEF = Estimate(
    Profile(latency_ms=Quadratic(0.0, 100.0, 0.0), max_batch=1, max_cores=1, accelerator="A10", device_memory_bytes=12),
    variant="t5",
)
NAMES = [f"n{number}" for number in range(12)]


def node_view(name: str, free: Sequence[bool], rack: str = "", cores: float = 32.0) -> NodeView:
    """A node with a device for each of `free`, which says whether nobody uses it."""
    devices = tuple(Device(f"d{number}", "A10", 24) for number in range(len(free)))
    views = tuple(
        DeviceView(device, float(is_free), 24 * is_free, int(is_free))
        for device, is_free in zip(devices, free, strict=True)
    )
    return NodeView(Node(name, "gpu", 32.0, 200, devices, rack=rack), cores, 200, views)


def given_of(
    nodes: Sequence[NodeView], count: int, weights: Sequence[WeightsView] = (), **others: object
) -> ProvisionInput:
    sites = [Site(node, device) for node in nodes for device in node.devices if device.free_share]
    made = ProvisionInput(
        stage="only",
        spec=SPEC,
        count=count,
        sites=sites,
        place=BestFit(),
        costs=COSTS,
        belief=BELIEF,
        weights=weights,
        sends={},
        waiting=0,
        arrivals_rps=1.0,
        served_rps=0.0,
    )
    return structs.replace(made, **others)


def has(name: str, rack: str = "") -> WeightsView:
    return WeightsView(name, rack, has_files=True, arriving=None, replicas=1, is_source=True)


def comes(name: str, transfer: int) -> WeightsView:
    return WeightsView(name, "", False, TransferId(transfer), replicas=1, is_source=False)


def places(found: Provisioning, asked: ProvisionInput) -> list[str]:
    """The node of each start."""
    return [asked.sites[start.site].node.node.name for start in found.starts]


@st.composite
def cluster(draw: st.DrawFn) -> ProvisionInput:
    nodes = [
        node_view(name, draw(st.lists(st.booleans(), min_size=1, max_size=4)), draw(st.sampled_from(["", "r0", "r1"])))
        for name in NAMES[: draw(st.integers(1, 6))]
    ]
    states = st.sampled_from(["none", "files", "coming"])
    weights: list[WeightsView] = []
    for each in nodes:
        state, name = draw(states), each.node.name
        if state == "coming":
            weights.append(comes(name, len(weights)))
        elif state != "none":
            weights.append(has(name, each.node.rack))
    return given_of(nodes, draw(st.integers(1, 20)), weights)


def layered(*load_ms: float) -> Estimate:
    """A model of equal layers of 100 ms, whose bytes are all that matters for a start."""
    blocks = tuple(
        LayerBlock(
            end=f"layer{number}",
            operators="MatMul",
            layers=1,
            param_bytes=100,
            output_bytes=1,
            crossing_bytes=1,
            load_ms=each,
            latency_ms=ParametricLatency(0.0, 100.0, 0.0, 0.0, 1.0),
        )
        for number, each in enumerate(load_ms)
    )
    layers = LayerProfile(
        blocks=blocks,
        load_ms=sum(load_ms),
        latency_ms=blocks[0].latency_ms,
        input_bytes=1,
        move_ms_per_mb=0.0,
        difference=0.0,
    )
    return Estimate(
        Profile(
            latency_ms=Quadratic(0.0, 400.0, 0.0),
            max_batch=1,
            max_cores=1,
            accelerator="A10",
            device_memory_bytes=12,
            layers=layers,
        )
    )


PARTS = StartCosts(ModelWeights("t5", 400_000_000), load_s=20.0, send_s=4.0, layer_bytes=(100,) * 4)


def in_parts(policy: Provision, count: int, *, waiting: int = 1, **others: object) -> Provisioning:
    """Eight nodes with two accelerators each."""
    nodes = [node_view(f"n{number}", [True, True], rack=f"r{number % 2}") for number in range(8)]
    options = {"costs": PARTS, "belief": layered(1, 1, 1, 1), "waiting": waiting} | others
    return policy.provide(0, given_of(nodes, count, **options))  # type: ignore[arg-type]
