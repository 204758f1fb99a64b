"""Random number streams: every random draw of a run comes from a named stream of the run's seed.

A stream's numbers depend on the seed and its own name only, so that a new consumer never shifts the draws of an old
one. `random.Random` (Mersenne twister) gives the same output for one seed on every machine and Python version; NumPy's
generators may change between releases (NEP 19). Arithmetic on top of it uses plain Python floats for the same reason.
"""

import hashlib
from random import Random


def stream(seed: int, name: str) -> Random:
    """The generator called `name` of the run with this seed. Each call starts it anew."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))
