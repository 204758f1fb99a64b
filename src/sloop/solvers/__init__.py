"""Optimisers and searches: pure functions of numbers. Units are those of the source papers; names carry them."""
