"""sloop compared with other inference servers: `python -m benchmarks.peers`.

Each peer is one file in `servers/` (how to install, start and ask it, and its admission limit) and one server program
in `programs/`, which runs in the peer's own environment. A new peer needs these two and a line in
`servers/__init__.py`.
"""
