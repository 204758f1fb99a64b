"""Where workers run: processes on this machine (`local`), or machines with an agent each (`agents`, `ray`)."""

from collections.abc import Iterable, Mapping

from sloop.serve.dataflow import StageWiring
from sloop.serve.protocols import Servable


class KnownStages:
    """The models and stages whose replicas a backend may start; `sloop.serve.protocols.Backend` has what its methods
    do."""

    def __init__(
        self, servables: Mapping[tuple[str, str], Servable], wirings: Mapping[str, StageWiring], threads_prepared: int
    ) -> None:
        self._servables, self._wirings = dict(servables), dict(wirings)
        self._threads_prepared = threads_prepared

    def servable(self, stage: str, variant: str) -> Servable | None:
        """The model of a variant; None if it is not known."""
        return self._servables.get((stage, variant))

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

    def forget(self, stages: Iterable[str]) -> None:
        ended = frozenset(stages)
        self._servables = {key: model for key, model in self._servables.items() if key[0] not in ended}
        self._wirings = {stage: wiring for stage, wiring in self._wirings.items() if stage not in ended}
