"""A speaking model of vLLM-Omni over each connector: its talker and its decoder on hosts of their own, or on one.

Needs the environment that `make omni-test` makes; `make omni-long` runs it.
"""

from __future__ import annotations

import logging
import math
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.support.connector_choices import CHOICES, Choice
from tests.support.host_etcd import REGISTRY_PORT, etcd_on
from tests.support.hub import Hub
from tests.support.netns import Host, Network
from tests.support.omni_cluster import MARKS, NAMESPACE, PYTHON, hub_with, speak, speaking, write_model
from tests.support.processes import Child

pytestmark = [*MARKS, pytest.mark.long]
logger = logging.getLogger(__name__)

#: Two processes import vLLM-Omni, on machines with other work.
_START_S = 600.0
#: Requests, by their numbers of tokens.
_TOKENS = (24, 90)
_FRAME_SAMPLES = 1920
#: What connectors import: packages of the tests' environment, which that of vLLM-Omni lacks.
_PACKAGES: Mapping[str, Sequence[str]] = {
    "Mooncake": ("mooncake", "mooncake_transfer_engine_non_cuda.libs"),
    "Yuanrong": ("yr",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "pieces"])
def in_pieces(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def expected(model: str, in_pieces: bool, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The samples of each request over the default connector, which has no line in the document."""
    document = speaking(model, talkers=1, decoders=1, python=PYTHON, pieces=in_pieces)
    with hub_with(tmp_path_factory.mktemp("default"), document, _START_S) as hub:
        heard = heard_from(hub.url, in_pieces)
        assert heard_from(hub.url, in_pieces) == heard
    assert all(len(set(samples)) > 100 for samples in heard), "that is silence"
    return heard


@pytest.mark.parametrize("name", CHOICES)
def test_the_same_samples_are_heard_over_each_connector(
    model: str, in_pieces: bool, expected: list[bytes], tmp_path: Path, name: str
) -> None:
    """1. requests are spoken, one after the other: every sample is that over the default connector
    2. the replicas, stopped, say that this connector stored each hand-off, or each piece of one, and fetched it once;
       that nothing failed, and that nothing travelled inside the metadata
    """
    choice = CHOICES[name]
    with running_by(choice, model, in_pieces, tmp_path) as running:
        with running.at_the_hub():
            assert heard_from(running.hub.url, in_pieces) == expected
        running.stop()
    assert "request.failed" not in running.hub.text
    carried = choice.counted([running.text])
    logger.info("%s over %s: %s", "pieces" if in_pieces else "whole", name, dict(carried))
    choice.assert_carried(carried, 2, sum(map(pieces_of, expected)) if in_pieces else len(expected))


def pieces_of(samples: bytes) -> int:
    """In how many pieces the codes of this sound were handed over: of one frame, then of four."""
    frames = len(samples) // 2 // _FRAME_SAMPLES
    return 1 + math.ceil((frames - 1) / 4)


def heard_from(url: str, in_pieces: bool) -> list[bytes]:
    return [speak(url, tokens, least=4 if in_pieces else 1) for tokens in _TOKENS]


class Running:
    """A hub and, where they are not its own, the hosts of its stages. ``client`` is the host that reaches the hub."""

    def __init__(self, hub: Hub, others: list[Child], client: Host | None = None) -> None:
        self.hub, self._client = hub, client
        self._children = [hub, *others]

    @property
    def text(self) -> str:
        return "".join(child.text for child in self._children)

    def at_the_hub(self) -> AbstractContextManager[None]:
        """What this thread asks meanwhile is asked on the hub's host."""
        return nullcontext() if self._client is None else self._client.inside()

    def stop(self) -> None:
        """Stop all by SIGTERM, stages first; nothing is left. Idempotent."""
        left = [child.stop() for child in reversed(self._children)]
        assert left == [[]] * len(self._children), self.text[-3000:]


@contextmanager
def running_by(choice: Choice, model: str, in_pieces: bool, folder: Path) -> Iterator[Running]:
    """The model, ready to be asked, with its hand-offs carried by the connector."""
    choice.require()
    with ExitStack() as stack:
        # What a speaking model hands over is small, and would travel in the metadata.
        edges = choice.line("shm_threshold_bytes: 0") + "\n"
        document = speaking(model, talkers=1, decoders=1, pieces=in_pieces, edges=edges)
        if choice.on_one_machine:
            running = Running(Hub.of_yaml(folder, document, "--omni-python", str(PYTHON)), [])
        else:
            network = stack.enter_context(Network("registry", "talker", "decoder"))
            stack.enter_context(etcd_on(network.hosts["registry"], folder))
            if choice.beside is not None:
                stack.enter_context(choice.beside(network))
            running = _on_hosts(choice, network, document, folder, Path(model).parent)
        stack.callback(running.stop)
        with running.at_the_hub():
            running.hub.wait_ready(_START_S)
        yield running


def _on_hosts(choice: Choice, network: Network, document: str, folder: Path, model_root: Path) -> Running:
    """A hub beside the registry, and a host without a hub for each stage."""
    hosts = network.hosts
    registry = ["--etcd-endpoints", f"{hosts['registry'].address}:{REGISTRY_PORT}"]
    variables = {"PYTHONPATH": str(_lent(choice, folder)), "DATASYSTEM_CLIENT_LOG_DIR": str(folder / "clients")}
    stages = []
    for stage_id, name in enumerate(("talker", "decoder")):
        here = ["--headless", "--stage-id", str(stage_id), "--namespace", NAMESPACE]
        words = ["serve", *here, "--omni-python", str(PYTHON), "--model-root", str(model_root), *registry]
        at = folder / name
        at.mkdir()
        stages.append(Child(words, at, name, variables=variables, host=hosts[name]))
    hub = Hub.of_yaml(folder, document, "--hub-only", *registry, host=hosts["registry"])
    return Running(hub, stages, hosts["registry"])


def _lent(choice: Choice, folder: Path) -> Path:
    """The packages that the connector imports, and no others, for the environment of vLLM-Omni."""
    made = folder / "lent"
    made.mkdir()
    for kind, names in _PACKAGES.items():
        for name in names if kind in choice.connector else ():
            (made / name).symlink_to(Path(sysconfig.get_path("platlib"), name))
    return made
