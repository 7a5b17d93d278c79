"""The HTTP client of a load test: asks one request and reads its answer as it comes."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec

from omni_discovery.commands.bench.plan import Asking
from omni_discovery.commands.bench.reading import ChatReading, Reading, SpeechReading, error_of
from omni_discovery.errors import ConfigError, OmniError

_OK: Final = 200
_UNAUTHORIZED: Final = 401
#: An idle connection is used again for so long: shorter than a hub keeps it open.
_IDLE_S: Final = 2.0
_CONNECT_S: Final = 10.0
#: What is read of an error's body.
_MOST_ERROR_BYTES: Final = 64 << 10
#: The failure of a request whose connection was not made.
UNREACHABLE: Final = "not reachable"


class HubUnloadableError(OmniError):
    """The operator must act: the hub can't be asked; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of one request; ``reading`` has what came of its answer."""

    reading: Reading
    status: int
    failure: str
    #: The failure in the hub's words, if it had some.
    message: str = ""


class BenchClient:
    """Asks a hub. Proxies and other settings of the environment are not used: what is measured is the hub."""

    def __init__(self, url: str, key: str = "", ca_file: str = "", timeout_s: float = 120.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
            raise ConfigError(f"--url {url!r} is no hub; right would be http://HOST:PORT, as the hub logs it")
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        try:
            trusted = ssl.create_default_context(cafile=ca_file or None)
        except OSError as error:
            raise ConfigError(f"--ca-file {ca_file} can't be read: {error}") from error
        self._http = httpx.AsyncClient(
            # Bytes are noted as they come: nothing on the way may pack them.
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            verify=trusted,
            trust_env=False,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
        )

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        await self._http.aclose()

    async def served_model(self) -> str:
        """The model that the hub serves. Raise HubUnloadableError if it can't be asked."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                answer = await self._http.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, TimeoutError) as error:
            why = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in why:
                raise HubUnloadableError(
                    f"the certificate of {self.url} is not one that this machine trusts for that name ({why}): give"
                    " --ca-file FILE with who signed it, and the name that stands in it with --url"
                ) from error
            raise HubUnloadableError(
                f"the hub at {self.url} does not answer ({why}): is that its address, does it run? omni hubs shows"
                " which there are"
            ) from error
        if answer.status_code == _UNAUTHORIZED:
            raise HubUnloadableError(
                f"the hub at {self.url} wants a key: give --api-key-file FILE, or set VLLM_API_KEY"
            )
        try:
            model = answer.json()["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            model = None
        if answer.status_code != _OK or not isinstance(model, str):
            raise HubUnloadableError(
                f"{self.url}/v1/models answers {answer.status_code}, and not as a hub does: is that the port of its"
                " API?"
            )
        return model

    async def ask(self, asking: Asking, prompt: str) -> Answered:
        """Ask, and read to the end. Whatever goes wrong is in what is returned."""
        reading = SpeechReading() if asking.is_speech else ChatReading()
        status = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                body = msgspec.json.encode(asking.body(prompt))
                headers = {"Content-Type": "application/json"}
                path = self.url + asking.path
                async with self._http.stream("POST", path, content=body, headers=headers) as answer:
                    status = answer.status_code
                    if status != _OK:
                        code, message = await _error_of(answer)
                        return Answered(reading, status, f"{status} {code}".strip(), message)
                    async for chunk in answer.aiter_raw():
                        reading.take(chunk, time.perf_counter())
            reading.end()
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return Answered(reading, status, UNREACHABLE)
        except TimeoutError:
            return Answered(reading, status, f"no end within {self._timeout_s:g} s")
        except (httpx.HTTPError, OSError):
            return Answered(reading, status, "cut off")
        return Answered(reading, status, reading.failure, reading.message)


async def _error_of(answer: httpx.Response) -> tuple[str, str]:
    """The ``code`` and the message of an error's body; empty if it has none."""
    body = bytearray()
    async for chunk in answer.aiter_raw():
        body += chunk
        if len(body) > _MOST_ERROR_BYTES:
            return "", ""
    try:
        found: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "", ""
    return error_of(found) if isinstance(found, dict) else ("", "")
