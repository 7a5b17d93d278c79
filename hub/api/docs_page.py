"""GET /docs: what /openapi.json says as a page for people. Plain HTML: no script, and nothing from elsewhere. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final
from urllib.parse import quote

from hub.api.openapi import NOT_SERVED

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; border-top: 1px solid #8886; padding-top: 1rem; font-size: 1.2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #8883; }
code, pre { font: 14px/1.4 ui-monospace, monospace; }
pre { background: #8882; padding: .75rem; overflow-x: auto; }
summary { cursor: pointer; }
"""
_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
#: A name in the page comes from the operator: whatever it is, the browser runs and fetches nothing.
HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_HOST: Final = re.compile(r"[A-Za-z0-9._:\[\]-]{1,255}")
#: What the pages are made for: a host by a name, and one by an IPv6 address.
_NAMED, _BRACKETED = "http://hub.invalid", "http://[::]"
_BOUNDS: Final = (
    ("minimum", "at least {}"),
    ("exclusiveMinimum", "above {}"),
    ("maximum", "at most {}"),
    ("exclusiveMaximum", "below {}"),
    ("minLength", "at least {} characters"),
    ("maxLength", "at most {} characters"),
    ("minItems", "at least {} of them"),
    ("maxItems", "at most {} of them"),
)


class DocsPage:
    """The page of an OpenAPI document. It is made once: pages differ by the address that their examples ask alone."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._pages = {address: _page(document, address) for address in (_NAMED, _BRACKETED)}

    def of(self, scheme: str, host: str) -> str:
        """The page for a client that has asked this host."""
        host = host if _HOST.fullmatch(host) else "localhost:8000"
        # A shell wants brackets in quotes.
        made_for = _BRACKETED if "[" in host or "]" in host else _NAMED
        return self._pages[made_for].replace(made_for, f"{scheme}://{host}")


def _page(document: Mapping[str, Any], address: str) -> str:
    title, version = escape(document["info"]["title"]), escape(document["info"]["version"])
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    rows = "".join(
        f'<tr><td><a href="#{_anchor(method, path)}"><code>{method} {escape(path)}</code></a></td>'
        f"<td>{escape(operation['summary'])}</td></tr>"
        for method, path, operation in operations
    )
    sections = "".join(_section(document, address, *each) for each in operations)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: HTTP API</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1>"
        f"<p>The HTTP API of this hub, omni-discovery {version}, in the shapes of OpenAI's clients: their "
        f"<code>base_url</code> is <code>{escape(address)}/v1</code>. For programs: "
        '<a href="openapi.json">/openapi.json</a>.</p>'
        "<p>Where the hub asks for a key, send it with each request: "
        "<code>-H 'Authorization: Bearer KEY'</code>.</p>"
        f"<table>{rows}</table>{sections}</body></html>\n"
    )


def _anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method}{path}".lower()).strip("-")


def _section(document: Mapping[str, Any], address: str, method: str, path: str, operation: Mapping[str, Any]) -> str:
    content: Mapping[str, Any] = operation.get("requestBody", {}).get("content", {})
    answers = ", ".join(f"<code>{escape(each)}</code>" for each in operation["responses"]["200"]["content"])
    fields = "".join(_fields(document, each["schema"]) for each in content.values())
    return (
        f'<h2 id="{_anchor(method, path)}"><code>{method} {escape(path)}</code></h2>'
        f"<p>{escape(operation['summary'])} The answer is {answers}.</p>"
        f"<pre>{escape(_curl(document, method, address + path, operation, content))}</pre>{fields}"
    )


def _curl(
    document: Mapping[str, Any], method: str, url: str, operation: Mapping[str, Any], content: Mapping[str, Any]
) -> str:
    """A command that asks this route."""
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "path":
            url = url.replace(f"{{{parameter['name']}}}", quote(parameter["example"]))
    words = ["curl", url, *(["-X", method] if method not in {"GET", "POST"} else [])]
    # Of a body that may be sent as JSON and as a form, the first.
    for kind, body in tuple(content.items())[:1]:
        if "example" in body:
            words += ["-H", f"Content-Type: {kind}", "-d", json.dumps(body["example"], ensure_ascii=False)]
            continue
        schema = _resolved(document, body["schema"])
        for name in schema["required"]:
            # What has no example is a file.
            (value,) = schema["properties"][name].get("examples", ["@picture.png"])
            words += ["-F", f"{name}={value}"]
    if next(iter(operation["responses"]["200"]["content"])).startswith(("audio/", "video/")):
        words += ["--output", "answer"]
    return shlex.join(words)


def _fields(document: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The fields of a body: a table of those that are served, and the names of the others."""
    schema = _resolved(document, reference)
    required = schema.get("required", ())
    neutral = {name: each for name, each in schema["properties"].items() if each.get("description") == NOT_SERVED}
    served = {name: each for name, each in schema["properties"].items() if name not in neutral}
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(' or '.join(_kinds(document, each)))}"
        f"{escape(_default(each))}</td></tr>"
        for name, each in sorted(served.items(), key=lambda item: item[0] not in required)
    )
    listed = ", ".join(
        f"<code>{escape(name)}</code> ({escape(', '.join(map(json.dumps, each['enum'])))})"
        for name, each in neutral.items()
    )
    more = f"<p>Not served, and taken only with these values: {listed}.</p>" if neutral else ""
    count = f"{len(served)} fields; {', '.join(required) or 'none'} needed"
    return f"<details><summary>{escape(count)}</summary><table>{rows}</table>{more}</details>"


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    found: Mapping[str, Any] = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return found


def _kinds(document: Mapping[str, Any], schema: Mapping[str, Any]) -> list[str]:
    """What a value may be, in words; nothing for null."""
    schema = _resolved(document, schema)
    if "anyOf" in schema:
        return [kind for each in schema["anyOf"] for kind in _kinds(document, each)]
    if "enum" in schema:
        return [json.dumps(each) for each in schema["enum"] if each is not None]
    kind = schema.get("type")
    if kind in {None, "null"}:
        return []
    bounds = ", ".join(text.format(schema[name]) for name, text in _BOUNDS if name in schema)
    inner = ""
    if kind == "array" and "items" in schema:
        inner = f" of {' or '.join(_kinds(document, schema['items'])) or 'anything'}"
    elif kind == "object":
        inner = "".join(_members(document, schema))
    elif schema.get("format") == "binary":
        kind = "file"
    return [f"{kind}{inner}" + (f" ({bounds})" if bounds else "")]


def _members(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[str]:
    names = ", ".join(schema.get("properties", ()))
    if names:
        yield f" with {names}"
    values = schema.get("additionalProperties")
    if isinstance(values, Mapping):
        yield f" of {' or '.join(_kinds(document, values))}"


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    return "" if value in (None, "", {}, []) else f"; default {json.dumps(value)}"
