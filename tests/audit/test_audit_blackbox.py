"""Endpoints asked and compared by strings, over HTTP."""

from __future__ import annotations

import datetime as dt
import io
from pathlib import Path

import pytest
from rich.console import Console

from cli_support import quantroute

pytest.importorskip("scipy", reason="needs the extra `audit`")

from quantroute import BudgetLedger, EnvKey, Service
from quantroute.audit import (
    Outcome,
    StringsEndpoint,
    StringsReport,
    StringsSettings,
    StringTest,
    audit_strings,
    evidence_of,
    strings_html,
)
from quantroute.audit._blackbox import _outcome
from quantroute.errors import BudgetExceeded, ConfigurationError
from quantroute.policy import EvidenceTable, ExclusionPolicy
from quantroute.registry import ProviderRegistry
from quantroute.report.audit import strings_table
from quantroute.simulator import (
    DEFAULT_API_KEY,
    AnswerRequest,
    EndpointSpec,
    ModelSpec,
    Scenario,
    SimulatedAnswer,
    Simulator,
)

MODEL = "example/model"
PRICES = {"prompt": "0.000001", "completion": "0.000002"}
TAGS = ("author/int4", "honest/int4", "other/int4")


class Speakers:
    """Random letters; one endpoint prefers others than the rest."""

    async def answer(self, request: AnswerRequest) -> SimulatedAnswer:
        letters = "aabcdef" if request.endpoint == "other/int4" else "abcdeff"
        greedy = request.parameters.get("temperature") == 0.0
        text = letters * 4 if greedy else "".join(request.rng.choices(letters, k=30))
        return SimulatedAnswer(content=text, output_tokens=10)


def scenario() -> Scenario:
    specs = tuple(EndpointSpec(tag=tag, quantization="int4", pricing=PRICES) for tag in TAGS)
    return Scenario(name="speakers", models=(ModelSpec(id=MODEL, endpoints=specs),))


async def found(tmp_path: Path, settings: StringsSettings, *, cap: str = "1.00") -> StringsReport:
    async with Simulator(scenario(), seed=3, backend=Speakers()) as simulator:
        service = Service(base_url=simulator.base_url)
        key = EnvKey("AUDIT_TEST_KEY")
        async with (
            ProviderRegistry(service=service, key=key) as registry,
            BudgetLedger.open(tmp_path / "audit.sqlite", cap=cap) as ledger,
        ):
            report = await audit_strings(
                MODEL,
                settings,
                ledger=ledger,
                registry=registry,
                policy=ExclusionPolicy(native="int4"),
                service=service,
                key=key,
                run="r",
            )
            assert report.spent_pusd == simulator.bill.total_pusd
            return report


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUDIT_TEST_KEY", DEFAULT_API_KEY)


SETTINGS = StringsSettings(
    reference="author/int4", prompts=("one", "two"), answers=12, permutations=199
)


async def test_the_other_speaker_is_found_and_the_honest_one_is_not(tmp_path: Path) -> None:
    report = await found(tmp_path, SETTINGS)
    outcomes = {item.endpoint: item.outcome for item in report.endpoints}
    assert outcomes == {"other/int4": Outcome.FAILS, "honest/int4": Outcome.PASSES}
    greedy = {item.endpoint: item.greedy for item in report.endpoints}
    assert greedy["honest/int4"] is not None
    assert greedy["honest/int4"].equal_share == 1.0
    assert greedy["other/int4"] is not None
    assert greedy["other/int4"].equal_share == 0.0
    own = [item.greedy_own for item in report.endpoints]
    assert [item is not None and item.equal_share for item in own] == [1.0, 1.0]
    assert report.as_dict()["endpoints"][0]["outcome"] == "fails"
    table = report._repr_html_()
    assert "other/int4" in table
    assert "fails" in table
    page = strings_html(report)
    assert page.count("<circle") == len(report.endpoints)
    assert "http" not in page
    tests = {item.endpoint: item.test for item in report.endpoints}
    for name, is_above in (("other/int4", True), ("honest/int4", False)):
        test = tests[name]
        assert test is not None
        assert 0 < test.usual < test.limit
        assert (test.discrepancy > test.limit) is is_above
    text = evidence_of(report, date=dt.date(2026, 11, 30))
    (row,) = EvidenceTable.parse(text).serving
    assert (row.tag, row.failed, row.source) == ("other/int4", True, "audit of run r")


async def test_the_cap_holds(tmp_path: Path) -> None:
    with pytest.raises(BudgetExceeded):
        await found(tmp_path, SETTINGS, cap="0.0005")


def test_one_answer_of_the_reference_is_too_few_to_pass_by() -> None:
    test = StringTest(answers=(24, 1), discrepancy=0.1, p=0.5)
    assert _outcome(test, 0.5, SETTINGS) is Outcome.TOO_FEW


def test_names_that_look_like_markup_stand_as_they_are() -> None:
    item = StringsEndpoint(
        endpoint="a[/b]<i>\ud800",
        outcome=Outcome.PASSES,
        test=None,
        greedy=None,
        greedy_own=None,
        p_adjusted=1.0,
    )
    report = StringsReport(
        model="m",
        reference="r",
        alpha=0.05,
        endpoints=(item,),
        spent_pusd=0,
        reference_failures={"refused": 3},
    )
    console = Console(width=200, file=io.StringIO())
    console.print(strings_table(report))
    assert "a[/b]<i>" in console.file.getvalue()
    page = strings_html(report).encode().decode()
    assert "a[/b]&lt;i&gt;" in page
    assert "r (the reference): 3 requests without an answer: refused" in page


async def test_an_unknown_reference_is_refused_before_money_is_spent(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="eligible are: author/int4"):
        await found(tmp_path, StringsSettings(reference="nobody/int4"))


@pytest.mark.parametrize("wrong", [{"prompts": ()}, {"answers": 1}, {"temperature": 0.0}])
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError):
        StringsSettings(reference="a", **wrong)  # type: ignore[arg-type]


def test_the_command_asks_the_simulator(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(
        '[audit]\nmodel = "moonshotai/kimi-k2.5"\ncap_usd = "1.00"\nanswers = 3\n'
        'reference = "parasail/int4"\nprompts = ["Hi", "Ho"]\n'
    )
    page = tmp_path / "audit.html"
    ended = quantroute("audit", spec, "--black-box", "--simulate", "--json", "--html", page)
    assert ended.code in (0, 4), ended.err
    assert ended.data["method"] == "strings"
    assert ended.data["spent_pusd"] > 0
    assert "answers compared with those of parasail/int4" in page.read_text()


def test_the_command_says_what_is_missing(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text("[audit]\n")
    assert "rows = [...]" in quantroute("audit", spec).err
    assert "cap_usd" in quantroute("audit", spec, "--black-box", "--simulate").err
    spec.write_text('[audit]\nrows = ["a.jsonl"]\ntarget = "t"\nformats = ["int3"]\n')
    assert "int3" in quantroute("audit", spec).err
