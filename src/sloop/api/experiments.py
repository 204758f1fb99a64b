"""Simulated experiments: applications, traces, truths, worlds, and what has happened in them."""

from sloop.actions import Decided
from sloop.app.application import Application, Deployment, Estimates, Stage, SystemChoice, Variant
from sloop.app.load import load_application, load_deployment, load_scenario
from sloop.app.scenario import ColdStartTruth, Scenario, ServiceTruth, Truth
from sloop.runlog import MemoryLog, Record
from sloop.runlog.summary import RunSummary
from sloop.sim.run import simulate
from sloop.sim.scenarios import run_scenario
from sloop.sim.world import World
from sloop.streams import stream
from sloop.systems.planning import explain_plan
from sloop.systems.setup import set_up
from sloop.workload import Spread, Trace, trace_from

__all__ = [
    "Application",
    "ColdStartTruth",
    "Decided",
    "Deployment",
    "Estimates",
    "MemoryLog",
    "Record",
    "RunSummary",
    "Scenario",
    "ServiceTruth",
    "Spread",
    "Stage",
    "SystemChoice",
    "Trace",
    "Truth",
    "Variant",
    "World",
    "explain_plan",
    "load_application",
    "load_deployment",
    "load_scenario",
    "run_scenario",
    "set_up",
    "simulate",
    "stream",
    "trace_from",
]
