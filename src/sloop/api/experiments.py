"""Simulated experiments: applications, traces, truths, worlds, and what has happened in them."""

from sloop.actions import AttachShadow, Decided, End, StartBatch, StartReplica
from sloop.app.application import Application, Deployment, Estimates, Stage, SystemChoice, Variant
from sloop.app.load import load_application, load_deployment, load_scenario
from sloop.app.scenario import (
    BackgroundTruth,
    ColdStartTruth,
    InterferenceTruth,
    NodeTruth,
    Scenario,
    ServiceTruth,
    Truth,
)
from sloop.events import BatchFailed, Finished, ReplicaLost, ReplicaStopped, ShadowLost, ShadowReady, ShadowStopped
from sloop.runlog import MemoryLog, Record
from sloop.runlog.cost import NodeRow
from sloop.runlog.summary import RunSummary
from sloop.sim.run import simulate
from sloop.sim.scenarios import run_scenario
from sloop.sim.world import Clients, World, faults_of, foretold
from sloop.streams import seed_of, stream
from sloop.systems.planning import explain_plan
from sloop.systems.setup import set_up
from sloop.workload import Spread, Trace, TraceFile, trace_from, trace_of
from sloop.workload.generate import poisson_ns
from sloop.workload.read import read_counts, trace_of_counts

__all__ = [
    "Application",
    "AttachShadow",
    "BackgroundTruth",
    "BatchFailed",
    "Clients",
    "ColdStartTruth",
    "Decided",
    "Deployment",
    "End",
    "Estimates",
    "Finished",
    "InterferenceTruth",
    "MemoryLog",
    "NodeRow",
    "NodeTruth",
    "Record",
    "ReplicaLost",
    "ReplicaStopped",
    "RunSummary",
    "Scenario",
    "ServiceTruth",
    "ShadowLost",
    "ShadowReady",
    "ShadowStopped",
    "Spread",
    "Stage",
    "StartBatch",
    "StartReplica",
    "SystemChoice",
    "Trace",
    "TraceFile",
    "Truth",
    "Variant",
    "World",
    "explain_plan",
    "faults_of",
    "foretold",
    "load_application",
    "load_deployment",
    "load_scenario",
    "poisson_ns",
    "read_counts",
    "run_scenario",
    "seed_of",
    "set_up",
    "simulate",
    "stream",
    "trace_from",
    "trace_of",
    "trace_of_counts",
]
