"""Every text that goes into a page comes out as text."""

from __future__ import annotations

from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from quantroute._html import Html, joined, notebook_table, tag, text


class Reader(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.data = ""
        self.seen: list[tuple[str, list[tuple[str, str | None]]]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, attrs))

    def handle_data(self, data: str) -> None:
        self.data += data


fit = st.text(
    st.characters(
        exclude_categories=["Cc", "Cs", "Cf"], include_characters="<>&\"'\n", max_codepoint=0x1FFFF
    )
)


@settings(deadline=None)  # a busy machine is no failure
@given(content=fit, value=fit)
def test_text_and_attributes_come_back_as_they_were(content: str, value: str) -> None:
    read = Reader(tag("p", content, title=value))
    assert read.seen == [("p", [("title", value)])]
    assert read.data == content


@settings(deadline=None)  # a busy machine is no failure
@given(st.text())
def test_any_text_can_be_encoded_and_holds_no_markup(content: str) -> None:
    page = text(content)
    page.encode()
    assert not set(page) & set("<>\"'\0\u202e")


def test_markup_is_not_escaped_twice() -> None:
    assert tag("p", tag("b", "<")) == "<p><b>&lt;</b></p>"
    assert joined([Html("<hr>"), "<hr>"], " & ") == "<hr> &amp; &lt;hr&gt;"


def test_attributes() -> None:
    made = tag("svg", viewBox="0 0 1 1", class_="a", data_x=1, hidden=True, id=None, open=False)
    assert made == '<svg viewBox="0 0 1 1" class="a" data-x="1" hidden></svg>'
    assert tag("br") == "<br>"


def test_a_table_for_notebooks() -> None:
    made = notebook_table(
        ["name", "sum"],
        [["<b>", 1], ["y", 2]],
        caption="c",
        numeric={1},
        dimmed={1},
        footer=["", 3],
    )
    read = Reader(made)
    names = [name for name, _ in read.seen]
    assert names.count("tr") == 4
    assert "b" not in names
    assert read.data == "cnamesum<b>1y23"
    assert made.count("text-align:right") == 4
    assert made.count("opacity:0.6") == 1
