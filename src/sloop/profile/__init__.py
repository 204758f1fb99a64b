"""Model profiles: latency functions and their fits, measurements with provenance, and the estimates policies use.

Every worker imports parts of it, so it imports none by itself: the published profiles are read from files.
"""
