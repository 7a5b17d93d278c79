"""Writes tiny Qwen2.5-Omni and Qwen3-Omni models of random weights.

`.venv-omni/bin/python -m tests.support.tiny_qwen_omni qwen2_5_omni FOLDER`, or `qwen3_omni_moe`.

A folder of the real model's layout, in seconds and without any download: the thinker with its tokenizer and the
processors of sound, pictures and video, the talker, and the decoder of its codes. What they say is noise, but every
token that vLLM-Omni knows by its id is where the real model has it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_HIDDEN: Final = 64
_VOCABULARY: Final = 152064
_END_OF_TEXT, _IM_START, _IM_END = 151643, 151644, 151645
#: The talkers find the turns of a chat by these.
_ROLES: Final = {"system": 8948, "user": 872, "assistant": 77091}
_CHAT: Final = {"<|endoftext|>": _END_OF_TEXT, "<|im_start|>": _IM_START, "<|im_end|>": _IM_END}
_SHORT_TRANSFORMER: Final = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
_HEARING: Final = {
    "num_mel_bins": 128,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 32,
    "output_dim": _HIDDEN,
}
_SIGHT: Final = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": _HIDDEN}

#: By the names that transformers' processors have for them.
_ITEM_TOKENS_2_5: Final = {
    "audio_token": ("<|AUDIO|>", 151646),
    "audio_bos_token": ("<|audio_bos|>", 151647),
    "audio_eos_token": ("<|audio_eos|>", 151648),
    "vision_bos_token": ("<|vision_bos|>", 151652),
    "vision_eos_token": ("<|vision_eos|>", 151653),
    "image_token": ("<|IMAGE|>", 151655),
    "video_token": ("<|VIDEO|>", 151656),
}
_ITEM_TOKENS_3: Final = {
    "vision_bos_token": ("<|vision_start|>", 151652),
    "vision_eos_token": ("<|vision_end|>", 151653),
    "image_token": ("<|image_pad|>", 151655),
    "video_token": ("<|video_pad|>", 151656),
    "audio_bos_token": ("<|audio_start|>", 151669),
    "audio_eos_token": ("<|audio_end|>", 151670),
    "audio_token": ("<|audio_pad|>", 151675),
}
_SPOKEN_3: Final = {"<tts_pad>": 151671, "<tts_text_bos>": 151672, "<tts_text_eod>": 151673}

_ROPE_2_5: Final = {"rope_type": "default", "type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1000000.0}
_ROPE_3: Final = {
    "rope_type": "default",
    "mrope_section": [4, 6, 6],
    "interleaved": True,
    "mrope_interleaved": True,
    "rope_theta": 1000000.0,
}


def _with_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {**_SHORT_TRANSFORMER, "rope_parameters": rope, "rope_scaling": rope, "tie_word_embeddings": False}


_TEXT_IDS: Final = {
    "vocab_size": _VOCABULARY,
    "pad_token_id": _END_OF_TEXT,
    "bos_token_id": _END_OF_TEXT,
    "eos_token_id": _IM_END,
}
_QWEN2_5: Final = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "enable_audio_output": True,
    "enable_talker": True,
    "torch_dtype": "float32",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "text_config": {**_with_rope(_ROPE_2_5), **_TEXT_IDS},
        "audio_config": {**_HEARING, "max_source_positions": 1500, "n_window": 100},
        "vision_config": {**_SIGHT, "fullatt_block_indexes": [0], "tokens_per_second": 25},
        "ignore_index": -100,
        "pad_token_id": _END_OF_TEXT,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
    },
    "talker_config": {
        **_with_rope(_ROPE_2_5),
        "model_type": "qwen2_5_omni_talker",
        "architectures": ["Qwen2OmniTalkerForConditionalGeneration"],
        "num_hidden_layers": 1,
        "head_dim": 32,
        "vocab_size": 8448,
        "embedding_size": _HIDDEN,
        "pad_token_id": 8292,
    },
    "token2wav_config": {
        "model_type": "qwen2_5_omni_token2wav",
        # The last of the encoder's channels is three times the others, as in the real one.
        "dit_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "ff_mult": 2,
            "emb_dim": 16,
            "head_dim": 16,
            "block_size": 24,
            "look_ahead_layers": [0],
            "look_backward_layers": [0],
            "num_embeds": 8193,
            "mel_dim": 80,
            "enc_emb_dim": 16,
            "enc_dim": 16,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_res2net_scale": 2,
            "enc_se_channels": 8,
        },
        "bigvgan_config": {
            "mel_dim": 80,
            "upsample_initial_channel": 64,
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
            "upsample_rates": [5, 3, 2, 2, 2, 2],
            "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
        },
    },
}
_CODE_GROUPS: Final = 16
_CODES: Final = 2048
_EXPERTS: Final = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "num_experts": 4, "head_dim": 32}
_QWEN3: Final = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "enable_audio_output": True,
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "text_config": {**_with_rope(_ROPE_3), **_EXPERTS, **_TEXT_IDS},
        "audio_config": {**_HEARING, "downsample_hidden_size": 16},
        "vision_config": {
            **_SIGHT,
            "num_position_embeddings": 16,
            "image_size": 64,
            "apply_vit_abs_pos_embed": True,
            "deepstack_visual_indexes": [0],
        },
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "audio_end_token_id": 151670,
        "seconds_per_chunk": 2,
    },
    "talker_config": {
        "model_type": "qwen3_omni_moe_talker",
        "text_config": {
            **_with_rope(_ROPE_3),
            **_EXPERTS,
            "vocab_size": 3072,
            "shared_expert_intermediate_size": 64,
        },
        "thinker_hidden_size": _HIDDEN,
        "num_code_groups": _CODE_GROUPS,
        "accept_hidden_layer": 1,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "speaker_id": {"ethan": 2500, "chelsie": 2301},
        "spatial_merge_size": 2,
        "vision_end_token_id": 151653,
        "audio_end_token_id": 151670,
        "code_predictor_config": {
            **_SHORT_TRANSFORMER,
            "num_hidden_layers": 1,
            "head_dim": 32,
            "vocab_size": _CODES,
            "num_code_groups": _CODE_GROUPS,
        },
    },
    "code2wav_config": {
        "codebook_size": _CODES,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_quantizers": _CODE_GROUPS,
        "decoder_dim": 32,
        "sliding_window": 72,
        "max_position_embeddings": 8000,
    },
}


def write_qwen2_5_omni(folder: Path) -> None:
    """Write a Qwen2.5-Omni. The same weights at each call."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor

    _begin(folder, _QWEN2_5)
    kind: Any = Qwen2_5OmniForConditionalGeneration
    model = kind(Qwen2_5OmniConfig.from_pretrained(folder))
    decoder = ("token2wav.",)
    save_file({name: _telling(name, value, decoder) for name, value in model.state_dict().items()}, _weights(folder))
    voices = {voice: {"cond": torch.randn(1, 16), "ref_mel": torch.randn(1, 60, 80)} for voice in ("Chelsie", "Ethan")}
    torch.save(voices, folder / "spk_dict.pt")
    _write_processors(folder, Qwen2_5OmniProcessor, _ITEM_TOKENS_2_5, {}, patch=14)


def write_qwen3_omni(folder: Path) -> None:
    """Write a Qwen3-Omni. The same weights at each call."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeProcessor

    _begin(folder, _QWEN3)
    kind: Any = Qwen3OmniMoeForConditionalGeneration
    model = kind(Qwen3OmniMoeConfig.from_pretrained(folder)).to(torch.bfloat16)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(_telling(name, value, ("code2wav.",)))
    # It writes the experts' weights one by one, as the real model's files have them; and configs of its own.
    model.save_pretrained(folder)
    _write_configs(folder, _QWEN3)
    _write_processors(folder, Qwen3OmniMoeProcessor, _ITEM_TOKENS_3, _SPOKEN_3, patch=16)


#: By the model type in ``config.json``.
WRITERS: Final[Mapping[str, Callable[[Path], None]]] = {
    "qwen2_5_omni": write_qwen2_5_omni,
    "qwen3_omni_moe": write_qwen3_omni,
}


def _begin(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    _write_configs(folder, config)


def _write_configs(folder: Path, config: Mapping[str, Any]) -> None:
    from transformers import __version__

    # Without a version, transformers suspects the tokenizer of an old mistake.
    _write_json(folder / "config.json", {**config, "transformers_version": __version__})
    _write_json(folder / "generation_config.json", {"eos_token_id": _IM_END, "pad_token_id": _END_OF_TEXT})


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")


#: What hears and sees: with the usual weights two tones are one, once they are rounded to bfloat16.
_SENSES: Final = ("thinker.audio_tower.", "thinker.visual.")


def _telling(name: str, value: torch.Tensor, decoder: tuple[str, ...]) -> torch.Tensor:
    """A weight of such a size that tokens differ and sound is heard: with the usual ones a decoder is silent."""
    if name.endswith(("embed_tokens.weight", "lm_head.weight", "codec_head.weight", "codec_embedding.weight")):
        return torch.randn(value.shape).to(value.dtype) * 0.1
    if ".experts." in name:
        # The library leaves those of a talker as they were in memory.
        return torch.randn(value.shape).to(value.dtype) * 0.05
    if name.startswith(_SENSES) and value.dim() >= 2:
        return (torch.randn(value.shape) * 1.5 / math.sqrt(value[0].numel())).to(value.dtype)
    if not name.startswith(decoder) or not value.is_floating_point():
        return value.contiguous().clone()
    if name.endswith(("layer_scale.scale", "gamma")):
        return torch.full_like(value, 0.3)
    if value.dim() >= 2 and "code_embedding" not in name:
        return (torch.randn(value.shape) * 0.55 / math.sqrt(value[0].numel())).to(value.dtype)
    return value.contiguous().clone()


# ---- the tokenizer, and the processors of sound, pictures and video


def _write_processors(
    folder: Path, kind: Any, items: Mapping[str, tuple[str, int]], spoken: Mapping[str, int], *, patch: int
) -> None:
    from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor

    special = {**_CHAT, **dict(items.values()), **spoken}
    _write_tokenizer(folder, special)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 32768,
        "extra_special_tokens": {name: token for name, (token, _) in items.items()},
    }
    _write_json(folder / "tokenizer_config.json", settings)
    hearing: Any = WhisperFeatureExtractor
    pictures = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 16 * (2 * patch) ** 2}
    kind(
        image_processor=Qwen2VLImageProcessor(**pictures, size=size),
        video_processor=Qwen2VLVideoProcessor(**pictures, size=size),
        feature_extractor=hearing(feature_size=128, chunk_length=30),
        tokenizer=AutoTokenizer.from_pretrained(folder),
    ).save_pretrained(folder)
    _write_json(folder / "tokenizer_config.json", settings)
    # As in the real models: the processor reads this file, and the tokenizer alone has no template.
    _write_json(folder / "chat_template.json", {"chat_template": _chat_template(items)})


def _chat_template(items: Mapping[str, tuple[str, int]]) -> str:
    names = {name: token for name, (token, _) in items.items()}
    sight, hearing = ((f"{kind}_bos_token", f"{kind}_eos_token") for kind in ("vision", "audio"))
    kinds = {"image": sight, "video": sight, "audio": hearing}
    parts = "".join(
        f"{{% elif part.type == '{kind}' %}}{names[begin]}{names[f'{kind}_token']}{names[end]}"
        for kind, (begin, end) in kinds.items()
    )
    one = f"{{% if part.type == 'text' %}}{{{{ part.text }}}}{parts}{{% endif %}}"
    content = f"{{% for part in m.content %}}{one}{{% endfor %}}"
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}{content}{{% endif %}}<|im_end|>\n{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def _write_tokenizer(folder: Path, special: Mapping[str, int]) -> None:
    """Bytes at the low ids, what vLLM-Omni knows by its id in its place, and a word for each other id."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {**_ROLES, **special}
    vocabulary |= {f"Ġw{number}": number for number in _missing(vocabulary.values())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(role) for role in _ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))


def _missing(taken: Iterable[int]) -> list[int]:
    return sorted(set(range(_VOCABULARY)) - set(taken))


if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]))
