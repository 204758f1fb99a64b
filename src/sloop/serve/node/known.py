"""The models and stages of which a node knows."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from msgspec import structs

from sloop.errors import MachineError
from sloop.events import Event
from sloop.serve.copies import note_difference
from sloop.serve.dataflow import StageWiring
from sloop.serve.messages import encode
from sloop.serve.protocols import BackendListener, CutModel, OnDifference, Servable
from sloop.vocabulary import LayerSet, ModelWeights, ReplicaSpec


class KnownStages:
    """The models and stages whose replicas a backend may start, and the listener to which it reports events;
    `sloop.serve.protocols.Backend` says what the methods do."""

    def __init__(
        self, servables: Mapping[tuple[str, str], Servable], wirings: Mapping[str, StageWiring], threads_prepared: int
    ) -> None:
        self._servables, self._wirings = dict(servables), dict(wirings)
        self._threads_prepared = threads_prepared
        self.on_difference: OnDifference = lambda replica, stage, variant, why: None
        self._listener: BackendListener | None = None
        self._report: Callable[[Event], None] = _unheard

    def attach(self, listener: BackendListener) -> None:
        self._listener, self._report = listener, listener.on_event

    def _detach(self) -> None:
        """Report nothing from now on."""
        self._listener, self._report = None, _unheard

    @property
    def stages(self) -> list[str]:
        """Those that are known."""
        return list(self._wirings)

    def servable(self, stage: str, variant: str) -> Servable | None:
        """The model of a variant; None if it is not known."""
        return self._servables.get((stage, variant))

    def with_weights(self, weights: ModelWeights) -> list[Servable]:
        """The models with these weights or, of some layers, with those of the whole model, the newest first."""
        return [
            servable
            for servable in reversed(self._servables.values())
            if weights in servable.weights
            or (weights.layers is not None and weights.model in {w.model for w in servable.weights})
        ]

    def fingerprint(self, stage: str, variant: str) -> bytes:
        """What a worker of this variant does, apart from what is in its model's file: equal for two servers whose
        workers can replace each other. Empty if it is not known."""
        servable, wiring = self._servables.get((stage, variant)), self._wirings.get(stage)
        if servable is None or wiring is None:
            return b""
        if servable.source:  # with its checksum; where a machine keeps it does not matter
            servable = structs.replace(servable, model="", weights=())
        if servable.digest:  # nor the name of the state folder, nor the times of the user's files
            servable = structs.replace(servable, model=Path(servable.model).name, files=())
        if servable.cut is not None:
            blocks = [structs.replace(each, file="") if each.source else each for each in servable.cut.blocks]
            servable = structs.replace(servable, cut=structs.replace(servable.cut, blocks=tuple(blocks)))
        return hashlib.sha256(encode((stage, variant, servable, wiring))).digest()

    def learn(
        self,
        servables: Mapping[tuple[str, str], Servable],
        wirings: Mapping[str, StageWiring],
        *,
        threads_prepared: int,
    ) -> None:
        self._servables |= servables
        self._wirings |= wirings
        self._threads_prepared = max(self._threads_prepared, threads_prepared)

    def run_alone(self, stage: str, variant: str, why: str) -> None:
        """See `Backend.run_alone`."""
        if (stage, variant) in self._servables:
            lone = structs.replace(self._servables[stage, variant], obstacle=why)
            note_difference(Path(lone.model), why)
            self.learn({(stage, variant): lone}, {}, threads_prepared=0)

    def forget(self, stages: Iterable[str]) -> None:
        ended = frozenset(stages)
        self._servables = {key: model for key, model in self._servables.items() if key[0] not in ended}
        self._wirings = {stage: wiring for stage, wiring in self._wirings.items() if stage not in ended}


def _unheard(event: Event) -> None:
    """Nobody is told."""


def sources_of(servable: Servable, layers: LayerSet | None = None) -> list[str]:
    """The sources from which agents get a model: its URL or, if it was cut, its blocks, or those of some layers
    (`ModelWeights.layers`). Empty if agents do not fetch it."""
    if servable.cut is None:
        return [servable.source] if servable.source else []
    sources = [block.source for block in servable.cut.blocks]
    if layers is None or not all(sources):
        return sources if all(sources) else []
    return [sources[place] for place in layers.positions(len(sources))]


def blocks_of(servable: Servable | None, spec: ReplicaSpec) -> CutModel:
    """The model of a worker in blocks. MachineError if it is not cut."""
    if servable is None or servable.cut is None:
        raise MachineError(f"the model of {spec.variant!r} of {spec.stage!r} is not cut into blocks")
    return servable.cut
