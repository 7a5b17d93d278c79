"""The demo of speech: what it serves, what it refuses, and what of an answer it hears."""

from __future__ import annotations

import base64
import io
import json
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from omni_discovery.deploy.resolution import is_peers
from stage_runtime.demo.http_client import DemoError, ask, listen
from stage_runtime.demo.speech import DEPLOY, main


def test_its_deploy_file_is_vllm_omnis_own() -> None:
    assert is_peers(DEPLOY.read_text(), str(DEPLOY))


def test_a_folder_without_a_model_is_refused_with_what_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", str(tmp_path), "--omni-python", "/p", "--output", str(tmp_path / "out")]) == 2
    assert "'make omni-demo' makes one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Speaker(BaseHTTPRequestHandler):
    """Answers every request with these events."""

    events: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for event in self.events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Speaker) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def piece(samples: bytes) -> dict[str, Any]:
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(24000)
        wav.writeframes(samples)
    return {"choices": [{"delta": {"audio": {"data": base64.b64encode(file.getvalue()).decode()}}}]}


def test_pieces_are_heard_in_order_and_counted(url: str) -> None:
    named, over = ({"choices": [{"delta": {"audio": said}}]} for said in ({"id": "audio-1"}, {"expires_at": 1}))
    word = {"choices": [{"delta": {"content": "word"}}]}
    Speaker.events = [named, word, piece(b"\1\0\2\0"), piece(b"\3\0"), over]
    counted: list[int] = []
    sound = listen(url, "hello", [{}], counted.append)
    assert (sound.samples, sound.rate_hz, counted) == (b"\1\0\2\0\3\0", 24000, [1, 2])
    assert 0 < sound.first_s <= sound.seconds


def test_one_answer_has_words_a_picture_and_sound_and_tells_where_the_time_went(url: str) -> None:
    png = base64.b64encode(b"a picture").decode()
    picture = {"choices": [{"delta": {"content": [{"image_url": {"url": f"data:image/png;base64,{png}"}}]}}]}
    words = [{"choices": [{"delta": {"content": word}}]} for word in ("1 + 1", " = 2")]
    over = {"choices": [{"delta": {}}], "timings_s": {"stage0.total": 0.5}}
    Speaker.events = [*words, piece(b"\1\0"), picture, piece(b"\2\0\3\0"), over]
    heard: list[tuple[bytes, int]] = []
    reply = ask(url, "1 + 1", on_sound=lambda samples, rate_hz: heard.append((samples, rate_hz)))
    assert (reply.text, reply.png, reply.samples, reply.rate_hz) == ("1 + 1 = 2", b"a picture", b"\1\0\2\0\3\0", 24000)
    assert heard == [(b"\1\0", 24000), (b"\2\0\3\0", 24000)]
    assert reply.timings_s == {"stage0.total": 0.5}
    assert 0 < reply.first_sound_s <= reply.seconds


@pytest.mark.parametrize(
    ("events", "told"),
    [([], "the answer has no sound"), ([{"error": {"message": "stage 1 is lost"}}], "stage 1 is lost")],
)
def test_an_answer_without_sound_is_an_error(url: str, events: list[dict[str, Any]], told: str) -> None:
    Speaker.events = events
    with pytest.raises(DemoError, match=told):
        listen(url, "hello", [{}])
