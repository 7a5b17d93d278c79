"""A document's file: how it is read, where two documents differ, and what in one may be a slip."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_discovery.deploy.document import DeployConfig, parse_deploy
from omni_discovery.deploy.load import (
    check_model_place,
    check_model_places,
    describe_difference,
    doubtful_connectors,
    doubtful_engines,
    load_deploy,
    needs_start_folder,
)
from omni_discovery.deploy.trust.bounds import Bounds
from omni_discovery.errors import ConfigError
from tests.support.documents import TREE


def test_a_model_beside_the_file_is_found_from_anywhere_and_the_default_fills_in(tmp_path: Path) -> None:
    """``./`` and ``../`` go by the file's folder; a name on a model hub and an absolute path stay as they are."""
    folder = tmp_path / "deploys"
    folder.mkdir()
    models = ["./a", "../b", "org/c", "/d"]
    stages = [f"{{stage_id: {number}, engine: echo, model: {model}}}" for number, model in enumerate(models)]
    file = folder / "deploy.yaml"
    file.write_text(f"stages: [{', '.join(stages)}, {{stage_id: 4, engine: echo, final_output: text}}]")
    found = [stage.model for stage in load_deploy(file, "the-default").stages]
    assert found == [str(folder / "a"), str(tmp_path / "b"), "org/c", "/d", "the-default"]


def test_a_file_that_can_not_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*absent\.yaml: .*No such file"):
        load_deploy(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"can't read .*binary\.yaml: .*decode"):
        load_deploy(tmp_path / "binary.yaml")


def test_a_connector_that_is_not_known_here_is_named_with_its_edge(tree: DeployConfig) -> None:
    assert doubtful_connectors(tree, None, ()) == []
    text = f"{TREE.partition('connectors:')[0]}connectors: {{small: {{name: TcpConector}}}}"
    slip = parse_deploy(text, "t")
    told = ["the edge 0 to 2: connector 'TcpConector' is not known on this host; did you mean 'TcpConnector'?"]
    assert doubtful_connectors(slip, None, ()) == doubtful_connectors(slip, [0], ()) == told
    assert doubtful_connectors(slip, [1], ()) == doubtful_connectors(slip, [0], ["TcpConector"]) == []


def test_a_difference_names_the_place_and_both_sides(tree: DeployConfig) -> None:
    other = parse_deploy(TREE.replace("audio", "none").replace("num_replicas: 2", "num_replicas: 3"), "other")
    assert describe_difference(tree, tree) == ""
    assert describe_difference(tree, other) == (
        "stage 1.final_output: 'audio' here, 'none' in force; stage 2.runtime.num_replicas: 2 here, 3 in force"
    )


def test_a_stage_that_only_one_of_two_documents_has_is_named_and_no_other(tree: DeployConfig) -> None:
    shorter = parse_deploy("stages: [{stage_id: 2, engine: echo, final_output: image}]", "short.yaml")
    told = describe_difference(tree, shorter)
    assert told.startswith("stage 0 only here; stage 1 only here; stage 2.runtime.devices: '0,1' here, '' in force")
    assert "(and " in told
    assert describe_difference(shorter, tree).startswith("stage 0 only in force; stage 1 only in force")
    many = "x" * 1000
    long = parse_deploy(f"stages: [{{stage_id: 2, engine: echo, model: {many}, final_output: image}}]", "long.yaml")
    assert len(describe_difference(shorter, long)) < 150


def test_the_order_of_stages_is_a_difference_that_shows_in_their_inputs() -> None:
    stage = "{stage_id: %d, engine: e, final_output: text}"
    one, other = (
        parse_deploy(f"stages: [{stage % first}, {stage % second}]", "t.yaml") for first, second in ((0, 1), (1, 0))
    )
    assert describe_difference(one, other).endswith("order of stages: '[0, 1]' here, '[1, 0]' in force")


def test_an_engine_that_nobody_knows_is_named_with_the_nearest(tree: DeployConfig) -> None:
    assert doubtful_engines(tree.stages, ()) == []
    slip = parse_deploy("stages: [{stage_id: 0, engine: ehco, final_output: text}]", "slip.yaml")
    told = ["stage 0: engine 'ehco' is not known on this host; did you mean 'echo'?"]
    assert doubtful_engines(slip.stages, ()) == told
    assert doubtful_engines(slip.stages, ("ehco",)) == []
    other = parse_deploy("stages: [{stage_id: 0, engine: zzz, final_output: text}]", "other.yaml")
    assert "there are diffusion, echo, mine, torch, vllm" in doubtful_engines(other.stages, ("mine",))[0]


@pytest.fixture
def anybodys(tmp_path: Path) -> Path:
    """A folder as /tmp is, with a model in it."""
    (tmp_path / "anybodys/acme/tiny").mkdir(parents=True)
    (tmp_path / "anybodys").chmod(0o1777)
    return tmp_path / "anybodys"


@pytest.mark.attack("F2")
def test_a_name_is_no_folder_of_a_start_folder_that_others_can_write_to(
    anybodys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a folder is called like a model on a model hub: refused, with what to do; a name without one passes
    2. where this user alone can write, the folder is the model
    """
    monkeypatch.chdir(anybodys)
    with pytest.raises(ConfigError) as caught:
        check_model_place("acme/tiny", Bounds(), "stage 3: ")
    assert str(caught.value) == (
        f"stage 3: the model acme/tiny is a folder here, {anybodys}/acme/tiny, and not for this user alone: others can"
        f" write to {anybodys}. Name a folder that others can't change by its full path, or trust who can:"
        f" --model-root {anybodys}/acme/tiny"
    )
    check_model_place("acme/other", Bounds())
    check_model_place("acme/tiny", Bounds(named_roots=(str(anybodys / "acme"),)))
    anybodys.chmod(0o755)
    check_model_place("acme/tiny", Bounds())


@pytest.mark.attack("F2")
def test_a_full_path_is_refused_where_others_can_swap_what_is_there(anybodys: Path) -> None:
    """Whatever is below a sticky folder is its owner's, unless its owner lets others write there, or it is a link."""
    own, shared, link = anybodys / "acme/tiny", anybodys / "shared", anybodys.parent / "open/link"
    (shared / "tiny").mkdir(parents=True)
    shared.chmod(0o777)
    link.parent.mkdir()
    link.symlink_to(own)
    check_model_place(str(own), Bounds())
    check_model_place(str(link), Bounds())
    link.parent.chmod(0o777)
    for path, writable in ((shared / "tiny", shared), (link, link.parent), (anybodys, anybodys)):
        with pytest.raises(ConfigError, match=f"others can write to {writable}"):
            check_model_place(str(path), Bounds())
        check_model_place(str(path), Bounds(named_roots=(str(path),)))


@pytest.mark.attack("F2")
@pytest.mark.parametrize(
    "stage",
    [
        "model: acme/tiny",
        "model: org/c, engine_args: {tokenizer: acme/tiny}",
        "model: org/c, engine_args: {speculative_config: {model: acme/tiny}}",
        "model: org/c, default_sampling_params: {lora: {name: a, path: acme/tiny}}",
    ],
)
def test_each_text_of_a_stage_that_names_a_model_is_looked_at(
    anybodys: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    deploy = parse_deploy(f"stages: [{{stage_id: 0, engine: vllm, final_output: text, {stage}}}]", "t")
    monkeypatch.chdir(anybodys.parent)
    check_model_places(deploy, 0, Bounds())
    assert not needs_start_folder(deploy, 0)
    monkeypatch.chdir(anybodys)
    assert needs_start_folder(deploy, 0)
    with pytest.raises(ConfigError, match="the model acme/tiny is a folder here"):
        check_model_places(deploy, 0, Bounds())
