"""Versions of applications in a running server: what it takes to serve one, how it is checked, deployed, kept and
removed."""
