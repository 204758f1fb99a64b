"""Chance: every random draw of a run comes from a named stream of the world's seed.

A stream's numbers depend on the seed and its own name only, so a new consumer never shifts the draws of an old one.
Uses `random.Random` (Mersenne twister), whose output for one seed is the same on every machine and Python version;
the arithmetic on top of it must use plain Python floats for the same reason.
"""

import hashlib
from random import Random


def stream(seed: int, name: str) -> Random:
    """The generator called `name` in the world `seed`."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))
