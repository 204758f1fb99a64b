"""NetNN (Razavi, dissertation, TU Darmstadt 2024, chapters P5 and P6): inference inside the network."""
