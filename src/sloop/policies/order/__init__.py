"""Which waiting visit comes first. One policy per file; they never import each other."""
