"""The settings of vLLM's engine that a document from etcd may use, held against the vLLM that is installed."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.deploy.trust.judge import within
from omni_discovery.deploy.trust.vllm_args import CHOICES, MODELS, NAMES, PARTS, REVISIONS, SETTINGS, TABLES
from omni_discovery.errors import ConfigError
from stage_runtime.engines.base import create_engine
from stage_runtime.replica.failures import not_loaded
from tests.support.engines import THINKER, as_the_supervisor_has_it

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: What can name code, files or addresses, by what vLLM 0.32 does with it. Never to be moved to SETTINGS.
CLOSED = {
    *("worker_cls", "worker_extension_cls", "scheduler_cls", "logits_processors", "hf_overrides", "hf_token"),
    *("model_class_overrides", "io_processor_plugin", "reasoning_parser_plugin", "additional_config"),
    *("model_loader_extra_config", "mm_processor_kwargs", "log_config_file", "logging_config", "profiler_config"),
    *("download_dir", "allowed_local_media_path", "allowed_media_domains", "otlp_traces_endpoint"),
    *("collect_detailed_traces", "kv_events_config", "ec_transfer_config", "ec_manager_config"),
    *("weight_transfer_config", "quantization_config", "pt_load_map_location", "master_addr", "master_port"),
    *("mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_path", "data_parallel_address", "trust_remote_code"),
}
#: Of later minors, or of none of those that are installed here.
_OTHER_MINORS = {"swap_space", "num_lookahead_slots", "max_num_partial_prefills", "max_long_partial_prefills"}


def test_no_argument_that_can_bring_code_is_a_setting() -> None:
    assert not CLOSED & (SETTINGS | NAMES | REVISIONS | TABLES | MODELS)


def test_the_settings_are_arguments_of_the_installed_vllm() -> None:
    """A name that vLLM does not have is a slip, or was renamed: the new name is closed until it is looked at."""
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    listed = SETTINGS | NAMES | REVISIONS | TABLES | {name for name in (*PARTS, *CHOICES) if "." not in name}
    assert listed - known <= _OTHER_MINORS
    assert {name for name in MODELS if "." not in name} <= known
    assert known >= CLOSED


def test_arguments_whose_type_is_a_class_or_a_config_are_no_plain_settings() -> None:
    """vLLM's own types say what can't be a mere setting: classes, callables, free mappings."""
    from vllm import EngineArgs

    for field in dataclasses.fields(EngineArgs):
        text = str(field.type)
        if "Callable" in text or "type[" in text or "dict[str, typing.Any]" in text:
            assert field.name not in SETTINGS | NAMES, field.name


@pytest.mark.attack("A3")
def test_pickled_weights_are_not_read_unless_the_host_allows_them(tmp_path: Path) -> None:
    """A folder with nothing but a pickle: by itself vLLM would read it."""
    import torch
    from safetensors.torch import load_file

    shutil.copytree(THINKER.model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    stage = msgspec.structs.replace(THINKER, model=str(tmp_path / "model"))
    loading = pytest.raises(RuntimeError)
    with as_the_supervisor_has_it(), closing(create_engine(within(stage, Bounds()))) as engine, loading as caught:
        engine.load(lambda _phase, _share: None)
    refusal = not_loaded(stage, caught.value)
    assert isinstance(refusal, ConfigError)
    assert "--allow pickled-weights" in str(refusal)
    assert within(stage, Bounds(allow=("pickled-weights",))) is stage


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_vllm_logs_goes_where_our_log_goes(form: str) -> None:
    """Answers of a command are on standard output, and nothing else."""
    program = f"""
from omni_discovery.commands.output import configure_logging
from omni_discovery.logs.setup import LogOptions
configure_logging(LogOptions(format="{form}"))
from vllm.logger import init_logger
init_logger("vllm.entrypoints.here").info("it was told")
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert (told.stdout, told.stderr.count("it was told")) == ("", 1)
