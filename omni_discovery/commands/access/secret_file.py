"""Files that hold keys and tokens: read only if nobody else can read them."""

from __future__ import annotations

import os
import stat
from typing import Final

from omni_discovery.errors import ConfigError

#: No list of keys is longer.
_MOST_BYTES: Final = 1 << 20
_OTHERS: Final = stat.S_IROTH | stat.S_IWOTH


def read_secret_file(flag: str, name: str) -> str:
    """The text of a file that the flag names. Raise ConfigError if it can't be read, or others can.

    Its group may read it: a container gets mounted secrets so.
    """
    try:
        with open(name, "rb") as file:  # noqa: PTH123 - what is read must be what was looked at
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISREG(mode) and mode & _OTHERS:
                raise ConfigError(f"{flag} {name}: every user of this machine can read or write it: chmod 600 {name}")
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {name} can't be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"{flag} {name}: more than {_MOST_BYTES} bytes are no list of keys")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {name} is no text: {error.reason}") from error
