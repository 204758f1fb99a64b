"""Scaling policies: which replicas, cores and batches the cluster should have. They never import each other."""
