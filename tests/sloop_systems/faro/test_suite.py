"""The suite of every system (`sloop.testing`) for those of Faro."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.faro"
