"""The browser's files: modules of ours, libraries as their authors published them, a stylesheet, and the page itself.

Modules name each other (`from "sloop/chart"`), and an import map says where each is: at a path of the server, or, in a
report that is one file, in the map itself. So there is no build step, and both are the same modules.
"""

from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Final, NamedTuple

import msgspec

STATIC: Final = files("sloop.page").joinpath("static")
VENDOR: Final = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/hooks.mjs",
    "htm": "vendor/htm.mjs",
}
"""Libraries that are modules, by the names under which they are imported."""
CHARTS: Final = "vendor/uPlot.iife.min.js"
"""uPlot is a plain script, which is a third of its module's size."""
KINDS: Final = {
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
STYLES: Final = ("vendor/uPlot.min.css", "page.css")


class IndexPage(NamedTuple):
    """The page, and the content security policy under which it runs."""

    html: bytes
    policy: str


def modules() -> dict[str, str]:
    """Every module, by the name under which it is imported: the path of its file."""
    ours = sorted(entry.name for entry in STATIC.iterdir() if entry.name.endswith(".js"))
    return VENDOR | {f"sloop/{name.removesuffix('.js')}": name for name in ours}


def text_of(path: str) -> str:
    """A file as text."""
    return STATIC.joinpath(path).read_text("utf-8")


@cache
def asset(path: str) -> tuple[bytes, str] | None:
    """A file with its content type; None if there is none with this name."""
    known = {*modules().values(), CHARTS, *STYLES, "icon.svg"}
    if path not in known:
        return None
    return text_of(path).encode(), KINDS[path[path.rindex(".") :]]


@cache
def index() -> IndexPage:
    """The page of a server, which loads the other files."""
    imports = msgspec.json.encode({"imports": {name: f"/static/{path}" for name, path in modules().items()}}).decode()
    links = "".join(f'<link rel="stylesheet" href="/static/{path}">' for path in STYLES)
    start = '<script type="module" src="/static/main.js"></script>'
    head = (
        f'{links}<link rel="icon" href="/static/icon.svg"><script type="importmap">{imports}</script>'
        f'<script src="/static/{CHARTS}"></script>'
    )
    digest = b64encode(sha256(imports.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return IndexPage(_page(head, start, "sloop").encode(), policy)


def report(picture: bytes, title: str) -> str:
    """The page with the picture of a run in it, as JSON: one file, which loads no other."""
    urls = {
        name: f"data:text/javascript;base64,{b64encode(text_of(path).encode()).decode()}"
        for name, path in modules().items()
    }
    imports = msgspec.json.encode({"imports": urls}).decode()
    styles = "".join(f"<style>{text_of(path)}</style>" for path in STYLES)
    icon = b64encode(text_of("icon.svg").encode()).decode()
    # In a script, only `</` could end the text early, and `<!--` could change how it is read.
    data = picture.decode().replace("<", "\\u003c")
    head = (
        f'{styles}<link rel="icon" href="data:image/svg+xml;base64,{icon}"><script type="importmap">{imports}</script>'
        f"<script>{text_of(CHARTS)}</script>"
    )
    picture_tag = f'<script type="application/json" id="picture">{data}</script>'
    body = f'{picture_tag}<script type="module">import "sloop/main"</script>'
    return _page(head, body, title)


def _page(head: str, body: str, title: str) -> str:
    plain = title.replace("&", "&amp;").replace("<", "&lt;")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{plain}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{head}</head>'
        f'<body><div id="page"></div><noscript>This page needs JavaScript.</noscript>{body}</body></html>\n'
    )
