"""Policies: all decisions that the core leaves open. One module per verb; scaling policies have modules in `scale`.

A policy is a frozen dataclass whose fields are its parameters, see `sloop.core.protocols`. `sloop.systems.registry` has
their names.
"""
