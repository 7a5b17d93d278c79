"""Writes a tiny Qwen3-TTS of random weights: `.venv-omni/bin/python -m tests.support.tiny_qwen3_tts FOLDER`.

A folder of the real model's layout, in seconds and without any download: the talker with its tokenizer, and the codec
in ``speech_tokenizer``. What it says is noise, but every size is real where vLLM-Omni has it fixed: the ids of the
codec's tokens, 2048 codes in each book, 1920 samples for each frame.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_HIDDEN: Final = 64
_INTERMEDIATE: Final = 128
_HEADS, _KV_HEADS, _HEAD_SIZE = 2, 1, 32
_CODE_GROUPS: Final = 4
_CODES: Final = 2048
_CODEC_TOKENS: Final = 3072
_TEXT_TOKENS: Final = 512
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
_WORDS: Final = "the quick brown fox jumps over the lazy dog, hello world! assistant user\n stage replica hub "
_TRANSFORMER: Final = {
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_SIZE,
    "max_position_embeddings": 4096,
    "num_code_groups": _CODE_GROUPS,
}
_TALKER: Final = {
    **_TRANSFORMER,
    "vocab_size": _CODEC_TOKENS,
    "text_hidden_size": _HIDDEN,
    "text_vocab_size": _TEXT_TOKENS,
    "position_id_per_seconds": 13,
    "codec_eos_token_id": 2150,
    "codec_think_id": 2154,
    "codec_nothink_id": 2155,
    "codec_think_bos_id": 2156,
    "codec_think_eos_id": 2157,
    "codec_pad_id": 2148,
    "codec_bos_id": 2149,
    "codec_language_id": {"english": 2050},
    "spk_id": {"ethan": 2500},
    "spk_is_dialect": {"ethan": False},
    "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "interleaved": True},
    "rope_theta": 1000000,
    "code_predictor_config": {**_TRANSFORMER, "vocab_size": _CODES},
}
_CONFIG: Final = {
    "architectures": ["Qwen3TTSForConditionalGeneration"],
    "model_type": "qwen3_tts",
    "tokenizer_type": "qwen3_tts_tokenizer_12hz",
    "tts_model_size": "tiny",
    "tts_model_type": "custom_voice",
    "im_start_token_id": 1,
    "im_end_token_id": 2,
    "tts_pad_token_id": 3,
    "tts_bos_token_id": 4,
    "tts_eos_token_id": 5,
    "talker_config": _TALKER,
    # The last of its channels is three times the others, as in the real one.
    "speaker_encoder_config": {
        "mel_dim": 16,
        "enc_dim": _HIDDEN,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_kernel_sizes": [5, 3, 3, 3, 1],
        "enc_dilations": [1, 2, 3, 4, 1],
        "enc_attention_channels": 8,
        "enc_res2net_scale": 2,
        "enc_se_channels": 8,
    },
}
_CODEC_ENCODER: Final = {
    "hidden_size": 16,
    "num_filters": 4,
    "num_residual_layers": 1,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "codebook_size": 64,
    "codebook_dim": 8,
    "num_quantizers": _CODE_GROUPS,
    "num_semantic_quantizers": 1,
    "vector_quantization_hidden_dimension": 8,
    "upsample_groups": 1,
    "upsampling_ratios": [8, 6, 5, 4],
}
_CODEC_DECODER: Final = {
    "codebook_size": _CODES,
    "hidden_size": 32,
    "latent_dim": 32,
    "codebook_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 72,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_quantizers": _CODE_GROUPS,
    "num_semantic_quantizers": 1,
    "semantic_codebook_size": _CODES,
    "vector_quantization_hidden_dimension": 16,
    "decoder_dim": 32,
    "upsample_rates": (8, 5, 4, 3),
    "upsampling_ratios": (2, 2),
}
_SOUND_FEATURES: Final = {
    "feature_extractor_type": "EncodecFeatureExtractor",
    "feature_size": 1,
    "sampling_rate": 24000,
    "padding_value": 0.0,
    "padding_side": "right",
    "return_attention_mask": True,
}


def write_model(folder: Path) -> None:
    """Write the model. The same weights at each call."""
    codec = folder / "speech_tokenizer"
    codec.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    _write_tokenizer(folder)
    _write_json(folder / "config.json", _CONFIG)
    _write_json(folder / "generation_config.json", {"do_sample": True, "eos_token_id": 2150})
    save_file(_talker_weights(), folder / "model.safetensors")
    _write_json(codec / "preprocessor_config.json", _SOUND_FEATURES)
    _write_codec(codec)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([_WORDS * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    _write_json(folder / "tokenizer_config.json", {**settings, "model_max_length": 2048})


def _talker_weights() -> dict[str, torch.Tensor]:
    """By their names in the real model's file."""
    shapes: dict[str, tuple[int, ...]] = {
        **_layer_shapes("talker.model.layers.0"),
        "talker.model.norm.weight": (_HIDDEN,),
        "talker.model.codec_embedding.weight": (_CODEC_TOKENS, _HIDDEN),
        "talker.model.text_embedding.weight": (_TEXT_TOKENS, _HIDDEN),
        "talker.codec_head.weight": (_CODEC_TOKENS, _HIDDEN),
        **_layer_shapes("talker.code_predictor.model.layers.0"),
        "talker.code_predictor.model.norm.weight": (_HIDDEN,),
    }
    for number in (1, 2):
        shapes[f"talker.text_projection.linear_fc{number}.weight"] = (_HIDDEN, _HIDDEN)
        shapes[f"talker.text_projection.linear_fc{number}.bias"] = (_HIDDEN,)
    for group in range(_CODE_GROUPS - 1):
        shapes[f"talker.code_predictor.model.codec_embedding.{group}.weight"] = (_CODES, _HIDDEN)
        shapes[f"talker.code_predictor.lm_head.{group}.weight"] = (_CODES, _HIDDEN)
    return {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape) * 0.08
        for name, shape in shapes.items()
    }


def _layer_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
    queries, keys = _HEADS * _HEAD_SIZE, _KV_HEADS * _HEAD_SIZE
    return {
        f"{prefix}.self_attn.q_proj.weight": (queries, _HIDDEN),
        f"{prefix}.self_attn.k_proj.weight": (keys, _HIDDEN),
        f"{prefix}.self_attn.v_proj.weight": (keys, _HIDDEN),
        f"{prefix}.self_attn.o_proj.weight": (_HIDDEN, queries),
        f"{prefix}.self_attn.q_norm.weight": (_HEAD_SIZE,),
        f"{prefix}.self_attn.k_norm.weight": (_HEAD_SIZE,),
        f"{prefix}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{prefix}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{prefix}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        f"{prefix}.input_layernorm.weight": (_HIDDEN,),
        f"{prefix}.post_attention_layernorm.weight": (_HIDDEN,),
    }


def _write_codec(folder: Path) -> None:
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import configuration_qwen3_tts_tokenizer_v2 as configs
    from vllm_omni.model_executor.models.qwen3_tts.tokenizer_12hz import modeling_qwen3_tts_tokenizer_v2 as modeling

    config = configs.Qwen3TTSTokenizerV2Config(
        encoder_config=_CODEC_ENCODER, decoder_config=_CODEC_DECODER, encoder_valid_num_quantizers=_CODE_GROUPS
    )
    config.save_pretrained(folder)
    parts = {
        "decoder": modeling.Qwen3TTSTokenizerV2Decoder._from_config(config.decoder_config),
        "encoder": modeling.Qwen3TTSTokenizerV2Encoder._from_config(config.encoder_config),
    }
    weights = {
        f"{part}.{name}": _audible(part, name, value)
        for part, model in parts.items()
        for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors")


def _audible(part: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """A weight of such a size that the decoder's sound depends on its codes: with the usual ones it is silence."""
    if name.endswith("embedding_sum"):
        return torch.randn_like(value)
    if name.endswith("cluster_usage"):
        return torch.ones_like(value)
    if part == "decoder" and name.endswith(("layer_scale.scale", "gamma")):
        return torch.full_like(value, 0.3)
    if part == "decoder" and value.dim() >= 2 and value.is_floating_point():
        return torch.randn(value.shape) * 0.55 / math.sqrt(value[0].numel())
    return value.contiguous().clone()


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
