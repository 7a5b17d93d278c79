"""The device on which a consumer wants the tensors of a hand-off: the check of its name, and the move there."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

from omni_discovery.errors import ConfigError
from stage_runtime.connectors.errors import TransferError

_DEVICE: Final = re.compile(r"([a-z]+)(:[0-9]+)?")
#: The kinds of devices that torch and its plugins know, for hosts without torch.
_KINDS: Final = frozenset(
    ("cpu", "cuda", "hip", "hpu", "ipu", "lazy", "maia", "meta", "mlu", "mps", "mtia", "musa", "npu", "xla", "xpu")
)
_CPU: Final = "cpu"


def check_device(name: Any) -> str:
    """The name of a device as torch has it. Raise ConfigError for any other value.

    Whether the device exists shows when a hand-off is fetched: an edge has one ``device`` for both of its ends, and the
    producer's host may lack it.
    """
    found = _DEVICE.fullmatch(name) if isinstance(name, str) else None
    if found is None or (found[1] not in _KINDS and not _knows_torch(found[1])):
        raise ConfigError(f"device is {name!r}; 'cpu' is wanted, or a device of torch, such as 'cuda:0'")
    return str(name)


def _knows_torch(kind: str) -> bool:
    """Whether torch, where it is imported, has this kind of device: a plugin may have named its own."""
    torch = sys.modules.get("torch")
    try:
        return torch is not None and torch.device(kind) is not None
    except RuntimeError:
        return False


def to_device(value: Any, device: str) -> Any:
    """The object with its tensors on ``device``. Raise TransferError if there is no such device here."""
    torch = sys.modules.get("torch")
    if device == _CPU or torch is None:
        return value
    try:
        return _moved(value, device, torch.Tensor)
    except (RuntimeError, AssertionError) as error:
        told = str(error).partition("\n")[0]
        raise TransferError(
            f"the connector's device is {device}, and tensors can't be moved there: {told}; give the replica that "
            "device, or leave 'device' out to get tensors on the CPU"
        ) from error


def _moved(value: Any, device: str, tensor: type) -> Any:
    if isinstance(value, tensor):
        return value.to(device)  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {name: _moved(part, device, tensor) for name, part in value.items()}
    if isinstance(value, list):
        return [_moved(part, device, tensor) for part in value]
    return value
