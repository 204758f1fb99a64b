"""What really happens in a simulated world, as against what policies believe of it (law 2).

Each module owns one kind of truth: it is given its parameters and draws from its own named streams of the world's
seed. Nothing above or beside `sim/` may import this package; the core meets truth only through events.
"""
