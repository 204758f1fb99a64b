"""Which node a new replica goes to. One policy per file; they never import each other."""
