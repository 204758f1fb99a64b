"""Which batches are run before a worker is ready, and what their failure means."""

from collections.abc import Callable, Sequence

import pytest

from sloop.profile.warming import LARGEST_S_MAX, WARM_S_MAX, batches_to_warm, placeholders, warm_up
from sloop.tensor import Port, Signature


class Passes:
    """Passes that take `row_s` for each row, and `once_s` more for each size that was not run before."""

    def __init__(self, row_s: float, once_s: float) -> None:
        self.row_s, self.once_s = row_s, once_s
        self.now_s = 0.0
        self.ran: list[int] = []

    def run(self, rows: int) -> None:
        self.now_s += rows * self.row_s + self.once_s * (rows not in self.ran)
        self.ran.append(rows)

    def warm_up(self, batches: Sequence[int]) -> tuple[int, ...]:
        return warm_up(self.run, batches, clock_s=self.clock_s, work_s=self.clock_s)

    def clock_s(self) -> float:
        return self.now_s


def test_every_size_is_run_if_sizes_cost_something_once() -> None:
    passes = Passes(0.001, 0.4)
    assert passes.warm_up((1, 2, 4, 8)) == ()
    assert passes.ran == [2, 2, 2, 4, 4, 8, 3, 5, 6, 7], "first those that a profile knows; one is confirmed"


def test_otherwise_only_the_largest_is_and_if_it_is_short() -> None:
    passes = Passes(0.001, 0.0)
    assert passes.warm_up((1, 2, 4, 8)) == ()
    assert passes.ran == [2, 2, 2, 8]
    spare = Passes(0.001, 0.0)
    warm_up(spare.run, (1, 2, 4, 8), for_memory=False, clock_s=spare.clock_s, work_s=spare.clock_s)
    assert spare.ran == [2, 2, 2]
    slow = Passes(LARGEST_S_MAX / 7, 0.0)
    assert slow.warm_up((1, 2, 4, 8)) == ()
    assert slow.ran == [2, 2, 2]


def test_sizes_that_cost_something_once_in_classes_are_found_by_the_largest() -> None:
    passes = Passes(0.001, 0.0)
    known: set[int] = set()

    def run(rows: int) -> None:
        size_class = (rows - 1) // 4
        passes.once_s = 0.4 * (size_class > 0 and size_class not in known)
        known.add(size_class)
        passes.run(rows)

    assert warm_up(run, (1, 2, 4, 8, 16), clock_s=passes.clock_s, work_s=passes.clock_s) == ()
    assert set(passes.ran) == set(range(2, 17))


@pytest.mark.parametrize("slow", [2, 64], ids=["what is done once", "memory for the largest"])
def test_one_slow_pass_does_not_make_all_sizes_run(slow: int) -> None:
    passes = Passes(0.001, 0.0)

    def run(rows: int) -> None:
        passes.once_s = 0.4 * (rows == slow)
        passes.run(rows)

    assert warm_up(run, (1, 2, 4, 8, 16, 32, 64), clock_s=passes.clock_s, work_s=passes.clock_s) == ()
    assert set(passes.ran) == {2, 4, 8, 16, slow}


def test_warming_has_a_bound_and_names_the_sizes_left() -> None:
    passes = Passes(0.0, 2.0)
    assert passes.warm_up((1, 2, 4, 8, 16)) == (5, 6, 7, 9, 10, 11, 12, 13, 14, 15)
    assert passes.now_s <= WARM_S_MAX


@pytest.mark.parametrize(("batches", "ran"), [((1,), []), ((4,), []), ((1, 3), [3, 3, 3])])
def test_few_sizes(batches: tuple[int, ...], ran: list[int]) -> None:
    passes = Passes(0.001, 0.0)
    assert passes.warm_up(batches) == ()
    assert passes.ran == ran


def test_a_batch_that_fails_ends_it() -> None:
    passes = Passes(0.001, 0.4)
    run: Callable[[int], None] = passes.run

    def fails(rows: int) -> None:
        if rows == 4:
            raise MemoryError
        run(rows)

    with pytest.raises(MemoryError):
        warm_up(fails, (1, 2, 4, 8), clock_s=passes.clock_s, work_s=passes.clock_s)


def test_sizes_are_those_that_were_measured_and_powers_of_two() -> None:
    assert batches_to_warm([1]) == (1,)
    assert batches_to_warm([3, 12]) == (1, 2, 3, 4, 8, 12)


def test_placeholders_have_rows_where_inputs_have() -> None:
    signature = Signature.of([Port("x", "FP32", (-1, -1, 2)), Port("s", "FP32", ()), Port("t", "INT64", (2, 3))], [])
    assert placeholders(signature, 5, {}, {}) is None
    made = placeholders(signature, 5, {"x": (7, 2)}, {})
    assert made is not None
    assert {name: array.shape for name, array in made.items()} == {"x": (5, 7, 2), "s": (), "t": (2, 3)}
    guessed = placeholders(signature, 5, {}, {"x": (16, 2)})
    assert guessed is not None
    assert guessed["x"].shape == (5, 16, 2)
