"""Which companions picture engines take."""

from __future__ import annotations

import pytest

from omni_discovery.errors import InvalidRequestError
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.companions import NEGATIVE, negative_of


def test_a_request_without_companions_has_no_negative() -> None:
    assert negative_of(StageRequest("k", "r")) is None


def test_the_hand_offs_of_the_negative_are_given_by_stage() -> None:
    handed = {0: {"text": "blurred"}, 1: {"text": "dark"}}
    assert negative_of(StageRequest("k", "r", companions={NEGATIVE: handed})) == handed


def test_any_other_role_is_refused_by_name() -> None:
    request = StageRequest("k", "r", companions={NEGATIVE: {0: {}}, "style": {0: {}}})
    with pytest.raises(InvalidRequestError, match="companion 'style'"):
        negative_of(request)
