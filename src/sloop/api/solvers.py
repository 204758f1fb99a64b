"""Optimisation, queueing and forecasts for policies, as functions of numbers."""

from sloop.solvers import highs
from sloop.solvers.budget import IndexedPath
from sloop.solvers.forecasting import seconds_rps
from sloop.solvers.highs import Row
from sloop.solvers.queueing import fill_ms, patience_ns, replicas_needed

__all__ = ["IndexedPath", "Row", "fill_ms", "highs", "patience_ns", "replicas_needed", "seconds_rps"]
