"""IPA (Razavi, dissertation, TU Darmstadt 2024, chapter P3): the most accurate variants that are worth their cores."""
