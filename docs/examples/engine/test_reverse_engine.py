"""The engine keeps what the replica relies on, and says what it should."""

from __future__ import annotations

from reverse_engine import ReverseEngine

from omni_discovery.deploy.document import StageConfig
from stage_runtime.engines.base import Engine, StageRequest
from stage_runtime.testing import EngineContract, run


class TestReverseEngine(EngineContract):
    def make_engine(self) -> Engine:
        return ReverseEngine(StageConfig(stage_id=0, engine="reverse", engine_args={"capacity": 2}))

    def good_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": "one two three"})

    def bad_request(self, key: str) -> StageRequest:
        return StageRequest(key, key, inputs={"prompt": "   "})


def test_the_last_word_comes_first() -> None:
    engine = ReverseEngine(StageConfig(stage_id=0, engine="reverse", engine_args={"separator": "-"}))
    request = StageRequest("k", "k", inputs={"messages": [{"role": "user", "content": "you hear me"}]})
    outputs = run(engine, request)["k"]
    assert [output.text for output in outputs] == ["me-", "hear-", "you"]
