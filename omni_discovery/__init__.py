"""Service discovery: records, leases, the watched view, balancers and the operator's commands.

The public names are exported here lazily; ``import omni_discovery`` alone loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.lazy import lazy_exports

if TYPE_CHECKING:
    from omni_discovery.balancing.base import LoadBalancer, Task
    from omni_discovery.balancing.policies import (
        LeastQueueLengthBalancer,
        LoadBalancingPolicy,
        RandomBalancer,
        RoundRobinBalancer,
    )
    from omni_discovery.clients import OmniCoordClientForHub, OmniCoordClientForStage
    from omni_discovery.records.schema import ReplicaEvent, ReplicaInfo, ReplicaList, ReplicaStatus

__version__ = "0.2.0.dev0"

__all__ = [
    "LeastQueueLengthBalancer",
    "LoadBalancer",
    "LoadBalancingPolicy",
    "OmniCoordClientForHub",
    "OmniCoordClientForStage",
    "RandomBalancer",
    "ReplicaEvent",
    "ReplicaInfo",
    "ReplicaList",
    "ReplicaStatus",
    "RoundRobinBalancer",
    "Task",
    "__version__",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "LeastQueueLengthBalancer": "omni_discovery.balancing.policies",
            "LoadBalancer": "omni_discovery.balancing.base",
            "LoadBalancingPolicy": "omni_discovery.balancing.policies",
            "OmniCoordClientForHub": "omni_discovery.clients",
            "OmniCoordClientForStage": "omni_discovery.clients",
            "RandomBalancer": "omni_discovery.balancing.policies",
            "ReplicaEvent": "omni_discovery.records.schema",
            "ReplicaInfo": "omni_discovery.records.schema",
            "ReplicaList": "omni_discovery.records.schema",
            "ReplicaStatus": "omni_discovery.records.schema",
            "RoundRobinBalancer": "omni_discovery.balancing.policies",
            "Task": "omni_discovery.balancing.base",
        },
    )
