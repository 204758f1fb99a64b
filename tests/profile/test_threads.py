"""The threads of libraries in models in Python follow the cores of their process, unless the user says otherwise."""

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from sloop.profile.threads import ARE_OURS, VARIABLES, before_cores_are_known

COUNTED = f"""
import json, os, sys
import numpy as np
from threadpoolctl import threadpool_info
from sloop.profile.threads import follow_cores

class Torch:
    threads = None
    def set_num_threads(self, count):
        self.threads = count

sys.modules["torch"] = torch = Torch()
seen = []
for count in (None, 3, 1):
    if count:
        follow_cores(count)
    pools = {{pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}}
    seen.append([sorted(pools), torch.threads, [os.environ.get(name) for name in {VARIABLES!r}]])
print(json.dumps(seen))
"""


def counted(given: Mapping[str, str]) -> list[list[object]]:
    """The threads of BLAS, those of PyTorch, and the variables: at the start of a process, with 3 cores and with 1."""
    environment = {**given, **before_cores_are_known(given)}
    done = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True, check=True, env=environment)
    found: list[list[object]] = json.loads(done.stdout)
    return found


def test_blas_and_pytorch_have_as_many_threads_as_the_process_has_cores() -> None:
    assert counted({}) == [[[1], None, ["1"] * 3], [[3], 3, ["3"] * 3], [[1], 1, ["1"] * 3]]


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_of_the_user_wins(name: str) -> None:
    seen = counted({name: "2", "OMP_NUM_THREADS": "2"})
    assert [each[0] for each in seen] == [[2]] * 3
    assert {each[1] for each in seen} == {None}


def test_what_sloop_has_set_is_not_the_users() -> None:
    ours = before_cores_are_known({"PATH": "/bin"})
    assert before_cores_are_known(ours) == ours == {ARE_OURS: "1", **dict.fromkeys(VARIABLES, "1")}
    assert before_cores_are_known({"MKL_NUM_THREADS": "4"}) == {}
