"""Whether a chunk holds output of a kind that a hub passes on to clients. Pure.

Modality and type reach clients as they are, in data URLs and headers, so a replica may name known ones only. Log
probabilities are of tokens: those of tokens that are not there would make an answer of any length.
"""

from __future__ import annotations

from typing import Final

from omni_discovery import wire

#: The type of the files of each modality; text has none.
_TYPES: Final = {
    "text": "",
    "image": "image/png",
    "audio": "audio/wav",
    "video": "video/mp4",
    "embedding": "application/x-npy",
}


def flaw_of_content(message: wire.FromReplica, attachments: int) -> str:
    """What is wrong with a chunk that has so many attachments; empty if nothing is, or for another message."""
    if not isinstance(message, wire.Chunk):
        return ""
    of_modality = _TYPES.get(message.modality)
    if of_modality is None:
        return f"it put out {wire.shortened(message.modality, 40)!r}, which is none of {', '.join(_TYPES)}"
    if attachments and not of_modality:
        return f"its {message.modality} came with a file"
    if message.mime != of_modality and (attachments or message.mime):
        mime = wire.shortened(message.mime, 40)
        return f"its {message.modality} is of type {mime!r}, where {of_modality or 'none'!r} is due"
    if message.logprobs and len(message.logprobs) != len(message.token_ids):
        return f"it gave logprobs of {len(message.logprobs)} tokens where there are {len(message.token_ids)}"
    return ""
