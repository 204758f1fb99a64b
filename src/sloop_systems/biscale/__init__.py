"""Biscale (Razavi, dissertation, TU Darmstadt 2024, chapter P4; as Themis: arXiv 2407.14843): larger replicas in place
through a surge, then more of them."""
