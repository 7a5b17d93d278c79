"""Fields of the engine core's request, as releases of vLLM have had them."""

from __future__ import annotations

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.vllm.core_request import _fields_for

OLD = ("request_id", "prompt_token_ids", "mm_features", "lora_request", "cache_salt", "data_parallel_rank")


def test_a_field_that_the_release_lacks_is_left_out_while_nobody_wants_it() -> None:
    wanted = {"request_id": "r", "prompt_token_ids": [1], "prompt_embeds": None, "resumable": False}
    assert _fields_for(OLD, wanted) == {
        "request_id": "r",
        "prompt_token_ids": [1],
        "mm_features": None,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }


@pytest.mark.parametrize("wish", [{"resumable": True}, {"session_id": "s"}, {"priority": 0}])
def test_a_wish_that_the_release_can_t_grant_is_named(wish: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(wish))}: the installed vLLM"):
        _fields_for(OLD, {"request_id": "r", **wish})


def test_an_embedding_is_a_wish_though_it_compares_to_nothing() -> None:
    """A tensor has no one truth value, so it must not be asked for one."""

    class Tensor:
        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    with pytest.raises(InvalidRequestError, match="prompt_embeds"):
        _fields_for(OLD, {"prompt_embeds": Tensor()})
