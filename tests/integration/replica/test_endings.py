"""Replicas whose engine hangs while it is closed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.support.quiet import soon_s
from tests.support.replica_hub import eventually
from tests.support.replica_stage import Deployment, echo_stages

#: One replica in a process of its own, whose echo engine never comes back from ``close``.
PROGRAM = """
    import logging, os, sys, time
    from stage_runtime.config import ReplicaConfig
    from stage_runtime.engines.echo.engine import EchoEngine
    from stage_runtime.supervisor.deploy_document import deploy_of_replica
    from stage_runtime.replica.replica import Replica

    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    EchoEngine.close = lambda self: time.sleep(600)
    config = ReplicaConfig(stage_id=0, endpoints={endpoint!r}, namespace={namespace!r}, ttl_s=5.0, close_timeout_s=1.0)
    os._exit(Replica(config, deploy_of_replica(config)).run())
"""


def test_an_engine_that_never_closes_does_not_keep_its_process(endpoint: str, namespace: str, tmp_path: Path) -> None:
    """1. SIGTERM: it drains and withdraws; 2. its engine hangs in close: the process ends with the code of the drain"""
    with Deployment(endpoint, namespace, echo_stages({}), tmp_path) as deployment:
        program = textwrap.dedent(PROGRAM).format(endpoint=endpoint, namespace=namespace)
        with deployment.log().open("wb") as log:
            process = subprocess.Popen([sys.executable, "-c", program], stderr=log)
        try:
            deployment.wait_up()
            process.terminate()
            began_s = time.monotonic()
            assert process.wait(15.0) == 0
            assert time.monotonic() - began_s < soon_s(6.0)
        finally:
            process.kill()
            process.wait()
        assert eventually(lambda: not deployment.client.view().replicas)
        assert "replica.close_hung after_s=1 code=0" in deployment.log().read_text()
