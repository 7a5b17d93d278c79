"""create_stage_coord_client: a replica's client that asks the engine itself how long its queue is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from omni_discovery.client_for_stage import OmniCoordClientForStage
from omni_discovery.etcd import EtcdKV

logger = logging.getLogger(__name__)


def create_stage_coord_client(
    endpoints: str | Sequence[str],
    input_addr: str,
    output_addr: str,
    stage_id: int,
    queue_length_getter: Callable[[], int] | None = None,
    **options: Any,
) -> OmniCoordClientForStage:
    """Register a replica whose queue length is read from ``queue_length_getter`` each load interval.

    A negative length counts as 0; while the getter raises, the former length stands. It is called on the client's own
    thread and must be quick. ``options`` are those of OmniCoordClientForStage.
    """
    if queue_length_getter is None:
        return OmniCoordClientForStage(endpoints, input_addr, output_addr, stage_id, **options)
    return _AskingClient(endpoints, input_addr, output_addr, stage_id, queue_length_getter, **options)


class _AskingClient(OmniCoordClientForStage):
    """OmniCoordClientForStage that polls its getter."""

    def __init__(
        self,
        endpoints: str | Sequence[str],
        input_addr: str,
        output_addr: str,
        stage_id: int,
        getter: Callable[[], int],
        **options: Any,
    ) -> None:
        self._getter = getter
        self._asking: asyncio.Task[None] | None = None
        super().__init__(endpoints, input_addr, output_addr, stage_id, **options)

    def _begin(self, kv: EtcdKV) -> None:
        super()._begin(kv)
        self._asking = asyncio.create_task(self._ask(), name="queue-length")

    async def _close_on_loop(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        await super()._close_on_loop()

    async def _ask(self) -> None:
        told, warned = 0, False
        while True:
            try:
                length = max(0, int(self._getter()))
            except Exception:
                if not warned:
                    logger.warning("queue_length.unknown: the getter raised; the former length stands", exc_info=True)
                warned, length = True, told
            if length != told and not self._is_closed:
                told = length
                self.update_info(queue_length=length)
            await asyncio.sleep(self._config.load_interval_s)
