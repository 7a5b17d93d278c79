"""Deploy documents that several tests read."""

from __future__ import annotations

TREE = """
model: tree
stages:
  - {stage_id: 0, engine: echo, model: /m/thinker, final_output: text}
  - {stage_id: 1, engine: echo, final_output: audio}
  - {stage_id: 2, engine: echo, final_output: image, input_from: [0], runtime: {devices: "0,1", num_replicas: 2}}
edges:
  - {from: 0, to: 2, connector: small}
connectors:
  small: {name: SharedMemoryConnector, extra: {shm_threshold_bytes: 0}}
"""
