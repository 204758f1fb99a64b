"""What really happens in a simulated world, as opposed to what policies believe (law 2).

Each module samples one kind of truth from its parameters and from named streams of the world's seed: `service` (how
long batches take; interference belongs there), `branches` (what requests do in the graph), `cold_start` (starts and
resizes), `network` (requests on their way to the server; flows between nodes belong there) and `failure`. `recorded`
reads a log as truth for another run.

Only `sloop.sim` may import this package; the core meets truth only through events.
"""
