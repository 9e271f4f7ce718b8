"""The page's sections on endpoints, speed, errors and verdicts: from a picture to markup. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from quantroute._html import Html, joined, tag
from quantroute.generation import EndpointQuality, RowClass, Speeds
from quantroute.report._charts import Bar, Box, Part, bars, boxes, stacks
from quantroute.report._facts import JudgedEndpoint
from quantroute.report._parts import card, legend, note, page_table
from quantroute.report._picture import Picture
from quantroute.report._scale import (
    Spread,
    per_million_text,
    seconds_text,
    short_number,
    usd_text,
)

__all__ = ["endpoints", "errors", "speed", "verdicts"]

_MOST_ENDPOINTS: Final = 16
_CLASS_STYLES: Final = {
    RowClass.GOOD: "good",
    RowClass.TRUNCATED: "c2",
    RowClass.LOOP: "c3",
    RowClass.REASONING_ONLY: "c4",
    RowClass.LEAKED_THINKING: "c5",
    RowClass.WRONG_MODE: "c6",
}


def endpoints(picture: Picture) -> Html:
    """What an accepted token cost at each endpoint, and how its answers were."""
    rows = picture.look.qualities
    if not rows:
        return Html("")
    listed = {
        item.endpoint: _price_of(item) for item in (picture.facts.verdicts if picture.facts else ())
    }
    return joined((_cost_card(rows, listed), _quality_card(rows, picture)))


def _cost_card(rows: Sequence[EndpointQuality], listed: dict[str, float | None]) -> Html:
    priced = sorted((item for item in rows if item.accepted_tokens), key=_per_token)
    drawn = [
        Bar(
            label=item.endpoint,
            value=_per_token(item) / 10**6,
            text=f"{per_million_text(item.cost_pusd, item.accepted_tokens)} per M",
            goal=listed.get(item.endpoint),
        )
        for item in priced[:_MOST_ENDPOINTS]
    ]
    said = "Everything paid at an endpoint, per million output tokens of its accepted answers"
    said += "; the mark is its listed output price." if any(bar.goal for bar in drawn) else "."
    lost = sum(item.cost_pusd for item in rows if not item.accepted_tokens)
    return card(
        "Cost of an accepted token",
        bars(drawn, title="Cost per million accepted tokens by endpoint", description=said)
        if drawn
        else "",
        note(said, f" {usd_text(lost)} went where nothing was accepted." if lost else ""),
        *_more(len(priced)),
    )


def _quality_card(rows: Sequence[EndpointQuality], picture: Picture) -> Html:
    served = sorted((item for item in rows if item.answers), key=lambda item: -item.answers)
    seen = [item for item in RowClass if any(row.classes.get(item) for row in served)]
    seen.sort(key=lambda item: item is not RowClass.GOOD)
    drawn = [
        (
            row.endpoint,
            f"{row.rate(RowClass.GOOD):.1%} of {row.answers:,}",
            [_part(row, item) for item in seen],
        )
        for row in served[:_MOST_ENDPOINTS]
    ]
    said = "Answers by class; the figure is the share of accepted ones."
    return card(
        "Quality of answers",
        stacks(drawn, title="Quality of answers by endpoint", description=said) if drawn else "",
        legend((_style(item), item.value.replace("_", " ")) for item in seen),
        note(said),
        *_more(len(served)),
        *(note("Alarm: ", str(alarm), style="alarm") for alarm in picture.alarms),
        tag(
            "details",
            tag("summary", "Rates by class"),
            page_table(
                ["endpoint", "answers", *(item.value.replace("_", " ") for item in seen)],
                [
                    [row.endpoint, f"{row.answers:,}", *(f"{row.rate(x):.1%}" for x in seen)]
                    for row in served
                ],
                caption="Rates of answers by class and endpoint",
                numeric=range(1, len(seen) + 2),
            ),
        ),
    )


def _part(row: EndpointQuality, row_class: RowClass) -> Part:
    return Part(
        name=row_class.value.replace("_", " "),
        share=row.rate(row_class),
        style=_style(row_class),
    )


def _style(row_class: RowClass) -> str:
    return _CLASS_STYLES.get(row_class, "bad")


def _more(count: int) -> list[Html]:
    hidden = count - _MOST_ENDPOINTS
    return [note(f"{hidden:,} more endpoints are in the table.")] if hidden > 0 else []


def speed(picture: Picture) -> Html:
    """How long answers took, by endpoint, and how many requests were under way."""
    speeds = picture.look.speeds
    first = [
        (name, Spread.of(x for x in item.first_byte_s if x > 0)) for name, item in speeds.items()
    ]
    total = [(name, Spread.of(x for x in item.total_s if x > 0)) for name, item in speeds.items()]
    rate = [(name, Spread.of(item.tokens_per_s)) for name, item in speeds.items()]
    return joined(
        (
            _spread_card("Time to the first byte", first, seconds_text, remark=_at_once(speeds)),
            _spread_card("Time of a whole answer", total, seconds_text),
            _spread_card("Output tokens per second of one answer", rate, short_number),
        )
    )


def _at_once(speeds: Mapping[str, Speeds]) -> str:
    """Answers that are not streamed have no first byte of their own."""
    first_s = sum(sum(item.first_byte_s) for item in speeds.values())
    total_s = sum(sum(item.total_s) for item in speeds.values())
    return " Answers came whole: they were not streamed." if first_s > 0.95 * total_s else ""


def _spread_card(
    title: str,
    found: Iterable[tuple[str, Spread | None]],
    words: Callable[[float], str],
    *,
    remark: str = "",
) -> Html:
    rows = [(name, spread) for name, spread in found if spread is not None]
    if not rows:
        return Html("")
    said = f"Box: the middle half of the answers, mark: median, line: 5 to 95%.{remark}"
    return card(
        title,
        boxes(
            [Box(label=name, spread=spread) for name, spread in rows[:_MOST_ENDPOINTS]],
            title=f"{title} by endpoint",
            description=said,
            value_text=words,
        ),
        note(said),
        tag(
            "details",
            tag("summary", "Figures"),
            page_table(
                ["endpoint", "5%", "25%", "50%", "75%", "95%"],
                [
                    [name, *map(words, (s.low, s.first, s.median, s.third, s.high))]
                    for name, s in rows
                ],
                caption=f"{title}: quantiles by endpoint",
                numeric=range(1, 6),
            ),
        ),
    )


def errors(picture: Picture) -> Html:
    """Attempts that failed, by kind, and what else was out of the ordinary."""
    return joined((_failures(picture), _happenings(picture)))


def _failures(picture: Picture) -> Html:
    found = sorted(picture.events.failures.values(), key=lambda item: -item.count)
    ends = Counter({name: picture.events.counts[name] for name in ("row refused", "row given up")})
    if not found:
        said = "No attempt failed." if picture.events.is_there else "No events file: not known."
        return card("Failed attempts", note(said))
    drawn = [
        Bar(label=_kind(item.kind, item.status), value=item.count, text=f"{item.count:,}")
        for item in found[:_MOST_ENDPOINTS]
    ]
    total = sum(item.count for item in found)
    said = f"{total:,} attempts brought no answer; most are asked again. " + ", ".join(
        f"{count:,} {name.replace('row', 'rows')}" for name, count in ends.items()
    )
    return card(
        "Failed attempts",
        bars(drawn, title="Failed attempts by kind", description=said),
        note(said, "."),
        tag(
            "details",
            tag("summary", "What was said"),
            page_table(
                ["kind", "count", "the last one said"],
                [[_kind(x.kind, x.status), f"{x.count:,}", x.example or "-"] for x in found],
                caption="Failed attempts: examples",
                numeric={1},
                wordy=True,
            ),
        ),
    )


def _kind(kind: str, status: str) -> str:
    return kind.replace("_", " ") + (f", status {status}" if status not in ("", "None") else "")


def _happenings(picture: Picture) -> Html:
    rows = [
        [item.at.replace("T", " ").removesuffix("Z"), item.event, item.facts]
        for item in sorted(picture.events.happenings, key=lambda item: item.at, reverse=True)
    ]
    if not rows:
        return Html("")
    return card(
        "What happened",
        note("Starts, stops and warnings, the latest first."),
        tag(
            "div",
            page_table(["UTC", "event", "facts"], rows, caption="Events", wordy=True),
            class_="tall",
        ),
    )


def verdicts(picture: Picture) -> Html:
    """Who may serve and why not the others, with what their precision rests on."""
    facts = picture.facts
    if facts is None or not facts.verdicts:
        return Html("")
    headings = ["endpoint", "provider", "precision", "$/M in", "$/M out", "why"]
    native = next((item.native for item in facts.verdicts if item.native), None)
    inputs = _price_texts(item.input_usd_per_million for item in facts.verdicts)
    outputs = _price_texts(item.output_usd_per_million for item in facts.verdicts)
    return card(
        "Endpoints and verdicts",
        note(
            f"Judged {facts.at.replace('T', ' ').replace('+00:00', ' UTC')}. ",
            f"The model's own format is {native}." if native else "Its own format is not known.",
        ),
        page_table(
            headings,
            [_verdict_row(*cells) for cells in zip(facts.verdicts, inputs, outputs, strict=True)],
            caption="Endpoints, precision, prices and verdicts",
            numeric={3, 4},
            dimmed={n for n, item in enumerate(facts.verdicts) if not item.is_eligible},
            wordy=True,
        ),
        wide=True,
    )


def _verdict_row(item: JudgedEndpoint, input_price: str, output_price: str) -> list[object]:
    use = "yes" if item.is_eligible else "no"
    source = {"evidence": " (evidence)", "user": " (your choice)"}.get(item.precision_source, "")
    why = [*item.reasons, *item.notes]
    if item.evidence:
        why.append(f"evidence: {item.evidence}")
    return [
        tag("span", tag("b", use, class_=use), " ", item.endpoint, class_="keep"),
        item.provider,
        item.precision + source,
        input_price,
        output_price,
        tag("ul", *(tag("li", reason) for reason in why)) if why else "-",
    ]


# Display only: money becomes a float where it turns into a place on a picture.


def _per_token(item: EndpointQuality) -> float:
    return item.cost_pusd / item.accepted_tokens


def _price_of(item: JudgedEndpoint) -> float | None:
    return None if item.output_usd_per_million is None else float(item.output_usd_per_million)


def _price_texts(prices: Iterable[str | None]) -> list[str]:
    """Prices as published, with as many decimals as the longest, so that the points align."""
    known = list(prices)
    places = max((len(price.partition(".")[2]) for price in known if price), default=0)
    return ["unknown" if price is None else f"{Decimal(price):.{places}f}" for price in known]
