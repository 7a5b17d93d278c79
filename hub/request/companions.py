"""The companions of one request: prompts that run through its first stage with it, for guidance of a later one. Pure.

Classifier-free guidance needs the first stage's answer to more than one prompt, the negative one for example. Each
companion is named by its role and runs on the parent's replica. The stages that take the first stage's hand-off begin
when all companions are done. Parent and companions end together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hub.request.plan import RequestPlan
from omni_discovery.errors import InvalidRequestError, RequestError
from omni_discovery.wire import PayloadRef

#: How many companions one request may have, and how long a role's name may be.
MAX_COMPANIONS: Final = 8
_MAX_ROLE_LENGTH: Final = 32


class Companions:
    """The companions of a request, by role, and the hand-offs of those that are done."""

    def __init__(self, plan: RequestPlan, prompts: Mapping[str, Mapping[str, Any]]) -> None:
        self.prompts = prompts
        #: The stage that companions run; the stages that take its hand-off wait for them.
        self.stage_id = plan.stages[0]
        self._takers = plan.next_stages[self.stage_id]
        self._collected: dict[str, tuple[PayloadRef, ...]] = {}
        self.started = False

    @property
    def complete(self) -> bool:
        """Whether every companion is done."""
        return len(self._collected) == len(self.prompts)

    def collect(self, role: str, refs: tuple[PayloadRef, ...]) -> str:
        """A companion is done and left ``refs``; return which stage's hand-off is missing, or an empty text."""
        missing = [stage_id for stage_id in self._takers if all(ref.to_stage != stage_id for ref in refs)]
        if missing:
            return f"companion {role!r} handed nothing over for stage {missing[0]}"
        self._collected[role] = tuple(msgspec.structs.replace(ref, role=role) for ref in refs)
        return ""

    def refs_for(self, stage_id: int) -> tuple[PayloadRef, ...]:
        """The companions' hand-offs for a stage, in the order in which the request named the companions."""
        return tuple(ref for role in self.prompts for ref in self._collected.get(role, ()) if ref.to_stage == stage_id)

    def ready_for(self, stage_id: int) -> bool:
        """Whether every companion hand-off that the stage takes is there."""
        return self.complete or stage_id not in self._takers

    def reset(self) -> None:
        """The request is restarted: forget every hand-off."""
        self._collected.clear()
        self.started = False


def companion_plan(plan: RequestPlan) -> RequestPlan:
    """The plan of a companion: the first stage, whose hand-off is kept for the parent's next stages."""
    first = plan.stages[0]
    return RequestPlan(stages=(first,), inputs={first: ()}, next_stages={first: plan.next_stages[first]}, finals={})


def check_number(prompts: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError for more companions than a request may have, whatever they are."""
    if len(prompts) > MAX_COMPANIONS:
        raise InvalidRequestError(f"{len(prompts)} companions; a request may have {MAX_COMPANIONS}")


def check_companions(plan: RequestPlan, prompts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InvalidRequestError for companions that this pipeline, or any pipeline, can't serve."""
    if not prompts:
        return
    check_number(prompts)
    for role, inputs in prompts.items():
        if len(role) > _MAX_ROLE_LENGTH or not role.isidentifier():
            raise InvalidRequestError(
                f"a companion's role is a name of 1 to {_MAX_ROLE_LENGTH} letters, digits and _; not {role!r}"
            )
        if not inputs:
            raise InvalidRequestError(f"companion {role!r} is empty; give it a prompt")
    if not plan.next_stages[plan.stages[0]]:
        raise InvalidRequestError(
            f"companions are for a later stage, and nothing comes after stage {plan.stages[0]} in this request"
        )


def of_companion(role: str, error: RequestError) -> RequestError:
    """Turn a companion's error into its parent's: the same error, with the role in its text."""
    error.args = (f"companion {role!r}: {error}",)
    return error
