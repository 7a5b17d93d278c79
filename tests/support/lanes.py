"""``python -m tests.support.lanes [PYTEST ARGUMENTS]``: all tests, in two lanes that run at the same time.

Most tests wait for something most of the time. The first lane is printed as it goes, the other one when it has ended.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Final

LANES: Final = (
    ("tests/integration",),
    # Of a speaking model, the short form alone; `make omni-test` runs the others.
    (
        "tests/unit",
        "tests/contract",
        "tests/simulation",
        "tests/linearizability",
        "tests/fault",
        "tests/gpu",
        "tests/guard",
        "tests/e2e",
        "--ignore-glob=tests/e2e/test_vllm_omni*.py",
    ),
)
#: pytest's exit code when nothing was collected.
_NOTHING: Final = 5
_SOON_S: Final = 60


def main(arguments: Sequence[str]) -> int:
    """Run both lanes; return the worse exit code."""
    shown, hidden = ([sys.executable, "-m", "pytest", *lane, *arguments] for lane in LANES)
    begun_s = time.monotonic()
    with tempfile.TemporaryFile() as said:
        other = subprocess.Popen(
            [*hidden, "-p", "no:cacheprovider"], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
        try:
            codes = [subprocess.call(shown), other.wait()]
        except KeyboardInterrupt:
            other.send_signal(signal.SIGINT)
            codes = [130, other.wait(_SOON_S)]
        said.seek(0)
        sys.stdout.write(f"\n{'=' * 30} {' '.join(LANES[1])} {'=' * 30}\n")
        sys.stdout.write(said.read().decode(errors="replace"))
    sys.stdout.write(f"both lanes: {time.monotonic() - begun_s:.0f} s\n")
    ran = [code for code in codes if code != _NOTHING]
    return max(ran, key=abs) if ran else _NOTHING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
