"""The same two queues in each simulator of `benchmarks.sim_speed`, every one a program of its own.

    python -m benchmarks.simulators.NAME --queue many-servers --requests 100000 [--servers 8] [--waits]

Each runs in the interpreter that has what it needs; `setting` and `bare` need the standard library alone.
"""
