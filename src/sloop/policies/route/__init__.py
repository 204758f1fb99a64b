"""Which idle replica takes the next batch. One policy per file; they never import each other."""
