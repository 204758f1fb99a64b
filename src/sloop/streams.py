"""Random number streams: every random draw of a run comes from a named stream of the run's seed.

A stream's numbers depend only on the seed and the stream's name, so that a new stream never changes the numbers of an
old one. `random.Random` (Mersenne twister) gives the same output for one seed on every machine and Python version;
NumPy's generators may change between releases (NEP 19). Arithmetic on the numbers uses plain Python floats for the same
reason.
"""

import hashlib
from random import Random


def stream(seed: int, name: str) -> Random:
    """The generator called `name` of the run with this seed. Each call starts from the stream's first number."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "big"))


def seed_of(seed: int, name: str) -> int:
    """The seed of a part of a run that has streams of its own, such as one of several applications."""
    return stream(seed, name).getrandbits(63)
