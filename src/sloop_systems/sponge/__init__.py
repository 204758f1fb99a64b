"""Sponge (Razavi et al., EuroMLSys 2024): one replica for each application, resized in place."""
