"""Presentation of runs: tables, plots, HTML pages, and explanations of requests and decisions."""
