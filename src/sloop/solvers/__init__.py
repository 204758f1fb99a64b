"""Optimisers and searches: pure functions of numbers, in the units of the papers they come from, named so."""
