"""Pieces that sections are made of: cards, tiles, tables, legends. Pure; all text is escaped."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from quantroute._html import Html, joined, tag
from quantroute.report._extras import is_number
from quantroute.report._scale import short_number

__all__ = ["card", "facts_list", "legend", "note", "page_table", "plain_tables", "tile"]

_MOST_ROWS: Final = 200
_MOST_COLUMNS: Final = 9
_MOST_TEXT: Final = 300


def card(title: str, *content: object, wide: bool = False) -> Html:
    """One box of a section."""
    return tag("div", tag("h3", title), *content, class_="card wide" if wide else "card")


def tile(name: str, value: object, more: object = "", *, share: float | None = None) -> Html:
    """A figure in large letters, with a bar below it if it is a share of something."""
    bar: object = ""
    if share is not None:
        filled = tag("span", style=f"width:{min(1.0, max(0.0, share)) * 100:.1f}%")
        bar = tag("div", filled, class_="meter", aria_hidden="true")
    return tag(
        "div",
        tag("div", name, class_="name"),
        tag("div", value, class_="value"),
        bar,
        tag("div", more, class_="more") if more else "",
        class_="tile",
    )


def note(*content: object, style: str = "note") -> Html:
    """A sentence below a chart."""
    return tag("p", *content, class_=style)


def legend(items: Iterable[tuple[str, str]]) -> Html:
    """What the colours mean: (class of the style sheet, words)."""
    return tag(
        "ul",
        *(tag("li", tag("i", class_=style, aria_hidden="true"), words) for style, words in items),
        class_="legend",
    )


def page_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    caption: str,
    numeric: Collection[int] = (),
    dimmed: Collection[int] = (),
    wordy: bool = False,
) -> Html:
    """A table of the page. A wordy one becomes a list of small cards on a narrow screen.

    Args:
        caption: for readers who do not see it; the heading above says the same.
    """
    sides = ["num" if column in numeric else None for column in range(len(headings))]
    head = tag(
        "tr",
        *(
            tag("th", name, scope="col", role="columnheader", class_=side)
            for name, side in zip(headings, sides, strict=True)
        ),
        role="row",
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, role="cell", class_=side, data_label=name or None)
                for cell, side, name in zip(cells, sides, headings, strict=True)
            ),
            role="row",
            class_="dim" if index in dimmed else None,
        )
        for index, cells in enumerate(rows)
    ]
    table = tag(
        "table",
        tag("caption", caption),
        tag("thead", head, role="rowgroup"),
        tag("tbody", *body, role="rowgroup"),
        role="table",
        class_="wordy" if wordy else None,
    )
    # What scrolls sideways must be reachable with the keyboard too.
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)


def facts_list(facts: Iterable[tuple[str, object]]) -> Html:
    """Names and values in two columns."""
    return tag("dl", *(joined((tag("dt", name), tag("dd", value))) for name, value in facts))


def plain_tables(data: Mapping[str, Any], *, caption: str) -> Html:
    """Whatever JSON holds: plain values as a list, lists of objects as tables, the rest as text."""
    plain: list[tuple[str, object]] = []
    tables: list[Html] = []
    for key, value in data.items():
        name = _words(key)
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            tables += [tag("h4", name), table_of(value, caption=f"{caption}: {name}")]
        elif value not in (None, "", [], {}):
            plain.append((name, _cell(value)))
    return joined((facts_list(plain[:_MOST_ROWS]) if plain else "", *tables))


def table_of(rows: Sequence[Mapping[str, Any]], *, caption: str) -> Html:
    """Objects of one kind, one a row; a column per key that occurs."""
    keys = list(dict.fromkeys(str(key) for row in rows for key in row))[:_MOST_COLUMNS]
    numeric = {
        column for column, key in enumerate(keys) if any(is_number(row.get(key)) for row in rows)
    }
    return page_table(
        [_words(key) for key in keys],
        [[_cell(row.get(key)) for key in keys] for row in rows[:_MOST_ROWS]],
        caption=caption,
        numeric=numeric,
        wordy=True,
    )


def _words(key: object) -> str:
    return str(key).replace("_", " ")


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return short_number(float(value))
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= _MOST_TEXT else f"{shown[:_MOST_TEXT]}…"
