"""Pictures in chats of vLLM's server: their files are sent to the stage, beside a prompt with placeholders for them.

vLLM's server would turn pictures into the model's input tensors itself. Here the replica does that: the hub renders the
template with placeholders and passes on the files that came in the request or were fetched.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from traceback import walk_tb
from typing import Any, Final

from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import mm_input, tokens_input
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.media.image import ImageMediaIO
from vllm.renderers.registry import RENDERER_REGISTRY
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin
from vllm.tokenizers.registry import tokenizer_args_from_config

from hub.api.vllm.bounds.body import run_aside
from hub.api.vllm.bounds.texts import bound_tokenizers
from hub.api.vllm.errors import as_vllm_error
from omni_discovery.data_urls import MAX_PIXELS, PICTURE_FORMATS
from omni_discovery.errors import InvalidRequestError, OverloadedError
from omni_discovery.inputs.picture_heads import check_head

#: Bound of the pictures of one request together: one message to a replica has to hold them.
MAX_PICTURES_BYTES: Final = 3 << 20

#: Modalities that no stage takes; refused before anything is fetched.
_OTHERS: Final = ("audio", "video", "vision_chunk")
#: Substrings in the names of message parts that are not text.
_NOT_TEXT: Final = ("image", "audio", "video", "vision", "file")
#: Not a host name: no link is allowed, and vLLM's error message shows this text.
_NO_DOMAIN: Final = "none: give the picture itself as a data: URL"


class Pictures(dict[str, Any]):
    """The pictures in a prompt's ``mm_kwargs``: a list ``image`` of their files."""


def picture_args(engine_args: Mapping[str, Any], *, taken: bool) -> dict[str, Any]:
    """Engine arguments of vLLM's server for pictures, which override those of the stage.

    Links are fetched only from hosts in ``allowed_media_domains``; vLLM's own default is all hosts.
    """
    nothing_is_fetched = {"allowed_media_domains": [_NO_DOMAIN], "allowed_local_media_path": ""}
    if not taken:
        # Not enough by itself: for a pooling model vLLM's server fetches links before it checks the model.
        return {"language_model_only": True, **nothing_is_fetched}
    limits = {name: each for name, each in (engine_args.get("limit_mm_per_prompt") or {}).items() if name == "image"}
    named = engine_args.get("allowed_media_domains")
    return {
        **nothing_is_fetched,
        **({"allowed_media_domains": named} if named else {}),
        "limit_mm_per_prompt": {**limits, **dict.fromkeys(_OTHERS, 0)},
        "enable_mm_embeds": False,
        "media_io_kwargs": None,
        "mm_processor_cache_gb": 0,
    }


def read_few_formats() -> None:
    """Have Pillow open no formats in this process but those that the hub's check reads.

    A file may be several formats at once: what the check takes for a small JPEG was a large FLI to vLLM's server.
    """
    Image.init()
    for name, (factory, _) in list(Image.OPEN.items()):
        if name not in PICTURE_FORMATS:
            Image.OPEN[name] = factory, _is_not_read


def open_pictures_only() -> None:
    """Have vLLM's server open pictures and not decode them: a few KB may be 67 million pixels, and none is needed here.

    The replica decodes them, the clients in turn.
    """
    ImageMediaIO.load_bytes = _opened  # type: ignore[method-assign, assignment]


def _opened(_: ImageMediaIO, data: bytes) -> MediaWithBytes[Image.Image]:
    try:
        check_head(data)
        picture = Image.open(BytesIO(data), formats=PICTURE_FORMATS)
    except (InvalidRequestError, OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"Failed to load image: {error}") from error
    return MediaWithBytes(picture, data)


def _is_not_read(_begin: bytes) -> bool:
    return False


def renderer_of(config: Any) -> Any:
    """VLLM's renderer for a model, with pictures left as files."""
    model = config.model_config
    mode, *_ = tokenizer_args_from_config(model)
    kind = RENDERER_REGISTRY.load_renderer_cls(mode)
    # It copies the tokenizer for each of its threads, and here is one more, which is not for all of its texts.
    with _one_thread_more(model):
        renderer = type(kind.__name__, (_LeavesPictures, kind), {})(config, cached_tokenizer_from_config(model))
    executor = renderer._executor  # noqa: SLF001
    executor._max_workers = model.renderer_num_workers  # noqa: SLF001
    executor.replace_inner()
    bound_tokenizers(renderer, short_apart=isinstance(renderer.tokenizer, ThreadSafeHFTokenizerMixin))
    return renderer


@contextmanager
def _one_thread_more(model: Any) -> Iterator[None]:
    threads = model.renderer_num_workers
    model.renderer_num_workers = threads + 1
    try:
        yield
    finally:
        model.renderer_num_workers = threads


def split(prompt: Any) -> tuple[Any, tuple[bytes, ...]]:
    """Split a prompt into tokens and picture files. Raise InvalidRequestError if the files are too large together."""
    pictures = prompt.get("mm_kwargs") if isinstance(prompt, dict) else None
    if not isinstance(pictures, Pictures):
        return prompt, ()
    files = tuple(pictures["image"])
    size_bytes = sum(map(len, files))
    if size_bytes > MAX_PICTURES_BYTES:
        raise InvalidRequestError(
            f"the pictures have {size_bytes} bytes, where one request may have {MAX_PICTURES_BYTES}: send smaller ones"
        )
    tokens = tokens_input(prompt["prompt_token_ids"], prompt=prompt.get("prompt"), cache_salt=prompt.get("cache_salt"))
    return tokens, files


class _LeavesPictures:
    """Overrides the renderer's last step, which would turn pictures into the model's input tensors."""

    #: The renderer's own.
    model_config: Any

    def render_messages(self, messages: Any, params: Any) -> Any:
        """See vLLM, which uses this method for pooling models, and would decode or fetch any part."""
        parent: Any = super()
        if self.model_config.runner_type == "pooling":
            _refuse_all_but_text(messages)
        with _refused():
            _check_pixels(messages)
            return parent.render_messages(messages, params)

    async def render_messages_async(self, messages: Any, params: Any) -> Any:
        """See vLLM."""
        parent: Any = super()
        with _refused():
            if (size_bytes := sum(map(len, _urls_in(messages)))) > 0:
                # To open them may take some tenths of a second.
                await _aside(size_bytes, lambda: _check_pixels(messages))
            return await parent.render_messages_async(messages, params)

    async def process_for_engine_async(
        self, prompt: Any, arrival_time: float, *, skip_mm_cache: bool = False, tok_params: Any = None
    ) -> Any:
        """See vLLM. Raise VLLMValidationError for options that can't be combined with pictures."""
        if not prompt.get("multi_modal_data"):
            parent: Any = super()
            return await parent.process_for_engine_async(
                prompt, arrival_time, skip_mm_cache=skip_mm_cache, tok_params=tok_params
            )
        if skip_mm_cache:
            raise VLLMValidationError("how many tokens a picture takes is only known to the stage; ask without it")
        if getattr(tok_params, "truncate_prompt_tokens", None) is not None:
            raise VLLMValidationError("truncate_prompt_tokens: a prompt with pictures is not cut; leave it out")
        rendered = mm_input(
            prompt["prompt_token_ids"],
            Pictures(image=_files(prompt)),  # type: ignore[arg-type]
            {},
            {},
            prompt=prompt.get("prompt"),
            cache_salt=prompt.get("cache_salt"),
        )
        return {**rendered, "arrival_time": arrival_time}

    def warmup_mm(self) -> None:
        """Do nothing: the hub processes no pictures."""


async def _aside(size_bytes: int, check: Callable[[], object]) -> None:
    try:
        await run_aside(size_bytes, check)
    except OverloadedError as error:
        raise as_vllm_error(error) from error


def _check_pixels(messages: Iterable[Any]) -> None:
    """Raise VLLMValidationError if the pictures have too many pixels together, by their headers.

    vLLM decodes all pictures of a request before it counts them. Pictures behind links are not checked: their hosts
    are named by the operator.
    """
    pixels = sum(map(_pixels_of, _urls_in(messages)))
    if pixels > MAX_PIXELS:
        raise VLLMValidationError(
            f"the pictures have {pixels} pixels, where one request may show {MAX_PIXELS}: send fewer or smaller ones"
        )


def _refuse_all_but_text(messages: Iterable[Any]) -> None:
    for part in _parts_of(messages):
        kind = next((name for name in (part.get("type"), *part) if any(each in str(name) for each in _NOT_TEXT)), None)
        if kind is not None:
            raise VLLMValidationError(f"this pipeline pools text; leave {kind} out")


def _parts_of(messages: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        yield from (part for part in (content if isinstance(content, list) else ()) if isinstance(part, Mapping))


def _urls_in(messages: Iterable[Any]) -> Iterator[str]:
    """The pictures that come in the request, as data: URLs."""
    for part in _parts_of(messages):
        shown = part.get("image_url")
        url = shown.get("url") if isinstance(shown, Mapping) else shown
        if isinstance(url, str) and url.lstrip()[:5].lower() == "data:":
            yield url


def _pixels_of(url: str) -> int:
    # vLLM accepts more forms of data: URLs than the hub's own API; only the file matters here.
    try:
        file = b64decode(url.partition(",")[2])
        check_head(file)
        picture = Image.open(BytesIO(file), formats=PICTURE_FORMATS)
    except InvalidRequestError as error:
        raise VLLMValidationError(f"image_url: {error}") from error
    except Image.DecompressionBombError:
        return MAX_PIXELS + 1
    except Exception as error:
        raise VLLMValidationError(f"image_url: it can't be read as {' or '.join(PICTURE_FORMATS)}") from error
    return picture.width * picture.height


@contextmanager
def _refused() -> Iterator[None]:
    """Raise VLLMValidationError for what is the client's mistake, though vLLM raises something else for it."""
    try:
        yield
    except Exception as error:
        # Arguments of earlier calls are JSON in a text, which vLLM reads itself.
        if isinstance(error, RecursionError):
            raise VLLMValidationError("a text of JSON in the messages is nested too deep: send less of it") from error
        # A file: URL without an allowed folder.
        if isinstance(error, RuntimeError) and "local files" in str(error):
            raise VLLMValidationError("a picture comes as a data: URL, not as a file of the server's") from error
        # Pillow raises anything over a malformed file.
        if any(frame.f_globals.get("__name__", "").startswith("PIL.") for frame, _ in walk_tb(error.__traceback__)):
            raise VLLMValidationError(f"a picture can't be read: {str(error) or type(error).__name__}") from error
        raise


def _files(prompt: Mapping[str, Any]) -> list[bytes]:
    items = prompt["multi_modal_data"]
    for name in ("mm_processor_kwargs", "media_io_kwargs"):
        if prompt.get(name):
            raise VLLMValidationError(f"{name} don't reach the stage; leave them out")
    if set(items) != {"image"}:
        raise VLLMValidationError(f"this pipeline reads text and pictures, not {', '.join(sorted(items))}")
    files = [getattr(item, "original_bytes", None) for item in items["image"]]
    if not all(isinstance(file, bytes) for file in files):
        raise VLLMValidationError("a picture comes as image_url with its file, or with a link where those are allowed")
    return [file for file in files if file is not None]
