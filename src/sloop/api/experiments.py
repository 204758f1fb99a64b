"""Simulated experiments: applications, traces, truths, worlds, and what has happened in them."""

from sloop.actions import Decided, End, StartBatch, StartWorker, StopWorker
from sloop.app.application import Application, Deployment, Estimates, Stage, SystemChoice, Variant
from sloop.app.load import load_application, load_deployment, load_scenario
from sloop.app.scenario import (
    BackgroundTruth,
    ColdStartTruth,
    Delivery,
    InterferenceTruth,
    NetworkTruth,
    NodeTruth,
    Scenario,
    ServiceTruth,
    StoreLink,
    TopologyTruth,
    Truth,
)
from sloop.events import (
    BatchFailed,
    Finished,
    WorkerLost,
    WorkerReady,
    WorkerResized,
    WorkerStopped,
)
from sloop.runlog import MemoryLog, Record
from sloop.runlog.cost import NodeRow
from sloop.runlog.summary import RunSummary
from sloop.sim import FlowNetwork, Topology
from sloop.sim.run import simulate
from sloop.sim.scenarios import run_scenario
from sloop.sim.world import Clients, World, faults_of, with_known_future
from sloop.streams import seed_of, stream
from sloop.systems.planning import explain_plan
from sloop.systems.setup import set_up
from sloop.workload import Link, Spread, Trace, TraceFile, link_from, read_link, trace_from, trace_of
from sloop.workload.generate import generated, kind_of, poisson_ns
from sloop.workload.link import LinkFile
from sloop.workload.read import read_counts, read_trace, trace_of_counts
from sloop.workload.trace import cut, scale

__all__ = [
    "Application",
    "BackgroundTruth",
    "BatchFailed",
    "Clients",
    "ColdStartTruth",
    "Decided",
    "Delivery",
    "Deployment",
    "End",
    "Estimates",
    "Finished",
    "FlowNetwork",
    "InterferenceTruth",
    "Link",
    "LinkFile",
    "MemoryLog",
    "NetworkTruth",
    "NodeRow",
    "NodeTruth",
    "Record",
    "RunSummary",
    "Scenario",
    "ServiceTruth",
    "Spread",
    "Stage",
    "StartBatch",
    "StartWorker",
    "StopWorker",
    "StoreLink",
    "SystemChoice",
    "Topology",
    "TopologyTruth",
    "Trace",
    "TraceFile",
    "Truth",
    "Variant",
    "WorkerLost",
    "WorkerReady",
    "WorkerResized",
    "WorkerStopped",
    "World",
    "cut",
    "explain_plan",
    "faults_of",
    "generated",
    "kind_of",
    "link_from",
    "load_application",
    "load_deployment",
    "load_scenario",
    "poisson_ns",
    "read_counts",
    "read_link",
    "read_trace",
    "run_scenario",
    "scale",
    "seed_of",
    "set_up",
    "simulate",
    "stream",
    "trace_from",
    "trace_of",
    "trace_of_counts",
    "with_known_future",
]
