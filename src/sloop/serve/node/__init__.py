"""The workers of one machine: one class for this machine and for those of agents (`node`), and what it is made of."""
