"""Horizontal scaling as the artefact's: up at once, down late, nothing while replicas start."""

from sloop.reproduce.biscale.rivals import Horizontal
from tests.policies.scale.test_biscale import Scene


def scene_of(settle: int = 2) -> Scene:
    scene = Scene(Horizontal(batch_max=8, settle=settle, initial_batch=4))  # type: ignore[arg-type]  # any scaler does
    scene.step(0)
    scene.ready()
    return scene


def test_it_begins_with_one_replica_and_the_artefacts_batch() -> None:
    scene = scene_of()
    assert (scene.groups, scene.batches) == ([[(1, 1)], [(1, 1)]], [4, 4])


def test_growth_at_once_and_its_batches_when_it_is_ready() -> None:
    scene = scene_of()
    scene.step(40)
    assert scene.groups == [[(8, 1)], [(3, 1)]]
    assert scene.batches == [4, 4]
    assert scene.step(60) is None, "nothing is decided while replicas start"
    scene.ready()
    scene.step(40)
    assert scene.batches == [1, 1]


def test_shrinkage_after_decisions_that_agree() -> None:
    scene = scene_of(settle=3)
    scene.step(40)
    scene.ready()
    scene.step(40)
    assert [scene.step(5) for _ in range(3)] == [None] * 3
    scene.step(5)
    assert scene.groups == [[(1, 1)], [(1, 1)]]
