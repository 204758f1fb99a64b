"""The suite of every system (`sloop.testing`) for Sponge."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.sponge"
