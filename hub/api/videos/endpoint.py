"""/v1/videos over HTTP: makes jobs, shows, lists and deletes them, and sends their videos."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from starlette.responses import JSONResponse, Response, StreamingResponse

from hub.api.client_quota import client_of
from hub.api.cross_origin import FORM
from hub.api.errors import error_response
from hub.api.exchange import Exchange, exchange_of
from hub.api.generation.running import Came, Route
from hub.api.protocols import cut_answer
from hub.api.videos.schema import (
    ContentQuery,
    VideoCreate,
    VideoQuery,
    check_taken,
    makes_videos,
    parse_video,
    video_params,
)
from hub.jobs.errors import JobFileError, JobStoreUnavailableError
from hub.jobs.job import Client
from hub.jobs.work import JobWork
from omni_discovery.errors import InvalidRequestError, OmniError, OverloadedError
from omni_discovery.records.jobs import JobRecord, JobState

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

    from hub.async_omni import AsyncOmni
    from hub.jobs.service import JobService
    from omni_discovery.deploy.document import DeployConfig

_Query = TypeVar("_Query", VideoQuery, ContentQuery)
_AUTO: Final = "auto"
#: Videos that are sent at one time, by one hub and to one client.
_MOST_DOWNLOADS: Final = 256
_MOST_DOWNLOADS_OF_CLIENT: Final = 16
#: One that takes longer gives its place to another where there is none.
_LONG_DOWNLOAD_S: Final = 60.0
_RETRY_AFTER_S: Final = 2.0


class Videos:
    """The endpoints. ``jobs`` is None where no stage of the pipeline puts out videos."""

    def __init__(self, omni: AsyncOmni, deploy: DeployConfig, jobs: JobService | None) -> None:
        self._route = Route(omni, deploy, "video")
        self._omni, self._deploy, self._jobs = omni, deploy, jobs
        #: Those that are under way, the one that began first is the first.
        self._downloads: list[_Download] = []

    async def respond(self, request: Request) -> Response:
        """POST and GET /v1/videos."""
        return await (self._create(request) if request.method == "POST" else self._list_all(request))

    async def respond_to_one(self, request: Request) -> Response:
        """GET and DELETE /v1/videos/{video_id}."""
        return await (self._delete(request) if request.method == "DELETE" else self._show(request))

    async def _create(self, request: Request) -> Response:
        content_type = request.headers.get("content-type", "")
        is_form = content_type.partition(";")[0].strip().lower() == FORM

        def parse(body: bytes) -> VideoCreate:
            self._served()
            return parse_video(content_type, body)

        expected = FORM if is_form else "application/json"
        return await self._route.answer(request, parse, self._make, expected, can_repeat=False)

    async def _list_all(self, request: Request) -> Response:
        async def listed(jobs: JobService, client: Client) -> Response:
            query = _query_of(request, VideoQuery)
            is_desc = query.order == "desc"
            found, has_more = await jobs.page(client, query.limit, newest_first=is_desc, after=query.after)
            page = [await self._shown(jobs, job) for job in found]
            ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
            body = {"object": "list", "data": page, "first_id": None, "last_id": None, **ends}
            return JSONResponse({**body, "has_more": has_more})

        return await self._answer(request, listed)

    async def _show(self, request: Request) -> Response:
        async def shown(jobs: JobService, client: Client) -> Response:
            return JSONResponse(await self._shown(jobs, await jobs.find(request.path_params["video_id"], client)))

        return await self._answer(request, shown)

    async def _delete(self, request: Request) -> Response:
        async def deleted(jobs: JobService, client: Client) -> Response:
            job_id: str = request.path_params["video_id"]
            await jobs.delete(job_id, client)
            return JSONResponse({"id": job_id, "object": "video.deleted", "deleted": True})

        return await self._answer(request, deleted)

    async def content(self, request: Request) -> Response:
        """GET /v1/videos/{video_id}/content."""
        return _Download(self._downloads, client_of(request.scope), lambda: self._file(request))

    async def _file(self, request: Request) -> Response:
        async def sent(jobs: JobService, client: Client) -> Response:
            _query_of(request, ContentQuery)
            job = await jobs.find(request.path_params["video_id"], client)
            if job.state is not JobState.COMPLETED:
                has_failed = job.state is JobState.FAILED
                text = "its 'error' says why" if has_failed else "its file is there once it is 'completed'"
                text = f"the video has the status '{job.state}': {text}"
                raise InvalidRequestError(text, 409)
            length, pieces = await jobs.content(job)
            return _File(pieces, length, f"{job.job_id}.mp4")

        return await self._answer(request, sent)

    async def _make(self, asked: VideoCreate, came: Came) -> Response:
        jobs = self._served()
        with self._omni.rejections.counted():
            came.repeat.progress(can_resume=False)
            params = video_params(self._deploy, asked)
            for stage in self._deploy.stages:
                check_taken(asked, stage.stage_id, params[stage.stage_id], self._omni.params_taken(stage.stage_id))
        work = JobWork(
            inputs={"messages": [{"role": "user", "content": asked.content()}]},
            params=params,
            timeout_s=asked.timeout,
            priority=asked.priority,
            async_chunk=asked.async_chunk,
            label=came.exchange.label,
        )
        given = {name: "" if value in {None, _AUTO} else str(value) for name, value in _asked_of(asked).items()}
        model = self._deploy.served_name[:512]
        job = await jobs.create(work, _client_of(came.exchange), model, given["seconds"], given["size"])
        return JSONResponse(await self._shown(jobs, job))

    def _served(self) -> JobService:
        if self._jobs is None or not makes_videos(self._deploy):
            raise InvalidRequestError("this pipeline makes no videos: no stage of it has final_output: video")
        return self._jobs

    async def _answer(self, request: Request, respond: Callable[[JobService, Client], Awaitable[Response]]) -> Response:
        exchange = exchange_of(request.scope)
        try:
            return await respond(self._served(), _client_of(exchange))
        except OmniError as error:
            exchange.note_error(error)
            return error_response(error)

    async def _shown(self, jobs: JobService, job: JobRecord) -> dict[str, Any]:
        """A job in the shape of OpenAI. ``hub`` is there if only that hub knows it."""
        shown: dict[str, Any] = {
            "id": job.job_id,
            "object": "video",
            "status": str(job.state),
            "progress": await jobs.percent(job),
            "created_at": int(job.created_at),
            "completed_at": int(job.ended_at) if job.state is JobState.COMPLETED else None,
            "expires_at": int(job.expires_at),
            "model": job.model,
            "seconds": job.seconds or _AUTO,
            "size": job.size or _AUTO,
            "prompt": None,
            "remixed_from_video_id": None,
            "error": None,
        }
        if job.state is JobState.FAILED:
            shown["error"] = {"code": job.error or "internal_error", "message": await jobs.error_text(job)}
        return shown | ({"hub": job.hub} if job.hub else {})


def _client_of(exchange: Exchange) -> Client:
    return Client(exchange.key, exchange.key_digest)


def _asked_of(asked: VideoCreate) -> dict[str, str | int | None]:
    return {"seconds": asked.seconds, "size": asked.size}


def _query_of(request: Request, kind: type[_Query]) -> _Query:
    """The query of a request. Raise InvalidRequestError that names the parameter."""
    given = request.query_params.multi_items()
    if len({name for name, _ in given}) < len(given):
        raise InvalidRequestError("a parameter of the query is there twice")
    try:
        return msgspec.convert(dict(given), kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the query can't be used: {error}".replace("`", "'")) from error


class _Download(Response):
    """A file that is sent while there is a place for it: clients that do not read keep some megabytes of it each.

    Where all places are taken, one that has its place for a minute gives way: of who has most of them, the oldest.
    """

    def __init__(self, under_way: list[_Download], client: str, file: Callable[[], Awaitable[Response]]) -> None:
        self._under_way, self._client, self._file = under_way, client, file
        self._began_s = 0.0
        self._scope: Scope = {}
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self._began_s, self._scope = time.monotonic(), scope
        if (full := self._why_full()) is not None:
            exchange_of(scope).note_error(full)
            await error_response(full)(scope, receive, send)
            return
        self._under_way.append(self)
        try:
            response = await self._file()
            await response(scope, receive, send)
        finally:
            if self in self._under_way:
                self._under_way.remove(self)

    def _why_full(self) -> OverloadedError | None:
        if sum(each._client == self._client for each in self._under_way) >= _MOST_DOWNLOADS_OF_CLIENT:  # noqa: SLF001
            text = f"{_MOST_DOWNLOADS_OF_CLIENT} videos are on their way to this client, which is the most"
            return OverloadedError(text, _RETRY_AFTER_S)
        if len(self._under_way) < _MOST_DOWNLOADS:
            return None
        taken = Counter(each._client for each in self._under_way)  # noqa: SLF001
        long = (each for each in self._under_way if self._began_s - each._began_s >= _LONG_DOWNLOAD_S)  # noqa: SLF001
        oldest = max(long, key=lambda each: taken[each._client], default=None)  # noqa: SLF001
        if oldest is None:
            text = f"{_MOST_DOWNLOADS} videos are being sent by this hub, which is the most"
            return OverloadedError(text, _RETRY_AFTER_S)
        self._under_way.remove(oldest)
        cut_answer(oldest._scope)  # noqa: SLF001
        return None


class _File(StreamingResponse):
    """A video's file, cut short if a later part of it can't be read."""

    def __init__(self, pieces: AsyncIterator[bytes], length: int, name: str) -> None:
        headers = {
            "Content-Length": str(length),
            "Content-Disposition": f'attachment; filename="{name}"',
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "private, no-store",
        }
        super().__init__(pieces, media_type="video/mp4", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        try:
            await super().__call__(scope, receive, send)
        except (JobFileError, JobStoreUnavailableError):
            cut_answer(scope)
