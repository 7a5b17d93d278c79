"""Tiny diffusers pipelines with random weights, saved as folders, and the stages that run them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from omni_discovery.deploy.document import StageConfig

#: How many numbers a token has, in the embeddings that they draw.
EMBEDS_SIZE = 16
WORDS = ["a", "red", "cat", "on", "the", "blue", "moon"]
NUM_LABELS = 1000


def save(pipeline: Any, folder: Path) -> None:
    """Diffusers gives the method to all its pipelines, and types it on none."""
    pipeline.save_pretrained(folder)


def save_qwen_image(folder: Path, embeds_size: int = EMBEDS_SIZE) -> None:
    """Draws embeddings that somebody else has made; has a callback for each step."""
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=embeds_size,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 2],
        num_res_blocks=1,
        temperal_downsample=[False],
        attn_scales=[],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    scheduler = FlowMatchEulerDiscreteScheduler()
    parts: dict[str, Any] = {"scheduler": scheduler, "vae": vae, "transformer": transformer}
    save(QwenImagePipeline(**parts, text_encoder=None, tokenizer=None), folder)


def save_dit(folder: Path) -> None:
    """Draws classes; has no callback at all."""
    from diffusers import DDIMScheduler, DiTPipeline, DiTTransformer2DModel

    torch.manual_seed(0)
    transformer = DiTTransformer2DModel(
        sample_size=4,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        in_channels=4,
        out_channels=8,
        num_embeds_ada_norm=NUM_LABELS,
    )
    save(DiTPipeline(transformer=transformer, vae=_small_vae(), scheduler=DDIMScheduler()), folder)


def save_pixart(folder: Path) -> None:
    """Draws text, or embeddings; its callback can't say no."""
    from diffusers import DDIMScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    config = T5Config(vocab_size=16, d_model=EMBEDS_SIZE, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    transformer = PixArtTransformer2DModel(
        sample_size=8,
        num_layers=2,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=EMBEDS_SIZE,
        in_channels=4,
        cross_attention_dim=16,
        out_channels=8,
    )
    pipeline = PixArtSigmaPipeline(
        tokenizer=tokenizer,
        text_encoder=T5EncoderModel(config),
        vae=_small_vae(),
        transformer=transformer,
        scheduler=DDIMScheduler(),
    )
    save(pipeline, folder)


def _small_vae() -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        latent_channels=4,
    )


SAVE: dict[str, Callable[[Path], None]] = {"qwen": save_qwen_image, "dit": save_dit, "pixart": save_pixart}
#: What their stages are given besides; PixArt's own sizes are far above a tiny model's.
_ARGS: dict[str, dict[str, Any]] = {
    "pixart": {"call_args": {"use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 8}}
}


def stage_of(name: str, folder: Path, **engine_args: Any) -> StageConfig:
    """The stage that runs a pipeline saved in ``folder``."""
    return StageConfig(
        stage_id=1,
        engine="diffusion",
        model=str(folder),
        engine_args={"capacity": 4, **_ARGS.get(name, {}), **engine_args},
        default_sampling_params={"num_inference_steps": 4},
        final_output="image",
    )


def embeds(seed: int, tokens: int = 5) -> torch.Tensor:
    """A prompt as the stage before would hand it over, of shape (tokens, EMBEDS_SIZE)."""
    return torch.randn(tokens, EMBEDS_SIZE, generator=torch.Generator().manual_seed(seed))
