"""Sound as it comes: into a WAV file that can be opened at any time, and to the loudspeaker if this host has one."""

from __future__ import annotations

import shutil
import subprocess
import wave
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Programs that play raw samples from their standard input, and how each is told what these are.
_PLAYERS: Final = {
    "pw-cat": ("--playback", "--raw", "--format=s16", "--rate={rate}", "--channels=1", "-"),
    "paplay": ("--raw", "--format=s16le", "--rate={rate}", "--channels=1"),
    "aplay": ("-q", "-t", "raw", "-f", "S16_LE", "-r", "{rate}", "-c", "1"),
}


def write_wav(file: Path, samples: bytes, rate_hz: int) -> None:
    """Write 16-bit samples of one channel."""
    with wave.open(str(file), "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(rate_hz)
        made.writeframes(samples)


class Player:
    """Saves and plays one sound piece by piece. ``aloud``: play it too, where a player is installed."""

    def __init__(self, file: Path, *, aloud: bool) -> None:
        self._path = file
        self._aloud = aloud
        self._file: wave.Wave_write | None = None
        self._player: subprocess.Popen[bytes] | None = None

    def put(self, samples: bytes, rate_hz: int) -> None:
        """The next samples. The file's header says after each how many there are."""
        if self._file is None:
            self._file = wave.open(str(self._path), "wb")  # noqa: SIM115 - it is closed by ``close``
            self._file.setnchannels(1)
            self._file.setsampwidth(2)
            self._file.setframerate(rate_hz)
            self._player = _start_player(rate_hz) if self._aloud else None
        self._file.writeframes(samples)
        if self._player is not None and self._player.stdin is not None:
            try:
                self._player.stdin.write(samples)
                self._player.stdin.flush()
            except OSError:
                # A host without a loudspeaker: the file is there.
                self._stop_player()

    def close(self) -> None:
        """End the file, and wait until it was heard."""
        if self._file is not None:
            self._file.close()
        self._stop_player()

    def _stop_player(self) -> None:
        """It ends when it has played what it was given."""
        player, self._player = self._player, None
        if player is None or player.stdin is None:
            return
        with suppress(OSError):
            player.stdin.close()
        try:
            player.wait(30)
        except subprocess.TimeoutExpired:
            player.kill()
            player.wait()


def _start_player(rate_hz: int) -> subprocess.Popen[bytes] | None:
    for name, flags in _PLAYERS.items():
        if command := shutil.which(name):
            told = [flag.format(rate=rate_hz) for flag in flags]
            return subprocess.Popen(
                [command, *told], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
    return None
