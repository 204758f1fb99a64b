"""The suite of every system; `sloop.testing` says how to use it."""

import os
import pickle
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from sloop.actions import StartWorker, Transfer
from sloop.app.application import SystemChoice
from sloop.app.load import load_application, load_scenario
from sloop.errors import InputError
from sloop.options import keys_of, read_options, written
from sloop.runlog import MemoryLog
from sloop.sim import World, simulate
from sloop.sim.scenarios import run_scenario
from sloop.sim.worlds import Make, fitting, play, random_deployment, random_world
from sloop.streams import seed_of, stream
from sloop.systems import SYSTEMS, build_system
from sloop.systems.planning import explain_plan
from sloop.systems.registry import POLICIES, build
from sloop.systems.setup import set_up
from sloop.systems.system import VERBS, is_system_file, parameters_of
from sloop.testing.laws import LAWS
from sloop.testing.restoring import restores

__all__ = ["SystemSuite"]

WORLDS: Final = 4
"""Random worlds of one application, of equal nodes that are always there."""
DEPLOYMENTS: Final = 2
"""Random worlds of one application or several, on mixed nodes, with deployments during the run."""
CASES: Final = 25
"""Cases that a law draws."""
DURATIONS: Final = (1e17, 1e300, -1e300)
"""Longer than a hundred years, or negative."""


_LINEAR: Final = {"form": "quadratic", "alpha": 0.0, "beta": 10.0, "gamma": 20.0}
_ALONE_MS: Final = {"page": 215.8, "line": 46.45, "orient": 104.6, "flip": 76.75, "labels": 13.45}
_AFTER: Final = {"orient": ["page"], "flip": ["line"], "labels": ["orient", "flip"]}
"""Page layout of a newcomer's OCR: two chains that meet."""


def _worlds(make: Make, system: str, number: int) -> list[World]:
    """The first random worlds that the system can serve, other ones for each system. InputError if there are none."""
    first = seed_of(3, Path(system).name) % 1_000_000  # the first of another stream takes a minute under `harbor`
    origin = f"sloop.sim.worlds.{make.__name__}(%s, {system!r})"
    made = ((seed, fitting(make, seed, system)) for seed in range(first, first + 100))
    found = (replace(world, origin=origin % seed) for seed, world in made if world is not None)
    worlds = list(islice(found, number))
    if not worlds:
        make(first, system).check()  # says why
    return worlds


def _one_model(**more: Any) -> dict[str, Any]:  # noqa: ANN401  # keys of the file
    """An application file: one model on four nodes."""
    profile = {"latency_ms": _LINEAR, "max_batch": 8, "max_cores": 8, "load_s": 1.0, "weights_bytes": 10**8}
    nodes = {"hardware": "custom", "count": 4, "cores": 16, "memory_bytes": 10**10}
    stages = [{"name": "only", "profile": profile}]
    return {"name": "scene", "slo_ms": 1000, "stages": stages, "cluster": {"nodes": [nodes]}} | more


def _many_stages(system: str) -> dict[str, Any]:
    """A scenario: more stages than cores."""

    def stage(name: str) -> dict[str, Any]:
        table = {"form": "table", "table": {1: {1: _ALONE_MS[name]}}}
        return {
            "name": name,
            "after": _AFTER.get(name, []),
            "profile": {"latency_ms": table, "max_batch": 1, "load_s": 2},
        }

    return {
        "name": "pages",
        "slo_ms": 1000,
        "stages": [stage(name) for name in _ALONE_MS],
        "cluster": {"nodes": [{"hardware": "custom", "cores": 2}]},
        "system": system,
        "trace": {"kind": "poisson", "rate": 1},
        "duration_s": 60,
        "seed": 3,
    }


class SystemSuite:
    """What holds for every system and policy, whatever it decides."""

    package: ClassVar[str] = ""
    """The package whose entry points name systems and policies; `sloop` for sloop's own."""
    systems: ClassVar[Sequence[str]] = ()
    """Further systems: names, or paths of files."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest: one test for each system or policy."""
        systems, policies = self._systems(), self._policies()
        if not systems and not policies:
            raise pytest.UsageError(
                f"{type(self).__name__}: no entry point of {self.package!r} is a system or a policy"
            )
        if "system" in metafunc.fixturenames:
            metafunc.parametrize("system", systems)
        elif "policy" in metafunc.fixturenames:
            metafunc.parametrize(("verb", "policy"), policies.values(), ids=policies)

    def _systems(self) -> list[str]:
        names = [*SYSTEMS.names_in(self.package), *self.systems]
        if os.environ.get("SLOOP_SUITE") == "all":
            return names
        kinds = {name: type(build_system(name).policies.scale) for name in names}
        namesakes = [name for name in names if POLICIES["scale"].name_of(kinds[name]) == name.replace("-", "_")]
        chosen = {kinds[name]: name for name in (*reversed(names), *namesakes)}
        return sorted(chosen.values(), key=names.index)

    def _policies(self) -> dict[str, tuple[str, Callable[[], Any]]]:
        """All policies, by verb and name: entry points, and those of the systems that are none."""
        named: dict[str, tuple[str, Callable[[], Any]]] = {
            f"{verb}.{name}": (verb, partial(build, verb, name))
            for verb, registry in POLICIES.items()
            for name in registry.names_in(self.package)
        }
        for system in self.systems:
            policies = build_system(system).policies
            for verb in VERBS:
                policy = getattr(policies, verb)
                if POLICIES[verb].name_of(type(policy)) is None:
                    named[f"{verb}.{type(policy).__name__}"] = (
                        verb,
                        partial(read_options, type(policy), written(policy)),
                    )
        return named

    # Systems

    def test_it_reads_what_it_shows(self, system: str) -> None:
        """And each run has policies of its own. It says where it comes from, what it does on a cluster of several kinds
        of hardware, and what each parameter means; no parameter is called like a verb, as both stand side by side."""
        first, second = build_system(system), build_system(system)
        assert is_system_file(system) or first.name == system
        assert first.source, "say where it comes from: `source`"
        assert first.mixed, "say what it does on a cluster of several kinds of hardware: `mixed`"
        assert not set(first.parameters) & set(VERBS), "a parameter is called like a verb"
        for verb in VERBS:
            assert getattr(first.policies, verb) is not getattr(second.policies, verb)
        if first.overseer is not None:
            own = {each.key: each.default for each in parameters_of(first)}
            assert build_system(system, own).overseer == first.overseer
            assert [each.key for each in parameters_of(first) if not each.meaning] == [], "write a docstring below them"
            return
        slots = first.slots
        for verb in VERBS:  # a policy that only this system has needs no name, and nobody else can name it
            if POLICIES[verb].name_of(type(getattr(first.policies, verb))) is None:
                del slots[verb]["name"]
        assert build_system(system, slots).policies == first.policies
        parameters = parameters_of(first)
        declared: dict[str, Any] = {}
        for each in parameters:
            verb, dot, key = each.key.partition(".")
            (declared.setdefault(verb, {}) if dot else declared)[key or verb] = each.default
        assert build_system(system, declared).slots == first.slots
        assert [each.key for each in parameters if not each.meaning] == [], "write a docstring below these fields"

    def test_every_invariant_holds_in_random_worlds(self, system: str) -> None:
        """Faults and wrong beliefs included, and its replay decides the same."""
        for world in _worlds(random_world, system, WORLDS):
            play(world)

    def test_every_invariant_holds_in_random_deployments(self, system: str) -> None:
        """On mixed hardware, with versions that are deployed, promoted and removed."""
        for world in _worlds(random_deployment, system, DEPLOYMENTS):
            play(world)

    def test_a_restored_core_decides_as_the_saved_one(self, system: str) -> None:
        """Its policies' state is data, which a snapshot holds."""
        random, compared = stream(0, f"restored {system}"), 0
        for seed in range(40):
            make = random_deployment if random.random() < 0.3 else random_world
            compared += restores(make(seed, system), random.uniform(0.1, 0.9))
            if compared == 2:
                return
        assert compared, "no random world let it be saved and restored"

    def test_a_plan_is_feasible_or_explained(self, system: str) -> None:
        """And is never said to be feasible where even one request alone would be late."""
        setup = set_up(load_application(_one_model()), SystemChoice(system))
        busy, idle = explain_plan(setup, 60.0), explain_plan(setup, 0.0)
        assert busy.cores >= idle.cores, "it plans less for more requests"
        for answer in (busy, idle):
            assert answer.predicted_ms <= 1000 if answer.feasible else answer.why
        impossible = set_up(load_application(_one_model(slo_ms=1)), SystemChoice(system), must_fit=False)
        assert not explain_plan(impossible, 5.0).feasible

    def test_a_pipeline_of_more_stages_than_cores_is_served_refused_or_explained(self, system: str) -> None:
        """Two cores carry a request per second, which takes half a second of one of them."""
        scenario = load_scenario(_many_stages(system))
        (choice,) = scenario.systems
        try:
            answer = explain_plan(set_up(scenario.deployment, choice), 1.0)
        except InputError:  # it serves one model, for example
            return
        row = run_scenario(scenario, choice).row
        assert row.requests > 50
        assert row.served >= 0.95 * row.requests if answer.feasible else answer.why

    def test_its_starts_wait_for_what_a_provision_policy_sends(self, system: str) -> None:
        """A user may name a provision policy in the application file, whatever the system; under an overseer, for each
        of its systems."""
        declared: dict[str, Any] = {"name": system, "provision": "cheapest_start"}
        overseer = build_system(system).overseer
        if overseer is not None:
            each = [one if isinstance(one, dict) else {"name": one} for one in overseer.among]
            declared = {"name": system, "among": [one | {"provision": "cheapest_start"} for one in each]}
        scenario = load_scenario(
            _one_model(
                system=declared,
                trace={"kind": "poisson", "rate": 5},
                duration_s=3,
                truth={"cold_start": {"warm": False}, "network": {"topology": {"store_mbps": 1000, "node_mbps": 4000}}},
            )
        )
        log = MemoryLog()
        simulate(World.from_scenario(scenario), [log])
        sent = {record.transfer for _, record in log if isinstance(record, Transfer)}
        starts = [record for _, record in log if isinstance(record, StartWorker)]
        assert sent, "no weights are sent"
        assert starts[0].transfer in sent

    # Policies

    def test_a_policy_is_a_frozen_dataclass_that_reads_what_it_writes(
        self, verb: str, policy: Callable[[], Any]
    ) -> None:
        """It can be copied and sent to another process, and no duration is negative or longer than a century."""
        made = policy()
        assert is_dataclass(made)
        for field in fields(made):
            with pytest.raises(FrozenInstanceError):
                setattr(made, field.name, 0)
        assert tuple(written(made)) == keys_of(type(made))
        assert read_options(type(made), written(made)) == made
        assert pickle.loads(pickle.dumps(made)) == made == deepcopy(made)
        for key in (key for key in keys_of(type(made)) if key.endswith("_ms")):
            for value in DURATIONS:
                with pytest.raises(InputError, match=rf"^{key}: must be a number of at least 0"):
                    read_options(type(made), {key: value})

    def test_a_policy_obeys_the_law_of_its_verb(self, verb: str, policy: Callable[[], Any]) -> None:
        """See `sloop.testing.laws`."""
        for seed in range(CASES) if verb in LAWS else ():
            LAWS[verb](policy, stream(seed, verb))
