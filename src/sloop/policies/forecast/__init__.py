"""How many requests per second to expect. One policy per file; they never import each other."""
