"""One suite for every system: sloop's own, published ones and anybody's. `SystemSuite` needs pytest, which sloop
does not install.

A distribution's tests are one class, which names the package whose entry points name its systems and policies:

    from sloop.testing import SystemSuite


    class TestSuite(SystemSuite):
        package = "street"

A system that is no entry point is given by the path of its file: `systems = ("headroom.py",)`.

Of systems with a scale policy of the same class, only one is tried; with SLOOP_SUITE=all in the environment, all are.
`sloop.testing.views` makes arguments of policies for tests of one's own, without pytest.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sloop.testing.suite import SystemSuite

__all__ = ["SystemSuite"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # as modules have it
    """`SystemSuite`, once it is asked for: `sloop.testing.views` needs no pytest."""
    if name in __all__:
        from sloop.testing import suite  # noqa: PLC0415  # it needs pytest

        return getattr(suite, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
