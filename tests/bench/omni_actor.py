"""A hub in Python alone, without HTTP, in a process of its own; for an Actor."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import uvloop

from hub.async_omni import AsyncOmni
from hub.config import HubConfig
from hub.serve.running_hub import RunningHub, ServeConfig
from omni_discovery.deploy.document import parse_deploy
from omni_discovery.etcd.config import RegistrySecurity
from tests.bench.actors import now_s


class OmniActor:
    """Joins the registry at ``endpoint`` and serves Python calls."""

    def __init__(self, endpoint: str, namespace: str, deploy: str) -> None:
        self._config = ServeConfig(
            deploy=parse_deploy(deploy, "bench"),
            hub=HubConfig(),
            endpoints=endpoint,
            security=RegistrySecurity(),
            namespace=namespace,
            ttl_s=10.0,
            policy="least-load",
            host="",
            port=0,
            local_stages=(),
            runtime_dir=Path("/nonexistent"),
            etcd_binary=None,
        )
        self._loop = uvloop.new_event_loop()
        self._ready: Future[AsyncOmni] = Future()
        self._stopping: asyncio.Event
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._serve(endpoint),), daemon=True)
        self._thread.start()
        self._omni = self._ready.result(30.0)

    def rate(self, at_once: int, count: int, prompt: str) -> float:
        """Requests per second with so many of them out at any time."""
        began_s = now_s()
        self._call(self._ask_all(at_once, count, prompt))
        return count / (now_s() - began_s)

    def streams(self, count: int, prompt: str) -> int:
        """So many at once; how many pieces came."""
        return int(self._call(self._ask_all(count, count, prompt)))

    def crowd(self, streams: int, tokens: int, every_s: float) -> dict[str, Any]:
        """So many long requests at once, and meanwhile a short one each ``every_s``: seconds to its first piece."""
        found: dict[str, Any] = self._call(self._crowd(streams, tokens, every_s))
        return found

    def shut(self) -> None:
        """Leave the registry."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10.0)

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _serve(self, endpoint: str) -> None:
        self._stopping = asyncio.Event()
        async with AsyncExitStack() as stack:
            started = await RunningHub(self._config, endpoint, "", self._stopping).start(stack)
            assert started is not None
            omni = started[0]
            while not all(stage.pickable == stage.registered > 0 for stage in omni.stage_status()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            self._ready.set_result(omni)
            await self._stopping.wait()

    async def _ask_all(self, at_once: int, count: int, prompt: str) -> int:
        left = iter(range(count))
        pieces = 0

        async def keep_asking() -> None:
            nonlocal pieces
            for _ in left:
                async for output in self._omni.generate({"prompt": prompt}):
                    pieces += bool(output.text)

        await asyncio.gather(*(keep_asking() for _ in range(at_once)))
        return pieces

    async def _crowd(self, streams: int, tokens: int, every_s: float) -> dict[str, Any]:
        first_s: list[float] = []

        async def words_of(prompt: str, first_s: list[float]) -> int:
            began_s, words, has_begun = now_s(), 0, False
            async for output in self._omni.generate({"prompt": prompt}):
                if output.text and not has_begun:
                    has_begun = True
                    first_s.append(now_s() - began_s)
                words += len(output.text.split())
            return words

        async def probe() -> list[int]:
            short = []
            while True:
                await asyncio.wait([crowd], timeout=every_s)
                if crowd.done():
                    return list(await asyncio.gather(*short))
                short.append(asyncio.create_task(words_of("one two three", first_s)))

        began_s = now_s()
        crowd = asyncio.gather(*(words_of(" ".join(["word"] * tokens), []) for _ in range(streams)))
        probed = await probe()
        words = sum(await crowd) + sum(probed)
        return {"took_s": now_s() - began_s, "pieces": words, "first_s": first_s, "most_queued": None}
