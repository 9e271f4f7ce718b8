"""The page: one HTML document that needs nothing else, not even a network. Pure."""

from __future__ import annotations

from quantroute._html import Html, joined, tag
from quantroute._version import __version__
from quantroute.report import _endpoint_sections, _later, _sections
from quantroute.report._picture import Picture
from quantroute.report._style import LIVE_SCRIPT, STYLE

__all__ = ["live_page", "page_body", "run_page"]

# Even if something were to slip through: nothing runs and nothing is asked for.
_NOTHING_ELSE = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)


def run_page(picture: Picture) -> str:
    """The whole document for a file."""
    return _document(picture, policy=_NOTHING_ELSE)


def live_page(picture: Picture, *, version: str, nonce: str) -> str:
    """The document for a browser that asks for `data.json` again and again.

    Args:
        version: of what it shows; `data.json` gives the body if that has another.
        nonce: allows the page's own script, and no other; new for each answer.
    """
    policy = f"{_NOTHING_ELSE}; script-src 'nonce-{nonce}'; connect-src 'self'"
    return _document(picture, policy=policy, version=version, nonce=nonce)


def page_body(picture: Picture) -> Html:
    """What changes during a run."""
    extras = picture.extras
    return joined(
        (
            _sections.headline(picture),
            _sections.tiles(picture),
            _section("Money and targets", _sections.money(picture), _sections.datasets(picture)),
            _section(
                "Endpoints",
                _endpoint_sections.endpoints(picture),
                _endpoint_sections.verdicts(picture),
            ),
            _section("Speed", _endpoint_sections.speed(picture), _sections.in_flight(picture)),
            _section("Errors and events", _endpoint_sections.errors(picture)),
            _section("Audit", _later.audit(extras)),
            _section("Drafter", _later.training(extras), _later.acceptance(extras)),
            _absent(picture),
            tag("footer", f"quantroute {__version__}"),
        )
    )


def _section(title: str, *cards: Html) -> Html:
    content = joined(cards)
    if not content:
        return content
    return tag("section", tag("h2", title), tag("div", content, class_="grid"))


def _absent(picture: Picture) -> Html:
    if not picture.absent:
        return Html("")
    items = (tag("li", sentence) for sentence in picture.absent)
    return tag("section", tag("h2", "Not on this page"), tag("ul", *items, class_="absent"))


def _document(picture: Picture, *, policy: str, version: str = "", nonce: str = "") -> str:
    title = f"{picture.look.run.name}: quantroute report"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        # An empty icon: browsers ask the server for one otherwise.
        Html('<link rel="icon" href="data:,">'),
        tag("style", Html(STYLE)),
    )
    is_live = bool(nonce)
    body = tag(
        "body",
        tag("div", "The report's server does not answer.", id="lost", role="status")
        if is_live
        else "",
        tag("main", page_body(picture), id="report", data_version=version if is_live else None),
        tag("script", Html(LIVE_SCRIPT), nonce=nonce) if is_live else "",
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"
