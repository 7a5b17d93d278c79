"""The connector that vLLM-Omni is given: it leaves and fetches payloads in the stage's mailbox, and moves nothing.

The engine hands them on as hand-offs of this project, through the connector of the deploy document's edge.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from stage_runtime.engines.vllm_omni.mailbox import Mailbox

#: The name under which it is registered with vLLM-Omni.
NAME: Final = "OmniDiscoveryHandoff"

#: The mailbox of each stage in this process: one, but in tests.
_mailboxes: dict[int, Mailbox] = {}


def open_mailbox(stage_id: int) -> Mailbox:
    """A new mailbox, for the connectors of a stage that is about to be loaded."""
    mailbox = _mailboxes[stage_id] = Mailbox()
    return mailbox


def register() -> None:
    """Make the connector known to vLLM-Omni. Idempotent."""
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory

    if NAME not in OmniConnectorFactory.list_registered_connectors():
        OmniConnectorFactory.register_connector(NAME, connector_class())


@functools.cache
def connector_class() -> Any:
    """The class, which derives from vLLM-Omni's own."""
    from vllm_omni.data_entry_keys import OmniPayloadStruct, to_dict
    from vllm_omni.distributed.omni_connectors.connectors.base import OmniConnectorBase

    class MailboxConnector(OmniConnectorBase):  # type: ignore[misc]
        #: Payloads are given and taken as they are.
        supports_raw_data = True

        def __init__(self, config: dict[str, Any]) -> None:
            # Both are read by vLLM-Omni.
            self.config = config
            self.stage_id = int(config["stage_id"])
            self._mailbox = _mailboxes[self.stage_id]

        def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, None]:
            del from_stage, to_stage
            self._mailbox.put(put_key, to_dict(data) if isinstance(data, OmniPayloadStruct) else data)
            return True, 0, None

        def get(self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None) -> tuple[Any, int] | None:
            del from_stage, to_stage, metadata
            found = self._mailbox.get(get_key)
            return None if found is None else (found, 0)

        def get_with_deadline(
            self, from_stage: str, to_stage: str, get_key: str, metadata: Any = None, *, deadline: float
        ) -> tuple[Any, int] | None:
            del deadline
            return self.get(from_stage, to_stage, get_key, metadata)

        def cleanup(self, request_id: str) -> None:
            """Nothing: the engine forgets a request by itself, and vLLM-Omni never calls this."""

        def health(self) -> dict[str, Any]:
            return {"status": "healthy"}

        def close(self) -> None:
            """Nothing is held."""

    return MailboxConnector
