"""Which requests may enter. One policy per file; they never import each other."""
