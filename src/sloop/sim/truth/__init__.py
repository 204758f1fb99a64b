"""The true behaviour of a simulated world, as opposed to the beliefs of policies (law 2).

Each module samples one kind of truth from its parameters and from named random streams of the world's seed: `service`
(batch durations; interference belongs there), `branches` (routes of requests through the graph), `cold_start` (starts
and resizes), `network` (transfers to the server) and `failure`. `recorded` reads the truth from the log of another run.
Two draw nothing: `flows` (transfers between nodes) and `weights` (which node has what, and what is on its way).

Only `sloop.sim` may import this package; the core sees truth only through events.
"""
