"""A replica's supervisor that never gives up: ``python -m tests.bench.patient_supervisor``, arguments as always.

The shipped one takes six ends soon after a start for a crash loop, and ends when all of its replicas are in one. The
soak kills each replica far more often.
"""

from __future__ import annotations

from functools import partial
from typing import Final
from unittest.mock import patch

from stage_runtime.cli import main
from stage_runtime.supervisor import supervisor
from stage_runtime.supervisor.restarts import RestartPolicy, Restarts

_PATIENT: Final = RestartPolicy(first_delay_s=0.05, most_delay_s=0.05, loop_after=1_000_000)

if __name__ == "__main__":
    with patch.object(supervisor, "Restarts", partial(Restarts, _PATIENT)):
        raise SystemExit(main())
