"""Which waiting visits to give up. One policy per file; they never import each other."""
