"""Measuring how workers share cores: a small model for a few milliseconds in real processes, and what may go wrong."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.models import perceptron
from sloop.errors import InputError, MachineError
from sloop.machine import usable_cpus
from sloop.profile.fit import SHARING_FORMS
from sloop.profile.interference import BandwidthLaw, ProcessorSharing
from sloop.profile.sharing import Contender, SharingTimes, _means_ns, fit_all_laws, measure_sharing, running

STRICT = """
import numpy as np

class Model:
    inputs = {"x": ("FP32", (-1, 4))}
    outputs = {"y": ("FP32", (-1, 4))}
    joins_rows = True

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def run(self, x):
        if len(x) > 2:
            raise ValueError("at most two rows")
        return x * self.threads
"""


@pytest.fixture
def network(tmp_path: Path) -> Contender:
    return Contender(perceptron(tmp_path, width=16, layers=2), 2, {})


@pytest.mark.live
def test_measures_each_number_of_workers_in_each_pass_and_the_pair(network: Contender, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    other = Contender(perceptron(tmp_path, width=32, layers=1), 1, {})
    found = measure_sharing(
        network, beside=other, together=3, seconds=0.005, passes=2, progress=lambda *now: seen.append(now)
    )
    assert [count for count, _ in found.points] == [1.0, 2.0, 3.0]
    assert found.points[0][1] == 1.0
    assert [[count for count, _ in each] for each in found.passes] == [[1, 2, 3]] * 2
    for place, (_, factor) in enumerate(found.points):
        assert factor == pytest.approx(np.median([each[place][1] for each in found.passes]))
    assert all(factor > 0 for _, factor in found.points)
    assert found.alone_ms > 0
    assert (found.full_batch, "ONNX Runtime" in found.software) == (2, True)
    assert [done for done, _, _ in seen] == [1, 2, 3, 6, 7, 8, 9, 12]
    assert {cells for _, cells, _ in seen} == {12}
    assert found.pair is not None
    assert (found.pair.beside, found.pair.beside_batch) == (str(other.file), 1)
    assert min(found.pair.slowdown, found.pair.beside_slowdown) > 0


class Scripted:
    """A `BatchStream` whose batches take what a list says."""

    def __init__(self, *series_ns: float) -> None:
        self._left, self.asked = list(series_ns), list[tuple[int, float]]()

    def mean_ns(self, workers: int, seconds: float) -> float:
        self.asked.append((workers, seconds))
        return self._left.pop(0)

    def software(self) -> str:
        return "scripted"


def test_measures_workers_of_another_kind(tmp_path: Path) -> None:
    stream = Scripted(2e6, 3e6, 4e6, 12e6, 8e6, 4e6)
    nowhere = Contender(tmp_path / "nowhere.onnx", 8, {})
    found = measure_sharing(nowhere, together=3, seconds=0.5, passes=2, stream=stream)
    assert stream.asked == [(count, 0.5) for count in (1, 2, 3, 3, 2, 1)]
    assert found.passes == (((1, 1.0), (2, 1.5), (3, 2.0)), ((1, 1.0), (2, 2.0), (3, 3.0)))
    assert found.points == ((1.0, 1.0), (2.0, 1.75), (3.0, 2.5))
    assert (found.alone_ms, found.full_batch, found.software) == (3.0, 8, "scripted")


@pytest.mark.live
def test_a_worker_has_a_thread_for_each_core(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(STRICT)
    with running(Contender(tmp_path / "m.py", 2, {"x": (4,)}), 3) as worker:
        worker.begin()
        while worker.receive() is None:
            pass
        outputs = np.frombuffer(bytes(worker.batch.outputs[: 2 * 4 * 4]), np.float32)
        inputs = np.frombuffer(bytes(worker.batch.inputs[0]), np.float32)
        assert outputs == pytest.approx(3 * inputs)
        assert worker.end().cores == 3


@pytest.mark.live
def test_a_batch_that_a_model_does_not_take_is_an_error_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(STRICT)
    with pytest.raises(InputError, match=r"a batch of 3 fails: .*at most two rows"):
        measure_sharing(Contender(tmp_path / "m.py", 3, {"x": (4,)}), together=2, seconds=0.01)
    with pytest.raises(InputError, match=r"1 workers are .*at least 2"):
        measure_sharing(Contender(tmp_path / "m.py", 1, {}), together=1)


@pytest.mark.live
def test_a_worker_that_dies_is_reported(network: Contender) -> None:
    with running(network, 1) as one, running(network, 1) as other:
        assert len(_means_ns([[one], [other]], 0.0)) == 2
        os.kill(other.process.pid, signal.SIGKILL)
        with pytest.raises(MachineError, match=r"the measured process ended .*exit status -9"):
            _means_ns([[one, other]], 0.0)


def times(*factors: float) -> SharingTimes:
    points = tuple((float(count), factor) for count, factor in enumerate(factors, 1))
    return SharingTimes(8, 10.0, points, (), "ONNX Runtime 1")


def test_the_law_with_the_least_error_is_chosen_and_says_for_which_cores() -> None:
    convex = fit_all_laws(times(1.0, 1.65, 3.4, 6.0, 9.5), "a test")
    assert convex.best == "bandwidth"
    assert set(convex.fits) == set(SHARING_FORMS)
    sharing = convex.fits["bandwidth"].sharing
    assert isinstance(sharing.law, BandwidthLaw)
    assert sharing.law.alpha > 0.1
    assert (sharing.cores, sharing.full_batch, sharing.source) == (float(len(usable_cpus())), 8, "a test")
    assert sharing.origin == "measured"
    assert "ONNX Runtime 1" in sharing.software
    assert convex.fits["literal"].sharing.law == BandwidthLaw(0.0)
    assert convex.fits["count"].max_error == pytest.approx(0.0), "the table is never chosen, but always exact"
    halves = fit_all_laws(times(1.0, 1.0, 1.5, 2.0, 2.5), "a test")
    assert halves.fits[halves.best].max_error < 0.01
    assert halves.fits[halves.best].sharing.bandwidth == pytest.approx(0.5, abs=0.01)


def in_passes(*series: Sequence[float]) -> SharingTimes:
    passes = tuple(tuple(enumerate(each, 1)) for each in series)
    medians = tuple((float(count), float(at)) for count, at in enumerate(np.median(np.array(series), axis=0), 1))
    return SharingTimes(8, 10.0, medians, passes, "ONNX Runtime 1")


def test_of_several_passes_the_law_is_chosen_that_is_nearest_to_the_one_left_out() -> None:
    overlapping = fit_all_laws(in_passes((1, 1.7, 2.5, 3.1), (1, 1.72, 2.38, 3.15), (1, 1.69, 2.42, 3.08)), "a test")
    assert overlapping.best == "scalability", "the table repeats the noise of the passes that it is made of"
    assert overlapping.error == overlapping.held_out["scalability"] == min(overlapping.held_out.values())
    steps = fit_all_laws(in_passes(*[(1, 1.0, 1.0, 2.6, 2.6, 2.6)] * 3), "a test")
    assert steps.best == "count", "no law has such a shape"
    assert steps.error == pytest.approx(0.0)
    single = fit_all_laws(in_passes((1, 1.0, 1.0, 2.6, 2.6, 2.6)), "a test")
    assert single.best != "count"
    assert single.error == single.fits[single.best].mape > 0


def test_processor_sharing_has_nothing_to_fit() -> None:
    found = fit_all_laws(times(1.0, 2.0, 3.0), "a test").fits["processor_sharing"]
    assert found.sharing.law == ProcessorSharing("batches")
    assert found.max_error == 0.0
