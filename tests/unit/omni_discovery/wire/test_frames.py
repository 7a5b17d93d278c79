"""The frames: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_discovery import wire
from omni_discovery.deploy.document import MOST_STAGES
from omni_discovery.errors import WireError
from omni_discovery.wire.containers import MAX_CONTAINERS_TO_REPLICA

REF = wire.PayloadRef(from_stage=0, to_stage=1, key="k", connector="c", size_bytes=3, metadata={"inline": b"\0\1"})

TO_REPLICA: list[wire.ToReplica] = [
    wire.Hello(hub_id="h", epoch=7),
    wire.Submit(epoch=7, request_id="r", inputs={"prompt": "ü"}, payloads=(REF,), next_stages=(1, 2), remaining_s=0.5),
    wire.Abort(epoch=7, request_id="r"),
    wire.ReleasePayloads(epoch=7, request_id="r"),
    wire.WantCredits(epoch=7, session=2, waiting=3, oldest_wait_s=0.5),
    wire.ReturnCredits(epoch=7, session=2, credits=1),
]
FROM_REPLICA: list[wire.FromReplica] = [
    wire.Welcome(epoch=7, capacity=8, queue_length=0),
    wire.Aborted(epoch=7, request_id="r", attempt=1, running=True, queue_length=0),
    wire.Grant(epoch=7, session=2, credits=4, queue_length=1),
    wire.Recall(epoch=7, session=2, credits=1, queue_length=1),
    wire.Accepted(epoch=7, request_id="r", queue_length=1),
    wire.Rejected(epoch=7, request_id="r", kind=wire.FailureKind.DRAINING, reason="bye", queue_length=1, attempt=3),
    wire.Chunk(epoch=7, request_id="r", seq=0, modality="text", queue_length=1, text="a", token_ids=(1, 2)),
    wire.StageDone(epoch=7, request_id="r", seq=1, finish_reason="stop", queue_length=0, payloads=(REF,)),
    wire.StageFailed(epoch=7, request_id="r", kind=wire.FailureKind.ENGINE, reason="x", queue_length=0),
]


@pytest.mark.parametrize("message", TO_REPLICA, ids=lambda message: type(message).__name__)
def test_what_a_hub_says_arrives_as_it_was(message: wire.ToReplica) -> None:
    assert wire.decode_to_replica([wire.encode(message)]) == [message]


@pytest.mark.parametrize("message", FROM_REPLICA, ids=lambda message: type(message).__name__)
def test_what_a_replica_says_arrives_as_it_was(message: wire.FromReplica) -> None:
    assert wire.decode_from_replica([wire.encode(message)]) == ([message], [])


def test_only_a_chunk_of_an_unfinished_picture_has_its_number() -> None:
    """All other chunks are the bytes that the release before knows."""
    plain = wire.Chunk(epoch=7, request_id="r", seq=0, modality="image", queue_length=1, mime="image/png")
    assert b"partial_image" not in wire.encode(plain)
    numbered = msgspec.structs.replace(plain, partial_image=2)
    assert wire.decode_from_replica([wire.encode(numbered), b"png"]) == ([numbered], [b"png"])


def test_a_chunk_brings_its_attachments_along_and_only_a_chunk_may() -> None:
    head, other = wire.encode(FROM_REPLICA[6]), wire.encode(FROM_REPLICA[7])
    assert wire.decode_from_replica([head, b"png"])[1] == [b"png"]
    with pytest.raises(WireError, match="only a chunk"):
        wire.decode_from_replica([other, b"png"])
    with pytest.raises(WireError, match="frames"):
        wire.decode_to_replica([wire.encode(TO_REPLICA[0]), b"more"])


@given(st.text(max_size=40), st.integers(8, 20))
def test_a_text_that_is_too_long_keeps_its_beginning_and_its_end(text: str, most: int) -> None:
    short = wire.shortened(text, most)
    assert len(short) == min(len(text), most)
    if len(text) > most:
        first, last = text[: most // 2], text[-1:]
        assert short.startswith(first)
        assert short.endswith(last)
    else:
        assert short == text


@pytest.mark.parametrize(
    ("message", "field", "most"),
    [
        (FROM_REPLICA[5], "reason", wire.MAX_REASON),
        (FROM_REPLICA[6], "mime", 256),
        (FROM_REPLICA[7], "finish_reason", 256),
        (FROM_REPLICA[8], "reason", wire.MAX_REASON),
    ],
)
def test_no_text_about_an_answer_is_longer_than_its_bound(message: wire.FromReplica, field: str, most: int) -> None:
    longest = msgspec.structs.replace(message, **{field: "ü" * most})
    assert wire.decode_from_replica([wire.encode(longest)]) == ([longest], [])
    with pytest.raises(WireError, match=field):
        wire.decode_from_replica([wire.encode(msgspec.structs.replace(message, **{field: "ü" * (most + 1)}))])


def test_a_batch_is_read_in_its_order_and_attaches_nothing() -> None:
    head = wire.encode(FROM_REPLICA)
    assert wire.decode_from_replica([head]) == (FROM_REPLICA, [])
    assert wire.decode_to_replica([wire.encode(TO_REPLICA)]) == TO_REPLICA
    with pytest.raises(WireError, match="only a chunk"):
        wire.decode_from_replica([head, b"png"])
    for count in (0, wire.MAX_BATCH + 1):
        with pytest.raises(WireError, match="a batch of"):
            wire.decode_to_replica([wire.encode([TO_REPLICA[3]] * count)])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\x01"],
        [b"\x02" + wire.encode(TO_REPLICA[0])[1:]],
        [b"\x01\xc1"],
        [b"\x01" + msgspec.msgpack.encode(["hello"])],
        [b"\x01" + msgspec.msgpack.encode({"t": "nonsense", "epoch": 1})],
        [b"\x01" + msgspec.msgpack.encode({"t": "hello", "epoch": 1})],
        [b"\x01" + msgspec.msgpack.encode({"t": "hello", "hub_id": "", "epoch": 1})],
        [b"\x01" + msgspec.msgpack.encode({"t": "hello", "hub_id": "h", "epoch": -1})],
        [b"\x01" + msgspec.msgpack.encode({"t": "hello", "hub_id": "h", "epoch": 1 << 60})],
        [b"\x01" + msgspec.msgpack.encode({"t": "submit", "epoch": 1, "request_id": "r", "remaining_s": float("nan")})],
        [b"\x01" + msgspec.msgpack.encode({"t": "submit", "epoch": 1, "request_id": "r" * 257})],
        [b"\x01" + b"\x91" * 100_000],
        [b"\x01" + bytes(wire.MAX_HEAD_BYTES)],
    ],
)
def test_anything_else_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode_to_replica(frames)


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_at_all_get_past_as_anything_but_a_message_or_a_wire_error(body: bytes, versioned: bool) -> None:
    frame = b"\x01" + body if versioned else body
    for decode in (wire.decode_to_replica, wire.decode_from_replica):
        try:
            decode([frame])
        except WireError:
            continue


@given(st.integers(0, len(wire.encode(TO_REPLICA[1])) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused_but_never_crashes(position: int, value: int) -> None:
    frame = bytearray(wire.encode(TO_REPLICA[1]))
    frame[position] = value
    try:
        messages = wire.decode_to_replica([bytes(frame)])
    except WireError:
        return
    assert all(isinstance(message, wire.ToReplica) for message in messages)


def test_fields_that_a_later_release_adds_are_skipped() -> None:
    frame = b"\x01" + msgspec.msgpack.encode({"t": "hello", "hub_id": "h", "epoch": 1, "new": [1, 2]})
    assert wire.decode_to_replica([frame]) == [wire.Hello(hub_id="h", epoch=1)]


def test_what_can_not_be_written_is_a_wire_error_at_the_sender() -> None:
    with pytest.raises(WireError):
        wire.encode(wire.Submit(epoch=1, request_id="r", params={"seed": 1 << 70}))
    with pytest.raises(WireError, match="bytes are more"):
        wire.encode(wire.Submit(epoch=1, request_id="r", inputs={"prompt": "x" * wire.MAX_HEAD_BYTES}))


def test_a_value_that_is_nested_too_deep_to_be_encoded_is_refused_as_any_other() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(WireError, match="can't be encoded"):
        wire.encode(wire.Submit(epoch=1, request_id="r", inputs={"x": deep}))


def _head(kind: str, **values: bytes) -> bytes:
    """A head of which some values are encoded already."""
    about = {"t": kind, "epoch": 1, "queue_length": 0, "request_id": "r", "call_id": "c", "ok": True, "seq": 0}
    about |= {"finish_reason": "stop", "modality": "text", "number": 0, "attempt": 0}
    pairs = [msgspec.msgpack.encode(name) + msgspec.msgpack.encode(value) for name, value in about.items()]
    pairs += [msgspec.msgpack.encode(name) + value for name, value in values.items()]
    return b"\x01\xde" + len(pairs).to_bytes(2, "big") + b"".join(pairs)


def _many(value: bytes, count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big") + value * count


def _ref(metadata: bytes) -> bytes:
    encoded = msgspec.msgpack.encode({"from_stage": 0, "to_stage": 1, "key": "k", "connector": "c", "size_bytes": 1})
    return b"\x91\x86" + encoded[1:] + msgspec.msgpack.encode("metadata") + metadata


@pytest.mark.attack("K3")
@pytest.mark.parametrize(
    "value", [b"\x80", b"\x90", b"\x81\x01\x01", b"\xdc\x00\x00"], ids=["map", "array", "pair", "long"]
)
@pytest.mark.parametrize("kind", ["controlled", "done", "piece", "segment"])
def test_a_head_of_a_million_maps_is_refused_before_they_are_made(kind: str, value: bytes) -> None:
    many = _many(value, 1_000_000)
    more = {"segment": b"\x00"} if kind == "segment" else {}
    head = _head(kind, result=many) if kind == "controlled" else _head(kind, payloads=_ref(b"\x81\xa1x" + many), **more)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="maps, arrays and texts"):
            wire.decode_from_replica([head])
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    few = _many(value, 1000)
    assert wire.decode_from_replica(
        [_head(kind, result=few) if kind == "controlled" else _head(kind, payloads=_ref(b"\x81\xa1x" + few), **more)]
    )


@pytest.mark.parametrize(
    ("field", "most"),
    [
        pytest.param("usage", 64, marks=pytest.mark.attack("Q60")),
        pytest.param("timings_s", 65_536, marks=pytest.mark.attack("K3")),
    ],
)
def test_no_more_names_are_read_than_an_answer_may_count(field: str, most: int) -> None:
    done = wire.StageDone(epoch=1, request_id="r", seq=0, finish_reason="stop", queue_length=0)
    counted = msgspec.structs.replace(done, **{field: {str(number): 1 for number in range(most)}})
    assert wire.decode_from_replica([wire.encode(counted)]) == ([counted], [])
    getattr(counted, field)["one more"] = 1
    with pytest.raises(WireError, match=f"length <= {most}.*{field}"):
        wire.decode_from_replica([wire.encode(counted)])


@pytest.mark.attack("Q60")
def test_a_segment_counts_no_more_kinds_of_tokens_than_an_answer() -> None:
    ended = wire.SegmentDone(
        epoch=1, request_id="r", attempt=0, seq=0, segment=0, finish_reason="stop", queue_length=0,
        usage={str(number): 1 for number in range(65)},
    )  # fmt: skip
    with pytest.raises(WireError, match=r"length <= 64.*usage"):
        wire.decode_from_replica([wire.encode(ended)])


def test_the_largest_heads_that_replicas_send_are_read() -> None:
    """Log probabilities of a whole chunk, a long prompt with items in it, a long text, and a stored hand-off."""
    about: dict[str, Any] = {"epoch": 1, "request_id": "r", "queue_length": 0}
    chances = random.Random(7)
    place = tuple(wire.TokenLogprob(chances.randrange(200_000), -chances.random(), rank, "wörd") for rank in range(21))
    ids = tuple(chances.randrange(200_000) for _ in range(1 << 17))
    chunk = wire.Chunk(**about, seq=0, modality="text")
    for more in ({"prompt_logprobs": (place,) * 1024}, {"prompt_token_ids": ids}, {"text": "他们说" * 300_000}):
        large = msgspec.structs.replace(chunk, **more)
        assert wire.decode_from_replica([wire.encode(large)]) == ([large], [])
    ref = msgspec.structs.replace(REF, metadata={"inline": chances.randbytes(3 << 20)})
    done = wire.StageDone(**about, seq=0, finish_reason="stop", payloads=(ref,))
    assert wire.decode_from_replica([wire.encode(done)]) == ([done], [])


def test_a_batch_may_hold_one_message_and_not_none() -> None:
    """The version, then msgpack's array of so many."""
    one = wire.encode(FROM_REPLICA[0])
    messages, _ = wire.decode_from_replica([one[:1] + b"\x91" + one[1:]])
    assert messages == [FROM_REPLICA[0]]
    with pytest.raises(WireError, match="a batch of 0 messages"):
        wire.decode_from_replica([one[:1] + b"\x90"])


def with_inputs(packed: bytes, epoch: int = 7) -> bytes:
    """The head of a Submit whose inputs have these bytes as their only value."""
    head = wire.encode(wire.Submit(epoch=epoch, request_id="r", inputs={"x": 0}))
    place = head.index(b"\xa1x\x00") + 2
    return head[:place] + packed + head[place + 1 :]


@pytest.mark.attack("Q21")
def test_a_head_of_a_hub_with_millions_of_maps_is_refused_before_it_is_decoded() -> None:
    """Each is 4 MB in a frame and 300 MB decoded. A hub does not encode such a one, and its client hears why."""
    for count, fits in (
        (MAX_CONTAINERS_TO_REPLICA - 100, True),
        (MAX_CONTAINERS_TO_REPLICA, False),
        (4_100_000, False),
    ):
        head = with_inputs(b"\xdd" + count.to_bytes(4, "big") + b"\x80" * count)
        if fits:
            assert len(wire.decode_to_replica([head])) == 1
            continue
        tracemalloc.start()
        try:
            with pytest.raises(WireError, match="maps, arrays and texts"):
                wire.decode_to_replica([head])
            assert tracemalloc.get_traced_memory()[1] < 40 << 20
        finally:
            tracemalloc.stop()
    with pytest.raises(WireError, match="maps, arrays and texts"):
        wire.encode(wire.Submit(epoch=7, request_id="r", inputs={"x": [{}] * MAX_CONTAINERS_TO_REPLICA}))


def test_the_largest_honest_inputs_pass() -> None:
    """Token ids, allowed tokens, a chat of 50 000 objects, a picture: as much of each as the API of a hub takes."""
    inputs: list[dict[str, Any]] = [
        {"prompt_token_ids": [150_000 - (number % 100_000) for number in range(1 << 19)]},
        {"prompt_token_ids": [1] * 131_072, "allowed_token_ids": list(range(1 << 18))},
        {"messages": [{"role": "user", "content": "a"}] * 50_000},
        {"messages": [{"role": "user", "content": [{"image_url": {"url": "A" * (3 << 20)}}]}]},
        {"prompt": "\u7684" * (1 << 20)},
    ]
    for each in inputs:
        submit = wire.Submit(epoch=7, request_id="r", inputs=each)
        assert wire.decode_to_replica([wire.encode(submit)]) == [submit]


@given(st.lists(st.integers(0, (1 << 53) - 1), min_size=1, max_size=20))
def test_the_epochs_of_a_head_are_told_without_the_rest(epochs: list[int]) -> None:
    kinds = [
        lambda epoch: wire.Submit(epoch=epoch, request_id="r", inputs={"epoch": 3}),
        lambda epoch: wire.Hello(epoch=epoch, hub_id="h"),
        lambda epoch: wire.WantCredits(epoch=epoch, session=1, waiting=2),
    ]
    heads = [wire.encode(kinds[place % 3](epoch)) for place, epoch in enumerate(epochs)]
    assert [wire.epochs_of(head) for head in heads] == [[epoch] for epoch in epochs]
    assert wire.epochs_of(wire.join(heads)) == epochs
    assert wire.epochs_of(with_inputs(b"\xc1", epochs[0])) == epochs[:1]


@pytest.mark.parametrize(
    "head", [b"\x01", b"\x02\x81\xa5epoch\x01", b"\x01\x80", b"\x01\x81\xa5epoch\xa1a", b"\x01\x90"]
)
def test_a_head_without_an_epoch_is_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        wire.epochs_of(head)


def cut_frames(lengths: list[int]) -> list[bytes]:
    return [bytes([number + 1]) * length for number, length in enumerate(lengths)]


@given(st.lists(st.integers(0, 3 * wire.MAX_FRAME_BYTES), min_size=1, max_size=4))
def test_what_is_cut_is_put_together_again_and_no_frame_is_long(lengths: list[int]) -> None:
    frames = cut_frames(lengths)
    pieces = [bytes(piece) for piece in wire.cut(frames)]
    if max(lengths) <= wire.MAX_FRAME_BYTES:
        assert pieces == frames
        return
    assert max(map(len, pieces)) <= wire.MAX_FRAME_BYTES
    assert wire.lengths_of(pieces[0]) == lengths
    assert wire.most_pieces(lengths) == len(pieces) - 1
    assert wire.put_together(lengths, pieces[1:]) == frames


def test_the_largest_message_of_all_is_cut_and_one_byte_more_is_none() -> None:
    most = [wire.MAX_HEAD_BYTES, *[wire.MAX_ATTACHMENT_BYTES] * wire.MAX_ATTACHMENTS]
    table = b"\x02" + msgspec.msgpack.encode(most)
    assert wire.lengths_of(table) == most
    assert wire.most_pieces(most) == 64 + 16 * 1024
    for wrong in ([most[0] + 1], [1, wire.MAX_ATTACHMENT_BYTES + 1], [*most, 0], [], [-1], ["1"], {"a": 1}, [True]):
        with pytest.raises(WireError, match="cut"):
            wire.lengths_of(b"\x02" + msgspec.msgpack.encode(wrong))
    with pytest.raises(WireError, match="cut"):
        wire.lengths_of(table + b"\0")
    with pytest.raises(WireError, match="cut"):
        wire.lengths_of(b"\x02")


@pytest.mark.parametrize("frame", [b"", b"\x01", b"\x01\x91\x01", b"\x03\x91\x01"])
def test_other_frames_begin_no_message_that_is_cut(frame: bytes) -> None:
    assert wire.lengths_of(frame) is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pieces: pieces[:-1],
        lambda pieces: [*pieces, b"x"],
        lambda pieces: [*pieces[:-1], pieces[-1] + b"x"],
        lambda pieces: [pieces[-1], *pieces[:-1]],
        lambda pieces: [],
    ],
)
def test_pieces_that_are_not_as_was_said_are_refused(spoil: Any) -> None:
    lengths = [3, wire.MAX_FRAME_BYTES + 1]
    pieces = [bytes(piece) for piece in wire.cut(cut_frames(lengths))][1:]
    with pytest.raises(WireError, match="cut, with"):
        wire.put_together(lengths, spoil(pieces))


def test_a_message_that_is_cut_and_was_not_put_together_decodes_for_nobody() -> None:
    table = bytes(wire.cut(cut_frames([wire.MAX_FRAME_BYTES + 1]))[0])
    for decode in (wire.decode_to_replica, wire.decode_from_replica):
        with pytest.raises(WireError, match="version 2"):
            decode([table])


@pytest.mark.attack("Z35")
@pytest.mark.parametrize("field", ["next_stages", "stream_to", "stream_from"])
def test_a_request_names_no_more_stages_than_a_document_has(field: str) -> None:
    longest = wire.Submit(epoch=1, request_id="r", **{field: tuple(range(MOST_STAGES))})
    assert wire.decode_to_replica([wire.encode(longest)]) == [longest]
    with pytest.raises(WireError, match=field):
        wire.decode_to_replica([wire.encode(msgspec.structs.replace(longest, **{field: (1,) * (MOST_STAGES + 1)}))])
