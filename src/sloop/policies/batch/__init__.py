"""How many waiting visits to run now. One policy per file; they never import each other."""
