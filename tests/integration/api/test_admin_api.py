"""Collective calls over HTTP, on the application that a hub serves at ``--admin-port``."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from hub.api.admin.app import build_admin
from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from omni_discovery import wire
from tests.support.hub_fakes import ONE_STAGE, FakeReplica, deploy_of, running_hub


class Caller(FakeReplica):
    """Answers every call with its arguments."""

    def _hear(self, name: str, message: wire.ToReplica) -> None:
        super()._hear(name, message)
        if isinstance(message, wire.Control):
            about = {"epoch": message.epoch, "call_id": message.call_id, "queue_length": 0}
            result = [message.method, list(message.args), message.kwargs, b"\0"]
            self.say(wire.ControlResult(**about, ok=True, result=result))


def client_of(omni: AsyncOmni, *, admin: bool = True) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_admin(omni) if admin else build_app(omni, deploy_of(ONE_STAGE), 0))
    return httpx.AsyncClient(transport=transport, base_url="http://hub")


async def test_an_operator_calls_every_replica_and_gets_one_entry_for_each() -> None:
    async with running_hub(Caller(), Caller(replica_id=1)) as omni, client_of(omni) as http:
        answer = await http.post("/admin/add_lora", json={"args": ["mine", 3], "kwargs": {"path": "/l"}})
        assert answer.status_code == 200
        assert answer.json() == [
            {
                "stage_id": 0,
                "replica_id": replica_id,
                "ok": True,
                "result": ["add_lora", ["mine", 3], {"path": "/l"}, "AA=="],
                "error": "",
            }
            for replica_id in (0, 1)
        ]
        empty = await http.post("/admin/is_sleeping", headers={"Content-Type": "application/json; charset=utf-8"})
        assert [entry["ok"] for entry in empty.json()] == [True, True]
        assert (await http.get("/health")).status_code == 404


async def test_a_stage_that_is_not_there_is_named_in_a_header_and_the_others_answer() -> None:
    async with running_hub(Caller()) as omni, client_of(omni) as http:
        answer = await http.post("/admin/list_loras", json={"stage_ids": [0, 99]})
        assert [entry["ok"] for entry in answer.json()] == [True]
        assert answer.headers["x-omni-warning"] == "the pipeline has no stage 99; it has 0"
        assert "x-omni-warning" not in (await http.post("/admin/list_loras", json={"stage_ids": [0]})).headers


async def test_a_replica_that_does_not_answer_is_an_entry_and_no_error() -> None:
    async with running_hub(Caller(), FakeReplica(replica_id=1)) as omni, client_of(omni) as http:
        answer = await http.post("/admin/list_loras", json={"timeout_s": 0.3})
        assert answer.status_code == 200
        assert [entry["error"] for entry in answer.json()] == ["", "DeadlineExceededError: no answer within 0.3 s"]


@pytest.mark.attack("C26")
async def test_at_the_port_of_the_api_there_is_no_such_place() -> None:
    replica = Caller()
    async with running_hub(replica) as omni, client_of(omni, admin=False) as http:
        assert (await http.post("/admin/sleep", json={})).status_code == 404
        assert replica.of(wire.Control) == []


@pytest.mark.attack("C25")
async def test_what_is_no_call_is_refused_and_nobody_hears_of_it() -> None:
    """Among them what a page in a browser may send to any host: a body that is not called JSON."""
    replica = Caller()
    bodies: list[Any] = [
        [],
        {"args": 1},
        {"kwargs": {"a": 1}, "more": 2},
        {"stage_ids": [7]},
        {"stage_ids": 0},
        {"timeout_s": -1},
    ]
    async with running_hub(replica) as omni, client_of(omni) as http:
        for body in bodies:
            answer = await http.post("/admin/sleep", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_request"), body
        assert (
            await http.post("/admin/sleep", content=b"{}", headers={"Content-Type": "text/plain"})
        ).status_code == 415
        assert (await http.post("/admin/sleep", content=b"{}")).status_code == 415
        nested = await http.post("/admin/sleep", content=b"[" * 100_000, headers={"Content-Type": "application/json"})
        assert nested.status_code == 400
        assert (await http.get("/admin/sleep")).status_code == 405
        assert (await http.post("/admin/a/b", json={})).status_code == 404
        assert replica.of(wire.Control) == []
        await omni.close()
        assert (await http.post("/admin/sleep", json={})).status_code == 500
