"""``--omni-lb-policy packed``: fills one replica after the other, so that the last ones can be shut down when idle."""

from __future__ import annotations

from omni_discovery import LoadBalancer, ReplicaInfo, Task


class PackedBalancer(LoadBalancer):
    """The replica with the lowest id that has a free slot; if all are full, the one with the shortest queue."""

    def select(self, task: Task, replicas: list[ReplicaInfo]) -> int:
        """See LoadBalancer. Replicas that weigh 0 are chosen only if all do."""
        del task
        if not replicas:
            raise ValueError("replicas must not be empty")
        usable = [index for index, info in enumerate(replicas) if info.weight > 0] or list(range(len(replicas)))
        free = [index for index in usable if replicas[index].queue_length < replicas[index].capacity]
        if free:
            return min(free, key=lambda index: replicas[index].replica_id)
        return min(usable, key=lambda index: replicas[index].queue_length)
