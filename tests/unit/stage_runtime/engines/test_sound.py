"""Sound in pieces, put together by the hub; pieces of whoever's engine."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest

from hub.media import joined_wav
from omni_discovery.errors import EngineFailedError
from stage_runtime.engines.files import wav_of


def test_one_piece_stays_as_it_is_and_several_are_one_file() -> None:
    pieces = [wav_of(np.full(3, level), 8000) for level in (0.0, 1.0)]
    assert joined_wav(pieces[:1]) is pieces[0]
    with wave.open(io.BytesIO(joined_wav(pieces))) as reader:
        assert np.frombuffer(reader.readframes(6), "<i2").tolist() == [0, 0, 0, 32767, 32767, 32767]


def test_pieces_that_make_no_sound_are_the_engines_fault() -> None:
    good = wav_of(np.zeros(3), 8000)
    with pytest.raises(EngineFailedError, match="several sample rates"):
        joined_wav([good, wav_of(np.zeros(3), 16000)])
    for bad in (b"", b"RIFF", b"no sound at all", good[:20]):
        with pytest.raises(EngineFailedError, match="no WAV"):
            joined_wav([good, bad])
