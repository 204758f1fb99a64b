"""The suite of every system (`sloop.testing`) for those that share GPUs."""

from sloop.testing import SystemSuite


class TestSuite(SystemSuite):
    package = "sloop_systems.colocation"
