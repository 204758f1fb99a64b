"""A fabric of switches as a device: sessions of compiled networks, and their profiles.

A compiled network (`MODEL.innet`, see `netnn.compiled`) is opened like any model. Here it runs as the reference
in NumPy, or in the kernel if it was compiled for it. Both give the switches' answers, bit for bit, and take longer than
a switch would. The time of a switch is modelled, and stands in the profile that `fabric_profile` makes: the closed form
of `FabricTime` is the belief with which policies plan, and the durations by the emulator's clock are the samples, which
simulations take as true.

A replica is a slot of the fabric. It serves one inference at a time. The duration does not depend on the other slots,
as long as no more slots are in use than the busiest layer can serve (`FabricTime.shares`). So a replica has one share
of the device, and its batches have one row.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from sloop.api.models import Port, Signature
from sloop.api.profiles import LatencyTable, Profile, Region, Sample, digest_of_model, sample_of
from sloop_systems.netnn.compiled import CompiledNetwork, load
from sloop_systems.netnn.emulator import Emulator
from sloop_systems.netnn.network import classify
from sloop_systems.netnn.xdp import XdpFabric

Array = NDArray[Any]
FABRIC: Final = "innet"
"""The kind of device: a replica is a slot of it. Also the suffix of compiled networks."""


class FabricSession:
    """A compiled network that is open; a `Session`.

    The input is `features` (integers). The outputs are `logits`, `class`, and `doubtful`, which is 1 where the answer
    of the fabric alone is too uncertain. A row whose inference is lost has no verdict: `class` is -1, its logits are 0,
    and it is doubtful.
    """

    joins_rows: bool | None = True

    def __init__(self, path: Path, threads: int = 1) -> None:
        self._compiled = load(path)
        network = self._compiled.network
        datatype = "UINT8" if network.inputs.low >= 0 else "INT16"
        self.signature = Signature(
            (Port("features", datatype, (-1, network.input_count)),),
            (
                Port("logits", "INT32", (-1, network.classes)),
                Port("class", "INT32", (-1, 1)),
                Port("doubtful", "UINT8", (-1, 1)),
            ),
        )
        self.dimension_names: Mapping[tuple[str, int], str] = {}
        self._held = ExitStack()
        self._fabric: XdpFabric | None = None
        self.software = "programs in the kernel" if self._compiled.in_kernel else "reference in NumPy"

    def close(self) -> None:
        """Remove the programs from the kernel; the end of the process does it too."""
        self._held.close()
        self._fabric = None

    def example(self, rows: int) -> dict[str, Array]:
        """Random rows: a switch takes equally long for all."""
        inputs = self._compiled.network.inputs
        shape = (rows, self._compiled.network.input_count)
        drawn = RandomState(0).randint(inputs.low, inputs.high + 1, shape)
        return {"features": drawn.astype(np.uint8 if inputs.low >= 0 else np.int16)}

    def run(self, feed: Mapping[str, Array], outputs: tuple[int, ...] = ()) -> list[Array]:
        """Inference of each row. InputError for a feature out of range; MachineError if it was compiled for the kernel
        and this process lacks the rights."""
        rows = np.asarray(feed["features"]).astype(np.int64)
        if self._compiled.in_kernel and self._fabric is None:  # building it takes seconds, which a signature need not
            self._fabric = self._held.enter_context(XdpFabric(self._compiled.program))
        if self._fabric is None:
            logits, lost = self._compiled.network.run(rows), np.zeros(len(rows), bool)
        else:
            found = [verdict.logits for verdict in self._fabric.run(rows)]
            lost = np.array([each is None for each in found], bool)
            nothing = np.zeros(self._compiled.network.classes, np.int64)
            logits = np.array([nothing if each is None else each for each in found], np.int64).reshape(len(rows), -1)
        classes = np.where(lost, -1, classify(logits))
        doubtful = lost | self._compiled.is_doubtful(logits)
        return [logits.astype(np.int32), classes.astype(np.int32)[:, None], doubtful.astype(np.uint8)[:, None]]


def fabric_profile(compiled: CompiledNetwork, path: Path, *, emulated_rows: int = 1, seed: int = 0) -> Profile:
    """The profile of the compiled network in the file `path`, on the fabric that it is for.

    `emulated_rows` inferences are executed instruction by instruction, as many at once as the device has shares; the
    profile has their durations as samples. With 0 it has no samples, and simulations take the closed form as true.
    """
    program = compiled.program
    time = program.time
    modelled_ms = time.latency_ns / 1e6
    samples: tuple[Sample, ...] = ()
    if emulated_rows:
        inputs = compiled.network.inputs
        rows = RandomState(seed).randint(inputs.low, inputs.high + 1, (emulated_rows, compiled.network.input_count))
        durations_ns: list[int] = []
        for start in range(0, emulated_rows, time.shares):
            verdicts, _ = Emulator(program, seed=seed).run(rows[start : start + time.shares])
            durations_ns += [round(each.end_ns - each.start_ns) for each in verdicts if each.logits is not None]
        samples = (sample_of(1, 1.0, durations_ns),)
    weights = sum(layer.weights.size + 4 * layer.bias.size for layer in compiled.network.layers)
    return Profile(
        latency_ms=LatencyTable({1: {1.0: modelled_ms}}),
        max_batch=1,
        max_cores=1.0,
        load_s=0.0,
        memory_bytes=0,
        hardware=f"a modelled fabric of {compiled.fabric.leaves} leaves with {compiled.fabric.pipelines} pipelines",
        accelerator=FABRIC,
        device_share=1.0 / time.shares,
        device_memory_bytes=weights,
        origin="assumed",
        source="closed form of the in-network specification (section 3.11); samples: the emulator's clock",
        software="sloop innet",
        model_digest=digest_of_model(path),
        measured=Region(1, 1, 1.0, 1.0),
        samples=samples,
    )
