"""A replica whose output is of a kind or type that no engine puts out."""

from __future__ import annotations

import pytest

from omni_discovery import wire
from omni_discovery.errors import EngineFailedError
from tests.support.hub_fakes import FakeReplica, Script, collect, echo, running_hub, text_of


def lying(modality: str, mime: str = "", *attachments: bytes) -> Script:
    def script(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        replica.chunk(submit, 0, modality=modality, mime=mime, attachments=list(attachments))
        replica.done(submit, 1)

    return script


LIES = (
    lying("image", "text/html\r\nX-Evil: 1", b"<script>"),
    lying("noise"),
    lying("summary"),
)


@pytest.mark.attack("H10")
@pytest.mark.parametrize("script", LIES)
async def test_it_is_the_replicas_failure_and_another_replica_answers(script: Script) -> None:
    liar, honest = FakeReplica(script), FakeReplica(echo, replica_id=1)
    async with running_hub(liar, honest) as omni:
        for _ in range(4):
            assert text_of(await collect(omni.generate({"prompt": "a b"}))) == "a b "
        assert omni.metrics.get_sample_value("omni_hub_dropped_frames_total", {"reason": "content"})
    assert liar.of(wire.Submit)


@pytest.mark.attack("H10")
async def test_without_another_replica_the_request_fails_and_says_why() -> None:
    async with running_hub(FakeReplica(LIES[0])) as omni:
        with pytest.raises(EngineFailedError, match=r"its image is of type 'text/html"):
            await collect(omni.generate({"prompt": "a"}))
