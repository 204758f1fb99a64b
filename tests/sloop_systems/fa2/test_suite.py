"""The suite of every system (`sloop.testing`) for those of FA2."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.fa2"
