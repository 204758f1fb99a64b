"""The threads of libraries that compute in models in Python: BLAS under NumPy, OpenMP, PyTorch.

They get as many as the process has cores, at its start and after each resize. If the user has set one of `VARIABLES`,
all of them are the user's, and nothing here changes a number of threads.
"""

import os
import sys
from collections.abc import Mapping
from typing import Final

VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
ARE_OURS: Final = "SLOOP_SETS_THREADS"
"""Set in the environment if sloop has set `VARIABLES`, not the user."""


def before_cores_are_known(given: Mapping[str, str]) -> dict[str, str]:
    """The variables for a process that imports NumPy before it knows its cores: one thread, because BLAS would start
    one for each CPU of the machine. Empty if the user has set one of `VARIABLES` in the environment `given`."""
    if ARE_OURS not in given and any(name in given for name in VARIABLES):
        return {}
    return {ARE_OURS: "1", **dict.fromkeys(VARIABLES, "1")}


def follow_cores(count: int) -> None:
    """Let libraries compute with so many threads: those that are loaded, and those that will be.

    To be called in the thread that computes, because OpenMP has a number for each thread. A user who gives a library
    another number in the model's code does so later.
    """
    if ARE_OURS not in os.environ:
        return
    os.environ.update(dict.fromkeys(VARIABLES, str(count)))
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # noqa: PLC0415  # 20 ms, for Python

    threadpool_limits(count)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
