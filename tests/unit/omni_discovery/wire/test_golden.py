"""The wire byte by byte: a release that writes or reads other bytes talks to no other release, so it must be noticed.

If one of these fails on purpose, the version byte has to change with it, unless only new fields with defaults came.
"""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from omni_discovery import wire
from omni_discovery.errors import WireError

REF = wire.PayloadRef(
    from_stage=0, to_stage=1, key="k/0", connector="shm", size_bytes=300, metadata={"shm": "f", "n": [1, b"\0\1"]}
)

TO_REPLICA: dict[str, tuple[wire.ToReplica, str]] = {
    "hello": (
        wire.Hello(hub_id="hub-1", epoch=70_000, session=3),
        "0184a174a568656c6c6fa66875625f6964a56875622d31a565706f6368ce00011170a773657373696f6e03",
    ),
    "submit": (
        wire.Submit(
            epoch=70_000,
            request_id="r~1",
            attempt=2,
            inputs={"prompt": "ü"},
            params={"temperature": 0.5, "stop": None},
            payloads=(REF,),
            next_stages=(1, 2),
            remaining_s=0.5,
            resume=wire.Resume(token_ids=(1, 128, 65_536), text="so far"),
            credit=True,
            priority=-7,
            stream_from=(0,),
            stream_to=(2,),
            segmented=True,
            trace="00-7-7-01",
        ),
        "01de0010a174a67375626d6974a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a669"
        "6e7075747381a670726f6d7074a2c3bca6706172616d7382ab74656d7065726174757265cb3fe0000000000000a473746f70"
        "c0a87061796c6f6164739187aa66726f6d5f737461676500a8746f5f737461676501a36b6579a36b2f30a9636f6e6e656374"
        "6f72a373686daa73697a655f6279746573cd012ca86d6574616461746182a373686da166a16e9201c4020001a4726f6c65a0"
        "ab6e6578745f737461676573920102ab72656d61696e696e675f73cb3fe0000000000000a6726573756d6582a9746f6b656e"
        "5f6964739301cc80ce00010000a474657874a6736f20666172a6637265646974c3a87072696f72697479f9ab73747265616d"
        "5f66726f6d9100a973747265616d5f746f9102a97365676d656e746564c3a57472616365a930302d372d372d3031",
    ),
    "submit_least": (
        wire.Submit(epoch=1, request_id="r"),
        "01de0010a174a67375626d6974a565706f636801aa726571756573745f6964a172a7617474656d707400a6696e7075747380"
        "a6706172616d7380a87061796c6f61647390ab6e6578745f73746167657390ab72656d61696e696e675f73cb4082c0000000"
        "0000a6726573756d65c0a6637265646974c2a87072696f7269747900ab73747265616d5f66726f6d90a973747265616d5f74"
        "6f90a97365676d656e746564c2a57472616365a0",
    ),
    "submit_labelled": (
        wire.Submit(epoch=1, request_id="r", label="mine"),
        "01de0011a174a67375626d6974a565706f636801aa726571756573745f6964a172a7617474656d707400a6696e7075747380"
        "a6706172616d7380a87061796c6f61647390ab6e6578745f73746167657390ab72656d61696e696e675f73cb4082c0000000"
        "0000a6726573756d65c0a6637265646974c2a87072696f7269747900ab73747265616d5f66726f6d90a973747265616d5f74"
        "6f90a97365676d656e746564c2a57472616365a0a56c6162656ca46d696e65",
    ),
    "submit_of_client": (
        wire.Submit(epoch=1, request_id="r", client="1a2b"),
        "01de0011a174a67375626d6974a565706f636801aa726571756573745f6964a172a7617474656d707400a6696e7075747380"
        "a6706172616d7380a87061796c6f61647390ab6e6578745f73746167657390ab72656d61696e696e675f73cb4082c0000000"
        "0000a6726573756d65c0a6637265646974c2a87072696f7269747900ab73747265616d5f66726f6d90a973747265616d5f74"
        "6f90a97365676d656e746564c2a57472616365a0a6636c69656e74a431613262",
    ),
    "abort": (
        wire.Abort(epoch=70_000, request_id="r~1", attempt=2),
        "0184a174a561626f7274a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402",
    ),
    "abort_all": (
        wire.Abort(epoch=1, request_id="r"),
        "0184a174a561626f7274a565706f636801aa726571756573745f6964a172a7617474656d7074cf001fffffffffffff",
    ),
    "pause": (
        wire.Pause(epoch=70_000, request_id="r~1", attempt=2, paused=True),
        "0185a174a57061757365a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a6706175736564c3",
    ),
    "release": (
        wire.ReleasePayloads(epoch=70_000, request_id="r~1"),
        "0183a174a772656c65617365a565706f6368ce00011170aa726571756573745f6964a3727e31",
    ),
    "feed": (
        wire.Feed(epoch=70_000, request_id="r~1", attempt=2, from_stage=0, number=300, payload=REF),
        "0188a174a466656564a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402aa66726f6d5f"
        "737461676500a66e756d626572cd012ca77061796c6f616487aa66726f6d5f737461676500a8746f5f737461676501a36b65"
        "79a36b2f30a9636f6e6e6563746f72a373686daa73697a655f6279746573cd012ca86d6574616461746182a373686da166a1"
        "6e9201c4020001a4726f6c65a0a769735f6c617374c2",
    ),
    "feed_last": (
        wire.Feed(epoch=70_000, request_id="r~1", attempt=2, from_stage=0, number=301, is_last=True),
        "0188a174a466656564a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402aa66726f6d5f"
        "737461676500a66e756d626572cd012da77061796c6f6164c0a769735f6c617374c3",
    ),
    "room": (
        wire.PieceRoom(epoch=70_000, request_id="r~1", attempt=2, to_stage=1, number=300, again=True),
        "0187a174a4726f6f6da565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a8746f5f7374"
        "61676501a66e756d626572cd012ca5616761696ec3",
    ),
    "update": (
        wire.Update(
            epoch=70_000, request_id="r~1", attempt=2, segment=3, inputs={"prompt": "ü"}, payloads=(REF,), kept_from=1
        ),
        "0189a174a6757064617465a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a7736567"
        "6d656e7403a6696e7075747381a670726f6d7074a2c3bca87061796c6f6164739187aa66726f6d5f737461676500a8746f5f"
        "737461676501a36b6579a36b2f30a9636f6e6e6563746f72a373686daa73697a655f6279746573cd012ca86d657461646174"
        "6182a373686da166a16e9201c4020001a4726f6c65a0a769735f6c617374c2a96b6570745f66726f6d01",
    ),
    "update_last": (
        wire.Update(epoch=1, request_id="r", attempt=0, segment=1, is_last=True),
        "0189a174a6757064617465a565706f636801aa726571756573745f6964a172a7617474656d707400a77365676d656e7401a6"
        "696e7075747380a87061796c6f61647390a769735f6c617374c3a96b6570745f66726f6d00",
    ),
    "want": (
        wire.WantCredits(epoch=70_000, session=3, waiting=12, oldest_wait_s=0.25),
        "0185a174a477616e74a565706f6368ce00011170a773657373696f6e03a777616974696e670cad6f6c646573745f77616974"
        "5f73cb3fd0000000000000",
    ),
    "return": (
        wire.ReturnCredits(epoch=70_000, session=3, credits=1),
        "0184a174a672657475726ea565706f6368ce00011170a773657373696f6e03a76372656469747301",
    ),
    "control": (
        wire.Control(
            epoch=70_000,
            call_id="c~1",
            method="add_lora",
            args=("ü", 7),
            kwargs={"path": "/l", "n": [1, b"\0\1"]},
            remaining_s=0.5,
        ),
        "0187a174a7636f6e74726f6ca565706f6368ce00011170a763616c6c5f6964a3637e31a66d6574686f64a86164645f6c6f"
        "7261a46172677392a2c3bc07a66b776172677382a470617468a22f6ca16e9201c4020001ab72656d61696e696e675f73cb"
        "3fe0000000000000",
    ),
    "control_least": (
        wire.Control(epoch=1, call_id="c", method="m"),
        "0187a174a7636f6e74726f6ca565706f636801a763616c6c5f6964a163a66d6574686f64a16da46172677390a66b776172"
        "677380ab72656d61696e696e675f73cb404e000000000000",
    ),
}

FROM_REPLICA: dict[str, tuple[wire.FromReplica, str]] = {
    "welcome": (
        wire.Welcome(epoch=70_000, capacity=8, queue_length=300, session=3),
        "0185a174a777656c636f6d65a565706f6368ce00011170a8636170616369747908ac71756575655f6c656e677468cd012ca7"
        "73657373696f6e03",
    ),
    "accepted": (
        wire.Accepted(epoch=70_000, request_id="r~1", queue_length=1, attempt=2),
        "0185a174a86163636570746564a565706f6368ce00011170aa726571756573745f6964a3727e31ac71756575655f6c656e67"
        "746801a7617474656d707402",
    ),
    "rejected": (
        wire.Rejected(
            epoch=70_000, request_id="r~1", kind=wire.FailureKind.OVERLOADED, reason="full", queue_length=9, attempt=2
        ),
        "0187a174a872656a6563746564a565706f6368ce00011170aa726571756573745f6964a3727e31a46b696e64aa6f7665726c"
        "6f61646564a6726561736f6ea466756c6cac71756575655f6c656e67746809a7617474656d707402",
    ),
    "aborted": (
        wire.Aborted(epoch=70_000, request_id="r~1", attempt=2, running=True, queue_length=0),
        "0186a174a761626f72746564a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a77275"
        "6e6e696e67c3ac71756575655f6c656e67746800",
    ),
    "piece": (
        wire.HandOffPiece(epoch=70_000, request_id="r~1", attempt=2, number=300, payloads=(REF,), queue_length=1),
        "0187a174a57069656365a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a66e756d62"
        "6572cd012ca87061796c6f6164739187aa66726f6d5f737461676500a8746f5f737461676501a36b6579a36b2f30a9636f6e"
        "6e6563746f72a373686daa73697a655f6279746573cd012ca86d6574616461746182a373686da166a16e9201c4020001a472"
        "6f6c65a0ac71756575655f6c656e67746801",
    ),
    "taken": (
        wire.PieceTaken(epoch=70_000, request_id="r~1", attempt=2, from_stage=0, number=300, queue_length=1),
        "0187a174a574616b656ea565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402aa66726f6d"
        "5f737461676500a66e756d626572cd012cac71756575655f6c656e67746801",
    ),
    "segment": (
        wire.SegmentDone(
            epoch=70_000,
            request_id="r~1",
            attempt=2,
            seq=300,
            segment=3,
            finish_reason="length",
            queue_length=1,
            payloads=(REF,),
            usage={"prompt_tokens": 3},
        ),
        "018aa174a77365676d656e74a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402a37365"
        "71cd012ca77365676d656e7403ad66696e6973685f726561736f6ea66c656e677468ac71756575655f6c656e67746801a870"
        "61796c6f6164739187aa66726f6d5f737461676500a8746f5f737461676501a36b6579a36b2f30a9636f6e6e6563746f72a3"
        "73686daa73697a655f6279746573cd012ca86d6574616461746182a373686da166a16e9201c4020001a4726f6c65a0a57573"
        "61676581ad70726f6d70745f746f6b656e7303",
    ),
    "grant": (
        wire.Grant(epoch=70_000, session=3, credits=4, queue_length=1),
        "0185a174a56772616e74a565706f6368ce00011170a773657373696f6e03a76372656469747304ac71756575655f6c656e67746801",
    ),
    "recall": (
        wire.Recall(epoch=70_000, session=3, credits=2, queue_length=1),
        "0185a174a6726563616c6ca565706f6368ce00011170a773657373696f6e03a76372656469747302ac71756575655f6c656e67746801",
    ),
    "chunk": (
        wire.Chunk(
            epoch=70_000,
            request_id="r~1",
            seq=0,
            modality="text",
            queue_length=1,
            attempt=2,
            text="ja ",
            token_ids=(5, 300),
            mime="",
        ),
        "018aa174a56368756e6ba565706f6368ce00011170aa726571756573745f6964a3727e31a373657100a86d6f64616c697479"
        "a474657874ac71756575655f6c656e67746801a7617474656d707402a474657874a36a6120a9746f6b656e5f6964739205cd"
        "012ca46d696d65a0",
    ),
    "chunk_logprobs": (
        wire.Chunk(
            epoch=70_000,
            request_id="r~1",
            seq=0,
            modality="text",
            queue_length=1,
            token_ids=(5,),
            logprobs=((wire.TokenLogprob(5, -0.5, 2, "ja"), wire.TokenLogprob(300, -0.25, 1, "")),),
        ),
        "018ba174a56368756e6ba565706f6368ce00011170aa726571756573745f6964a3727e31a373657100a86d6f64616c697479a4746578"
        "74ac71756575655f6c656e67746801a7617474656d707400a474657874a0a9746f6b656e5f6964739105a46d696d65a0a86c6f677072"
        "6f627391929405cbbfe000000000000002a26a6194cd012ccbbfd000000000000001a0",
    ),
    "chunk_prompt_logprobs": (
        wire.Chunk(
            epoch=70_000,
            request_id="r~1",
            seq=0,
            modality="text",
            queue_length=1,
            prompt_logprobs=((wire.TokenLogprob(5, -0.5, 2, "ja"), wire.TokenLogprob(300, -0.25, 1, "")),),
        ),
        "018ba174a56368756e6ba565706f6368ce00011170aa726571756573745f6964a3727e31a373657100a86d6f64616c697479a4746578"
        "74ac71756575655f6c656e67746801a7617474656d707400a474657874a0a9746f6b656e5f69647390a46d696d65a0af70726f6d7074"
        "5f6c6f6770726f627391929405cbbfe000000000000002a26a6194cd012ccbbfd000000000000001a0",
    ),
    "chunk_prompt_token_ids": (
        wire.Chunk(
            epoch=70_000,
            request_id="r~1",
            seq=0,
            modality="text",
            queue_length=1,
            token_ids=(5,),
            prompt_token_ids=(7, 300),
        ),
        "018ba174a56368756e6ba565706f6368ce00011170aa726571756573745f6964a3727e31a373657100a86d6f64616c697479a4746578"
        "74ac71756575655f6c656e67746801a7617474656d707400a474657874a0a9746f6b656e5f6964739105a46d696d65a0b070726f6d70"
        "745f746f6b656e5f6964739207cd012c",
    ),
    "chunk_image": (
        wire.Chunk(epoch=70_000, request_id="r~1", seq=1, modality="image", queue_length=1, mime="image/png"),
        "018aa174a56368756e6ba565706f6368ce00011170aa726571756573745f6964a3727e31a373657101a86d6f64616c697479"
        "a5696d616765ac71756575655f6c656e67746801a7617474656d707400a474657874a0a9746f6b656e5f69647390a46d696d"
        "65a9696d6167652f706e67",
    ),
    "done": (
        wire.StageDone(
            epoch=70_000,
            request_id="r~1",
            seq=2,
            finish_reason="stop",
            queue_length=0,
            attempt=2,
            payloads=(REF,),
            usage={"prompt_tokens": 3},
            timings_s={"queue": 0.125},
        ),
        "018ba174a4646f6e65a565706f6368ce00011170aa726571756573745f6964a3727e31a373657102ad66696e6973685f7265"
        "61736f6ea473746f70ac71756575655f6c656e67746800a7617474656d707402a87061796c6f6164739187aa66726f6d5f73"
        "7461676500a8746f5f737461676501a36b6579a36b2f30a9636f6e6e6563746f72a373686daa73697a655f6279746573cd01"
        "2ca86d6574616461746182a373686da166a16e9201c4020001a4726f6c65a0a5757361676581ad70726f6d70745f746f6b65"
        "6e7303a974696d696e67735f7381a57175657565cb3fc0000000000000a670696563657300",
    ),
    "done_by_a_token": (
        wire.StageDone(epoch=70_000, request_id="r~1", seq=2, finish_reason="stop", queue_length=0, stop_reason=300),
        "018ca174a4646f6e65a565706f6368ce00011170aa726571756573745f6964a3727e31a373657102ad66696e6973685f726561736f6e"
        "a473746f70ac71756575655f6c656e67746800a7617474656d707400a87061796c6f61647390a5757361676580a974696d696e67735f"
        "7380a670696563657300ab73746f705f726561736f6ecd012c",
    ),
    "done_by_a_text": (
        wire.StageDone(epoch=70_000, request_id="r~1", seq=2, finish_reason="stop", queue_length=0, stop_reason="ü"),
        "018ca174a4646f6e65a565706f6368ce00011170aa726571756573745f6964a3727e31a373657102ad66696e6973685f726561736f6e"
        "a473746f70ac71756575655f6c656e67746800a7617474656d707400a87061796c6f61647390a5757361676580a974696d696e67735f"
        "7380a670696563657300ab73746f705f726561736f6ea2c3bc",
    ),
    "failed": (
        wire.StageFailed(
            epoch=70_000, request_id="r~1", kind=wire.FailureKind.NOT_RESUMABLE, reason="why", queue_length=0, attempt=2
        ),
        "0187a174a66661696c6564a565706f6368ce00011170aa726571756573745f6964a3727e31a46b696e64ad6e6f745f726573"
        "756d61626c65a6726561736f6ea3776879ac71756575655f6c656e67746800a7617474656d707402",
    ),
    "failed_with_a_status": (
        wire.StageFailed(
            epoch=1, request_id="r", kind=wire.FailureKind.INVALID, reason="x", queue_length=0, status=422
        ),
        "0188a174a66661696c6564a565706f636801aa726571756573745f6964a172a46b696e64a7696e76616c6964a6726561736f6ea178"
        "ac71756575655f6c656e67746800a7617474656d707400a6737461747573cd01a6",
    ),
    "controlled": (
        wire.ControlResult(epoch=70_000, call_id="c~1", ok=True, queue_length=1, result={"a": [1, None, b"\0\1"]}),
        "0187a174aa636f6e74726f6c6c6564a565706f6368ce00011170a763616c6c5f6964a3637e31a26f6bc3ac71756575655f"
        "6c656e67746801a6726573756c7481a1619301c0c4020001a56572726f72a0",
    ),
    "controlled_not": (
        wire.ControlResult(epoch=70_000, call_id="c~1", ok=False, queue_length=1, error="TypeError: ü"),
        "0187a174aa636f6e74726f6c6c6564a565706f6368ce00011170a763616c6c5f6964a3637e31a26f6bc2ac71756575655f"
        "6c656e67746801a6726573756c74c0a56572726f72ad547970654572726f723a20c3bc",
    ),
}

BATCH_TO_REPLICA = (
    "019284a174a672657475726ea565706f6368ce00011170a773657373696f6e03a7637265646974730184a174a561626f7274"
    "a565706f6368ce00011170aa726571756573745f6964a3727e31a7617474656d707402"
)
BATCH_FROM_REPLICA = (
    "019285a174a86163636570746564a565706f6368ce00011170aa726571756573745f6964a3727e31ac71756575655f6c656e"
    "67746801a7617474656d70740285a174a56772616e74a565706f6368ce00011170a773657373696f6e03a763726564697473"
    "04ac71756575655f6c656e67746801"
)

#: What an early release sent, which knew neither credits nor resumption: absent fields take their defaults.
EARLY_HELLO = "0183a174a568656c6c6fa66875625f6964a56875622d31a565706f636807"
EARLY_SUBMIT = "0183a174a67375626d6974a565706f636807aa726571756573745f6964a172"


def head(golden: str) -> bytes:
    return bytes.fromhex(golden)


@pytest.mark.parametrize("name", TO_REPLICA)
def test_a_hub_writes_these_bytes_and_a_replica_reads_them(name: str) -> None:
    message, golden = TO_REPLICA[name]
    assert wire.encode(message).hex() == golden
    assert wire.decode_to_replica([head(golden)]) == [message]


@pytest.mark.parametrize("name", FROM_REPLICA)
def test_a_replica_writes_these_bytes_and_a_hub_reads_them(name: str) -> None:
    message, golden = FROM_REPLICA[name]
    assert wire.encode(message).hex() == golden
    assert wire.decode_from_replica([head(golden)]) == ([message], [])


def test_every_message_there_is_has_its_bytes_here() -> None:
    assert {type(message) for message, _ in TO_REPLICA.values()} == set(get_args(wire.ToReplica))
    assert {type(message) for message, _ in FROM_REPLICA.values()} == set(get_args(wire.FromReplica))


def test_a_batch_is_an_array_of_the_same_maps_behind_one_version_byte() -> None:
    to_replica = [TO_REPLICA["return"], TO_REPLICA["abort"]]
    assert wire.encode([message for message, _ in to_replica]).hex() == BATCH_TO_REPLICA
    assert wire.decode_to_replica([head(BATCH_TO_REPLICA)]) == [message for message, _ in to_replica]
    from_replica = [FROM_REPLICA["accepted"], FROM_REPLICA["grant"]]
    assert wire.encode([message for message, _ in from_replica]).hex() == BATCH_FROM_REPLICA
    assert wire.join([head(golden) for _, golden in from_replica]).hex() == BATCH_FROM_REPLICA
    assert wire.decode_from_replica([head(BATCH_FROM_REPLICA)]) == ([message for message, _ in from_replica], [])


@pytest.mark.parametrize("count", [15, 16, wire.MAX_BATCH])
def test_batches_of_every_length_are_joined_as_they_are_encoded(count: int) -> None:
    message, golden = FROM_REPLICA["accepted"]
    joined = wire.join([head(golden)] * count)
    assert joined == wire.encode([message] * count)
    assert wire.decode_from_replica([joined]) == ([message] * count, [])


def test_what_an_early_release_sends_is_read_with_the_defaults() -> None:
    assert wire.decode_to_replica([head(EARLY_HELLO)]) == [wire.Hello(hub_id="hub-1", epoch=7)]
    assert wire.decode_to_replica([head(EARLY_SUBMIT)]) == [wire.Submit(epoch=7, request_id="r")]


@pytest.mark.parametrize("name", [*TO_REPLICA, *FROM_REPLICA])
def test_unknown_fields_are_skipped_in_every_message(name: str) -> None:
    """Also where they hold maps, bytes or another message."""
    message, golden = {**TO_REPLICA, **FROM_REPLICA}[name]
    fields = msgspec.msgpack.decode(head(golden)[1:])
    fields |= {"zz_new": [1, {"t": "abort"}], "zz_more": b"\xff", "zz_deep": {"a": {"b": [None]}}}
    frame = b"\x01" + msgspec.msgpack.encode(fields)
    read = wire.decode_to_replica([frame]) if name in TO_REPLICA else wire.decode_from_replica([frame])[0]
    assert read == [message]


@pytest.mark.parametrize("version", [0, 2, 0x84, 255])
@pytest.mark.parametrize("name", [*TO_REPLICA, *FROM_REPLICA])
def test_another_version_byte_is_refused_whatever_follows(name: str, version: int) -> None:
    _, golden = {**TO_REPLICA, **FROM_REPLICA}[name]
    frame = bytes([version]) + head(golden)[1:]
    with pytest.raises(WireError, match=f"version {version}; this release speaks 1"):
        wire.decode_to_replica([frame])
    with pytest.raises(WireError, match=f"version {version}; this release speaks 1"):
        wire.decode_from_replica([frame])


@pytest.mark.parametrize("name", [*TO_REPLICA, *FROM_REPLICA])
def test_a_message_in_the_wrong_direction_is_refused(name: str) -> None:
    """A hub that sends chunks, a replica that submits: no such message exists for the one who reads."""
    _, golden = {**TO_REPLICA, **FROM_REPLICA}[name]
    decode = wire.decode_from_replica if name in TO_REPLICA else wire.decode_to_replica
    with pytest.raises(WireError):
        decode([head(golden)])


@pytest.mark.parametrize("name", [*TO_REPLICA, *FROM_REPLICA])
def test_a_message_that_is_cut_short_anywhere_is_refused(name: str) -> None:
    _, golden = {**TO_REPLICA, **FROM_REPLICA}[name]
    for length in range(len(head(golden))):
        with pytest.raises(WireError):
            wire.decode_to_replica([head(golden)[:length]])
        with pytest.raises(WireError):
            wire.decode_from_replica([head(golden)[:length]])


@pytest.mark.parametrize("name", [*TO_REPLICA, *FROM_REPLICA])
def test_bytes_behind_a_message_are_refused(name: str) -> None:
    _, golden = {**TO_REPLICA, **FROM_REPLICA}[name]
    for more in (b"\xc0", head(golden)[1:], b"\x00" * 100):
        with pytest.raises(WireError):
            wire.decode_to_replica([head(golden) + more])
        with pytest.raises(WireError):
            wire.decode_from_replica([head(golden) + more])


def test_numbers_and_names_have_their_bounds_on_the_wire() -> None:
    bad: list[dict[str, object]] = [
        {"t": "want", "epoch": 1, "session": 1, "waiting": -1},
        {"t": "want", "epoch": 1, "session": 1, "waiting": 1, "oldest_wait_s": -0.1},
        {"t": "want", "epoch": 1, "session": 1, "waiting": 1, "oldest_wait_s": float("inf")},
        {"t": "want", "epoch": 1, "session": 1 << 53, "waiting": 1},
        {"t": "return", "epoch": 1, "session": 1, "credits": 1 << 53},
        {"t": "return", "epoch": 1, "session": 1, "credits": 1.5},
        {"t": "abort", "epoch": 1, "request_id": ""},
        {"t": "abort", "epoch": 1, "request_id": b"r"},
        {"t": "abort", "epoch": True, "request_id": "r"},
        {"t": "submit", "epoch": 1, "request_id": "r", "priority": wire.MAX_PRIORITY + 1},
        {"t": "submit", "epoch": 1, "request_id": "r", "next_stages": [1_000_000_000]},
        {"t": "submit", "epoch": 1, "request_id": "r", "resume": {"token_ids": ["1"]}},
        {"t": "submit", "epoch": 1, "request_id": "r", "credit": 1},
        {"t": "control", "epoch": 1, "call_id": "", "method": "m"},
        {"t": "control", "epoch": 1, "call_id": "c", "method": "m" * 257},
        {"t": "control", "epoch": 1, "call_id": "c", "method": "m", "kwargs": {1: 2}},
        {"t": "control", "epoch": 1, "call_id": "c", "method": "m", "remaining_s": -1},
        {"t": "submit", "epoch": 1, "request_id": "r", "stream_to": [-1]},
        {"t": "feed", "epoch": 1, "request_id": "r", "attempt": 0, "from_stage": 0, "number": -1},
        {"t": "feed", "epoch": 1, "request_id": "r", "attempt": 0, "from_stage": -1, "number": 0},
        {"t": "feed", "epoch": 1, "request_id": "r", "attempt": 0, "from_stage": 0, "number": 0, "payload": "k"},
        {"t": "room", "epoch": 1, "request_id": "r", "attempt": 0, "to_stage": 1, "number": 1 << 53},
    ]
    for fields in bad:
        with pytest.raises(WireError):
            wire.decode_to_replica([b"\x01" + msgspec.msgpack.encode(fields)])


def test_attachments_have_their_bounds_on_the_wire() -> None:
    chunk = head(FROM_REPLICA["chunk_image"][1])
    assert len(wire.decode_from_replica([chunk, *[b"x"] * wire.MAX_ATTACHMENTS])[1]) == wire.MAX_ATTACHMENTS
    with pytest.raises(WireError, match="frames"):
        wire.decode_from_replica([chunk, *[b"x"] * (wire.MAX_ATTACHMENTS + 1)])
    with pytest.raises(WireError, match="longer than"):
        wire.decode_from_replica([chunk, memoryview(bytes(wire.MAX_ATTACHMENT_BYTES + 1))])
    with pytest.raises(WireError, match="frames"):
        wire.decode_from_replica([])
