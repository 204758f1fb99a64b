from sloop.sim.truth.resize import Resize
from sloop.units import ms


def test_the_delay_is_the_one_declared_unless_it_is_noisy() -> None:
    assert Resize(1, delay_ns=ms(50)).draw_ns() == ms(50)
    noisy = Resize(1, delay_ns=ms(50), cv=0.2)
    assert len({noisy.draw_ns() for _ in range(50)}) > 10


def test_a_batch_in_flight_keeps_its_speed_by_default() -> None:
    assert not Resize(1).rescales
    assert Resize(1, in_flight="rescale").rescales
