"""GET /v1/docs: the OpenAPI document as a page for people. Plain HTML made here: no script, nothing from elsewhere."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from starlette.responses import Response

from afluente.web.api.openapi import document
from afluente.web.api.problems import KINDS, TYPES_AT

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem 1.5rem 4rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line); } h3 code { font-size: 1.05em; }
code, pre { font: 14px/1.45 ui-monospace, monospace; } code { background: var(--soft); padding: 0 .25em; }
pre { background: var(--soft); padding: .75rem; overflow-x: auto; } pre code { background: none; padding: 0; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
"""
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'"


def answer() -> Response:
    """The page."""
    headers = {
        "cache-control": "public, max-age=300",
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(_page(), 200, headers, "text/html; charset=utf-8")


@cache
def _page() -> str:
    found = document()
    title = html.escape(found["info"]["title"])
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
        f"<h1>{title} {html.escape(found['info']['version'])}</h1>",
        *_paragraphs(found["info"]["description"]),
        '<p>The same for machines: <a href="/v1/openapi.json">/v1/openapi.json</a> (OpenAPI 3.1).</p>',
    ]
    for tag in found["tags"]:
        parts.append(f"<h2>{html.escape(tag['name'].capitalize())}</h2>")
        parts.append(f"<p>{_inline(tag['description'])}</p>")
        for path, item in found["paths"].items():
            for method, operation in item.items():
                if method != "parameters" and tag["name"] in operation["tags"]:
                    parts += _operation(path, method, operation, item.get("parameters", []))
    parts.append("<h2>Bodies and answers</h2>")
    for name, schema in found["components"]["schemas"].items():
        parts += _schema(name, schema)
    parts.append("<h2>Problems</h2>")
    for kind in KINDS.values():
        anchor = TYPES_AT.partition("#")[2] + kind.slug
        parts.append(f'<h3 id="{anchor}"><code>{kind.slug}</code> {kind.status}</h3>')
        parts.append(f"<p>{html.escape(kind.title)}. {_inline(kind.meaning)}</p>")
    parts.append("</body></html>")
    return "\n".join(parts)


def _operation(path: str, method: str, operation: dict[str, Any], shared: list[Any]) -> Iterator[str]:
    yield f'<h3 id="{operation["operationId"]}"><code>{method.upper()} {html.escape(path)}</code></h3>'
    yield f"<p>{html.escape(operation['summary'])}. {_inline(operation['description'])}</p>"
    parameters = [*shared, *operation.get("parameters", [])]
    if parameters:
        rows = [(f"{p['name']} ({p['in']})", _type(p["schema"]), p.get("description", "")) for p in parameters]
        yield _table(("Parameter", "Type", "Meaning"), rows)
    for media_type in operation.get("requestBody", {}).get("content", {}).values():
        yield f"<p>Body: {_type(media_type['schema'])}</p>"
    rows = []
    for status, response in operation["responses"].items():
        found = _resolved(response)
        content: dict[str, Any] = next(iter(found.get("content", {}).values()), {"schema": {}})
        rows.append((status, _type(content["schema"]), found["description"]))
    yield _table(("Status", "Answer", "Meaning"), rows)


def _schema(name: str, schema: dict[str, Any]) -> Iterator[str]:
    yield f'<h3 id="schema-{name}">{html.escape(name)}</h3>'
    if text := schema.get("description"):
        yield f"<p>{_inline(text)}</p>"
    required = schema.get("required", [])
    rows = [
        (field + ("" if field in required else " (optional)"), _type(kind), kind.get("description", ""))
        for field, kind in schema.get("properties", {}).items()
    ]
    yield _table(("Field", "Type", "Meaning"), rows)
    for example in schema.get("examples", []):
        yield f"<pre><code>{html.escape(json.dumps(example, indent=2, ensure_ascii=False))}</code></pre>"


def _table(names: tuple[str, str, str], rows: list[tuple[str, str, str]]) -> str:
    """A table; the middle column is HTML already."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(
        f"<tr><td><code>{html.escape(first)}</code></td><td>{second}</td><td>{_inline(third)}</td></tr>"
        for first, second, third in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _type(schema: dict[str, Any]) -> str:
    """A schema in a few words of HTML."""
    if reference := schema.get("$ref"):
        name = html.escape(reference.rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    for word in ("oneOf", "anyOf"):
        if alternatives := schema.get(word):
            return " or ".join(dict.fromkeys(_type(one) for one in alternatives))
    if "enum" in schema and len(schema["enum"]) < 10:
        return " | ".join(html.escape(json.dumps(value)) for value in schema["enum"])
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    text = " or ".join(kind) if isinstance(kind, list) else kind
    return html.escape(f"{text} ({schema['format']})" if "format" in schema else text)


def _resolved(value: dict[str, Any]) -> dict[str, Any]:
    found: Any = value
    if reference := value.get("$ref"):
        found = document()
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
    return dict(found)


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield f"<p>{_inline(paragraph)}</p>"


def _inline(text: str) -> str:
    """The little Markdown that descriptions use: `code` and **bold**."""
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
