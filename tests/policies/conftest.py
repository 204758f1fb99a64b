"""What `sloop.testing.views` makes, as fixtures."""

from collections.abc import Callable

import pytest

from sloop.core.views import ClusterView, NodeView, ReplicaView, StageView
from sloop.profile.estimate import Estimate
from sloop.testing.views import (
    Idle,
    make_arrivals,
    make_belief,
    make_idle,
    make_node,
    make_replica,
    make_stage,
    make_view,
    make_visit,
)
from sloop.vocabulary import Visit


@pytest.fixture(name="visit")
def visit_fixture() -> Callable[..., Visit]:
    return make_visit


@pytest.fixture(name="idle")
def idle_fixture() -> Callable[..., list[Idle]]:
    return make_idle


@pytest.fixture(name="node")
def node_fixture() -> Callable[..., NodeView]:
    return make_node


@pytest.fixture(name="arrivals")
def arrivals_fixture() -> Callable[..., StageView]:
    return make_arrivals


@pytest.fixture(name="stage")
def stage_fixture() -> Callable[..., StageView]:
    return make_stage


@pytest.fixture(name="view")
def view_fixture() -> Callable[..., ClusterView]:
    return make_view


@pytest.fixture(name="replica")
def replica_fixture() -> Callable[..., ReplicaView]:
    return make_replica


@pytest.fixture(name="belief")
def belief_fixture() -> Callable[..., Estimate]:
    return make_belief
