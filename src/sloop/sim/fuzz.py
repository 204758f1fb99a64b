"""Fuzzing: random worlds under all checkers, for as long as one likes. `python -m sloop.sim.fuzz --help`.

Promises that a failure is one line that shows it again. Every seed that ever failed becomes a named test.
"""

import argparse
import sys
import time
from itertools import count

from sloop.errors import InputError
from sloop.sim.run import simulate
from sloop.sim.swarm import world_from_seed
from sloop.systems import SYSTEMS


def main(arguments: list[str] | None = None) -> int:
    """Play worlds until the time is up; 1 as soon as one breaks an invariant."""
    parser = argparse.ArgumentParser(prog="python -m sloop.sim.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on (default: 60)")
    parser.add_argument("--seed", type=int, help="play this world only")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--system", action="append", choices=sorted(SYSTEMS), help="default: all")
    options = parser.parse_args(arguments)
    systems = options.system or sorted(SYSTEMS)
    seeds = [options.seed] if options.seed is not None else count(options.first)
    until_s = time.monotonic() + options.seconds
    worlds = requests = 0
    for seed in seeds:
        for system in systems:
            try:
                requests += simulate(world_from_seed(seed, system)).played.requests
            except InputError:
                continue  # a system that is not made for this application
            except AssertionError as failure:
                again = f"reproduce with: python -m sloop.sim.fuzz --seed {seed} --system {system}"
                sys.stderr.write(f"{type(failure).__name__}: {failure}\n{again}\n")
                return 1
            worlds += 1
        if time.monotonic() > until_s:
            break
    sys.stderr.write(f"{worlds} worlds with {requests} requests, every invariant held\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
