"""Which settings of the built-in connectors a document from etcd may decide, and which are the host's. Pure.

Tests hold the names against those that the connectors know: a new setting stays closed until somebody decides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

#: Settings of vLLM-Omni's model code that its documents write beside those of a connector. They are taken and kept in
#: ``config``, and no connector reads them.
OF_MODEL_CODE: Final = frozenset(
    (
        *("audio8_tts_codec_dtype", "audiocodec_token_offset", "audiocodec_vocab_size", "cfm_graph_bucket_frames"),
        *("cfm_max_graphs", "code_predictor_prefix_graph_buckets", "code_predictor_prefix_graph_seq_lens"),
        *("code_predictor_prefix_graphs", "codec_chunk_frames", "codec_chunk_frames_at_begin", "codec_chunk_ramp"),
        *("codec_left_context_frames", "codec_right_holdback_frames", "codec_streaming", "codec_token_offset"),
        *("codec_vocab_size", "connector_get_max_wait", "connector_get_max_wait_first_chunk"),
        *("connector_get_sleep_s", "crossfade_sec", "decode_batch_max_size", "decode_cudagraph_batch_sizes"),
        *("decode_cudagraph_capture_sizes", "decode_enable_tf32", "decoder_emit_chunk_frames", "enable_cfm_graph"),
        *("enable_hift_graph", "fish_speech_backlog_codec_chunk_frames", "fish_speech_backlog_load_threshold"),
        *("fish_speech_dac_dtype", "fish_speech_dac_max_batch", "fish_speech_dac_max_padded_frames"),
        *("fish_speech_single_initial_chunk", "fish_speech_tensor_codes", "initial_codec_chunk_frames"),
        *("initial_latent_chunk_size", "is_amplify_first_chunk", "is_skip_first_chunk", "latent_chunk_size"),
        *("latent_left_context", "native_talker", "ref_audio_artifact_cache_max_entries", "ref_code_context_frames"),
    )
)
#: What a replica always sets itself, whatever its document says: who it is, and that nothing is found by key alone.
OF_REPLICA: Final = frozenset(("by_key", "namespace", "stage_id"))

_COMMON: Final = frozenset(
    (
        *("device", "max_inflight", "max_inflight_bytes", "pool_bytes", "shm_threshold_bytes", "ttl_s"),
        "window_size",
    )
)
_TCP: Final = frozenset(("max_connections", "max_fetch_bytes", "request_timeout_s", "stall_timeout_s", "timeout_s"))
_ENGINE: Final = frozenset(
    ("device_name", "memory_pool_device", "memory_pool_size", "protocol", "role", "sender_zmq_port", "zmq_port")
)
_MOONCAKE_STORE: Final = frozenset(
    ("device_name", "localbuf", "master", "proto", "protocol", "rdma", "segment", "timeout_s")
)
#: Open: sizes, times, bounds, names of devices; and the store that a document is for, as ``host:port``.
OPEN: Final[Mapping[str, frozenset[str]]] = {
    "AutoConnector": _COMMON | _TCP,
    "MooncakeStoreConnector": _COMMON | _MOONCAKE_STORE,
    "MooncakeTransferEngineConnector": _COMMON | _TCP | _ENGINE,
    "SharedMemoryConnector": _COMMON,
    "TcpConnector": _COMMON | _TCP,
    "YuanrongConnector": _COMMON | {"get_sub_timeout_ms", "port", "request_timeout_s"},
    "YuanrongTransferEngineConnector": _COMMON | _TCP | _ENGINE | {"rpc_port"},
}
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - where hand-offs lie, not a file of ours
#: Closed, but for these values: files, folders and addresses of the host, URLs, and tokens.
CLOSED: Final[Mapping[str, tuple[Any, ...]]] = {
    "advertise_host": (),
    "bind_host": (),
    "directory": (_SHARED_MEMORY,),
    "host": (),
    "insecure_by_key": (False,),
    "metadata_server": ("P2PHANDSHAKE",),
    "sender_host": (),
    "sender_token": (),
    "tls": (None,),
}
#: Names of devices, and ``host:port``. No path and no URL.
_WORDS: Final = re.compile(r"[A-Za-z0-9_.:,\[\] -]*")


def is_open(connector: str, setting: str, value: Any) -> bool:
    """Whether a document from etcd may give this setting to a built-in connector."""
    if setting in OF_REPLICA or setting in OF_MODEL_CODE:
        return True
    if setting in CLOSED:
        return any(value is usual or (isinstance(value, str) and value == usual) for usual in CLOSED[setting])
    return setting in OPEN[connector] and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, str):
        return _WORDS.fullmatch(value) is not None
    return value is None or isinstance(value, int | float)
