"""etcd3's messages and stubs on any protobuf runtime, kept out of the default descriptor pool.

The generated modules of etcd3 0.12 are refused by protobuf 4 and later. This module reads their serialized
descriptors, builds the classes in a pool of its own and puts those in the place of the generated modules, so nothing
but etcd3's own entries in ``sys.modules`` changes, and no other etcd library in the process can collide with it.
Only messages and stubs are used, never etcd3's client.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE: Final = "etcd3.etcdrpc"
#: In the order in which they import each other.
_FILES: Final = ("kv", "auth", "rpc")
_MARK: Final = "serialized_pb=_b("

#: Fields that servers since 3.4 know and etcd3's schema does not: message, name, number, type, message type.
_Field = descriptor_pb2.FieldDescriptorProto
_LATER_FIELDS: Final = (
    ("WatchCreateRequest", "fragment", 8, _Field.TYPE_BOOL),
    ("WatchResponse", "fragment", 7, _Field.TYPE_BOOL),
)


def _serialized_descriptor(path: Path) -> bytes:
    """The bytes literal behind ``serialized_pb=`` in a generated module; the module itself is not run."""
    for line in path.read_text(encoding="utf-8").splitlines():
        start = line.find(_MARK)
        if start >= 0:
            literal = line[start + len(_MARK) :].rstrip().rstrip(",").removesuffix(")")
            text = ast.literal_eval(literal)
            if isinstance(text, str):
                return text.encode("latin-1")
    raise ImportError(f"{path} holds no serialized descriptor: is it etcd3 0.12.0?")


def _add_later_fields(file: descriptor_pb2.FileDescriptorProto) -> None:
    messages = {message.name: message for message in file.message_type}
    for message_name, field_name, number, kind in _LATER_FIELDS:
        message = messages.get(message_name)
        if message is None or any(known.number == number for known in message.field):
            continue
        message.field.add(name=field_name, number=number, type=kind, label=_Field.LABEL_OPTIONAL)


def _build_module(name: str, path: Path, pool: descriptor_pool.DescriptorPool) -> ModuleType:
    """A stand-in for one generated module: its messages and the values of its top-level enums."""
    proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized_descriptor(path))
    _add_later_fields(proto)
    pool.AddSerializedFile(proto.SerializeToString())
    file = pool.FindFileByName(proto.name)
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__["DESCRIPTOR"] = file
    for message_name, descriptor in file.message_types_by_name.items():
        message_class: Any = message_factory.GetMessageClass(descriptor)
        message_class.__module__ = name
        module.__dict__[message_name] = message_class
    for enum in file.enum_types_by_name.values():
        module.__dict__.update({value.name: value.number for value in enum.values})
    return module


def _load() -> tuple[Any, Any]:
    """Return etcd3's message module and stub module."""
    if f"{_PACKAGE}.rpc_pb2" not in sys.modules:
        spec = importlib.util.find_spec("etcd3")
        if spec is None or not spec.submodule_search_locations:
            raise ImportError("etcd3 is not installed; it is a dependency of omni-discovery")
        folder = Path(spec.submodule_search_locations[0]) / "etcdrpc"
        pool = descriptor_pool.DescriptorPool()
        built = [
            (name := f"{_PACKAGE}.{file}_pb2", _build_module(name, folder / f"{file}_pb2.py", pool)) for file in _FILES
        ]
        sys.modules.update(built)
    return (
        importlib.import_module(f"{_PACKAGE}.rpc_pb2"),
        importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc"),
    )


#: ``rpc``: request and response classes. ``stubs``: KVStub, LeaseStub, WatchStub, MaintenanceStub.
rpc, stubs = _load()
