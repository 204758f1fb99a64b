"""FA2 (Razavi et al., RTAS 2022): the fewest replicas over a whole graph."""
