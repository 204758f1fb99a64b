"""The same two queues in each simulator of `benchmarks.sim_speed`; each is a program.

    python -m benchmarks.simulators.NAME --queue many-servers --requests 100000 [--servers 8] [--waits]

Each program runs in an interpreter that has its packages; `setting` and `bare` need only the standard library.
"""
