"""What one host allows to a deploy document from etcd: the values of ``--allow`` and ``--model-root``. Pure."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Sequence
from typing import Final

import msgspec

from omni_discovery.deploy.document import DeployConfig, decode_deploy, encode_deploy
from omni_discovery.errors import ConfigError

#: Everything: the document is trusted as a file of this host's own command line is.
ALL: Final = "all"
#: The kinds of ``--allow`` that take a value, with what it is.
VALUED: Final = {
    "target": "a module whose callables engine torch may call, with the modules below it: my_models",
    "engine": "the name of an engine of another installed package",
    "connector": "the name of a connector of another installed package",
    "engine-arg": "an engine argument that can name code, files or addresses: hf_overrides",
    "model": "one model, exactly as the document writes it: s3://bucket/model",
    "key": "a key of the document outside of engine_args: runtime.python",
}
#: The kinds that take none.
PLAIN_KINDS: Final = {
    "remote-code": "trust_remote_code: the code that came with a model",
    "pickled-weights": "weights that are no safetensors: loading them can run code",
    ALL: "whatever the document says",
}
_MODULE: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What this host allows. Made by ``read_bounds``; without arguments, nothing beyond what is open anyway."""

    #: As on the command line: ``target=my_models``, ``remote-code``.
    allow: tuple[str, ...] = ()
    #: Folders under which models may lie, as given and with all links followed.
    model_roots: tuple[str, ...] = ()
    #: Those of them that the operator has named: models there are taken, whoever else can change them.
    named_roots: tuple[str, ...] = ()
    #: Digests of the documents that this host's own command line names: those are trusted.
    own: tuple[str, ...] = ()

    def allows(self, kind: str, value: str = "") -> bool:
        """Whether the operator of this host has allowed this."""
        return ALL in self.allow or (f"{kind}={value}" if value else kind) in self.allow

    def allowed_modules(self) -> tuple[str, ...]:
        """The modules whose callables engine ``torch`` may call."""
        return tuple(each.removeprefix("target=") for each in self.allow if each.startswith("target="))

    def trusts(self, deploy: DeployConfig) -> bool:
        """Whether a document is exactly one that this host's own command line names, or all are trusted."""
        return ALL in self.allow or digest_of(deploy) in self.own

    def owning(self, deploy: DeployConfig) -> Bounds:
        """These bounds on a host whose own command line names this document too.

        The models that it names may also be named by a later one: an update must not lose them.
        """
        models = (f"model={stage.model}" for stage in deploy.stages if stage.model)
        allow = tuple(dict.fromkeys((*self.allow, *models)))
        return msgspec.structs.replace(self, allow=allow, own=(*self.own, digest_of(deploy)))


def digest_of(deploy: DeployConfig) -> str:
    """A digest of a document's content, the same for a document and for what etcd returns of it."""
    through_etcd = decode_deploy(encode_deploy(deploy), "the document")
    return hashlib.sha256(encode_deploy(through_etcd)).hexdigest()


def is_below(module: str, modules: Sequence[str]) -> bool:
    """Whether a module is one of these, or lies below one of them."""
    return any(module == each or module.startswith(f"{each}.") for each in modules)


def read_allow(texts: Sequence[str]) -> tuple[str, ...]:
    """Check the values of ``--allow``. Raise ConfigError that says which there are."""
    for text in texts:
        kind, equals, value = text.partition("=")
        if kind in PLAIN_KINDS and not equals:
            continue
        if kind == "target" and value and not _MODULE.fullmatch(value):
            raise ConfigError(f"--allow {text}: a target is allowed by its module: --allow target=my_models")
        if kind in VALUED and value:
            continue
        if kind in VALUED:
            raise ConfigError(f"--allow {kind} needs a value, {VALUED[kind]}: --allow {kind}=...")
        near = difflib.get_close_matches(kind, [*VALUED, *PLAIN_KINDS], n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*VALUED, *PLAIN_KINDS])}"
        raise ConfigError(f"--allow {text!r} is not known; {hint}")
    return tuple(dict.fromkeys(texts))
