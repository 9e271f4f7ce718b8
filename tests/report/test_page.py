"""The page of a run: true, whole, harmless whatever the run holds, and readable on any screen."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import os
import re
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

import pytest

from browser_support import needs_browser, opened_tab
from cli_support import quantroute
from quantroute.money import format_usd
from quantroute.report import Picture, RunWatcher, run_page
from sqlite_support import database

AT = dt.datetime(2026, 11, 30, 12, tzinfo=dt.UTC)
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><svg/onload=alert(3)>\ud800\u202e"
VOID = {"meta", "link", "br", "hr", "col"}


class Outline(HTMLParser):
    """Elements, attributes and text; fails on tags that do not close each other."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def picture_of(folder: Path) -> Picture:
    return RunWatcher(folder, [folder / "run.sqlite"], folder.name).picture(at=AT)


def outline_of(folder: Path) -> Outline:
    return Outline(run_page(picture_of(folder)))


def assert_harmless(page: str) -> None:
    outline = Outline(page)
    assert "script" not in outline.elements
    assert not {"img", "iframe", "object", "embed", "form", "a", "base"} & {*outline.elements}
    assert not [name for name, _ in outline.attributes if name.startswith("on")]
    addresses = [value for name, value in outline.attributes if name in ("src", "href")]
    assert addresses == ["data:,"]
    assert "@import" not in page
    assert "url(" not in page


def test_figures_are_those_of_the_ledger(run_folder: Path) -> None:
    picture = picture_of(run_folder)
    text = outline_of(run_folder).text
    told = quantroute("status", run_folder, "--json").data

    assert picture.look.posted_pusd == told["posted_pusd"]
    assert format_usd(told["posted_pusd"]) in text
    assert picture.look.peak_pusd <= told["cap_pusd"]
    failed = sum(item.count for item in picture.events.failures.values())
    assert failed
    assert f"{failed:,} attempts brought no answer" in text
    accepted = picture.look.accepted["b4"].output_tokens
    assert f"of 90k tokens, {accepted / 90_000:.0%}" in text
    assert "alpha/int4" in text
    assert "truncated" in text


def test_verdicts_tell_why_in_the_words_of_a_run_file(run_folder: Path) -> None:
    text = outline_of(run_folder).text
    assert "no beta/fp4" in text
    assert "fp4 is a re-quantization" in text
    assert "The model's own format is int4." in text


def test_every_picture_has_a_title_and_a_description(run_folder: Path) -> None:
    elements = outline_of(run_folder).elements
    svgs = [index for index, name in enumerate(elements) if name == "svg"]
    assert len(svgs) >= 8
    assert all(elements[index + 1 : index + 3] == ["title", "desc"] for index in svgs)


def test_the_page_is_whole_and_asks_for_nothing(run_folder: Path) -> None:
    page = run_page(picture_of(run_folder))
    assert_harmless(page)
    assert "default-src &#x27;none&#x27;" in page


def test_hostile_text_stays_text(run_folder: Path) -> None:
    evil = EVIL.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    with database(run_folder / "run.sqlite") as store:
        store.execute("UPDATE generation_turns SET endpoint = ?", (evil,))
        store.execute("UPDATE generation_rows SET dataset = ?", (evil,))
        store.execute("UPDATE journal SET endpoint = ? WHERE kind = 'posted'", (evil,))
        store.execute("UPDATE generation_runs SET name = ?", (evil,))
    facts = json.loads((run_folder / "facts.json").read_text())
    for verdict in facts["verdicts"]:
        verdict.update(endpoint=EVIL, provider=EVIL, reasons=[EVIL], evidence=EVIL, native=EVIL)
    facts["datasets"][0]["name"] = EVIL
    (run_folder / "facts.json").write_text(json.dumps(facts))
    with (run_folder / "events.jsonl").open("a") as file:
        for event in ("attempt failed", EVIL):
            line = {"event": event, "level": "error", "kind": EVIL, "problem": EVIL, EVIL: EVIL}
            file.write(json.dumps(line) + "\n")
    (run_folder / "audit.json").write_text(
        json.dumps({"endpoints": {EVIL: {EVIL: EVIL, "p_value": 0.01}}, EVIL: [EVIL]})
    )
    (run_folder / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "split": EVIL, "loss": 2.0}) + "\n"
    )
    (run_folder / "acceptance.json").write_text(
        json.dumps({"trained": [{"dataset": EVIL, "length": 2.5}], "controls": {EVIL: {}}})
    )

    page = run_page(picture_of(run_folder))

    assert_harmless(page)
    assert page.count("&lt;script&gt;alert(1)") > 12
    page.encode()  # no half of a surrogate pair is left
    assert "\u202e" not in page


def test_what_other_stages_left_is_shown(run_folder: Path) -> None:
    (run_folder / "audit.json").write_text(
        json.dumps({"alpha": 0.05, "endpoints": [{"endpoint": "alpha/int4", "p_value": 0.43}]})
    )
    (run_folder / "train").mkdir()
    (run_folder / "train/metrics.jsonl").write_text(
        '{"step": 10, "split": "train", "loss": 3.5, "cumulative": [0.5, 0.25]}\n'
        '{"step": 20, "split": "train", "loss": 2.25, "cumulative": [0.75, 0.5]}\n'
        '{"torn'
    )
    (run_folder / "evaluation.json").write_text(
        json.dumps(
            {
                "depth": 3,
                "trained": [{"dataset": None, "length": 2.625}, {"dataset": "b3", "length": 2.5}],
                "untrained": {"length": 1.0625},
                "controls": {"wrong_layer": {"length": 1.25}},
            }
        )
    )
    outline = outline_of(run_folder)
    assert "0.43" in outline.text
    assert "train: 2.25 at step 20" in outline.text
    assert "trained, all rows 2.62" in outline.text
    assert "control: wrong layer 1.25" in outline.text
    assert "At most 4 are possible." in outline.text
    assert "Audit: no file" not in outline.text


BY_WEIGHTS = {
    "endpoint": "alpha/int4",
    "outcome": "fails",
    "cause": {"text": "precision: nvfp4", "confidence": 0.99},
    "rows": 40,
    "tokens": 3_200,
    "drift": {"z": 9.6},
    "effect": {"mean_nats": 0.4552, "low": 0.36, "high": None},
    "p_adjusted": 0.0001,
    "hints": ["prompts were billed with 9 tokens more"],
}
BY_STRINGS = {
    "endpoint": "beta/int4",
    "outcome": "passes",
    "test": {"answers": [100, 98], "discrepancy": 0.0125, "limit": 0.03},
    "greedy": {"equal_share": 0.75},
    "p_adjusted": 0.4,
}


@pytest.mark.parametrize(
    ("item", "shown"),
    [
        (BY_WEIGHTS, ("precision: nvfp4", "+0.4552", "+0.3600 to -", "9 tokens more")),
        (BY_STRINGS, ("passes", "greedy answers equal", "0.75", "1 in 20 above")),
    ],
    ids=["weights", "strings"],
)
def test_an_audit_is_shown_in_a_few_words(
    run_folder: Path, item: dict[str, object], shown: tuple[str, ...]
) -> None:
    (run_folder / "audit.json").write_text(json.dumps({"endpoints": [item]}))
    outline = outline_of(run_folder)
    for words in shown:
        assert words in outline.text
    assert "confidence" not in outline.text  # the rest is in the file


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[1, 2]",
        '"text"',
        "\x00\x01",
        '{"endpoints": 3}',
        "[" * 100_000,
        '{"endpoints": [{"n": %s}]}' % ("9" * 400),
    ],
)
def test_odd_files_of_other_stages_do_no_harm(run_folder: Path, content: str) -> None:
    for name in ("audit.json", "metrics.jsonl", "acceptance.json"):
        (run_folder / name).write_text(content)
    assert_harmless(run_page(picture_of(run_folder)))


def test_what_is_absent_is_said(run_folder: Path) -> None:
    for name in ("facts.json", "events.jsonl"):
        (run_folder / name).unlink()
    text = outline_of(run_folder).text
    assert "there is no facts.json" in text
    assert "there is no events.jsonl" in text
    assert "Audit: no file" in text
    assert "Training: no file" in text
    assert "Acceptance: no file" in text


def test_damaged_facts_are_said_to_be_so(run_folder: Path) -> None:
    (run_folder / "facts.json").write_text('{"at": "x", "verdicts": [{"endpoint": 3}]}')
    assert "facts.json: verdicts.0." in outline_of(run_folder).text


def test_the_command_writes_the_page_and_nothing_else(run_folder: Path) -> None:
    def digest() -> str:
        return hashlib.sha256((run_folder / "run.sqlite").read_bytes()).hexdigest()

    before = digest()
    ended = quantroute("report", run_folder)
    assert ended.code == 0
    assert ended.out == f"the page is {run_folder / 'report.html'}\n"
    assert_harmless((run_folder / "report.html").read_text())
    assert quantroute("report", run_folder, "--json").data == {
        "path": str(run_folder / "report.html")
    }
    assert digest() == before


def test_a_folder_that_nobody_may_write_is_read(run_folder: Path, tmp_path: Path) -> None:
    for name in ("run.sqlite-shm", "run.sqlite-wal"):
        (run_folder / name).unlink(missing_ok=True)
    run_folder.chmod(0o555)
    try:
        if os.access(run_folder, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert quantroute("report", run_folder, "--out", tmp_path / "page.html").code == 0
    finally:
        run_folder.chmod(0o755)


def test_other_files_are_refused(tmp_path: Path) -> None:
    assert quantroute("report", tmp_path).code == 2
    (tmp_path / "run.sqlite").write_text("no database at all, but long enough to look at" * 50)
    assert quantroute("report", tmp_path).code == 7
    (tmp_path / "run.sqlite").unlink()
    with database(tmp_path / "run.sqlite") as store:
        store.execute("CREATE TABLE other (x)")
    ended = quantroute("report", tmp_path)
    assert ended.code == 7
    assert "not a file of quantroute" in ended.err


def test_live_and_a_file_exclude_each_other(run_folder: Path, tmp_path: Path) -> None:
    ended = quantroute("report", run_folder, "--live", "--out", tmp_path / "x.html")
    assert ended.code == 2
    assert "leave --out out" in ended.err


@needs_browser
@pytest.mark.browser
async def test_a_browser_shows_it_without_complaint(run_folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(run_page(picture_of(run_folder)))
    async with opened_tab(tmp_path / "profile") as tab:
        for width in (400, 1400):
            await tab.visit(page.as_uri(), width=width)
            assert tab.complaints == []
            assert {urllib.parse.urlsplit(url).scheme for url in tab.requests} <= {"file", "data"}
            # Nothing sticks out sideways, and every picture has a size.
            assert await tab.evaluate("document.documentElement.scrollWidth") <= width
            sizes = await tab.evaluate(
                "[...document.querySelectorAll('svg')].map(x => x.getBoundingClientRect().width)"
            )
            assert len(sizes) >= 8
            assert min(sizes) > 250


def test_the_badge_says_how_it_ended(run_folder: Path) -> None:
    assert re.search(r'class="badge ok">done<', run_page(picture_of(run_folder)))
