"""Flashpoint (San Juan, thesis, Waterloo 2023): large models that start from inside the cluster."""
