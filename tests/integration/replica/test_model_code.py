"""The code that came with a model runs in no process that loads models, whatever its libraries are told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

#: Wherever this is imported, a line is left in the file that it names.
CODE = """
import os
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from diffusers import ModelMixin, ConfigMixin

with open(os.environ["RAN"], "a") as file:
    file.write("ran\\n")

class OwnTokenizer(PreTrainedTokenizerFast):
    pass

class OwnConfig(PretrainedConfig):
    model_type = "of-nobody"

class OwnModel(ModelMixin, ConfigMixin):
    pass
"""
#: Loads a folder's tokenizer, config and model of diffusers, each trusted by the caller, as those who write it into
#: their code do. argv: what is done first, whether its code may run, the folder.
LOADER = """
import sys, multiprocessing
when, may_run, folder = sys.argv[1:]

def load():
    from transformers import AutoConfig, AutoTokenizer
    from diffusers import AutoModel
    def told(load):
        try:
            return type(load()).__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    print(told(lambda: AutoTokenizer.from_pretrained(folder, trust_remote_code=True)))
    print(told(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=True)))
    print(told(lambda: AutoModel.from_pretrained(folder, trust_remote_code=True)))
    print("loaded", flush=True)

def guard():
    from omni_discovery.deploy.trust.model_code import guard_model_code
    guard_model_code()
    guard_model_code(may_run=may_run == "True")

if __name__ == "__main__":
    if when == "late":
        import transformers.models.auto.tokenization_auto, transformers.models.auto.configuration_auto
        import diffusers.models.auto_model
    if when != "never":
        guard()
    if when == "child":
        child = multiprocessing.get_context("spawn").Process(target=load)
        child.start()
        child.join()
    else:
        load()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which transformers knows the tokenizer's class and not the config's, with code for both."""
    folder = tmp_path_factory.mktemp("model")
    Tokenizer(models.WordLevel({"a": 0, "u": 1}, unk_token="u")).save(str(folder / "tokenizer.json"))
    auto = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": auto})
    )
    autos = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "of-nobody", "auto_map": autos}))
    (folder / "own.py").write_text(CODE)
    return folder


def loaded(folder: Path, ran: Path, when: str, *, may_run: bool) -> list[str]:
    """What became of the tokenizer, the config and the model."""
    script = ran.with_name("loader.py")
    script.write_text(LOADER)
    environment = {**os.environ, "RAN": str(ran), "PYTHONPATH": str(Path.cwd()), "HF_HUB_OFFLINE": "1"}
    environment["HF_MODULES_CACHE"] = str(ran.with_name("modules"))
    command = [sys.executable, str(script), when, str(may_run), str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    *told, last = ended.stdout.splitlines()[-4:] or [ended.stderr]
    assert last == "loaded", ended.stderr
    return told


@pytest.mark.attack("R1")
@pytest.mark.parametrize("when", ["first", "late", "child"])
def test_a_models_code_is_left_aside_however_its_libraries_are_called(when: str, folder: Path, tmp_path: Path) -> None:
    """1. the guard is there before the libraries, after them, or in the process that starts the one that loads
    2. the callers trust the model: a class of the library's own is taken all the same, and where there is none the
       model is refused, with what would open it
    """
    ran = tmp_path / "ran"
    tokenizer, config, model = loaded(folder, ran, when, may_run=False)
    assert not ran.exists()
    assert ":" not in tokenizer
    for told in (config, model):
        assert told.startswith("ModelCodeError: ")
        assert "--allow remote-code" in told
        assert "trust_remote_code: true" in told


@pytest.mark.parametrize("when", ["first", "child"])
def test_a_models_code_runs_where_its_host_allows_it(when: str, folder: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    tokenizer, config, _ = loaded(folder, ran, when, may_run=True)
    assert ran.exists()
    assert (tokenizer, config) == ("OwnTokenizer", "OwnConfig")
