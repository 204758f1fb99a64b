import pytest

from sloop.errors import InputError
from sloop.load.plan import ClosedLoop, LoadPlan, split_url
from sloop.units import s
from sloop.workload import KINDS, Link, generated
from sloop.workload.generate import Poisson

TRACE = generated(Poisson(10.0), seed=0, duration_ns=s(1))
LINK = Link("test", (1_000.0,), "assumed: a test")


def test_a_plan_needs_little() -> None:
    assert "poisson" in KINDS
    assert LoadPlan("http://localhost:8000", "m", TRACE, 100.0).seed == 0
    assert LoadPlan("https://h/base", "m", ClosedLoop(4, 1.0), 100.0, connections_max=4, warm_connections=0).cpus == ()


@pytest.mark.parametrize("inside", ["/v2", "/v2/models/m", "/v2/models/m/infer"])
def test_the_url_of_a_model_is_answered_with_that_of_its_server(inside: str) -> None:
    with pytest.raises(InputError, match="inside a server") as caught:
        split_url(f"http://host:8000/prefix{inside}")
    assert caught.value.help == "write http://host:8000/prefix, and the model with --model"
    assert split_url("http://host/v2x").path == "/v2x"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h?x=1",
        "http://h/\u00e4",
        "http://h/a b",
    ],
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(InputError, match="URL"):
        split_url(url)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"model": ""}, "model"),
        ({"slo_ms": 0.0}, "slo_ms"),
        ({"slo_ms": float("nan")}, "slo_ms"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"connections_max": 0}, "connections_max"),
        ({"connections_max": 4, "warm_connections": 5}, "warm_connections"),
        ({"payload_bytes": -1}, "payload_bytes"),
        ({"arrivals": ClosedLoop(0, 1.0)}, "connections"),
        ({"arrivals": ClosedLoop(1, 0.0)}, "duration_s"),
        ({"arrivals": ClosedLoop(1, 1.0, 2.0)}, "warmup_s"),
        ({"arrivals": ClosedLoop(1, 1.0), "link": LINK}, "link"),
        ({"arrivals": generated(Poisson(1.0), seed=0, duration_ns=s(1e8))}, "duration_s"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, object], where: str) -> None:
    plan: dict[str, object] = {"url": "http://h", "model": "m", "arrivals": TRACE, "slo_ms": 1.0, **options}
    with pytest.raises(InputError) as caught:
        LoadPlan(**plan)  # type: ignore[arg-type]
    assert caught.value.where == where
