"""Errors of a deploy document's file: their lines, equal keys, variables, and all of them at once."""

from __future__ import annotations

import pytest

from omni_discovery.deploy.document import decode_deploy, parse_deploy
from omni_discovery.errors import ConfigError

PAIR = """\
stages:
  - stage_id: 0
    engine: echo
    model: m
    runtime:
      num_replicas: 2
  - stage_id: 1
    engine: echo
    final_output: text
edges:
  - from: 0
    to: 1
"""


def refusal(text: str, **options: object) -> list[str]:
    """The lines of the error that ``parse_deploy`` raises for a file named ``p.yaml``."""
    with pytest.raises(ConfigError) as refused:
        parse_deploy(text, "p.yaml", **options)  # type: ignore[arg-type]
    lines = str(refused.value).splitlines()
    last = len(text.splitlines())
    numbers = [line.split("p.yaml:")[1].split(":")[0] for line in lines if "p.yaml:" in line]
    assert all(1 <= int(number) <= last for number in numbers if number.isdigit()), lines
    return lines


def test_the_same_key_twice_is_refused_with_both_lines() -> None:
    text = PAIR.replace("    model: m\n", "    model: m\n    engine: vllm\n")
    assert refusal(text) == ["p.yaml:5: stage 0.engine: the key is in line 3 already; keep one of the two"]
    assert refusal(f"{PAIR}stages: []\n")[0].startswith("p.yaml:13: stages: the key is in line 1 already")


def test_a_merged_mapping_may_be_overridden() -> None:
    """The keys of ``<<`` are defaults, not the same key twice; their errors have the line where they stand."""
    text = "stages:\n  - &first\n    stage_id: 0\n    engine: echo\n  - <<: *first\n    stage_id: 1\n"
    text += "    final_output: text\n"
    assert [stage.stage_id for stage in parse_deploy(text, "p.yaml").stages] == [0, 1]
    assert refusal(text.replace("echo", "3")) == [
        "p.yaml: 2 keys are wrong:",
        "  p.yaml:4: stage 0.engine is 3; right would be the name of an engine, as vllm or diffusion",
        "  p.yaml:4: stage 1.engine is 3; right would be the name of an engine, as vllm or diffusion",
    ]


def test_all_errors_come_at_once_in_the_order_of_lines() -> None:
    text = PAIR.replace(
        "engine: echo\n    final_output: text", "engine: echo\n    final_output: picture\n    env: {A: b}"
    )
    text = text.replace("num_replicas: 2", "num_replicas: 0").replace("    to: 1", "    to: one\n    window_size: wide")
    text = text.replace("    model: m", "    model: $HOME/m\n    model: 3")
    said = refusal(text)
    assert said[0] == "p.yaml: 8 keys are wrong:"
    lines = [int(line.split(":")[1]) for line in said[1:]]
    assert lines == sorted(lines) == [4, 5, 5, 7, 10, 11, 14, 15]


def test_what_stages_and_edges_have_wrong_together_has_its_lines() -> None:
    text = PAIR.replace("final_output: text", "input_from: [5]").replace("to: 1", "to: 1\n    connector: Tcpp\n")
    said = refusal(text)
    assert said[0] == "p.yaml: 4 keys are wrong:"
    assert [line.strip().split(": ")[0] for line in said[1:]] == ["p.yaml:1", "p.yaml:9", "p.yaml:11", "p.yaml:13"]


def test_no_more_than_twenty_are_listed() -> None:
    said = refusal(PAIR + "".join(f"strange_{number}: 1\n" for number in range(30)))
    assert (said[0], len(said), said[-1]) == ("p.yaml: 30 keys are wrong:", 22, "  and 10 more")


@pytest.mark.parametrize(
    ("value", "variable"), [("${MODEL}", "${MODEL}"), ("/m/${A:-b}/c", "${A:-b}"), ("$HOME/m", "$HOME")]
)
def test_a_variable_is_explained(value: str, variable: str) -> None:
    [said] = refusal(PAIR.replace("model: m", f"model: {value}"))
    assert said.startswith(f"p.yaml:4: stage 0.model: {variable} is not expanded in a deploy document")
    assert "envsubst" in said
    assert "--stage-overrides" in said
    # Only the variable is wrong, not the kind of its text.
    [said] = refusal(PAIR.replace("num_replicas: 2", "num_replicas: ${COUNT}"))
    assert said.startswith("p.yaml:6: stage 0.runtime.num_replicas: ${COUNT} is not expanded")


def test_text_that_only_looks_like_a_variable_is_left_alone() -> None:
    text = PAIR.replace(
        "    model: m\n", "    default_sampling_params: {stop: ['${END}']}\n    engine_args: {price: a$5, p: '^a$'}\n"
    )
    assert parse_deploy(text, "p.yaml").stages[0].default_sampling_params == {"stop": ["${END}"]}


def test_a_value_of_a_flag_has_no_line() -> None:
    overrides = {0: {"runtime": {"num_replicas": -3}}}
    [said] = refusal(PAIR, overrides=overrides)
    assert said.startswith("p.yaml: stage 0.runtime.num_replicas is -3; right would be")


def test_a_renamed_key_keeps_its_line() -> None:
    [said] = refusal(PAIR.replace("    final_output: text", "    final_output: true\n    final_output_type: film"))
    assert said.startswith("p.yaml:10: stage 1.final_output is 'film'; right would be")
    [said] = refusal(PAIR.replace("    model: m\n", "    engine_input_source: x\n"))
    assert said.startswith("p.yaml:4: stage 0.input_from is 'x'; right would be")


def test_the_line_of_a_syntax_error_exists() -> None:
    for text in ("stages: [\n", "stages: [\n\n\n", PAIR + "edges: {a: [\n", "a: 'b"):
        [said] = refusal(text)
        line = int(said.split(":")[1])
        assert 1 <= line <= len(text.splitlines()), said


def test_a_document_of_the_registry_has_no_lines() -> None:
    with pytest.raises(ConfigError) as refused:
        decode_deploy(b'{"stages":[{"stage_id":0,"engine":"echo","final_output":"film"}]}', "pipeline")
    assert str(refused.value).startswith("pipeline: stage 0.final_output is 'film'; right would be")
