"""The web application of ``--admin-port``: control calls, and why requests went where they went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette

from hub.api.admin.calls import call_routes
from hub.api.admin.receipts import receipt_routes

if TYPE_CHECKING:
    from hub.async_omni import AsyncOmni


def build_admin(omni: AsyncOmni) -> Starlette:
    """The web application of the operators' calls; who may make them is decided in front of it."""
    return Starlette(routes=[*receipt_routes(omni), *call_routes(omni)])


def build_receipts(omni: AsyncOmni) -> Starlette:
    """What this user may read without a token, at a socket in a private folder: nothing is changed there."""
    return Starlette(routes=receipt_routes(omni))
