"""The page's head and its sections on money and datasets: from a picture to markup. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quantroute._html import Html, tag
from quantroute.generation import RowClass, RowState, StopReason
from quantroute.ledger import Moment
from quantroute.report._charts import Bar, Line, bars, lines
from quantroute.report._facts import WantedDataset
from quantroute.report._parts import card, legend, note, page_table, tile
from quantroute.report._picture import Picture
from quantroute.report._scale import per_million_text, short_number, span_text, usd_text
from quantroute.report._tables import statement_totals

__all__ = ["datasets", "headline", "in_flight", "money", "tiles", "under_way_s"]

#: Longer than this without any record is a pause, not a part of the run.
_PAUSE_S: Final = 120.0
#: No attempt takes longer. What seems under way beyond it is of a killed run or a sleeping machine.
_LONGEST_ATTEMPT_S: Final = 3_600.0
#: A cap so far above what was ever committed would flatten the picture.
_FAR_CAP: Final = 4
_DONE: Final = StopReason.DONE.value
_ENDINGS: Final = {
    StopReason.CAP_REACHED.value: "stopped by a cap",
    StopReason.OUT_OF_CREDITS.value: "stopped: account out of funds",
    StopReason.KEY_REJECTED.value: "stopped: key rejected",
    StopReason.ACCOUNT.value: "stopped by the account",
    StopReason.NO_ENDPOINT.value: "stopped: no endpoint left",
}


def headline(picture: Picture) -> Html:
    """Name, model, and whether it is still going on."""
    look, reason = picture.look, picture.events.stop_reason
    if look.is_live:
        state, style = "under way", "live"
    elif reason:
        state, style = _ENDINGS.get(reason, reason), "ok" if reason == _DONE else "warn"
    else:
        state, style = "not running", "plain"
    return tag(
        "header",
        tag("h1", look.run.name, " ", tag("span", state, class_=f"badge {style}")),
        tag(
            "p",
            str(look.run.config.get("model", "")),
            f" · {span_text(under_way_s(look.moments))} under way · as of ",
            tag("time", f"{picture.at:%Y-%m-%d %H:%M:%S} UTC", datetime=picture.at.isoformat()),
        ),
    )


def tiles(picture: Picture) -> Html:
    """The figures one looks for first."""
    look = picture.look
    totals = statement_totals(look.statement)
    answers = sum(item.answers for item in look.qualities)
    accepted = sum(item.accepted for item in look.qualities)
    accepted_tokens = sum(item.accepted_tokens for item in look.qualities)
    elapsed_s = under_way_s(look.moments)
    cap = "no cap" if look.cap_pusd is None else f"of {usd_text(look.cap_pusd)} cap"
    held = f", {usd_text(look.held_pusd)} held" if look.held_pusd else ""
    unfinished = sum(
        count.rows for count in look.counts if count.state in (RowState.REFUSED, RowState.GAVE_UP)
    )
    return tag(
        "div",
        tile(
            "Spent",
            usd_text(look.posted_pusd),
            f"{cap}{held}",
            share=look.posted_pusd / look.cap_pusd if look.cap_pusd else None,
        ),
        tile(
            "Output tokens",
            short_number(totals["output"]),
            f"{short_number(totals['reasoning'])} of them reasoning",
        ),
        tile(
            "Accepted answers",
            f"{accepted / answers:.1%}" if answers else "-",
            f"{accepted:,} of {answers:,}" + (f"; rows failed: {unfinished:,}" * bool(unfinished)),
            share=accepted / answers if answers else None,
        ),
        tile(
            "Per million accepted",
            per_million_text(look.posted_pusd, accepted_tokens),
            "everything paid, input and waste included",
        ),
        tile(
            "Throughput",
            f"{short_number(round(totals['output'] / elapsed_s))} tok/s" if elapsed_s else "-",
            f"over {span_text(elapsed_s)}",
        ),
        tile(
            "Quality alarms",
            f"{len(picture.alarms):,}",
            "valid however often one looks" if picture.alarms else "no endpoint is credibly worse",
        ),
        class_="tiles",
    )


def money(picture: Picture) -> Html:
    """What was spent and set aside over time, against the cap."""
    look = picture.look
    if not look.moments:
        return card("Spending over time", note("Nothing has been asked yet."))
    timed, breaks = _on_one_axis(look.moments)
    cap_pusd, peak_pusd = look.cap_pusd, look.peak_pusd
    is_far = bool(cap_pusd and cap_pusd > _FAR_CAP * max(peak_pusd, 1))
    series = [
        Line(
            name="posted and reserved",
            points=[(x, _dollars(m.posted_pusd + m.pending_pusd)) for x, m in timed],
            style="c2 soft",
            is_area=True,
            is_step=True,
        ),
        Line(
            name="posted",
            points=[(x, _dollars(m.posted_pusd)) for x, m in timed],
            style="c1",
            is_area=True,
            is_step=True,
        ),
    ]
    entries = [("c1", "spent"), ("c2 soft", "reserved for requests on their way")]
    if not is_far and cap_pusd is not None:
        caps = [(x, _dollars(m.cap_pusd)) for x, m in timed if m.cap_pusd is not None]
        series.append(Line(name="cap", points=caps, style="cap", is_step=True))
        entries.append(("cap", "hard cap"))
    said = (
        f"Spent {usd_text(look.posted_pusd)}; at most {usd_text(peak_pusd)} were committed at once"
    )
    said += "." if cap_pusd is None else f", the cap is {usd_text(cap_pusd)}."
    if is_far:
        said += " The cap is far above this picture."
    return card(
        "Spending over time",
        lines(
            series,
            title="Spending over time",
            description=said,
            x_text=_time_text,
            y_text=_axis_usd,
            breaks=breaks,
            highest=0.0 if is_far else _dollars(cap_pusd or 0),
        ),
        legend(entries),
        note(said, " Dashed upright lines are pauses left out." if breaks else ""),
    )


def in_flight(picture: Picture) -> Html:
    """Requests without an end, over time."""
    timed, breaks = _on_one_axis(picture.look.moments)
    most = max((moment.in_flight for _, moment in timed), default=0)
    points = [(x, float(moment.in_flight)) for x, moment in timed]
    said = f"At most {most:,} requests had no known outcome at once."
    return card(
        "Requests under way",
        lines(
            [Line(name="in flight", points=points, style="c1", is_step=True)],
            title="Requests under way over time",
            description=said,
            x_text=_time_text,
            breaks=breaks,
        ),
        note(said),
    )


def under_way_s(moments: Sequence[Moment]) -> float:
    """How long the run was under way, pauses between its starts left out."""
    timed, _ = _on_one_axis(moments)
    return timed[-1][0] if timed else 0.0


def _on_one_axis(moments: Sequence[Moment]) -> tuple[list[tuple[float, Moment]], list[float]]:
    """Moments with the seconds that the run had been under way, and where pauses were cut."""
    timed: list[tuple[float, Moment]] = []
    breaks: list[float] = []
    now_s, last_s = 0.0, moments[0].at_s if moments else 0.0
    for moment in moments:
        step_s = max(0.0, moment.at_s - last_s)
        is_idle = not timed or not timed[-1][1].in_flight
        if step_s > (_PAUSE_S if is_idle else _LONGEST_ATTEMPT_S):
            breaks.append(now_s)
            step_s = 0.0
        now_s, last_s = now_s + step_s, moment.at_s
        timed.append((now_s, moment))
    return timed, breaks


def datasets(picture: Picture) -> Html:
    """Accepted tokens against targets, rows by class, money."""
    look = picture.look
    wanted = {item.name: item for item in picture.facts.datasets} if picture.facts else {}
    names = sorted({*look.accepted, *wanted, *look.run.config.get("datasets", ())})
    if not names:
        return Html("")
    rows = [_dataset_bar(name, picture, wanted.get(name)) for name in names]
    goals = any(row.goal for row in rows)
    said = "Output tokens of accepted rows" + (
        "; the mark is what was wanted." if goals else "; no targets are known."
    )
    return card(
        "Datasets",
        bars(rows, title="Accepted output tokens by dataset", description=said),
        note(said),
        page_table(
            ["dataset", "rows", "spent", "cap"],
            [_dataset_row(name, picture, wanted.get(name)) for name in names],
            caption="Datasets: rows by class and money",
            numeric={2, 3},
        ),
    )


def _dataset_bar(name: str, picture: Picture, wanted: WantedDataset | None) -> Bar:
    accepted = picture.look.accepted.get(name)
    tokens = accepted.output_tokens if accepted else 0
    goal = wanted.target_output_tokens if wanted else None
    words = f"{short_number(tokens)} tokens"
    if goal:
        words = f"{short_number(tokens)} of {short_number(goal)} tokens, {tokens / goal:.0%}"
    return Bar(label=name, value=tokens, text=words, goal=goal)


def _dataset_row(name: str, picture: Picture, wanted: WantedDataset | None) -> tuple[object, ...]:
    look = picture.look
    spent_pusd = sum(
        line.posted_pusd for line in look.statement if line.account.split("/")[-1] == name
    )
    counts = [
        f"{count.rows:,} {_class_words(count.row_class, count.state)}"
        for count in look.counts
        if count.dataset == name
    ]
    if wanted and wanted.target_rows:
        counts.append(f"{wanted.target_rows:,} wanted")
    cap = "-" if wanted is None or wanted.cap_pusd is None else usd_text(wanted.cap_pusd)
    return name, ", ".join(counts) or "none yet", usd_text(spent_pusd), cap


def _class_words(row_class: RowClass | None, state: RowState) -> str:
    return (row_class.value if row_class else state.value).replace("_", " ")


# Display only: money becomes a float where it turns into a place on a picture.


def _dollars(amount_pusd: int) -> float:
    return amount_pusd / 10**12


def _axis_usd(value: float) -> str:
    return f"${value:g}" if value < 1_000 else f"${value:,.0f}"


def _time_text(seconds: float) -> str:
    return "0" if not seconds else span_text(seconds).replace(".0", "")
