"""The GPUs on which replicas of this machine run: which GPU each declared device is, and what its workers get.

A node declares devices by kind (`devices: [T4]`); here each of them becomes one GPU of this machine. The memory of a
device is then what the GPU really has, if that is less than was declared, so that no plan gives away more.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import structs

from sloop.app.application import Deployment
from sloop.cuda import CudaDevice, Gpu, MpsDaemon, environment_on, present_gpus
from sloop.errors import MachineError
from sloop.profile.model import check_cuda, is_modelled, is_python
from sloop.profile.profile import Profile
from sloop.text import listed
from sloop.vocabulary import Device, Node, ReplicaSpec

MPS: Final = "mps"
"""The folder of MPS, in a state folder."""

_log: Final = logging.getLogger("sloop.gpus")


class AssignedGpus:
    """The GPUs of nodes that are this machine, by node and device; and MPS, by GPU, where it could be started."""

    def __init__(
        self,
        nodes: Iterable[Node],
        gpus: Mapping[tuple[str, str], Gpu],
        mps: Mapping[str, MpsDaemon] | None = None,
    ) -> None:
        self._gpus, self._mps = dict(gpus), dict(mps or {})
        self._nodes = {node.name: _as_present(node, gpus) for node in nodes}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with the memory that their devices really have, and without devices that are lost."""
        return tuple(self._nodes.values())

    def device_of(self, spec: ReplicaSpec, memory_bytes: int) -> CudaDevice:
        """The GPU of a replica that takes so much of its memory; 0 if that is unknown. A share that is no cap is only
        reserved. MachineError if the GPU is lost."""
        assert spec.node is not None
        assert spec.device is not None
        gpu = self._gpus.get((spec.node, spec.device))
        if gpu is None:
            raise MachineError(f"{spec.node} has no GPU {spec.device!r}, or has lost it")
        share = spec.slot.share if spec.slot.is_capped or spec.slot.share > 1 else 0.0
        return CudaDevice(gpu.uuid, share, memory_bytes)

    def environment(self, device: CudaDevice | None) -> dict[str, str]:
        """The variables of a worker that has this GPU, or none. MachineError for a share above 100 %."""
        return environment_on(device, self._mps.get(device.uuid) if device is not None else None)

    def lose(self, node: str, device: str) -> Node | None:
        """A GPU is gone. Returns the node as it is now; None if the loss was known."""
        if self._gpus.pop((node, device), None) is None:
            return None
        found = self._nodes[node]
        left = tuple(each for each in found.devices if each.name != device)
        self._nodes[node] = found = structs.replace(found, devices=left)
        return found


def assigned(nodes: Iterable[Node], present: Sequence[Gpu]) -> dict[tuple[str, str], Gpu]:
    """A GPU for each device of the nodes, by node and device; in the order of both. MachineError if one is missing."""
    wanted = [(node, device) for node in nodes for device in _gpus_of(node)]
    # A longer name fits fewer GPUs: it chooses first.
    wanted.sort(key=lambda each: -len(each[1].kind))
    left, found = list(present), dict[tuple[str, str], Gpu]()
    for node, device in wanted:
        gpu = next((gpu for gpu in left if gpu.is_of_kind(device.kind)), None)
        if gpu is None:
            there = listed([each.name for each in present])
            more = f"; other devices have {len(found)} of them" if found else ""
            raise MachineError(
                f"{node.name} declares a {device.kind} (device {device.name!r}); this machine has {there}{more}",
                help="correct `devices`; `sloop profile MODEL --device cuda` measures a model on the GPU that is here",
            )
        left.remove(gpu)
        found[node.name, device.name] = gpu
    return found


def _gpus_of(node: Node) -> list[Device]:
    return [device for device in node.devices if not is_modelled(device.kind)]


def _as_present(node: Node, gpus: Mapping[tuple[str, str], Gpu]) -> Node:
    """The node with the memory that its GPUs really have."""
    devices = tuple(
        structs.replace(device, memory_bytes=min(device.memory_bytes, gpu.memory_bytes or device.memory_bytes))
        if (gpu := gpus.get((node.name, device.name))) is not None
        else device
        for device in node.devices
    )
    return structs.replace(node, devices=devices)


@contextmanager
def opened_gpus(deployment: Deployment, folder: Path) -> Iterator[tuple[Deployment, AssignedGpus | None]]:
    """The GPUs of a deployment whose nodes are this machine, and the deployment with what they really have; None if no
    node declares any. MachineError if they are not there, or if a model cannot run on them.

    If a model shares a GPU, MPS is started in the state folder, unless it answers already; it ends with the context. If
    it cannot be started, that is logged: replicas then take turns, and their shares limit nothing.
    """
    nodes, applications = deployment.cluster, deployment.applications
    if not any(map(_gpus_of, nodes)):
        yield deployment, None
        return
    on_gpus = [
        (variant.model or "", profile)
        for application in applications
        for stage in application.stages
        for variant in stage.variants
        for profile in application.profiles_of(variant).values()
        if profile.accelerator and not is_modelled(profile.accelerator)
    ]
    gpus = assigned(nodes, present_gpus())
    if any(not is_python(Path(model)) for model, _ in on_gpus):
        check_cuda()
    with ExitStack() as stack:
        mps: dict[str, MpsDaemon] = {}
        if any(_shares(profile) for _, profile in on_gpus):
            with suppress(OSError):  # told with the daemon's own folder
                (folder / MPS).mkdir(0o700, parents=True, exist_ok=True)
            for gpu in gpus.values():
                daemon = MpsDaemon(gpu.uuid, folder / MPS / gpu.uuid[4:12])
                try:
                    mps[gpu.uuid] = stack.enter_context(daemon)
                except MachineError as error:
                    _log.warning(
                        "without MPS, replicas on GPU %d (%s) take turns, and their shares limit nothing: %s",
                        *(gpu.index, gpu.name, error.what),
                    )
        for (node, device), gpu in gpus.items():
            how = "shared by MPS" if gpu.uuid in mps else "without MPS"
            _log.info("device %s of %s is GPU %d, %s (%s), %s", device, node, gpu.index, gpu.name, gpu.uuid, how)
        found = AssignedGpus(nodes, gpus, mps)
        yield replace(deployment, cluster=found.nodes), found


def _shares(profile: Profile) -> bool:
    """Whether replicas of a model may share a GPU."""
    return profile.device_share < 1 or profile.sharing is not None
