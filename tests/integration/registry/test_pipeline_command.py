"""``omni pipeline``: the document in force is shown and replaced, never half and never behind somebody's back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from omni_discovery.etcd.embedded import EmbeddedEtcd
from omni_discovery.records.keys import pipeline_key
from tests.support.processes import Child
from tests.support.registry import etcdctl

ONE = "stages: [{stage_id: 0, engine: echo, model: ./thinker, final_output: text}]"


class Operator:
    """Runs ``omni pipeline`` against one etcd."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.endpoint = folder, endpoint

    def run(self, *arguments: str, code: int = 0) -> str:
        child = Child(["pipeline", *arguments, "--etcd-endpoints", self.endpoint], self.folder)
        assert child.process.wait(30) == code, child.text
        assert "Traceback" not in child.text
        return child.text

    def apply(self, text: str, code: int = 0) -> str:
        (self.folder / "deploy.yaml").write_text(text)
        return self.run("apply", "deploy.yaml", code=code)


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    with EmbeddedEtcd() as etcd:
        yield Operator(tmp_path, etcd.endpoint)


def test_the_first_is_put_the_same_changes_nothing_and_another_is_told_by_its_difference(operator: Operator) -> None:
    assert "no pipeline yet" in operator.run("show", code=2)
    assert "its first pipeline" in operator.apply(ONE)
    assert "in force already" in operator.apply(ONE)
    assert "stage 0.final_output: 'image' here, 'text' before" in operator.apply(ONE.replace("text", "image"))
    shown = yaml.safe_load(operator.run("show"))
    assert shown["stages"][0]["final_output"] == "image"
    assert shown["stages"][0]["model"] == str(operator.folder / "thinker"), "taken from the file's folder"


def test_replicas_tells_of_stages_that_nobody_serves_and_of_other_namespaces(operator: Operator) -> None:
    operator.apply(ONE)
    for namespace, said in (("default", "stage 0: nobody"), ("nowhere", "in namespace 'nowhere'; there is 'default'")):
        asked = ["replicas", "--namespace", namespace, "--etcd-endpoints", operator.endpoint]
        child = Child(asked, operator.folder, namespace)
        assert child.process.wait(30) == 0, child.text
        assert said in child.text
        assert ("there is" in child.text) == (namespace == "nowhere")


def test_a_wrong_file_replaces_nothing(operator: Operator) -> None:
    operator.apply(ONE)
    assert "did you mean 'engine'" in operator.apply(ONE.replace("engine", "engin"), code=2)
    pair = ONE.replace("]", ", {stage_id: 1, engine: echo}]\nedges: [{from: 0, to: 1, window_size: 0}]", 1)
    assert "the edge 0 to 1: window_size is 0; right would be" in operator.apply(pair, code=2)
    assert yaml.safe_load(operator.run("show"))["stages"][0]["engine"] == "echo"


def test_what_an_operator_broke_by_hand_can_be_replaced(operator: Operator) -> None:
    etcdctl(operator.endpoint, "put", pipeline_key("default"), "{nonsense")
    assert "could not be read" in operator.apply(ONE)
    assert yaml.safe_load(operator.run("show"))["stages"][0]["engine"] == "echo"
