"""What the servers of vLLM and of vLLM-Omni ask of their engine about the hub itself, whatever its stages are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from omni_discovery.errors import RequestError

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni


class ServingHub:
    """The base of both engine clients, before vLLM's class: its methods are abstract there."""

    _omni: AsyncOmni

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return self._omni.is_running

    @property
    def is_stopped(self) -> bool:
        """Whether the hub has stopped."""
        return not self._omni.is_running

    @property
    def errored(self) -> bool:
        """Whether the hub can't serve any request, with whatever replicas."""
        return self._trouble() is not None

    def _trouble(self) -> RequestError | None:
        """Why the hub can't serve any request; None if it can."""
        try:
            self._omni.check_serving()
        except RequestError as error:
            return error
        return None

    async def is_tracing_enabled(self) -> bool:
        """Whether the server should pass trace headers on."""
        return self._omni.is_traced

    async def is_paused(self) -> bool:
        """Whether the pipeline was paused: False, because a hub can't pause it."""
        return False

    async def do_log_stats(self) -> None:
        """Do nothing: each replica logs its own statistics."""

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the hub stops by its own signals, and its replicas drain."""
