"""Log probabilities on their way to the client: joined where text is joined, counted where memory is bounded."""

from __future__ import annotations

from hub.outputs import OmniOutput, chunk_outputs
from hub.results import ResultBuilder
from omni_discovery import wire


def shown(token_id: int) -> OmniOutput:
    """What the client gets of a chunk with one token."""
    chunk = wire.Chunk(
        epoch=1,
        request_id="r",
        seq=0,
        modality="text",
        queue_length=0,
        text="x",
        token_ids=(token_id,),
        logprobs=((wire.TokenLogprob(token_id, -0.5, 2, "x"), wire.TokenLogprob(9, -0.25, 1, "y")),),
    )
    (message,), attachments = wire.decode_from_replica([wire.encode(chunk)])
    assert isinstance(message, wire.Chunk)
    (output,) = chunk_outputs("r", 0, "0/1", message, [bytes(each) for each in attachments], 0.0)
    return output


def test_joined_text_keeps_one_entry_for_each_token() -> None:
    joined = shown(1).joined(shown(2))
    assert joined is not None
    assert [place[0].token_id for place in joined.logprobs] == list(joined.token_ids) == [1, 2]
    assert joined.size_bytes == shown(1).size_bytes + shown(2).size_bytes
    assert joined.size_bytes > 4 * 100


def test_a_result_has_those_of_all_pieces() -> None:
    builder = ResultBuilder(0, "r", "hi")
    builder.add(shown(1))
    builder.add(shown(2))
    (stage,) = builder.result().stages
    assert stage.logprobs == (*shown(1).logprobs, *shown(2).logprobs)


def test_an_image_of_a_chunk_has_none() -> None:
    chunk = wire.Chunk(epoch=1, request_id="r", seq=0, modality="image", queue_length=0, mime="image/png")
    assert [output.logprobs for output in chunk_outputs("r", 0, "0/1", chunk, [b"1", b"2"], 0.0)] == [(), ()]
