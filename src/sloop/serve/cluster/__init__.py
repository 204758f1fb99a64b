"""Other machines: an agent on each, which is a node behind a link; the server's side of it; Ray, which starts it."""
