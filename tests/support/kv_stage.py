"""One side of a prefill and decode pair in a process of its own, fed and read through a folder.

``python -m tests.support.kv_stage ROLE CONNECTOR FOLDER``: a prefill writes what it hands over, stays until the
decode is done, and writes whether it still holds any KV; a decode writes the tokens it made.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import StageRequest, create_engine
from tests.support.prefill_decode import PROMPTS, stage

GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
#: Sooner than a KV that nobody fetched is given up.
RELEASED_WITHIN_S = 15.0


def main() -> None:
    role, connector, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    engine_args = {} if role == "alone" else {"pd": role, "kv_transfer_config": {"kv_connector": connector}}
    engine = create_engine(StageConfig(**stage(0, **engine_args)))
    engine.load(lambda phase, progress: None)
    for index, prompt in enumerate(PROMPTS):
        payloads = {0: read(folder / f"handed-{index}")} if role == "decode" else {}
        request = StageRequest(f"{role}-{index}", "r", inputs={"prompt": prompt}, params=GREEDY, payloads=payloads)
        token_ids, handed = run(engine, request)
        write(folder / (f"handed-{index}" if role == "prefill" else f"{role}-{index}"), handed or token_ids)
    if role == "prefill":
        read(folder / f"decode-{len(PROMPTS) - 1}")
        deadline_s = time.monotonic() + RELEASED_WITHIN_S
        while engine.has_unfinished() and time.monotonic() < deadline_s:
            engine.step()
        write(folder / "holds", engine.has_unfinished())
    engine.close()


def run(engine: Any, request: StageRequest) -> tuple[list[int], Any]:
    engine.add(request)
    token_ids: list[int] = []
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        for output in engine.step():
            assert output.error is None, output
            token_ids += output.token_ids
            if output.finished:
                return token_ids, output.handoff
    raise TimeoutError("the request does not end")


def read(file: Path) -> Any:
    deadline_s = time.monotonic() + 300.0
    while not file.exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(str(file))
        time.sleep(0.02)
    return json.loads(file.read_text())


def write(file: Path, value: Any) -> None:
    file.with_suffix(".part").write_text(json.dumps(value))
    file.with_suffix(".part").rename(file)


if __name__ == "__main__":
    main()
