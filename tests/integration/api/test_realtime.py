"""/v1/realtime, asked by OpenAI's own clients over a WebSocket, of real replicas. Each event is checked by its type."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from httpx import AsyncClient
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from hub.api.audio.threads import EncoderThreads
from hub.api.door.guard import Door, Locks
from hub.api.door.keys import KeyRing
from hub.api.realtime import connection as connection_module
from hub.api.routes import build_app
from hub.api.server import HttpServer
from hub.config import RealtimeBounds
from omni_discovery.errors import OverloadedError
from omni_discovery.records.api_key import digest_of
from omni_discovery.sockets.listen import bind
from tests.support.hub_fakes import until
from tests.support.serving import CONFIG
from tests.support.speaking import GO_ON, LISTENER, SPEAKER, VOICE, Served, served, spoken
from tests.support.talking import SERVER_EVENT, WAIT_S, sound_of, talking, words_of
from tests.support.voice import silence, vowel


@pytest.fixture
async def hub() -> AsyncIterator[Served]:
    async with served(LISTENER) as running:
        yield running


async def test_a_text_is_answered_with_words_and_their_sound(hub: Served) -> None:
    async with talking(hub) as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"voice": "bob"}}})
        (updated,) = await talk.hear("session.updated")
        assert updated.session.audio.output.voice == "bob"
        events = await talk.ask("one two three")
        assert words_of(events).split() == ["one", "two", "three"]
        assert sound_of(events) == spoken("one two three", speaker="bob")
        response = events[-1].response
        assert (response.status, response.output[0].content[0].transcript) == ("completed", words_of(events))
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        events = await talk.ask("only words", output_modalities=["text"])
        assert (words_of(events).split(), sound_of(events)) == (["only", "words"], b"")


# The SDK's, of the library below it.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
async def test_the_synchronous_client_is_served_alike(hub: Served) -> None:
    def ask(client: OpenAI) -> list[Any]:
        with client, client.realtime.connect(model="listener") as connection:
            part: Any = {"type": "input_text", "text": "one two"}
            connection.conversation.item.create(item={"type": "message", "role": "user", "content": [part]})
            connection.response.create()
            events: list[Any] = []
            while not events or events[-1].type != "response.done":
                events.append(SERVER_EVENT.validate_json(connection.recv_bytes()))
            return events

    events = await asyncio.to_thread(ask, hub.sync_client)
    assert sound_of(events) == spoken("one two")


async def test_the_client_of_the_beta_gets_its_own_events(hub: Served) -> None:
    """It is deprecated in the SDK, and much that is in use is made for it."""
    events: list[Any] = []
    # Unless told otherwise, it connects by TLS.
    client = hub.client.with_options(websocket_base_url=f"{hub.address.replace('http', 'ws', 1)}/v1")
    async with client, client.beta.realtime.connect(model="listener") as connection:
        await connection.session.update(session={"modalities": ["text", "audio"], "voice": "sage"})
        part: Any = {"type": "input_text", "text": "one two"}
        await connection.conversation.item.create(item={"type": "message", "role": "user", "content": [part]})
        await connection.response.create()
        async with asyncio.timeout(WAIT_S):
            while not events or events[-1].type != "response.done":
                events.append(await connection.recv())
    assert events[1].session.voice == "sage"
    sound = b"".join(base64.b64decode(each.delta) for each in events if each.type == "response.audio.delta")
    assert sound == spoken("one two", speaker="sage")
    assert events[-1].response.output[0].content[0].type == "audio"
    assert not [each.type for each in events if "output" in each.type and "item" not in each.type]


async def test_what_is_said_is_heard_answered_and_remembered(hub: Served) -> None:
    """1. a vowel between silences; 2. the stage gets a sound of that length; 3. and then all that was said"""
    async with talking(hub) as talk:
        await talk.speak(silence(600), vowel(1000), silence(900))
        events = await talk.hear("response.done")
        by_type = {each.type: each for each in events}
        started = by_type["input_audio_buffer.speech_started"].audio_start_ms
        stopped = by_type["input_audio_buffer.speech_stopped"].audio_end_ms
        assert 200 <= started <= 400
        assert 2000 <= stopped <= 2400
        assert words_of(events).strip() == f"sound-of-{stopped - started}-ms"
        assert sound_of(events) == spoken(words_of(events))
        events = await talk.ask("ALL")
        first = f"sound-of-{stopped - started}-ms"
        assert words_of(events).split() == [f"user:{first}", f"assistant:{first}", "user:ALL"]


async def test_without_detection_turns_are_committed_and_asked_about(hub: Served) -> None:
    async with talking(hub) as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"input": {"turn_detection": None}}})
        await talk.hear("session.updated")
        await talk.speak(vowel(500))
        await talk.connection.input_audio_buffer.commit()
        await talk.connection.response.create()
        assert words_of(await talk.hear("response.done")).strip() == "sound-of-500-ms"
        item = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": _b64(vowel(300))}]}
        await talk.connection.conversation.item.create(item=item)
        await talk.connection.response.create()
        assert words_of(await talk.hear("response.done")).strip() == "sound-of-300-ms"


def _b64(sound: bytes) -> str:
    return base64.b64encode(sound).decode()


async def test_speech_ends_the_answer_and_frees_the_stages(hub: Served) -> None:
    """The voice waits in the middle of its sentence; the answer is cut to what was heard."""
    async with talking(hub) as talk:
        await talk.say("one WAIT three")
        await talk.connection.response.create()
        await talk.hear("response.output_audio.delta")
        await talk.speak(silence(200), vowel(1000))
        events = await talk.hear("conversation.item.truncated")
        (done,) = (each.response for each in events if each.type == "response.done")
        assert (done.status, done.status_details.reason) == ("cancelled", "turn_detected")
        GO_ON.set()
        await until(lambda: all(len(replica.loop) == 0 for replica in hub.replicas), WAIT_S)
        await talk.speak(silence(900))
        events = await talk.hear("response.done")
        assert words_of(events).startswith("sound-of-")


async def test_a_response_is_cancelled_by_its_client(hub: Served) -> None:
    async with talking(hub) as talk:
        await talk.say("one WAIT three")
        await talk.connection.response.create()
        await talk.hear("response.output_audio.delta")
        await talk.connection.response.create()
        (error,) = await talk.hear("error")
        assert error.error.code == "conversation_already_has_active_response"
        await talk.connection.response.cancel()
        assert (await talk.hear("response.done"))[-1].response.status_details.reason == "client_cancelled"
        GO_ON.set()
        assert words_of(await talk.ask("four")).strip() == "four"


async def test_a_client_that_leaves_ends_its_response() -> None:
    """With a goodbye, and without a word."""
    async with served(LISTENER) as hub:
        for abrupt in (False, True):
            async with talking(hub) as talk:
                await talk.say("one WAIT three")
                await talk.connection.response.create()
                await talk.hear("response.output_audio.delta")
                if abrupt:
                    talk.connection._connection.transport.abort()
            await until(lambda: not hub.omni._queues, WAIT_S)
            GO_ON.set()
            await until(lambda: all(len(replica.loop) == 0 for replica in hub.replicas), WAIT_S)
            GO_ON.clear()


async def test_a_stage_that_fails_is_told_and_the_session_goes_on(hub: Served) -> None:
    async with talking(hub) as talk:
        response = (await talk.ask("one FAIL three"))[-1].response
        assert (response.status, response.status_details.error.code) == ("failed", "engine_failed")
        assert "it was told to fail" in response.status_details.error.message
        assert words_of(await talk.ask("fine")).strip() == "fine"


async def test_sound_of_another_rate_comes_at_24_khz() -> None:
    async with served(VOICE) as hub, talking(hub) as talk:
        events = await talk.ask("RATE=16000 RATE=16000")
        # Two words of 2400 samples at 16 kHz are 300 ms; a resampler may keep some samples.
        assert len(sound_of(events)) == pytest.approx(300 * 48, abs=200)
        assert words_of(events) == ""


async def test_a_sound_may_be_said_faster(hub: Served) -> None:
    async with talking(hub) as talk:
        await talk.connection.session.update(session={"type": "realtime", "audio": {"output": {"speed": 1.5}}})
        events = await talk.ask(" ".join(["word"] * 12))
        assert len(sound_of(events)) == pytest.approx(12 * 4800 / 1.5, rel=0.15)


@asynccontextmanager
async def plain(hub: Served, query: str = "", **options: Any) -> AsyncIterator[ClientConnection]:
    address = f"{hub.address.replace('http', 'ws', 1)}/v1/realtime{query}"
    async with connect(address, **options) as connection:
        yield connection


async def hear(connection: ClientConnection, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(WAIT_S):
        while True:
            event: dict[str, Any] = json.loads(await connection.recv())
            if event["type"] == kind:
                return event


async def test_a_session_that_is_not_served_is_refused_before_it_begins(hub: Served) -> None:
    for query, status, said in (
        ("?model=other", 404, "there is 'listener'"),
        ("?intent=transcription", 501, "transcriptions"),
        ("?call_id=1", 501, "calls"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with plain(hub, query):
                pass
        assert refused.value.response.status_code == status
        assert said in json.loads(refused.value.response.body or b"{}")["error"]["message"]
    async with served(SPEAKER) as other, plain(other, subprotocols=["realtime"]) as connection:  # type: ignore[list-item]
        assert connection.subprotocol == "realtime"


async def counted(hub: Served, name: str, **labels: str) -> float:
    """A metric, as Prometheus gets it; 0.0 before it has a value."""
    async with AsyncClient() as client:
        families = text_string_to_metric_families((await client.get(f"{hub.address}/metrics")).text)
    samples = [each for family in families for each in family.samples if each.name == name]
    return next((each.value for each in samples if each.labels == labels), 0.0)


async def test_open_sessions_and_what_is_refused_are_counted(hub: Served) -> None:
    """1. two sessions, one of which sends what is wrong; 2. one that does not begin; 3. none, once both have left"""
    sessions, refused = "omni_hub_realtime_sessions", "omni_hub_realtime_refusals_total"
    async with talking(hub), plain(hub) as connection:
        assert await counted(hub, sessions) == 2
        for event in ('{"type": "song"}', '{"type": "response.cancel"}', '{"type": "song"}'):
            await connection.send(event)
            await hear(connection, "error")
        assert await counted(hub, refused, kind="event", code="invalid_request") == 2
        assert await counted(hub, refused, kind="event", code="response_cancel_not_active") == 1
        with pytest.raises(InvalidStatus):
            async with plain(hub, "?model=other"):
                pass
        assert await counted(hub, refused, kind="session", code="model_not_found") == 1
        assert await counted(hub, sessions) == 2
    await until(lambda: not hub.omni.hub_metrics.registry.get_sample_value(sessions), WAIT_S)
    assert await counted(hub, sessions) == 0


@pytest.mark.attack("J1")
async def test_wrong_events_get_an_error_each_and_close_nothing(hub: Served) -> None:
    """Text that is none, a thousand unknown events, sound that is none; then an answer as always."""
    async with plain(hub) as connection:
        wrong: list[str | bytes] = [
            *("", "{", "[]", "null", "5", '{"type": 5}', '{"type": "song"}', b"\x00\xff", "[" * 50_001),
            '{"type": "input_audio_buffer.append", "audio": "?"}',
            '{"type": "conversation.item.delete", "item_id": "nobody"}',
            '{"type": "response.create"}',
        ]
        for number, frame in enumerate(wrong * 5):
            await connection.send(frame)
            error = (await hear(connection, "error"))["error"]
            assert error["type"] in ("invalid_request_error", "rate_limit_error"), (number, error)
            assert error["message"]
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fine"}]}
        await connection.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await connection.send('{"type": "response.create"}')
        assert (await hear(connection, "response.done"))["response"]["status"] == "completed"


@pytest.mark.attack("J1")
async def test_a_frame_that_is_too_long_closes_the_session_and_ends_its_response(hub: Served) -> None:
    async with plain(hub) as connection:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one WAIT three"}]}
        await connection.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await connection.send('{"type": "response.create"}')
        await hear(connection, "response.output_audio.delta")
        await connection.send('{"type": "input_audio_buffer.append", "audio": "%s"}' % ("A" * (3 << 20)))
        with pytest.raises(ConnectionClosed):
            await hear(connection, "error")
        assert connection.close_code == 1009
        await until(lambda: not hub.omni._queues, WAIT_S)
        GO_ON.set()


@pytest.mark.attack("J2")
async def test_sound_without_end_is_bounded_for_one_session_and_for_all() -> None:
    """1. turns that nobody commits: an error at the bound, and what came before stays
    2. many sessions: an error at the bound of all, until one of them leaves
    """
    bounds = RealtimeBounds(max_turn_s=2.0, max_memory_bytes=150_000)
    append = json.dumps({"type": "input_audio_buffer.append", "audio": _b64(vowel(500))})
    update = '{"type": "session.update", "session": {"turn_detection": null}}'
    config = replace(CONFIG, realtime_bounds=bounds)
    async with served(LISTENER, config) as hub, plain(hub) as second:
        async with plain(hub) as first:
            await first.send(update)
            await hear(first, "session.updated")
            for _ in range(20):
                await first.send(append)
            errors = [(await hear(first, "error"))["error"]["code"] for _ in range(16)]
            assert set(errors) == {"input_audio_buffer_full"}
            await first.send('{"type": "input_audio_buffer.commit"}')
            await hear(first, "conversation.item.done")
            for _ in range(4):
                await first.send(append)
            # Once this is answered, the sound before it is held.
            await first.send(update)
            await hear(first, "session.updated")
            await second.send(update)
            for _ in range(4):
                await second.send(append)
            assert (await hear(second, "error"))["error"]["code"] == "overloaded"
        await second.send('{"type": "input_audio_buffer.clear"}')
        await hear(second, "input_audio_buffer.cleared")
        await second.send(append)
        await second.send('{"type": "input_audio_buffer.commit"}')
        assert await hear(second, "input_audio_buffer.committed")


@pytest.mark.attack("J3")
async def test_a_session_without_events_ends_and_says_so() -> None:
    config = replace(CONFIG, realtime_bounds=RealtimeBounds(idle_timeout_s=0.5))
    async with served(LISTENER, config) as hub, plain(hub) as connection:
        assert (await hear(connection, "error"))["error"]["code"] == "input_timeout"
        with pytest.raises(ConnectionClosed):
            await hear(connection, "nothing")
        assert connection.close_code == 1000


async def test_a_session_ends_at_its_longest() -> None:
    config = replace(CONFIG, realtime_bounds=RealtimeBounds(max_session_s=0.5))
    async with served(LISTENER, config) as hub, plain(hub) as connection:
        assert "the longest that one may" in (await hear(connection, "error"))["error"]["message"]


@pytest.mark.attack("J3")
async def test_a_session_whose_key_is_taken_back_ends_at_its_next_event(hub: Served) -> None:
    ring = KeyRing(from_etcd=True)
    ring.replace({"alice": digest_of("secret"), "bob": digest_of("other")})
    app = build_app(hub.omni, hub.omni.graph.deploy, 0)
    listeners = bind("127.0.0.1", 0)
    server = HttpServer(hub.omni, Door(app, Locks(ring), lambda _: None, lambda _: None))
    server.start(listeners)
    address = f"ws://127.0.0.1:{listeners[0].getsockname()[1]}/v1/realtime"
    try:
        async with (
            connect(address, additional_headers={"Authorization": "Bearer secret"}) as alice,
            connect(address, additional_headers={"Authorization": "Bearer other"}) as bob,
        ):
            for connection in (alice, bob):
                await connection.send('{"type": "input_audio_buffer.clear"}')
                await hear(connection, "input_audio_buffer.cleared")
            ring.replace({"bob": digest_of("other")})
            for connection in (alice, bob):
                await connection.send('{"type": "input_audio_buffer.clear"}')
            assert (await hear(alice, "error"))["error"]["code"] == "invalid_api_key"
            with pytest.raises(ConnectionClosed):
                await hear(alice, "input_audio_buffer.cleared")
            assert alice.close_code == 1008
            await hear(bob, "input_audio_buffer.cleared")
    finally:
        await server.stop()


@pytest.mark.attack("J2")
async def test_a_client_that_reads_nothing_is_waited_for(hub: Served) -> None:
    """Its answer is larger than what is kept for it; others are served; it leaves, and all is free."""
    async with plain(hub, max_queue=1) as slow:
        item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "word " * 4000}]}
        await slow.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await slow.send('{"type": "response.create"}')
        async with talking(hub) as talk:
            assert words_of(await talk.ask("fine")).strip() == "fine"
        assert len(hub.omni._queues) == 1
        slow.transport.abort()
        await until(lambda: not hub.omni._queues, WAIT_S)


def _message(*texts: str, **fields: Any) -> str:
    content = [{"type": "input_text", "text": each} for each in texts]
    item = {"type": "message", "role": "user", "content": content}
    return json.dumps({"type": "conversation.item.create", "item": {**item, **fields}})


@pytest.mark.attack("M1")
async def test_items_of_hundreds_of_empty_parts_push_out_the_oldest(hub: Served) -> None:
    """1. 20 items of 256 parts, of which 16 have room; 2. each that is too much is told; 3. an answer as always"""
    async with plain(hub) as connection:
        for number in range(20):
            await connection.send(_message(*[""] * 256, id=f"item-{number}"))
        gone = [(await hear(connection, "conversation.item.deleted"))["item_id"] for _ in range(4)]
        assert gone == [f"item-{number}" for number in range(4)]
        update = '{"type": "session.update", "session": {"type": "realtime", "truncation": "disabled"}}'
        await connection.send(update)
        await connection.send(_message("one more"))
        assert "is full" in (await hear(connection, "error"))["error"]["message"]
        await connection.send('{"type": "conversation.item.delete", "item_id": "item-19"}')
        await connection.send(_message("fine"))
        await connection.send('{"type": "response.create"}')
        assert (await hear(connection, "response.done"))["response"]["status"] == "completed"


@pytest.mark.attack("M2")
async def test_words_without_end_are_cut_and_the_stage_is_freed(hub: Served) -> None:
    """Each word is 600 kB. The events of the response are of up to 1 MiB, which is what OpenAI's library takes."""
    async with plain(hub, max_size=None) as connection:
        for _ in range(2):
            await connection.send(_message(" ".join(letter * 600_000 for letter in "abc")))
            await connection.send('{"type": "response.create", "response": {"output_modalities": ["text"]}}')
            words = "".join([(await hear(connection, "response.output_text.delta"))["delta"] for _ in range(2)])
            assert words == "a" * 600_000 + " " + "b" * 399_999
            assert (await hear(connection, "response.output_text.done"))["text"] == words
            done = await hear(connection, "response.done")
            assert len(json.dumps(done)) < 1 << 20
            response = done["response"]
            assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
            assert response["status_details"] == {"type": "incomplete", "reason": "max_output_tokens"}
            await until(lambda: all(len(replica.loop) == 0 for replica in hub.replicas), WAIT_S)
            await connection.send(_message("fine"))
            await connection.send('{"type": "response.create"}')
            assert (await hear(connection, "response.done"))["response"]["status"] == "completed"


@pytest.mark.attack("M2")
async def test_the_words_of_an_answer_are_held_while_it_is_made() -> None:
    """1. room for a question of 400 kB and a short sound; 2. its answer is as long, and waits for its voice: no room"""
    config = replace(CONFIG, realtime_bounds=RealtimeBounds(max_memory_bytes=700_000))
    update = '{"type": "session.update", "session": {"turn_detection": null}}'
    append = json.dumps({"type": "input_audio_buffer.append", "audio": _b64(bytes(96_000))})
    async with served(LISTENER, config) as hub, plain(hub) as first, plain(hub) as second:
        await first.send(_message("x" * 400_000 + " WAIT"))
        await hear(first, "conversation.item.done")
        await second.send(update)
        await second.send(append)
        await second.send('{"type": "input_audio_buffer.clear"}')
        await hear(second, "input_audio_buffer.cleared")
        await first.send('{"type": "response.create"}')
        await hear(first, "response.output_audio_transcript.delta")
        await hear(first, "response.output_audio.delta")
        await second.send(append)
        assert (await hear(second, "error"))["error"]["code"] == "overloaded"
        await first.send('{"type": "response.cancel"}')
        await hear(first, "response.done")
        GO_ON.set()


@pytest.mark.attack("M3")
async def test_responses_are_begun_the_more_slowly_the_more_they_have_sent(hub: Served) -> None:
    """Of 2.4 MB one each 0.6 s; and those that fail, because there is nothing to answer, one each 0.05 s."""
    async with plain(hub, max_size=None) as connection:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for _ in range(11):
            await connection.send('{"type": "response.create"}')
            await hear(connection, "error")
        assert loop.time() - began_s >= 0.45
        await connection.send(_message("x" * 2_400_000))
        began_s = loop.time()
        for _ in range(4):
            await connection.send('{"type": "response.create"}')
            await connection.send('{"type": "response.cancel"}')
            assert (await hear(connection, "response.done"))["response"]["status"] == "cancelled"
        assert loop.time() - began_s >= 1.6


@pytest.mark.attack("J2")
async def test_sessions_that_come_at_once_get_no_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the sound of the first is being encoded; 2. the second, for which there is no room beside it, is refused"""
    go_on, is_encoding, encode = asyncio.Event(), asyncio.Event(), EncoderThreads.speech_file

    async def wait(threads: EncoderThreads, samples: bytes) -> bytes:
        is_encoding.set()
        await go_on.wait()
        return await encode(threads, samples)

    monkeypatch.setattr(EncoderThreads, "speech_file", wait)
    config = replace(CONFIG, realtime_bounds=RealtimeBounds(max_memory_bytes=200_000))
    item = {"type": "message", "role": "user", "content": [{"type": "input_audio", "audio": _b64(bytes(96_000))}]}
    create = json.dumps({"type": "conversation.item.create", "item": item})
    async with served(LISTENER, config) as hub, plain(hub) as first, plain(hub) as second:
        await first.send(create)
        async with asyncio.timeout(WAIT_S):
            await is_encoding.wait()
        await second.send(create)
        assert (await hear(second, "error"))["error"]["code"] == "overloaded"
        go_on.set()
        await hear(first, "conversation.item.done")
        await second.send(create)
        await hear(second, "conversation.item.done")


@pytest.mark.attack("M3")
async def test_settings_are_changed_the_more_slowly_the_larger_they_are(hub: Served) -> None:
    """The first changes cost nothing; of 500 kB one each half second, whatever the event itself has."""
    async with plain(hub, max_size=None) as connection:
        loop = asyncio.get_running_loop()
        update = {"type": "session.update", "session": {"instructions": "x" * 500_000}}
        await connection.send(json.dumps(update))
        began_s = loop.time()
        for _ in range(3):
            await connection.send('{"type": "session.update", "session": {"turn_detection": null}}')
        for _ in range(4):
            await hear(connection, "session.updated")
        assert loop.time() - began_s >= 1.4


@pytest.mark.attack("O4")
async def test_events_are_read_the_more_slowly_the_more_they_have_shown(hub: Served) -> None:
    """An event of 60 bytes shows an item of 2.4 MB: one each 0.6 s. What shows little is read at once."""
    async with plain(hub, max_size=None) as connection:
        loop = asyncio.get_running_loop()
        await connection.send(_message("x" * 2_400_000, id="large"))
        await hear(connection, "conversation.item.done")
        began_s = loop.time()
        for _ in range(4):
            await connection.send('{"type": "conversation.item.retrieve", "item_id": "large"}')
        for _ in range(4):
            await hear(connection, "conversation.item.retrieved")
        assert loop.time() - began_s >= 1.8
    async with plain(hub) as connection:
        await connection.send(_message("x", id="small"))
        began_s = loop.time()
        for _ in range(100):
            await connection.send('{"type": "conversation.item.retrieve", "item_id": "small"}')
        for _ in range(100):
            await hear(connection, "conversation.item.retrieved")
        # A pause for each would be 5 s.
        assert loop.time() - began_s < 4


@pytest.mark.attack("Z79")
async def test_who_has_the_conversation_read_waits_for_a_turn(hub: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """26 bytes have thousands of parts read: one conversation at a time, as a long body is. A turn may be refused."""
    waited = 0

    async def turn(_scope: Any) -> None:
        nonlocal waited
        waited += 1
        if waited == 1:
            raise OverloadedError("too much waits here to be read", 1.0)

    monkeypatch.setattr(connection_module, "long_work", turn)
    async with plain(hub) as connection:
        await connection.send(_message("one two", id="first"))
        await hear(connection, "conversation.item.done")
        await connection.send('{"type": "response.create", "event_id": "mine"}')
        refused = await hear(connection, "error")
        assert refused["error"]["event_id"] == "mine"
        await connection.send('{"type": "response.create"}')
        await hear(connection, "response.done")
    assert waited == 2


@pytest.mark.attack("O4")
async def test_settings_of_one_response_are_looked_through_as_slowly_as_the_sessions(hub: Served) -> None:
    """Those of a response that fails, too."""
    async with plain(hub, max_size=None) as connection:
        loop = asyncio.get_running_loop()
        response = {"instructions": "x" * 500_000, "tool_choice": "required"}
        asked = {"type": "response.create", "response": response}
        began_s = loop.time()
        for _ in range(4):
            await connection.send(json.dumps(asked))
            await hear(connection, "error")
        assert loop.time() - began_s >= 1.4
