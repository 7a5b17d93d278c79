"""The typed input of a torch stage: a struct or dataclass, filled from a request and checked before the call."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec
from msgspec import inspect as shapes

from omni_discovery.data_urls import FILE_PARTS, file_parts
from omni_discovery.errors import ConfigError, InvalidRequestError
from omni_discovery.inputs.seeds import seed_of
from omni_discovery.records.params import ParamBounds
from stage_runtime.engines.base import StageRequest
from stage_runtime.engines.callable.live_pieces import LivePieces
from stage_runtime.engines.handoffs import count_listed

#: Numbers that are read from an array into a list, or from lists into an array: both take long, in the engine's thread.
_MOST_LISTED: Final = 1 << 20
#: Fields that get hand-offs, or a client's messages, as they come.
_WHOLE: Final = frozenset(("companions", "messages", "payloads", "pieces"))
_PLACE: Final = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING: Final = re.compile(r"missing required field `([^`]*)`$")


class TypedInput:
    """Makes inputs of type ``kind``, with tensors on ``device``. Raise ConfigError for a type that can't be one.

    Fields are filled by name: from the request's params, then its inputs, then the hand-offs of earlier stages, where a
    later source replaces an earlier one. The names ``prompt``, ``seed``, ``pieces``, ``payloads`` and ``companions``
    have a meaning of their own.
    """

    def __init__(self, kind: type, device: str) -> None:
        self._kind = kind
        self._device = device
        try:
            shape = shapes.type_info(kind)
        except (TypeError, NameError) as error:
            raise ConfigError(f"the input {kind.__name__} can't be read: {error}") from error
        fields: tuple[shapes.Field, ...] = getattr(shape, "fields", ())
        self._fields = {field.encode_name: field.type for field in fields}
        self._piece = self._kind_of_piece()

    @property
    def params(self) -> dict[str, ParamBounds]:
        """What the parameters of a request may be: all that ``read`` takes, as far as bounds can say it."""
        return {"seed": ParamBounds(), **{name: _bounds_of(kind) for name, kind in self._fields.items()}}

    @property
    def takes_live_pieces(self) -> bool:
        """Whether the type has a field ``pieces`` that is read piece by piece, while they come."""
        pieces = self._fields.get("pieces")
        return isinstance(pieces, shapes.CustomType) and pieces.cls is AsyncIterator

    def live_pieces(self) -> LivePieces:
        """What the field ``pieces`` of one request gets."""
        return LivePieces(self._read_piece)

    @property
    def takes_companions(self) -> bool:
        """Whether the type has a field for the hand-offs of a request's companions."""
        return "companions" in self._fields

    def read(self, request: StageRequest, live: LivePieces | None = None) -> Any:
        """The callable's argument for a request. Raise InvalidRequestError that names the wrong field.

        ``live`` has the pieces of an input that takes them live; hand-offs that are there already are put into it.
        """
        given = {name: value for name, value in request.params.items() if value is not None}
        unknown = next((name for name in given if name not in self._fields and name != "seed"), None)
        if unknown is not None:
            raise InvalidRequestError(f"the parameter {unknown!r} is not known to this stage")
        given |= {name: value for name, value in request.inputs.items() if value is not None}
        self._check_files(request)
        handed = self._handed(request) if live is None else {"pieces": _put_all(request, live)}
        given |= handed
        if "prompt" in self._fields and "prompt" not in given and "messages" in given:
            given["prompt"] = _last_text(given["messages"])
        if "seed" in self._fields and "seed" not in given:
            given["seed"] = seed_of(request.request_id)
        return self._filled(given, handed)

    def _filled(self, given: Mapping[str, Any], handed: Mapping[str, Any]) -> Any:
        values = {name: self._plain(name, given[name]) for name in self._fields if name in given}
        try:
            return msgspec.convert(values, self._kind, dec_hook=self._convert, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(_located(str(error), handed)) from error

    def _kind_of_piece(self) -> TypedInput | None:
        """What each of the live pieces is; None if that is not told, or is no struct."""
        if not self.takes_live_pieces:
            return None
        told = get_args(get_type_hints(self._kind)["pieces"])
        is_typed = bool(told) and (hasattr(told[0], "__struct_fields__") or hasattr(told[0], "__dataclass_fields__"))
        return TypedInput(told[0], self._device) if is_typed else None

    def _read_piece(self, piece: Mapping[str, Any]) -> Any:
        return piece if self._piece is None else self._piece._filled(piece, piece)  # noqa: SLF001 - our own class

    def _check_files(self, request: StageRequest) -> None:
        """Raise InvalidRequestError if a picture, or another file, of the client would be ignored."""
        is_first = not request.payloads and not request.stream_from
        files = file_parts(request.inputs.get("messages")) if is_first and "messages" not in self._fields else ()
        for part in files:
            what = FILE_PARTS[part["type"]]
            raise InvalidRequestError(f"messages: this stage takes no {what}; its input has no field 'messages'")

    def _handed(self, request: StageRequest) -> dict[str, Any]:
        """The values of the hand-offs by field; of equal names the last stage's."""
        handed: dict[str, Any] = {}
        for payload in request.payloads.values():
            pieces = payload.get("pieces") if set(payload) == {"pieces"} else None
            only = pieces[0] if isinstance(pieces, list) and len(pieces) == 1 else None
            if isinstance(only, Mapping) and "pieces" not in self._fields:
                handed |= only
            elif isinstance(pieces, list) and "pieces" not in self._fields:
                raise InvalidRequestError(f"pieces: the hand-off came in {len(pieces)}, this stage has no such field")
            else:
                handed |= payload
        if request.payloads:
            handed["payloads"] = dict(request.payloads)
        if request.companions:
            handed["companions"] = dict(request.companions)
        return handed

    def _plain(self, name: str, value: Any) -> Any:
        """An array as a list if the field is one, else the value. Raise InvalidRequestError for too many numbers."""
        kind = self._fields[name]
        kinds = kind.types if isinstance(kind, shapes.UnionType) else (kind,)
        if hasattr(value, "tolist"):
            if not any(isinstance(each, _LISTS) for each in kinds):
                return value
            count = int(value.numel()) if hasattr(value, "numel") else int(value.size)
            if count <= _MOST_LISTED:
                return value.tolist()
            raise InvalidRequestError(f"{name}: {count} numbers; a list of this stage takes up to {_MOST_LISTED}")
        if name in _WHOLE:
            return value
        if count_listed(value, _MOST_LISTED) > _MOST_LISTED:
            raise InvalidRequestError(f"{name}: its lists are longer than {_MOST_LISTED} values")
        return value

    def _convert(self, kind: Any, value: Any) -> Any:
        """A value for a field whose type JSON does not have, an array or a tensor. Raise ValueError."""
        wanted = get_origin(kind) or kind
        if inspect.isclass(wanted) and _of_library(wanted) in ("torch", "numpy"):
            if isinstance(value, str | bytes | Mapping):
                raise ValueError(f"expected numbers, got {type(value).__name__}")
            return self._tensor(value) if _of_library(wanted) == "torch" else _array(value)
        if not isinstance(value, wanted):
            raise ValueError(f"expected {wanted.__name__}, got {type(value).__name__}")
        return value

    def _tensor(self, value: Any) -> Any:
        torch = sys.modules["torch"]
        try:
            return torch.as_tensor(value, device=self._device)
        except (RuntimeError, OverflowError) as error:
            raise ValueError(f"no tensor: {error}") from error


def _put_all(request: StageRequest, live: LivePieces) -> LivePieces:
    """The live pieces of a request, with those in them that are there already."""
    stages = {*request.payloads, *request.stream_from}
    if len(stages) > 1:
        raise InvalidRequestError(f"pieces: they come one by one from a single stage, here {len(stages)} hand over")
    for payload in request.payloads.values():
        whole = set(payload) == {"pieces"} and isinstance(payload["pieces"], list)
        for piece in payload["pieces"] if whole else (payload,):
            live.put(piece)
    if not request.stream_from:
        live.end()
    return live


def _bounds_of(kind: shapes.Type) -> ParamBounds:
    """The bounds of a field's type; none for a type that is more than one number, text or switch."""
    if isinstance(kind, shapes.UnionType):
        others = [each for each in kind.types if not isinstance(each, shapes.NoneType)]
        return _bounds_of(others[0]) if len(others) == 1 else ParamBounds()
    match kind:
        case shapes.BoolType():
            return ParamBounds(type="boolean")
        case shapes.StrType():
            return ParamBounds(type="string")
        case shapes.IntType() | shapes.FloatType():
            return ParamBounds(
                type="integer" if isinstance(kind, shapes.IntType) else "number",
                minimum=kind.ge,
                maximum=kind.le,
                exclusive_minimum=kind.gt,
                exclusive_maximum=kind.lt,
                multiple_of=kind.multiple_of if isinstance(kind.multiple_of, int) else None,
            )
    return ParamBounds()


_LISTS: Final = (shapes.ListType, shapes.VarTupleType, shapes.TupleType, shapes.SetType, shapes.FrozenSetType)


def _of_library(kind: type) -> str:
    """The library, torch or numpy, whose array a type is; empty for any other type."""
    library = kind.__module__.partition(".")[0]
    is_array = {"torch": "Tensor", "numpy": "ndarray"}.get(library) in {base.__name__ for base in kind.__mro__}
    return library if is_array else ""


def _array(value: Any) -> Any:
    numpy = sys.modules["numpy"]
    array = numpy.asarray(value.cpu() if hasattr(value, "cpu") else value)
    if array.dtype.kind not in "biufc":
        raise ValueError(f"expected numbers, got {array.dtype}")
    return array


def _last_text(messages: Any) -> Any:
    """The text of the last message; None, or a value that is no text, for anything that is no message."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return content


def _located(text: str, handed: Mapping[str, Any]) -> str:
    place, missing = _PLACE.search(text), _MISSING.search(_PLACE.sub("", text))
    names = [found.group(1) for found in (place, missing) if found is not None]
    name = ".".join(names) or "input"
    reason = "it is missing" if missing is not None else _PLACE.sub("", text).replace("`", "'")
    whose = " (handed over by a stage before)" if re.split(r"[.\[]", name)[0] in handed else ""
    return f"{name}{whose}: {reason}"
