"""The live driver: gateway, driver, worker processes. Real time, real sockets; every decision is the core's."""
