"""What docs/engines.md and docs/extend/engine.md show: callables, an engine with its contract and entry point, run."""

from __future__ import annotations

import importlib.util
import re
import sys
from importlib.abc import InspectLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omni_discovery.deploy.document import parse_deploy
from omni_discovery.errors import ConfigError, InvalidRequestError
from stage_runtime.engines.base import Engine, EngineOutput, StageRequest, checked_args, create_engine
from stage_runtime.engines.callable.target import TorchArgs
from stage_runtime.engines.diffusers.engine import DiffusersArgs
from stage_runtime.engines.pictures.request import PipelineParams
from stage_runtime.engines.sampling import checked
from stage_runtime.engines.vllm.handoff import HandoffArgs
from tests.support.engines import run

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "engines.md").read_text(encoding="utf-8")
OWN_PAGE = (DOCS / "extend" / "engine.md").read_text(encoding="utf-8")
SHOWN: dict[str, str] = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE + OWN_PAGE, re.DOTALL))
#: Of callables, and of a pipeline of diffusers.
DOCUMENTS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


class _Page(InspectLoader):
    def get_source(self, fullname: str) -> str:
        return SHOWN[fullname]


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, _Page())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


imported("upper_engine")
#: Collected from here.
TestUpperEngine = imported("test_upper_engine").TestUpperEngine


def test_the_engine_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of a third party, as pip leaves it; its engine is served by name, and a broken one is named."""
    (group, line) = re.findall(r'```toml\n\[project.entry-points."(.*?)"\]\n(.*?)\n```', OWN_PAGE)[0]
    about = tmp_path / "upper-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: upper\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\n{line.replace(chr(34), '')}\nbroken = no_such_module:Engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    stage = "stages: [{stage_id: 0, engine: %s, final_output: text}]"
    engine = create_engine(parse_deploy(stage % "upper", "t").stages[0])
    said = run(engine, StageRequest("k", "k", inputs={"messages": [{"role": "user", "content": "hear me"}]}))["k"]
    assert "".join(output.text for output in said) == "HEAR ME "
    with pytest.raises(ConfigError, match="engine 'broken' can't be loaded: No module named 'no_such_module'"):
        create_engine(parse_deploy(stage % "broken", "t").stages[0])


def test_the_pipeline_of_diffusers_has_arguments_that_there_are() -> None:
    thinker, painter = parse_deploy(DOCUMENTS[1], "docs/engines.md").stages
    assert checked_args(thinker, HandoffArgs, thinker.engine_args["handoff"]).hidden_states
    assert checked_args(painter, DiffusersArgs).leave_out == ("text_encoder", "tokenizer")
    assert checked(painter.default_sampling_params, PipelineParams).num_inference_steps == 30


def test_the_callables_speak_and_sing() -> None:
    """The first stage's hand-off makes the second's sound."""
    imported("my_models")
    document = DOCUMENTS[0]
    speaker, singer = (loaded(stage) for stage in parse_deploy(document, "docs/engines.md").stages)
    request = StageRequest("k", "k", inputs={"prompt": "sing this"}, params={"loud": True}, next_stages=(1,))
    (said,) = run(speaker, request)["k"]
    assert said.text == "SING THIS"
    assert said.handoff is not None
    sung: list[EngineOutput] = run(singer, StageRequest("k", "k", payloads={0: said.handoff}))["k"]
    assert [output.audio_wav[:4] for output in sung if output.audio_wav] == [b"RIFF", b"RIFF"]
    with pytest.raises(InvalidRequestError, match="prompt: it is missing"):
        speaker.add(StageRequest("k", "k"))


def test_every_argument_of_the_torch_engine_is_in_the_page() -> None:
    table = PAGE.split("| `engine_args` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(TorchArgs.__struct_fields__)


def loaded(stage: Any) -> Engine:
    engine = create_engine(stage)
    engine.load(lambda _phase, _progress: None)
    return engine
