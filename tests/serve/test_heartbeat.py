"""What is taken for a hang, and what is merely slow: simulated looks, and the kernel's files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sloop.serve.heartbeat import HUNG_S, LOOK_S, PATIENCE_S, ProcessState, Silence, process_state

S = 10**9


def looks_until_hung(*, state: str, ran: float = 0.0, waited: float = 0.0, since_s: float = LOOK_S) -> int:
    """How many looks it takes if the thread is in this state at each, and computes and waits for a CPU for these parts
    of the time between them; 1,000 if that is not enough."""
    silence = Silence()
    for look in range(1000):
        passed_s = look * since_s
        silence.grow(since_s, ProcessState(state, round(ran * passed_s * S), round(waited * passed_s * S)))
        if silence.why:
            return look + 1
    return 1000


@pytest.mark.parametrize("state", ["T", "S"])
def test_a_process_that_is_stopped_or_waits_for_something_else_than_a_cpu_hangs_after_a_second(state: str) -> None:
    assert looks_until_hung(state=state) == pytest.approx(HUNG_S / LOOK_S, abs=1)


def test_one_that_computes_without_an_end_hangs_when_it_has_computed_for_a_second() -> None:
    assert looks_until_hung(state="R", ran=1.0) == pytest.approx(HUNG_S / LOOK_S, abs=2)
    assert looks_until_hung(state="R", ran=0.25) == pytest.approx(4 * HUNG_S / LOOK_S, abs=2), "with a quota"


@pytest.mark.parametrize("state", ["R", "D"])
def test_one_that_gets_no_cpu_or_page_has_more_time_but_not_for_ever(state: str) -> None:
    assert looks_until_hung(state=state) == pytest.approx(PATIENCE_S / LOOK_S, abs=1)


def test_time_in_a_queue_for_a_cpu_does_not_count() -> None:
    assert looks_until_hung(state="S", waited=0.9) > 5 * HUNG_S / LOOK_S


def test_time_in_which_nobody_looked_hardly_counts() -> None:
    """Whoever looks was stopped itself, for a minute each time."""
    silence = Silence()
    for _ in range(4):
        silence.grow(60.0, ProcessState("S", 0, 0))
        assert not silence.why


def test_a_sign_of_life_ends_the_silence() -> None:
    silence = Silence()
    for look in range(100):
        if look % 5 == 0:
            silence.end()
        silence.grow(LOOK_S, ProcessState("T", 0, 0))
        assert not silence.why


def test_without_the_kernel_all_time_counts() -> None:
    silence = Silence()
    for _ in range(8):
        silence.grow(LOOK_S, None)
    assert not silence.why
    for _ in range(4):
        silence.grow(LOOK_S, None)
    assert silence.why.endswith("its state is unknown")


def test_the_reason_says_for_how_long_and_in_what_state() -> None:
    silence = Silence()
    for _ in range(11):
        silence.grow(LOOK_S, ProcessState("T", 0, 0))
    assert re.fullmatch(r"it has hung: no sign of life for 1\.\d s; it is stopped by a signal", silence.why)


def test_the_kernel_says_what_a_thread_does_and_has_done() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = process_state(child.pid)
        assert found is not None
        assert found.state in "RSD"
        assert min(found.ran_ns, found.waited_ns) >= 0
    finally:
        child.communicate(b"\n")
    assert process_state(child.pid) is None
    own = process_state(os.getpid())
    assert own is not None
    assert own.ran_ns > 0


def test_a_name_with_brackets_and_spaces_is_read(tmp_path: Path) -> None:
    thread = tmp_path / "7" / "task" / "7"
    thread.mkdir(parents=True)
    (thread / "stat").write_text("7 (a) R (b) T 1 2 3")
    (thread / "schedstat").write_text("5 6 7\n")
    assert process_state(7, tmp_path) == ProcessState("T", 5, 6)
    helper = tmp_path / "7" / "task" / "8"
    helper.mkdir()
    (helper / "stat").write_text("8 (c) D 1 2 3")
    (helper / "schedstat").write_text("10 20 30\n")
    assert process_state(7, tmp_path) == ProcessState("D", 15, 26), "what any thread does"
    (thread / "schedstat").write_text("")
    assert process_state(7, tmp_path) is None
