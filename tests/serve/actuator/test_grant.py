import pytest

from sloop.serve.actuator.grant import Grant


@pytest.mark.parametrize(("cores", "threads"), [(0.1, 1), (1.0, 1), (1.0 + 1e-12, 1), (1.25, 2), (2.0, 2), (7.5, 8)])
def test_threads_are_cores_rounded_up(cores: float, threads: int) -> None:
    assert Grant(cores).threads == threads
