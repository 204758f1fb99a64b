"""Models that share GPUs: Elvinger's thesis (ETH Zurich 2024), with iGniter (TPDS 2023) and Usher (OSDI 2024)."""
