"""The same sample rates pass everywhere: as settings of engines, and as sound in a hub."""

from __future__ import annotations

import msgspec
import pytest

from hub.media import SoundKind, read_wav, wav_file
from omni_discovery.errors import EngineFailedError
from omni_discovery.inputs.sounds import LEAST_RATE_HZ, MOST_RATE_HZ
from stage_runtime.engines.callable.target import TorchArgs
from stage_runtime.engines.vllm_omni.args import OmniArgs


@pytest.mark.attack("F4")
def test_what_an_engine_may_be_set_to_is_what_a_hub_encodes() -> None:
    for rate_hz in (LEAST_RATE_HZ, MOST_RATE_HZ):
        msgspec.convert({"target": "a:b", "sample_rate_hz": rate_hz}, TorchArgs)
        msgspec.convert({"sample_rate_hz": rate_hz}, OmniArgs)
        assert read_wav(wav_file(SoundKind(1, 2, rate_hz), bytes(4)))[1] == bytes(4)
    for rate_hz in (LEAST_RATE_HZ - 1, MOST_RATE_HZ + 1):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"target": "a:b", "sample_rate_hz": rate_hz}, TorchArgs)
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"sample_rate_hz": rate_hz}, OmniArgs)
        with pytest.raises(EngineFailedError):
            read_wav(wav_file(SoundKind(1, 2, rate_hz), bytes(4)))
