"""Model files: where they are (`sources`), how they come (`web`, `objects`, `peers`), and where they are
kept (`cache`, with its `folder` and each `transfer`)."""
