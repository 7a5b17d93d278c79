"""What operators may ask of requests at ``--admin-port``: with a running hub and replicas on real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest

from hub.api.admin.app import build_admin
from hub.api.routes import build_app
from hub.async_omni import AsyncOmni
from omni_discovery import wire
from omni_discovery.errors import OmniError
from omni_discovery.receipts.receipt import Receipt, StageAttempt
from omni_discovery.receipts.replay import replay
from tests.support.hub_fakes import (
    ONE_STAGE,
    PAIR,
    QUICK,
    FakeReplica,
    accept_only,
    deploy_of,
    picture,
    running_hub,
    until,
)

SECRET = "the client's secret prompt"
PATIENT = replace(QUICK, request_timeout_s=120.0, pick_timeout_s=60.0, accept_timeout_s=5.0, accept_limit_s=20.0)


def admin_of(omni: AsyncOmni) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_admin(omni)), base_url="http://hub")


async def ask(omni: AsyncOmni, request_id: str, prompt: str = SECRET, **more: Any) -> None:
    async for _ in omni.generate({"prompt": prompt}, request_id, **more):
        pass


async def receipt(omni: AsyncOmni, name: str) -> Receipt:
    """The receipt of the one request of a name, as it comes over HTTP."""
    async with admin_of(omni) as http:
        answer = await http.get(f"/admin/requests/{name}")
        assert answer.status_code == 200, answer.text
        [found] = answer.json()["receipts"]
        return msgspec.convert(found, Receipt)


async def attempts(omni: AsyncOmni, name: str) -> list[StageAttempt]:
    return (await receipt(omni, name)).attempts


async def test_a_receipt_tells_each_stage_who_could_have_had_it_and_its_hand_off() -> None:
    replicas = FakeReplica(replica_id=0), FakeReplica(replica_id=1), FakeReplica(picture, stage_id=1)
    async with running_hub(*replicas, deploy=PAIR, config=PATIENT) as omni:
        await ask(omni, "mine", label="label-of-mine", key="alice")
        told = await receipt(omni, "mine")
        assert (told.outcome, told.error, told.label, told.key, told.hub) == (
            "ok",
            "",
            "label-of-mine",
            "alice",
            "hub-1",
        )
        assert told.took_s is not None
        assert [(each.stage, each.attempt, each.outcome) for each in told.attempts] == [(0, 0, "done"), (1, 0, "done")]
        first, second = told.attempts
        assert first.picking is not None
        assert {each.replica: each.out for each in first.picking.candidates} == {"0/0": "", "0/1": ""}
        assert first.replica in {"0/0", "0/1"}
        assert (first.modality, second.modality) == ("text", "image")
        assert None not in (first.due_s, first.sent_s, first.accepted_s, first.first_output_s, first.ended_s)
        [transfer] = told.transfers
        assert (transfer.from_stage, transfer.to_stage, transfer.size_bytes, transfer.connector) == (0, 1, 1, "shm")
        for each in told.attempts:
            assert each.picking is not None
            assert replay(each.picking).choice == each.replica
        assert SECRET.split()[2] not in msgspec.json.encode(told).decode()


async def test_a_replica_that_failed_a_request_is_named_in_the_next_attempt() -> None:
    """1. replica 0 fails it in the engine, with a text that quotes the prompt; 2. replica 1 serves it"""

    def fail(replica: FakeReplica, submit: wire.Submit) -> None:
        replica.accept(submit)
        about = replica._about(submit)
        replica.say(wire.StageFailed(**about, kind=wire.FailureKind.ENGINE, reason=f"ValueError: {SECRET}"))

    async with running_hub(FakeReplica(fail, replica_id=0), FakeReplica(replica_id=1)) as omni:
        for number in range(20):
            await ask(omni, f"r{number}")
            tried = await attempts(omni, f"r{number}")
            if len(tried) > 1:
                break
        first, second = tried
        assert (first.replica, first.outcome, first.reason) == ("0/0", "failed", "engine: ValueError")
        assert (second.replica, second.outcome, second.is_retry) == ("0/1", "done", True)
        assert second.picking is not None
        assert {each.replica: each.out for each in second.picking.candidates} == {
            "0/0": "it has failed this request, or was late with it",
            "0/1": "",
        }


async def test_failed_requests_are_listed_with_the_type_of_the_error_alone() -> None:
    def refuse(replica: FakeReplica, submit: wire.Submit) -> None:
        about = replica._about(submit)
        replica.say(wire.Rejected(**about, kind=wire.FailureKind.INVALID, reason=f"bad: {SECRET}"))

    async with running_hub(FakeReplica(refuse)) as omni, admin_of(omni) as http:
        with pytest.raises(OmniError):
            await ask(omni, "bad")
        answer = await http.get("/admin/requests", params={"failed": "1"})
        [line] = answer.json()["requests"]
        assert (line["shown_id"], line["outcome"], line["error"]) == ("bad", "failed", "InvalidRequestError")
        assert "error_stage" not in line, "the mistake of a client is that of no stage"
        assert line["replicas"] == ["0/0"]
        whole = (await http.get("/admin/requests/bad")).text
        assert "secret" not in answer.text + whole
        assert answer.headers["cache-control"] == "no-store"


async def test_waiting_work_tells_what_it_waits_for_and_a_running_request_has_a_receipt() -> None:
    """1. the only replica leaves the only request unanswered; 2. it then loses its session; 3. another request waits"""
    replica = FakeReplica(accept_only)
    async with running_hub(replica, config=PATIENT) as omni, admin_of(omni) as http:
        running = asyncio.create_task(ask(omni, "running"))
        await until(lambda: bool(replica.of(wire.Submit)))
        told = await receipt(omni, "running")
        assert (told.outcome, told.took_s, told.attempts[0].replica) == ("", None, "0/0")
        omni.releases.newest.pools[0].core.session_down(replica.info.input_addr, 0.0)
        waiting = asyncio.create_task(ask(omni, "waiting"))
        await until(lambda: bool(omni.receipts.waiting()))
        [work] = (await http.get("/admin/requests?waiting=1")).json()["waiting"]
        assert (work["shown_id"], work["stage"]) == ("waiting", 0)
        assert work["what"] == "a free slot: of 1 replicas 1 without a session"
        [attempt] = await attempts(omni, "waiting")
        assert [wait.what for wait in attempt.waits] == [work["what"]]
        for task in (running, waiting):
            task.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)


async def test_a_replica_that_gets_nothing_is_told_why() -> None:
    async with running_hub(FakeReplica(replica_id=0), FakeReplica(replica_id=1)) as omni, admin_of(omni) as http:
        pool = omni.releases.newest.pools[0].core
        cordoned = next(entry for entry in pool.members if entry.info.replica_id == 1)
        pool.upsert(replace(cordoned.info, cordoned=True), 0.0)
        for number in range(3):
            await ask(omni, f"r{number}")
        told = (await http.get("/admin/replicas/0/1")).json()["replica"]
        assert told["why"] == ["cordoned: omni cordon 0/1 --undo"]
        assert (told["picks"], told.get("chosen", 0), told["left_out"]) == (3, 0, {"cordoned": 3})
        other = (await http.get("/admin/replicas/0/0")).json()["replica"]
        assert (other["chosen"], other.get("why", [])) == (3, [])


async def test_what_is_not_there_is_told_with_what_is() -> None:
    async with running_hub(FakeReplica()) as omni, admin_of(omni) as http:
        for path, status, text in [
            ("/admin/requests/nobody", 404, "no receipt of 'nobody'"),
            ("/admin/replicas/0/7", 404, "it knows 0/0: omni replicas"),
            ("/admin/replicas/5/0", 404, "no stage 5; it has 0"),
            ("/admin/requests?limit=0", 400, "take 1 to"),
            ("/admin/requests?limit=x", 400, "take 1 to"),
            ("/admin/requests?limit=0000000019999", 400, "take 1 to"),
            ("/admin/requests?fail=1", 400, "there are failed, waiting and limit"),
        ]:
            answer = await http.get(path)
            assert (answer.status_code, text in answer.text) == (status, True), answer.text
        app = httpx.ASGITransport(build_app(omni, deploy_of(ONE_STAGE), 0))
        async with httpx.AsyncClient(transport=app, base_url="http://hub") as clients:
            assert (await clients.get("/admin/requests")).status_code == 404


async def test_a_revoked_hub_says_so_with_each_answer() -> None:
    async with running_hub(FakeReplica()) as omni, admin_of(omni) as http:
        omni.is_revoked = True
        for path in ("requests", "requests?failed=1", "requests?waiting=1", "replicas/0/0"):
            assert "omni hub allow hub-1" in (await http.get(f"/admin/{path}")).json()["problem"]
        assert "omni hub allow hub-1" in (await http.get("/admin/requests/nobody")).text
        omni.is_revoked = False
        assert "problem" not in (await http.get("/admin/requests")).json()


async def test_a_hub_that_keeps_none_says_so() -> None:
    async with running_hub(FakeReplica(), config=replace(QUICK, receipts=0)) as omni, admin_of(omni) as http:
        await ask(omni, "mine")
        answer = await http.get("/admin/requests/mine")
        assert (answer.status_code, "--receipts 0" in answer.text) == (501, True)
        assert (await http.get("/admin/requests?waiting=1")).json() == {"hub": "hub-1", "waiting": []}
