"""PALDIA (Bhasi et al., IPDPS 2024): the cheapest hardware on which all expected requests end in time."""
