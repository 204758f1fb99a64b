import time

import numpy as np
import pytest

from sloop.errors import InputError
from sloop.serve.runtimes.fake import FakeRuntime


def test_burning_takes_the_cpu_time_told_and_echoes() -> None:
    runtime = FakeRuntime.parse("fake:burn:1:0.5")
    rows = np.arange(4.0).reshape(4, 1)
    before_ns = time.thread_time_ns()
    [answer], threads = runtime.run([rows], 3)
    assert time.thread_time_ns() - before_ns >= 3_000_000
    assert answer is rows
    assert threads == 3


def test_failing_on_purpose() -> None:
    with pytest.raises(ValueError, match="on purpose"):
        FakeRuntime.parse("fake:sleep:0:0:fail").run([], 1)


@pytest.mark.parametrize("model", ["fake:", "fake:burn:1", "fake:rest:1:1", "fake:burn:x:1", "fake:burn:1:1:oops"])
def test_another_form_is_refused_with_the_right_one(model: str) -> None:
    with pytest.raises(InputError, match="help: write fake:burn"):
        FakeRuntime.parse(model)
