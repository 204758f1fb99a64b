from sloop.streams import stream

GOLDEN = 3_064_177_563
"""The first 32 bits of `arrivals` in world 1: were they to change, so would every figure we have published."""


def test_same_seed_and_name_give_the_same_draws_on_every_machine() -> None:
    assert [stream(7, "service").getrandbits(32) for _ in range(2)] == [stream(7, "service").getrandbits(32)] * 2
    assert stream(1, "arrivals").getrandbits(32) == GOLDEN


def test_streams_do_not_share_draws() -> None:
    names = ["arrivals", "service", "network", "failure"]
    first = {(seed, name): stream(seed, name).random() for seed in range(20) for name in names}
    assert len(set(first.values())) == len(first)


def test_a_new_consumer_never_shifts_an_old_one() -> None:
    alone = [stream(3, "service").random() for _ in range(1)]
    stream(3, "newcomer").random()
    assert [stream(3, "service").random()] == alone
