"""Encoders of sound: pieces of samples in, the bytes of one file out as they come, with the state kept in between.

WAV and raw samples need no library. The rest is done by PyAV, whose wheel brings FFmpeg with all the codecs that
OpenAI's clients may ask for, AAC among them, and needs neither NumPy nor packages of the system.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from hub.media import SoundKind, wav_file
from omni_discovery.errors import EngineFailedError, InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What OpenAI's clients take raw samples to be.
PCM16: Final = SoundKind(1, 2, 24_000)
#: Bytes of samples that are encoded in one go, before and behind the change of their rate: 20 s at 24 kHz.
SLICE_BYTES: Final = 960_000
#: Seconds of sound that become of them at most: their number is what encoding takes time for.
_SLICE_S: Final = 20
#: The length of a WAV file in its header where it is not known yet.
_UNKNOWN: Final = 0xFFFFFFFF


class SoundFormat(NamedTuple):
    """A format of files: its media type, and how FFmpeg calls it; no ``codec``: it needs none."""

    mime: str
    container: str = ""
    codec: str = ""
    options: Mapping[str, str] = {}
    #: Bits per second of each channel; 0: FFmpeg's own choice.
    channel_bit_rate: int = 0


#: By the names that OpenAI's chat has for them.
FORMATS: Final[Mapping[str, SoundFormat]] = {
    "wav": SoundFormat("audio/wav"),
    "pcm16": SoundFormat("audio/pcm"),
    # A stream can't be rewound to write how long it has become.
    "mp3": SoundFormat("audio/mpeg", "mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}, 64_000),
    "opus": SoundFormat("audio/ogg", "ogg", "libopus", {"page_duration": "200000"}),
    "aac": SoundFormat("audio/aac", "adts", "aac", {}, 64_000),
    "flac": SoundFormat("audio/flac", "flac", "flac"),
}


#: What clients say in a conversation, for the first stage.
_SPEECH: Final = SoundFormat("audio/ogg", "ogg", "libopus", {"page_duration": "200000"}, 24_000)


class _Encoder(Protocol):
    def add(self, samples: bytes) -> bytes:
        """Take 16-bit samples; return the bytes that are ready."""

    def finish(self) -> bytes:
        """The last bytes."""


class SoundFile:
    """The sound of one answer as one file. Used by one thread at a time.

    ``is_streamed``: bytes leave as soon as they can, so that the header of a WAV file does not say how long it is.
    """

    def __init__(self, name: str, speed: float = 1.0, *, is_streamed: bool) -> None:
        self.name = name
        self._speed = speed
        self._is_streamed = is_streamed
        self._kind: SoundKind | None = None
        #: Bytes of the file so far, those included that it still holds.
        self.size_bytes = 0
        self._reshaper: _Reshaper | None = None
        self._encoder: _Encoder | None = None

    def add(self, kind: SoundKind, frames: bytes) -> bytes:
        """Take the next samples and return what can be sent. Raise EngineFailedError for samples of another kind."""
        if self._encoder is None:
            self._encoder = self._begin(kind)
        if kind != self._kind:
            raise EngineFailedError("pieces of sound came in several sample rates, widths or numbers of channels")
        samples = _as_16_bits(kind.width_bytes, frames)
        if self._reshaper is not None:
            samples = self._reshaper.add(samples)
        made = self._encoder.add(samples)
        self.size_bytes += len(samples) if isinstance(self._encoder, _WholeWav) else len(made)
        return made

    def slice_bytes(self, kind: SoundKind) -> int:
        """How many bytes of samples of this kind to add in one go: whole frames, few where they become many more."""
        frame_bytes = kind.channels * kind.width_bytes
        target = self._target(kind)
        grown_bytes = 2 * target.channels * target.rate_hz / kind.rate_hz / self._speed
        fitting = SLICE_BYTES / max(grown_bytes, 2 * kind.channels, frame_bytes)
        return int(min(fitting, _SLICE_S * kind.rate_hz * self._speed)) * frame_bytes

    def _target(self, kind: SoundKind) -> SoundKind:
        """What the samples have to become before they are encoded."""
        return PCM16 if self.name == "pcm16" else kind._replace(width_bytes=2)

    def finish(self) -> bytes:
        """End the file and return what is left of it; nothing if there was no sound."""
        if self._encoder is None:
            return b""
        rest = b"" if self._reshaper is None else self._encoder.add(self._reshaper.finish())
        return rest + self._encoder.finish()

    def _begin(self, kind: SoundKind) -> _Encoder:
        self._kind = kind
        if kind.channels > 2:
            raise EngineFailedError(f"sound with {kind.channels} channels can't be encoded: 1 or 2 can")
        target = self._target(kind)
        if self._speed != 1.0 or (target.channels, target.rate_hz) != (kind.channels, kind.rate_hz):
            self._reshaper = _Reshaper(kind, target, self._speed)
        if self.name == "pcm16":
            return _Raw()
        if self.name == "wav":
            return _StreamedWav(target) if self._is_streamed else _WholeWav(target)
        return _Coded(FORMATS[self.name], target)


class _Raw:
    """The samples as they are."""

    def add(self, samples: bytes) -> bytes:
        return samples

    def finish(self) -> bytes:
        return b""


class _WholeWav:
    def __init__(self, kind: SoundKind) -> None:
        self._kind = kind
        self._samples: list[bytes] = []

    def add(self, samples: bytes) -> bytes:
        self._samples.append(samples)
        return b""

    def finish(self) -> bytes:
        return wav_file(self._kind, b"".join(self._samples))


class _StreamedWav:
    """A WAV file whose header names the greatest length, as players expect of a stream."""

    def __init__(self, kind: SoundKind) -> None:
        frame_bytes = kind.channels * 2
        head = struct.pack(
            "<4sI4s4sIHHIIHH4sI",
            *(b"RIFF", _UNKNOWN, b"WAVE", b"fmt ", 16, 1, kind.channels, kind.rate_hz),
            *(kind.rate_hz * frame_bytes, frame_bytes, 16, b"data", _UNKNOWN),
        )
        self._head = head

    def add(self, samples: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + samples

    def finish(self) -> bytes:
        return self.add(b"")


class _Written:
    """What FFmpeg writes: it can't seek in it, so it never changes what was written."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> int:
        self._pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        pieces, self._pieces = self._pieces, []
        return b"".join(pieces)


class _Coded:
    """A file that FFmpeg encodes."""

    def __init__(self, form: SoundFormat, kind: SoundKind) -> None:
        import av

        self._kind = kind
        self._written = _Written()
        # Without types, because it must pass where the library is not installed, too.
        container: Any = av.open(self._written, "w", format=form.container, options=dict(form.options))
        self._container = container
        rates = sorted(av.Codec(form.codec, "w").audio_rates or [kind.rate_hz])
        rate_hz = next((each for each in rates if each >= kind.rate_hz), rates[-1])
        self._stream = container.add_stream(form.codec, rate=rate_hz)
        self._stream.layout = _layout(kind)
        if form.channel_bit_rate:
            self._stream.bit_rate = form.channel_bit_rate * kind.channels
        self._position = 0

    def add(self, samples: bytes) -> bytes:
        if samples:
            frame = _frame(samples, self._kind, self._position)
            self._position += frame.samples
            self._container.mux(self._stream.encode(frame))
        return self._written.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return self._written.take()


class _Reshaper:
    """Samples at another rate, with another number of channels, or faster or slower without another pitch."""

    def __init__(self, kind: SoundKind, target: SoundKind, speed: float) -> None:
        from av.filter import Graph

        self._kind, self._position = kind, 0
        graph: Any = Graph()
        self._graph = graph
        time_base = Fraction(1, kind.rate_hz)
        chain = [graph.add_abuffer(sample_rate=kind.rate_hz, format="s16", layout=_layout(kind), time_base=time_base)]
        chain += [graph.add("atempo", str(factor)) for factor in _tempos(speed)]
        wanted = f"sample_fmts=s16:sample_rates={target.rate_hz}:channel_layouts={_layout(target)}"
        chain += [graph.add("aformat", wanted), graph.add("abuffersink")]
        for before, after in pairwise(chain):
            before.link_to(after)
        graph.configure()

    def add(self, samples: bytes) -> bytes:
        if not samples:
            return b""
        frame = _frame(samples, self._kind, self._position)
        self._position += frame.samples
        self._graph.push(frame)
        return b"".join(self._ready())

    def finish(self) -> bytes:
        self._graph.push(None)
        return b"".join(self._ready())

    def _ready(self) -> Iterator[bytes]:
        from av import BlockingIOError as NothingYet
        from av import EOFError as AtItsEnd

        while True:
            try:
                frame = self._graph.pull()
            except (NothingYet, AtItsEnd):
                return
            # A plane may be longer than its samples.
            yield bytes(frame.planes[0])[: frame.samples * len(frame.layout.channels) * 2]


class SpeechFile:
    """Speech as a small file of Opus: ten minutes are about 2 MB. Its samples are those of PCM16."""

    def __init__(self) -> None:
        self._encoder: _Coded | None = None

    def add(self, samples: bytes) -> bytes:
        """Take at most SLICE_BYTES and return what is ready."""
        if self._encoder is None:
            self._encoder = _Coded(_SPEECH, PCM16)
        return self._encoder.add(samples)

    def finish(self) -> bytes:
        """End the file and return what is left of it."""
        return b"" if self._encoder is None else self._encoder.finish()


def check_sound(name: str, field: str, speed: float = 1.0, *, names: Sequence[str] = tuple(FORMATS)) -> None:
    """Raise InvalidRequestError for a format that is unknown, or that this host has no encoder for."""
    if name not in names:
        raise InvalidRequestError(f"'{field}' is {name!r}; there are {', '.join(names)}")
    needs_library = bool(FORMATS["pcm16" if name == "pcm" else name].codec) or speed != 1.0
    if needs_library and importlib.util.find_spec("av") is None:
        what = f"'speed' {speed:g}" if speed != 1.0 else f"'{field}' {name!r}"
        raise InvalidRequestError(f"{what} needs PyAV on this hub's host (pip install av); wav and pcm at 1.0 do not")


def _tempos(speed: float) -> list[float]:
    """Factors from 0.5 to 2 whose product is ``speed``: beyond them samples would be left out, or it is refused."""
    factors = []
    while not 0.5 <= speed <= 2.0:
        step = 2.0 if speed > 2.0 else 0.5
        factors.append(step)
        speed /= step
    return [*factors, speed] if speed != 1.0 or not factors else factors


def _layout(kind: SoundKind) -> str:
    return "stereo" if kind.channels == 2 else "mono"


def _frame(samples: bytes, kind: SoundKind, position: int) -> Any:
    from av import AudioFrame

    frame = AudioFrame(format="s16", layout=_layout(kind), samples=len(samples) // (2 * kind.channels))
    frame.sample_rate, frame.time_base, frame.pts = kind.rate_hz, Fraction(1, kind.rate_hz), position
    frame.planes[0].update(samples)
    return frame


#: The signed high byte of each 8-bit sample, which WAV files hold without a sign.
_SIGNED: Final = bytes(value ^ 0x80 for value in range(256))


def _as_16_bits(width_bytes: int, frames: bytes) -> bytes:
    """Samples as signed 16-bit numbers, least byte first: of wider ones the two highest bytes."""
    if width_bytes == 2:
        return frames
    samples = bytearray(2 * (len(frames) // width_bytes))
    if width_bytes == 1:
        samples[1::2] = frames.translate(_SIGNED)
    else:
        samples[0::2] = frames[width_bytes - 2 :: width_bytes]
        samples[1::2] = frames[width_bytes - 1 :: width_bytes]
    return bytes(samples)
