"""Flashpoint (San Juan, thesis, Waterloo 2023): large models start from inside the cluster, and in parts."""

from dataclasses import replace
from typing import Final

from sloop.api.policies import (
    Fifo,
    FirstIdle,
    Hpa,
    Last,
    MaxMin,
    Never,
    Open,
    Policies,
    SpreadPlacement,
    WorkConserving,
)
from sloop.api.systems import ONE_KIND, System
from sloop_systems.flashpoint.policy import AtollRate, Flashpoint, SageMaker, TorchServe

AS_COMPARED: Final = "as compared with in San Juan, Flashpoint, thesis, Waterloo 2023"

_POLICIES: Final = Policies(
    Fifo(), WorkConserving(), FirstIdle(), Never(), Open(), SpreadPlacement(), Last(), AtollRate(), MaxMin()
)
"""Idle workers take the next request of one queue, and no request is given up."""

ATOLL_RATE: Final = System(
    "atoll-rate",
    "baseline",
    f"Singhvi et al., Atoll, SoCC 2021: its request-rate mode, {AS_COMPARED}",
    _POLICIES,
    ONE_KIND,
)
TORCHSERVE: Final = System(
    "torchserve",
    "baseline",
    f"TorchServe on Kubernetes, scaled by the mean wait in the queue, {AS_COMPARED}",
    replace(_POLICIES, scale=TorchServe()),
    ONE_KIND,
)
OPENWHISK: Final = System(
    "openwhisk",
    "baseline",
    f"OpenWhisk on Kubernetes, scaled by utilisation, {AS_COMPARED}",
    replace(_POLICIES, scale=Hpa(target=0.6, stabilisation_ns=0, batch_max=1)),
    ONE_KIND,
)
SAGEMAKER: Final = System(
    "sagemaker",
    "baseline",
    f"Amazon SageMaker, target tracking of invocations per instance, {AS_COMPARED}",
    replace(_POLICIES, scale=SageMaker()),
    ONE_KIND,
)
FLASHPOINT: Final = System(
    "flashpoint",
    "system",
    "San Juan, Flashpoint, thesis, Waterloo 2023: locality and chains of transfers, under Atoll's policy",
    replace(_POLICIES, provision=Flashpoint()),
    ONE_KIND,
)
"""Any other scaling policy may stand on it: `scale: torchserve`."""
ATOLL: Final = System(
    "atoll",
    "baseline",
    f"Singhvi et al., Atoll, SoCC 2021, {AS_COMPARED}: hosts keep files of models, others come from the store",
    replace(_POLICIES, provision=Flashpoint(multicast=False, join=False, source="store")),
    ONE_KIND,
)
GPU_FAAS: Final = replace(
    ATOLL,
    name="gpu-faas",
    source=f"GPU-enabled FaaS, {AS_COMPARED}: hosts keep models, others come from the store; as `atoll`",
)
"""Its hosts keep models loaded, which is not a policy's matter: a simulation declares it (`local_s`)."""
BASELINE: Final = System(
    "baseline",
    "baseline",
    f"the baseline of Flashpoint, {AS_COMPARED}: each replica downloads its model from the store",
    replace(_POLICIES, provision=Flashpoint(locality=False, multicast=False)),
    ONE_KIND,
)
