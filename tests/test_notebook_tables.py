"""Values show as tables in a notebook, and hostile names in them as text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from plan_support import demand, make_plan
from policy_support import make_endpoint
from quantroute.domain import Provider
from quantroute.ledger import Account, Basis, BudgetLedger, Charge, Statement
from quantroute.pricing import Pricing, TokenUsage
from quantroute.registry import EndpointList, ModelList, ModelSummary, ProviderDirectory

EVIL = "<script>alert(1)</script>"


class Cells(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows:
            self.rows[-1][-1] += data


def cells_of(value: object) -> Cells:
    html: Callable[[], str] = value._repr_html_  # type: ignore[attr-defined]
    cells = Cells(html())
    assert cells.tags <= {"table", "caption", "thead", "tbody", "tfoot", "tr", "th", "td"}
    return cells


def test_an_endpoint_list() -> None:
    odd = replace(make_endpoint("evil/int4", EVIL), pricing=Pricing(prices={}))
    listed = EndpointList(
        model=EVIL,
        canonical_slug=None,
        name=EVIL,
        endpoints=(make_endpoint("alpha/int4", "Alpha", usd_out="0.0000022"), odd),
        fetched_at_s=0.0,
        source="test",
    )
    heads, first, second = cells_of(listed).rows
    assert heads[0] == "endpoint"
    assert first[1] == "Alpha"
    assert first[4] == "2.2"
    assert second[1] == EVIL
    assert second[4] == "?"


def test_a_long_model_list_shows_its_beginning() -> None:
    models = tuple(
        ModelSummary(id=f"a/{number}", name=EVIL, canonical_slug=None, pricing=Pricing(prices={}))
        for number in range(60)
    )
    listed = ModelList(models=models, fetched_at_s=0.0, source="test")
    cells = cells_of(listed)
    assert len(cells.rows) == 51
    assert cells.rows[1][:2] == ["a/0", EVIL]
    assert "the first 50 of 60" in listed._repr_html_()


def test_a_provider_directory() -> None:
    directory = ProviderDirectory(
        providers=(Provider(slug="evil", name=EVIL, datacenters=("DE", "US")),),
        fetched_at_s=0.0,
        source="test",
    )
    assert cells_of(directory).rows[1] == ["evil", EVIL, "-", "DE, US"]


async def test_a_ledgers_statement_and_balance() -> None:
    async with BudgetLedger.in_memory(cap="1.00") as ledger:
        for output_tokens, endpoint in ((100, EVIL), (300, "alpha")):
            entry = await ledger.reserve(10**9, account=Account("run/b3"), endpoint=endpoint)
            usage = TokenUsage(input_tokens=10, output_tokens=output_tokens)
            charge = Charge(amount_pusd=5 * 10**8, basis=Basis.REPORTED, usage=usage)
            await ledger.post(entry, charge)
        await ledger.reserve(10**9, account=Account("run/b3"), endpoint="alpha")
        statement, balance = await ledger.statement(), ledger.balance(Account("run"))

    assert isinstance(statement, Statement)
    assert cells_of(statement).rows[1:] == [
        ["run/b3", EVIL, "1", "10", "100", "0", "$0.000500", "5.00"],
        ["run/b3", "alpha", "1", "10", "300", "0", "$0.000500", "1.67"],
        ["total", "", "2", "20", "400", "0", "$0.001000", "2.50"],
    ]
    shown = dict(row for row in cells_of(balance).rows if row[0])
    assert shown["spent"] == "$0.001000"
    assert shown["reserved"] == "$0.001000"
    assert shown["attempts paid, free, open"] == "2, 0, 1"


def test_an_empty_statement_has_no_price() -> None:
    assert cells_of(Statement()).rows[-1][-1] == "-"


@pytest.mark.parametrize("cap_usd", [1, 1_000])
def test_a_plan(cap_usd: int) -> None:
    plan = make_plan(demand("b3", rows=1_000), demand("b4", rows=10), cap_usd=cap_usd)
    assert plan.fits == (cap_usd == 1_000)
    cells = cells_of(plan)
    assert [row[0] for row in cells.rows] == ["dataset", "b3", "b4", "total"]
    assert cells.rows[1][1] == f"{plan.datasets[0].planned_rows:,}"
    assert ("suffices" if plan.fits else "does not suffice") in plan._repr_html_()
