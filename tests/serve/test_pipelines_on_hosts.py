"""A model whose parts are on several hosts: they fetch their own layers only, serve together while each gets the others
from the other, and what dies under load costs no answer. Figures are printed (`pytest -s`)."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, Hosts
from tests.serve.fleet import CAUGHT, Fleet, Load, Values, kill, tell, until, workers
from tests.serve.test_pipelines import WIDTH, document, model, session_of
from tests.serve.test_weights_on_hosts import sent_bytes

__all__ = ["model"]  # a fixture
pytestmark = [pytest.mark.live, pytest.mark.needs_hosts]

BITS_S = 8e6
"""A block takes a quarter of a second."""
NODES = ("local-0", "local-1")
PARTS = '''
"""Two replicas that are missing start as parts of one model, on a node each; the first ones too."""

from dataclasses import dataclass, replace

from sloop.core.views import Provisioning, ReplicaStart, WeightChain
from sloop.policies.provision import CheapestStart
from sloop.systems.catalogue import SYSTEMS
from sloop.vocabulary import STORE, LayerSet


@dataclass(frozen=True, slots=True)
class PartsAtOnce(CheapestStart):
    def provide(self, now_ns, given):
        if given.count < 2 or len(given.sites) < 2:
            return CheapestStart.provide(self, now_ns, given)
        starts = tuple(ReplicaStart(place, chain=place, pipeline=0) for place in (0, 1))
        names = [site.node.node.name for site in given.sites[:2]]
        chains = [WeightChain(STORE, (name,), LayerSet(first, first + 2)) for name, first in zip(names, (0, 2))]
        return Provisioning(starts, tuple(chains), "1 pipeline of 2 parts, cut before layer 2", ((0, 2, 4),))


STATIC = SYSTEMS["static"]
PROVISION = PartsAtOnce(partition=True)
SYSTEM = replace(STATIC, name="parts", policies=replace(STATIC.policies, provision=PROVISION))
'''


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A server, and two agents that have nothing yet."""
    app = document(model, tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    app["system"] |= {"cores": 1}
    app["cluster"] = {"nodes": [{"hardware": "local", "count": 2, "cores": 1}]}
    with Hosts(3, BITS_S) as hosts:
        made = Fleet(list(hosts), tmp_path, json.dumps(app), env={"SLOOP_MODELS_CACHE": "/dev/shm/models"})
        try:
            made.start_server()
            for name, host in zip(NODES, made.hosts[1:], strict=True):
                made.start_agent(name, host)
            yield made
        finally:
            made.stop()


def load(fleet: Fleet, model: Path) -> Load:
    """So many requests at once that the tensors of a batch go from host to host by themselves, not within orders."""

    def expected(x: Values) -> Any:
        return session_of(model).run(None, {"x": x})[0]

    return Load(fleet.address, "live", expected, rate_rps=40, width=WIDTH, together=8)


def forms(fleet: Fleet) -> list[tuple[str, str]]:
    """Life and form of each replica."""
    return [(each["life"], each["form"]) for _, each in fleet.replicas()]


def is_whole(fleet: Fleet) -> bool:
    return forms(fleet) == [("ready", "alone")] * 2


def test_parts_on_two_hosts_serve_together_and_become_whole_replicas(fleet: Fleet, model: Path) -> None:
    fleet.until_ready(2)
    assert forms(fleet) == [("ready", "pipeline")] * 2
    copies = model.stat().st_size
    before = [sent_bytes(host) / copies for host in fleet.hosts]
    with load(fleet, model) as asking:
        asking.until_steady(20)
        until(partial(is_whole, fleet), "both have the whole model")
        asking.until_steady(20)
    asking.check((200,))
    after = [sent_bytes(host) / copies for host in fleet.hosts]
    assert before[0] < 1.4, "the server has sent each block once"
    assert fleet.metric("sloop_pipeline_parts_total") == fleet.metric("sloop_completion_seconds_count") == 2
    assert fleet.metric("sloop_pipelines_lost_total") == 0
    tell(f"copies of the model sent until the parts served: {before}; until all were whole: {after}")


def cut_between(one: Host, other: Host) -> None:
    """They cannot reach each other any longer, but everybody else."""
    for host, away in ((one, other), (other, one)):
        host.output(["ip", "route", "add", "unreachable", f"{away.address}/32"])


def kill_worker(fleet: Fleet) -> None:
    kill(workers(fleet.hosts[2]))


def kill_host(fleet: Fleet) -> None:
    fleet.hosts[2].kill()
    fleet.start_agent(NODES[1], fleet.hosts[2])


@pytest.mark.parametrize("fault", [kill_worker, kill_host, lambda fleet: cut_between(*fleet.hosts[1:])])
def test_what_dies_in_a_pipeline_under_load_costs_no_answer(
    fleet: Fleet, model: Path, fault: Callable[[Fleet], None]
) -> None:
    fleet.until_ready(2)
    with load(fleet, model) as asking:
        asking.go_on(0.2)
        fault(fleet)
        until(partial(is_whole, fleet), "both have the whole model")
        asking.until_steady(20)
    asking.check(CAUGHT)
    tell(f"{asking.describe()}; the slowest took {asking.slowest_ms():.0f} ms")
