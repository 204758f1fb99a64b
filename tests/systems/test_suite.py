"""The suite of every system (`sloop.testing`) for sloop's own."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop"
