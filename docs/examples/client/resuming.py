"""Streamed chats that outlive the hub that began them: any other goes on where it ended."""

import time
from collections.abc import Iterator
from typing import Any

import openai


def chat(client: openai.OpenAI, **asked: Any) -> Iterator[Any]:
    """The chunks of one answer, each once."""
    place = "new"
    for pause_s in (0.2, 1, 2, 4, 8, None):
        try:
            for chunk in client.chat.completions.create(**asked, stream=True, extra_headers={"x-omni-resume": place}):
                place = chunk.resume
                yield chunk
            return
        except openai.APIError as error:
            is_refusal = isinstance(error, openai.APIStatusError) and error.status_code < 500
            if pause_s is None or is_refusal:
                raise
            time.sleep(pause_s)
