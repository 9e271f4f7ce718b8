"""Precision relative to the native format, and who decides it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone

import pytest

from policy_support import AT, K25, make_endpoint
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError
from quantroute.policy import EvidenceRow, EvidenceTable, ExclusionPolicy, Precision, Verdict

ROW = """
[[serving]]
model = "moonshotai/kimi-k2.5"
provider = "HostA"
quantization = "{label}"
source = "HostA's page"
date = 2026-05-01
expires = {expires}
{more}
"""


def table(label: str, *, expires: str = "2026-12-31", more: str = "") -> EvidenceTable:
    return EvidenceTable.builtin().merged(
        EvidenceTable.parse(ROW.format(label=label, expires=expires, more=more))
    )


def codes(verdict: Verdict) -> list[str]:
    return [reason.code for reason in verdict.reasons]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("int4", None),
        ("INT4", None),
        ("fp4", "precision_requantized"),
        ("mxfp4", "precision_requantized"),
        ("nvfp4", "precision_requantized"),
        ("fp6", "precision_above_native"),
        ("int8", "precision_above_native"),
        ("fp8", "precision_above_native"),
        ("mxfp8", "precision_above_native"),
        ("fp16", "precision_above_native"),
        ("bf16", "precision_above_native"),
        ("fp32", "precision_above_native"),
        ("unknown", "precision_unknown"),
        ("int3", "precision_unknown"),
        (None, "precision_unknown"),
    ],
)
@pytest.mark.parametrize(
    ("status", "blocks"), [(0, False), (-2, False), (-5, True), (-1, True), (-10, True)]
)
def test_each_label_in_each_status(
    label: str | None, expected: str | None, status: int, blocks: bool
) -> None:
    """For an int4 model only the label int4, up or degraded, is eligible by default."""
    verdict = ExclusionPolicy().judge(make_endpoint("x/y", "X", label, status=status), at=AT)
    assert verdict.eligible == (expected is None and not blocks)
    wanted = [code for code in (expected, "down" if blocks else None) if code]
    assert [reason.code for reason in verdict.excluding] == wanted


def test_every_label_is_covered() -> None:
    """A format added to the vocabulary must be judged by hand first."""
    assert {item.value for item in Quantization} == {
        "int4", "fp4", "mxfp4", "nvfp4", "fp6", "int8", "fp8", "mxfp8", "fp16", "bf16", "fp32",
        "unknown",
    }  # fmt: skip


def test_below_native() -> None:
    """fp8 for a bf16 model is a loss of precision."""
    verdict = ExclusionPolicy(native="bf16").judge(make_endpoint(label="fp8"), at=AT)
    assert codes(verdict) == ["precision_below_native"]


@pytest.mark.parametrize(
    ("native", "label"), [("nvfp4", "fp4"), ("mxfp4", "fp4"), ("mxfp8", "fp8")]
)
def test_generic_label_does_not_prove_a_specific_format(native: str, label: str) -> None:
    """The label fp4 may hide mxfp4 or nvfp4; the reason says so, and accepting it is possible."""
    endpoint = make_endpoint(label=label)
    assert codes(ExclusionPolicy(native=native).judge(endpoint, at=AT)) == ["precision_ambiguous"]
    assert ExclusionPolicy(native=native, accept=[label]).judge(endpoint, at=AT).eligible


def test_accepting_a_format_is_noted() -> None:
    """A listed format is eligible, and the verdict says whose decision that was."""
    verdict = ExclusionPolicy(accept=(Quantization.FP8,)).judge(make_endpoint(label="fp8"), at=AT)
    assert verdict.eligible
    assert codes(verdict) == ["format_accepted"]
    assert not verdict.precision.is_native


def test_unknown_native_format_says_what_to_set() -> None:
    """Without a known native format nothing is judged by guess."""
    endpoint = make_endpoint(label="bf16", model="nobody/knows")
    verdict = ExclusionPolicy().judge(endpoint, at=AT)
    assert codes(verdict) == ["native_unknown"]
    assert "native='...'" in str(verdict)
    assert "accept=('bf16',)" in str(verdict)
    assert ExclusionPolicy(native="bf16").judge(endpoint, at=AT).eligible
    assert ExclusionPolicy(accept=["bf16"]).judge(endpoint, at=AT).eligible


@pytest.mark.parametrize(
    "model",
    [K25, "moonshotai/kimi-k2.5-0127", "moonshotai/Kimi-K2.5:free", "moonshotai/kimi-k2-thinking"],
)
def test_native_format_of_a_model_by_each_of_its_ids(model: str) -> None:
    """Dated names and serving variants are the same weights."""
    assert EvidenceTable.builtin().native(model, at=AT) is Quantization.INT4


def test_other_weights_have_no_native_format_by_likeness() -> None:
    """A variant that may be other weights, and a model of a like name, are not assumed equal."""
    for model in (f"{K25}:thinking", "moonshotai/kimi-k2", f"{K25}-mini"):
        assert EvidenceTable.builtin().native(model, at=AT) is None


def test_shipped_evidence_names_basetens_format() -> None:
    """The label fp4 hides that BaseTen converts to nvfp4; a fresh row says so, with its source."""
    verdict = ExclusionPolicy().judge(make_endpoint("baseten/fp4", "BaseTen", "fp4"), at=AT)
    assert verdict.precision.quantization is Quantization.NVFP4
    assert verdict.precision.source == "evidence"
    assert "baseten.co" in str(verdict)


def test_fireworks_stays_unknown() -> None:
    """A claim without a page of the provider's own is not evidence."""
    verdict = ExclusionPolicy().judge(make_endpoint("fireworks", "Fireworks", "unknown"), at=AT)
    assert codes(verdict) == ["precision_unknown"]
    assert "accept_unknown=('Fireworks',)" in str(verdict)


def test_fresh_evidence_beats_the_label_in_both_directions() -> None:
    """A wrong label neither admits nor excludes while a fresh row contradicts it."""
    endpoint = make_endpoint("hosta/fp4", "HostA", "fp4")
    assert ExclusionPolicy(evidence=table("int4")).judge(endpoint, at=AT).eligible
    endpoint = make_endpoint("hosta/int4", "HostA", "int4")
    verdict = ExclusionPolicy(evidence=table("nvfp4")).judge(endpoint, at=AT)
    assert codes(verdict) == ["precision_requantized"]


def test_failed_evidence_excludes_whatever_is_accepted() -> None:
    """An endpoint that was found not to serve the model is accepted by no setting."""
    for label in ("unknown", "nvfp4", "int4"):
        found = table(label, more='failed = true\ntag = "hosta/int4"\nnote = "effect 0.1"')
        policy = ExclusionPolicy(accept=("nvfp4",), accept_unknown=True, evidence=found)
        verdict = policy.judge(make_endpoint("hosta/int4", "HostA", "int4"), at=AT)
        assert codes(verdict) == ["evidence_failed"]
        assert "effect 0.1" in str(verdict)
        assert Precision.from_dict(verdict.precision.as_dict()) == verdict.precision
        assert found.failed_tags(K25, at=AT) == {"hosta/int4"}
    late = AT.replace(year=2027)
    assert found.failed_tags(K25, at=late) == frozenset()
    assert found.failed_tags(K25) == found.failed_tags(None) == {"hosta/int4"}
    assert found.failed_tags("another/model") == frozenset()
    assert policy.judge(make_endpoint("hosta/int4", "HostA", "int4"), at=late).eligible


def test_rows_stored_before_failures_were_known_are_read() -> None:
    stored = {
        name: value
        for name, value in table("int4").serving[0].as_dict().items()
        if name != "failed"
    }
    assert not EvidenceRow.from_dict(stored).failed


def test_expired_evidence_falls_back_to_the_label_and_warns() -> None:
    """The day of expiry still counts, the next one does not."""
    endpoint = make_endpoint("hosta/int4", "HostA", "int4")
    policy = ExclusionPolicy(evidence=table("nvfp4", expires="2026-08-22"))
    assert not policy.judge(endpoint, at=AT).eligible
    verdict = policy.judge(endpoint, at=AT + timedelta(days=1))
    assert verdict.eligible
    assert codes(verdict) == ["evidence_expired"]
    assert verdict.precision.source == "label"


def test_expiry_is_counted_in_utc() -> None:
    """22:30 on the 22nd five hours west of Greenwich is already the 23rd."""
    endpoint = make_endpoint("hosta/int4", "HostA", "int4")
    policy = ExclusionPolicy(evidence=table("nvfp4", expires="2026-08-22"))
    west = datetime(2026, 8, 22, 22, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert policy.judge(endpoint, at=west).eligible
    assert not policy.judge(endpoint, at=datetime(2026, 8, 22, 22, 30, tzinfo=UTC)).eligible


def test_evidence_for_one_tag_leaves_the_hosts_other_endpoint_alone() -> None:
    """One host, two endpoints: each is judged by what is said about it."""
    evidence = table("int4", more='tag = "hosta/turbo"')
    policy = ExclusionPolicy(evidence=evidence)
    assert policy.judge(make_endpoint("hosta/turbo", "HostA", "fp4"), at=AT).eligible
    assert not policy.judge(make_endpoint("hosta/fp4", "HostA", "fp4"), at=AT).eligible


def test_evidence_can_withdraw_a_label() -> None:
    """A row that says unknown turns a claimed int4 into something to be decided."""
    endpoint = make_endpoint("hosta/int4", "HostA", "int4")
    policy = ExclusionPolicy(evidence=table("unknown"))
    assert codes(policy.judge(endpoint, at=AT)) == ["precision_unknown"]


@pytest.mark.parametrize("spelling", [True, ("Host A",), ("hosta",), ("HOSTA/turbo",)])
def test_unknown_is_accepted_by_explicit_choice(spelling: bool | tuple[str, ...]) -> None:
    """The choice is recorded as the user's, and is no claim about the format."""
    policy = ExclusionPolicy(accept_unknown=spelling)
    verdict = policy.judge(make_endpoint("hosta/turbo", "HostA", "unknown"), at=AT)
    assert verdict.eligible
    assert verdict.precision.source == "user"
    assert verdict.precision.quantization is Quantization.UNKNOWN
    assert codes(verdict) == ["unknown_accepted"]


@pytest.mark.parametrize("choice", [False, (), ("Other",)])
def test_unknown_is_excluded_otherwise(choice: bool | tuple[str, ...]) -> None:
    """Accepting one provider's unknown does not accept another's."""
    policy = ExclusionPolicy(accept_unknown=choice)
    assert not policy.judge(make_endpoint("hosta", "HostA", "unknown"), at=AT).eligible


def test_accepting_unknown_does_not_overrule_evidence_or_label() -> None:
    """What is known to be re-quantized is not unknown."""
    policy = ExclusionPolicy(accept_unknown=True, evidence=table("nvfp4"))
    assert not policy.judge(make_endpoint("hosta", "HostA", "unknown"), at=AT).eligible
    assert not policy.judge(make_endpoint("other/fp4", "Other", "fp4"), at=AT).eligible


@pytest.mark.parametrize(
    "policy",
    [
        ExclusionPolicy(),
        ExclusionPolicy(evidence=table("nvfp4")),
        ExclusionPolicy(native="bf16"),
        ExclusionPolicy(accept_unknown=True, evidence=table("unknown")),
    ],
)
def test_precision_survives_a_rows_provenance(policy: ExclusionPolicy) -> None:
    """as_dict is JSON and from_dict gives an equal value back."""
    precision = policy.judge(make_endpoint("hosta", "HostA", "int4"), at=AT).precision
    assert Precision.from_dict(json.loads(json.dumps(precision.as_dict()))) == precision


@pytest.mark.parametrize(
    "damage", [{"source": "rumour"}, {"quantization": "int5"}, {"evidence": {"date": 3}}]
)
def test_damaged_provenance_is_refused(damage: dict[str, object]) -> None:
    """A stored precision that cannot be read is an error, not a guess."""
    good = ExclusionPolicy().judge(make_endpoint(), at=AT).precision.as_dict()
    with pytest.raises(ConfigurationError):
        Precision.from_dict(good | damage)
