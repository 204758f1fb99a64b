"""Published systems: a folder for each publication, and `comparison`, which repeats their experiments.

They use what `docs/write-a-system.md` gives everybody. `sloop` knows none of them; their names are entry points, so a
folder can be removed together with its lines in pyproject.toml.
"""
