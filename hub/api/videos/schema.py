"""The body of POST /v1/videos: its fields, as JSON or a form, their checks, and what stages get of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec

from hub.api.cross_origin import FORM
from hub.api.errors import BodyTooLongError
from hub.api.generation.body import MAX_BODY_BYTES, decode_body
from hub.api.generation.fields import RequestFields, stage_params
from hub.api.images.form import Part, read_form
from hub.api.images.schema import kind_of, url_of_part
from omni_discovery.data_urls import read_picture
from omni_discovery.deploy.document import DeployConfig, StageConfig
from omni_discovery.errors import InvalidRequestError
from omni_discovery.records.params import ParamBounds, flaw_of_params

VIDEO: Final = "video"
#: Frames of a second where neither the request nor the stage's defaults say it.
USUAL_FPS: Final = 24
#: Frames of one video.
MOST_FRAMES: Final = 14_400
_PASSED: Final = ("negative_prompt", "num_inference_steps", "guidance_scale", "true_cfg_scale")
#: The field of a request that a parameter is made of.
_FIELDS_OF: Final = {"width": "size", "height": "size", "num_frames": "seconds", "fps": "seconds"}
_REFERENCE: Final = "input_reference"
_FORM_URL: Final = f"{_REFERENCE}[image_url]"
_PICTURE_URL: Final = r"\Adata:image/(png|jpeg|webp|gif);base64,"


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A picture to begin with, as a ``data:`` URL: nothing is fetched."""

    image_url: Annotated[str, msgspec.Meta(pattern=_PICTURE_URL)]


class VideoCreate(RequestFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/videos. In a form, ``input_reference`` is a picture's file."""

    prompt: Annotated[str, msgspec.Meta(min_length=1, max_length=1 << 16, examples=["26 plus 48"])]
    input_reference: Reference | None = None
    #: Whole seconds, and width and height in pixels; ``auto``, and nothing, is the model's own.
    seconds: (
        Annotated[str, msgspec.Meta(pattern=r"\A(auto|[1-9][0-9]{0,2})\Z")]
        | Annotated[int, msgspec.Meta(ge=1, le=999)]
        | None
    ) = None
    size: Annotated[str, msgspec.Meta(pattern=r"\A(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})\Z")] | None = None
    fps: Annotated[int, msgspec.Meta(ge=1, le=240)] | None = None
    #: In place of ``seconds``.
    num_frames: Annotated[int, msgspec.Meta(ge=1, le=MOST_FRAMES)] | None = None
    negative_prompt: Annotated[str, msgspec.Meta(max_length=1 << 16)] | None = None
    num_inference_steps: Annotated[int, msgspec.Meta(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None
    true_cfg_scale: Annotated[float, msgspec.Meta(ge=0, le=100)] | None = None

    def content(self) -> str | list[dict[str, Any]]:
        """What the first stage gets, as the content of a message."""
        if self.input_reference is None:
            return self.prompt
        shown = {"type": "image_url", "image_url": {"url": self.input_reference.image_url}}
        return [{"type": "text", "text": self.prompt}, shown]


_decoder = msgspec.json.Decoder(VideoCreate)
#: Fields that are lists or objects, and have no place in a form.
NOT_IN_FORMS: Final = ("sampling_params_list", "metadata")
#: Those that are on or off: a number would pass for one.
_SWITCHES: Final = ("async_chunk", "store")


def parse_video(content_type: str, body: bytes) -> VideoCreate:
    """Read and check a body. Raise InvalidRequestError that names the field."""
    is_form = content_type.partition(";")[0].strip().lower() == FORM
    asked = _read_form(content_type, body) if is_form else decode_body(_decoder, body)
    if not asked.prompt.strip():
        raise InvalidRequestError("'prompt' is empty; send what is to be shown")
    if asked.num_frames is not None and asked.seconds not in {None, "auto"}:
        raise InvalidRequestError("'num_frames' and 'seconds' both say how long it is: leave one of them out")
    if asked.input_reference is not None:
        _check_picture(asked.input_reference.image_url)
    return asked


def video_params(deploy: DeployConfig, asked: VideoCreate) -> dict[int, dict[str, Any]]:
    """The parameters of each stage. Raise InvalidRequestError."""
    more = {stage.stage_id: _params_of(stage, asked) for stage in deploy.stages if stage.final_output == VIDEO}
    return stage_params(deploy, asked, {}, more)


def check_taken(
    asked: VideoCreate,
    stage_id: int,
    params: Mapping[str, Any],
    taken: Sequence[Mapping[str, ParamBounds] | None],
) -> None:
    """Raise InvalidRequestError if no replica of a stage takes these parameters, by what each of them says.

    One that says nothing may take anything; so may one that is not there yet.
    """
    flaws = [("", "") if each is None else flaw_of_params(each, params) for each in taken]
    if not flaws or not all(name for name, _ in flaws):
        return
    name, flaw = flaws[0]
    field = _FIELDS_OF.get(name, name)
    value = getattr(asked, field, None)
    if value is None or field == name or name in _listed(asked):
        # Said by this name, or in the list of parameters.
        raise InvalidRequestError(f"'{name}' can't be {params[name]!r:.60} at stage {stage_id}: {flaw}")
    raise InvalidRequestError(f"'{field}' can't be {value} at stage {stage_id}: {name} is {params[name]}, and {flaw}")


def _listed(asked: VideoCreate) -> set[str]:
    return {name for params in asked.sampling_params_list or () for name in params or ()}


def makes_videos(deploy: DeployConfig) -> bool:
    """Whether a stage of the pipeline puts out videos."""
    return any(stage.final_output == VIDEO for stage in deploy.stages)


def _check_picture(url: str) -> None:
    """As the stages read it, as far as that goes without unpacking it."""
    try:
        _, file = read_picture(url)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"'{_REFERENCE}': {error}") from error
    if not kind_of(file[:12]):
        raise InvalidRequestError(f"'{_REFERENCE}' is no picture that can be read here: send a PNG, JPEG, WEBP or GIF")


def _params_of(stage: StageConfig, asked: VideoCreate) -> dict[str, Any]:
    """What is asked of a stage of video, by the names that stages which draw take."""
    params: dict[str, Any] = {name: getattr(asked, name) for name in (*_PASSED, "fps", "num_frames")}
    if asked.seconds not in {None, "auto"}:
        usual = stage.default_sampling_params.get("fps")
        fps = asked.fps or (usual if isinstance(usual, int) and usual > 0 else USUAL_FPS)
        params |= {"num_frames": int(str(asked.seconds)) * fps, "fps": fps}
        if params["num_frames"] > MOST_FRAMES:
            raise InvalidRequestError(f"'seconds': {params['num_frames']} frames; {MOST_FRAMES} are the most")
    if asked.size not in {None, "auto"}:
        width, _, height = str(asked.size).partition("x")
        params |= {"width": int(width), "height": int(height)}
    return {name: value for name, value in params.items() if value is not None}


def _read_form(content_type: str, body: bytes) -> VideoCreate:
    fields: dict[str, Any] = {}
    for part in read_form(content_type, body):
        name = _REFERENCE if part.name == _FORM_URL else part.name
        if name in fields:
            raise InvalidRequestError(f"'{name}' is there twice")
        # Clients send an empty text for a field that they leave out.
        if part.content or part.is_file or name == "prompt":
            fields[name] = _value_of(part)
    try:
        asked = msgspec.convert(fields, VideoCreate, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the form can't be used: {error}".replace("`", "'")) from error
    # The conversion takes the text "null" for nothing.
    if nothing := [name for name in fields if getattr(asked, name) is None]:
        raise InvalidRequestError(f"'{nothing[0]}' is 'null', which a form can't say: leave it out")
    return asked


def _value_of(part: Part) -> Any:
    if part.name == _REFERENCE:
        url = url_of_part(part)
        if len(url) > MAX_BODY_BYTES:
            raise BodyTooLongError(f"the file has more than {MAX_BODY_BYTES * 3 // 4} bytes: send a smaller picture")
        return {"image_url": url}
    if part.is_file:
        raise InvalidRequestError(f"'{part.name}' is a file; there is one file, '{_REFERENCE}', of a picture")
    if part.name == _FORM_URL:
        return {"image_url": part.text}
    if part.name in _SWITCHES and part.text.lower() not in {"true", "false"}:
        raise InvalidRequestError(f"'{part.name}' is true or false, not {part.text[:20]!r}")
    if part.name in NOT_IN_FORMS:
        raise InvalidRequestError(f"'{part.name}' can't be in a form: send the request as JSON")
    return part.text


class VideoQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /v1/videos."""

    after: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Annotated[str, msgspec.Meta(pattern=r"\A(asc|desc)\Z")] = "desc"


class ContentQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The query of GET /v1/videos/{video_id}/content."""

    variant: Annotated[str, msgspec.Meta(pattern=r"\Avideo\Z")] = "video"
