"""HTML from values: every text escaped, tables for pages and for notebooks. Pure.

`Html` marks what may stand in a page as it is; everything else is text and is escaped on its way
in. Names, reasons and answers come from services and models: none of them is ever trusted.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Sequence
from typing import Final

__all__ = ["Html", "joined", "notebook_table", "tag", "text"]

_VOID: Final = frozenset({"br", "col", "hr", "meta"})
#: Characters that no page may hold, and those that turn the direction of what follows them.
_UNFIT: Final = dict.fromkeys(
    (
        *(code for code in range(0x20) if chr(code) not in "\t\n\r"),
        *range(0x7F, 0xA0),
        *range(0x202A, 0x202F),
        *range(0x2066, 0x206A),
        *range(0xD800, 0xE000),
    ),
    "\N{REPLACEMENT CHARACTER}",
)


class Html(str):
    """Markup that is safe to put into a page as it stands."""

    __slots__ = ()


def text(value: object) -> Html:
    """`value` as text in a page: markup stays as it is, everything else is escaped."""
    if isinstance(value, Html):
        return value
    return Html(html.escape(str(value).translate(_UNFIT), quote=True))


def joined(parts: Iterable[object], separator: str = "") -> Html:
    """The parts one after the other, each of them escaped if it is not markup."""
    return Html(text(separator).join(map(text, parts)))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element. A trailing underscore of an attribute's name is dropped, others become dashes.

    Attributes that are None or False are left out, True stands without a value.
    """
    shown = "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{joined(content)}</{name}>")


def notebook_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str = "",
    numeric: Collection[int] = (),
    dimmed: Collection[int] = (),
    footer: Sequence[object] = (),
) -> Html:
    """A self-contained table for a notebook cell.

    Args:
        numeric: columns that stand to the right.
        dimmed: rows that matter less.
        footer: a last row of sums.
    """
    aligned = [
        f"text-align:{'right' if column in numeric else 'left'}" for column in range(len(headings))
    ]

    def line(cells: Sequence[object], kind: str, *, style: str | None = None) -> Html:
        return tag(
            "tr",
            *(tag(kind, cell, style=side) for cell, side in zip(cells, aligned, strict=True)),
            style=style,
        )

    body = [
        line(cells, "td", style="opacity:0.6" if index in dimmed else None)
        for index, cells in enumerate(rows)
    ]
    return tag(
        "table",
        tag("caption", caption, style="text-align:left") if caption else "",
        tag("thead", line(headings, "th")),
        tag("tbody", *body),
        tag("tfoot", line(footer, "th")) if footer else "",
    )


def _attribute(key: str) -> str:
    return "viewBox" if key == "viewBox" else key.rstrip("_").replace("_", "-")
