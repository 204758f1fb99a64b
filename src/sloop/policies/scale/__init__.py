"""What the cluster should look like. One policy per file; they never import each other."""
