"""sloop measured side by side with what users would pick instead: `python -m benchmarks.peers`.

Each peer is one file in `servers/` (what is installed, how it is started and asked, its admission limit) and the server
program that its own interpreter runs in `programs/`. A new peer is these two and a line in `servers/__init__.py`.
"""
