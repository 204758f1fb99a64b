import pytest

from sloop.serve.gateway.budget import MS_MAX, budget_ns
from sloop.serve.gateway.refusal import Refusal
from sloop.units import ms


@pytest.mark.parametrize(
    ("value", "slo_ns"), [(b"200", ms(200)), ("0.5", ms(0.5)), (200, ms(200)), (1e3, ms(1000)), (MS_MAX, ms(MS_MAX))]
)
def test_reads_milliseconds_however_they_are_sent(value: object, slo_ns: int) -> None:
    assert budget_ns(value, None) == (slo_ns, 0)


def test_leaves_the_budget_to_the_application_unless_asked() -> None:
    assert budget_ns(None, b"12.5") == (None, ms(12.5))


@pytest.mark.parametrize(
    "value", [b"-5", b"0", 0, b"nan", b"inf", 1e300, 10**400, MS_MAX + 1, b"fast", b"", True, [200], b"1_000", b"\xff"]
)
def test_refuses_negative_and_absurd_budgets(value: object) -> None:
    with pytest.raises(Refusal, match="x-slo-ms") as caught:
        budget_ns(value, None)
    assert caught.value.status == 400
    assert caught.value.fix.startswith("send milliseconds from 0.001 to 3600000")


def test_refuses_time_travel() -> None:
    with pytest.raises(Refusal, match="x-elapsed-ms: '-1' is out of range"):
        budget_ns(None, b"-1")
    assert budget_ns(None, b"0") == (None, 0)
