"""The live driver: edges, driver, worker processes. Real time, real sockets; every decision is the core's."""
