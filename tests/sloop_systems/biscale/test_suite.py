"""The suite of every system (`sloop.testing`) for Biscale."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.biscale"
