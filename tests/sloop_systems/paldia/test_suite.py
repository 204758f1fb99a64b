"""The suite of every system (`sloop.testing`) for those of PALDIA."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.paldia"
