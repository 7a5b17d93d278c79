"""A tiny Qwen-Image with random weights, for tests of vLLM-Omni's diffusion stages.

Writes a folder in the layout of the real model, text encoder and tokenizer included, for diffusers and transformers of
the environment that runs it: ``python -m tests.support.tiny_qwen_image FOLDER``. Its pictures are noise in which its
text and its seed can be told.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import diffusers
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

#: How many numbers a token of its prompt has.
EMBEDS_SIZE: Final = 16
#: Sides of its pictures are multiples of this.
SIDE_MULTIPLE_PX: Final = 16
_WORDS: Final = "a red cat sits on the blue moon and describes the image by detailing color shape size"
_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TOKENS: Final = 400
_INDEX: Final = {
    "_class_name": "QwenImagePipeline",
    "_diffusers_version": "0.40.0",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
}
_TOKENIZER: Final = {
    "tokenizer_class": "Qwen2Tokenizer",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "model_max_length": 4096,
}
_TEXT: Final = {
    "vocab_size": _TOKENS,
    "hidden_size": EMBEDS_SIZE,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0},
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION: Final = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": EMBEDS_SIZE,
    "fullatt_block_indexes": [0],
}


def write_model(folder: Path) -> None:
    """Write the pipeline. The same weights at each call."""
    torch.manual_seed(0)
    _write_tokenizer(folder / "tokenizer")
    # Their libraries type neither these classes nor their methods.
    made: Any = diffusers
    text: Any = transformers
    config = text.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=_VISION)
    parts: dict[str, Any] = {
        "text_encoder": text.Qwen2_5_VLForConditionalGeneration(config),
        "transformer": _transformer(made.QwenImageTransformer2DModel),
        "vae": made.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 2, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            attn_scales=[],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        "scheduler": made.FlowMatchEulerDiscreteScheduler(),
    }
    for name, part in parts.items():
        part.save_pretrained(folder / name)
    (folder / "model_index.json").write_text(json.dumps(_INDEX, indent=1), encoding="utf-8")


def _transformer(kind: Any) -> Any:
    transformer = kind(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=EMBEDS_SIZE,
        axes_dims_rope=(8, 4, 4),
    )
    with torch.no_grad():
        for name, weight in transformer.named_parameters():
            # With weights of the usual size a picture would not show its text.
            if "add_" in name or "txt" in name:
                weight.mul_(4.0)
    return transformer


def _write_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_TOKENS, special_tokens=list(_SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([f"{_WORDS} " * 20], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER), encoding="utf-8")


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
