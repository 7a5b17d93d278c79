"""AsyncOmni beside vLLM's EngineClient: every method is there, takes what vLLM's takes, or says why it can't."""

from __future__ import annotations

import inspect

import pytest

from hub.async_omni import AsyncOmni
from hub.engine_protocol import REFUSED

protocol = pytest.importorskip("vllm.engine.protocol")

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

#: What docs/python.md says of differences: ``add_lora`` takes the request, or three values, in its first place; the
#: arguments of a call come before its timeout, which is given by name.
OTHER_NAMES, OTHER_ORDER = ("add_lora",), ("collective_rpc",)
PUBLIC = sorted(name for name in vars(protocol.EngineClient) if not name.startswith("_"))


def test_the_class_is_the_one_that_is_meant() -> None:
    assert protocol.EngineClient.__abstractmethods__ >= {"generate", "abort", "check_health", "is_running", "errored"}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_method_of_the_engine_client_is_there_and_takes_its_arguments(name: str) -> None:
    ours, theirs = inspect.getattr_static(AsyncOmni, name), inspect.getattr_static(protocol.EngineClient, name)
    assert isinstance(ours, property) == isinstance(theirs, property)
    if isinstance(theirs, property):
        return
    given = [each for each in inspect.signature(theirs).parameters.values() if each.name != "self"]
    by_keyword = {each.name: None for each in given if each.kind is not each.VAR_KEYWORD}
    if name not in OTHER_NAMES:
        inspect.signature(ours).bind(object(), **by_keyword)
    by_position = [None for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    if name not in OTHER_ORDER:
        inspect.signature(ours).bind(object(), *by_position)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_says_why(name: str) -> None:
    with pytest.raises(NotImplementedError, match=name):
        getattr(AsyncOmni, name)(object(), "prompt", request_id="r")


@pytest.mark.parametrize("name", sorted(protocol.EngineClient.__abstractmethods__ - set(REFUSED)))
def test_what_is_not_refused_is_awaited_where_vllms_is(name: str) -> None:
    ours, theirs = inspect.getattr_static(AsyncOmni, name), inspect.getattr_static(protocol.EngineClient, name)
    if not isinstance(theirs, property) and name != "generate":
        assert inspect.iscoroutinefunction(ours) == inspect.iscoroutinefunction(theirs)


def test_both_give_outputs_one_by_one() -> None:
    assert inspect.isasyncgenfunction(AsyncOmni.generate)
