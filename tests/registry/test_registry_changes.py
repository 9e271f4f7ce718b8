"""What counts as a change between two reads, and how it reads."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.domain import EndpointKey
from quantroute.errors import ConfigurationError
from quantroute.registry import Change, ChangeKind, EndpointList, compare
from quantroute.registry._endpoints import parse_endpoints
from registry_support import MODEL, entry, listing


def read(*entries: Any, model: str = MODEL) -> EndpointList:
    return parse_endpoints(model, listing(*entries), fetched_at_s=0.0, source="test")


def prices(prompt: str, completion: str = "0.00000225", **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, **more}


def lines(changes: tuple[Change, ...]) -> list[str]:
    return [str(change).removeprefix(f"{MODEL} ") for change in changes]


def test_a_list_does_not_differ_from_itself() -> None:
    same = read(entry("a"), entry("b"), entry("b"))
    assert compare(same, same) == ()


def test_a_price_rise_names_the_dimension_and_both_prices() -> None:
    before = read(entry("digitalocean", pricing=prices("0.000000375")))
    after = read(entry("digitalocean", pricing=prices("0.0000005", request="0.01")))
    rise, fee = compare(before, after)
    assert rise == Change(
        kind=ChangeKind.PRICE,
        key=EndpointKey(MODEL, "digitalocean"),
        provider_name="HostA",
        field="prompt",
        before=Decimal("0.000000375"),
        after=Decimal("0.0000005"),
    )
    assert lines((rise, fee)) == [
        "digitalocean: prompt $0.375/M -> $0.5/M (+33%)",
        "digitalocean: request unpriced -> $0.01",
    ]


def test_price_overrides_are_part_of_the_price() -> None:
    late = {"utc_start": 2000, "utc_end": 600, "prompt": "0.000001"}
    before = read(entry("a", pricing=prices("0.0000005")))
    after = read(entry("a", pricing=prices("0.0000005", overrides=[late])))
    assert lines(compare(before, after)) == ["a: overrides changed (0 -> 1)"]


def test_status_limits_label_and_parameters_are_each_their_own_event() -> None:
    before = read(entry("wafer", quantization="fp4"))
    after = read(
        entry(
            "wafer",
            quantization="fp8",
            status=-2,
            max_completion_tokens=None,
            supported_parameters=["max_tokens", "stop"],
        )
    )
    changes = compare(before, after)
    assert [change.kind for change in changes] == [
        ChangeKind.LABEL,
        ChangeKind.STATUS,
        ChangeKind.LIMITS,
        ChangeKind.PARAMETERS,
    ]
    assert lines(changes) == [
        "wafer: quantization fp4 -> fp8",
        "wafer: status 0 -> -2",
        "wafer: max_output_tokens 65536 -> none",
        "wafer: supported_parameters -seed -temperature +stop",
    ]


def test_uptime_alone_is_no_change() -> None:
    assert compare(read(entry("a", uptime_last_30m=99)), read(entry("a", uptime_last_30m=97))) == ()


def test_endpoints_go_and_appear() -> None:
    changes = compare(read(entry("a"), entry("b")), read(entry("b"), entry("c")))
    assert [(change.kind, change.key.tag) for change in changes] == [
        (ChangeKind.APPEARED, "c"),
        (ChangeKind.GONE, "a"),
    ]
    assert lines(changes) == ["c: appeared, int4, $0.45/M in, $2.25/M out", "a: gone"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (("x/int4", "int4"), ("x", "unknown")),
        (("x/fp4", "fp4"), ("x/fp8", "fp8")),
        (("x", "unknown"), ("x/fp8", "fp8")),
    ],
)
def test_a_tag_that_moves_with_its_label_is_a_relabel(
    old: tuple[str, str], new: tuple[str, str]
) -> None:
    before = read(entry(old[0], quantization=old[1]), entry("y"))
    after = read(entry(new[0], quantization=new[1], status=-5), entry("y"))
    relabel, status = compare(before, after)
    assert relabel.kind is ChangeKind.RELABELLED
    assert (relabel.before, relabel.after) == (before.endpoints[0], after.endpoints[0])
    assert str(relabel).endswith(f"relabelled {old[1]} -> {new[1]}, tag {old[0]} -> {new[0]}")
    assert status.kind is ChangeKind.STATUS


def test_an_ambiguous_or_foreign_move_is_gone_and_appeared() -> None:
    before = read(entry("x/int4"))
    both = read(entry("x/fp8", quantization="fp8"), entry("x/fp4", quantization="fp4"))
    assert {change.kind for change in compare(before, both)} == {
        ChangeKind.GONE,
        ChangeKind.APPEARED,
    }
    other = read(entry("x", quantization="unknown", provider_name="HostB"))
    assert {change.kind for change in compare(before, other)} == {
        ChangeKind.GONE,
        ChangeKind.APPEARED,
    }
    variant = read(entry("x/highspeed"))
    assert ChangeKind.RELABELLED not in {change.kind for change in compare(before, variant)}


def test_when_the_cheaper_twin_goes_the_dearer_did_not_rise() -> None:
    cheap, dear = entry("t", pricing=prices("0.1")), entry("t", pricing=prices("0.2"))
    (gone,) = compare(read(cheap, dear), read(dear))
    assert gone.kind is ChangeKind.GONE
    assert gone.key.ordinal == 0
    (back,) = compare(read(dear), read(dear, cheap))
    assert back.kind is ChangeKind.APPEARED
    assert back.key.ordinal == 0


def test_a_twins_own_price_rise_is_a_price_change() -> None:
    before = read(entry("t", pricing=prices("0.1")), entry("t", pricing=prices("0.2")))
    after = read(entry("t", pricing=prices("0.1")), entry("t", pricing=prices("0.3")))
    (rise,) = compare(before, after)
    assert (rise.kind, rise.key.ordinal) == (ChangeKind.PRICE, 1)


def test_lists_of_two_models_are_not_compared() -> None:
    with pytest.raises(ConfigurationError, match="cannot compare"):
        compare(read(), read(model="x/y"))


_entries = st.lists(
    st.builds(
        lambda tag, label, price, status: entry(
            f"{tag}/{label}" if label != "unknown" else tag,
            quantization=label,
            status=status,
            pricing=prices(price),
        ),
        st.sampled_from(["x", "y"]),
        st.sampled_from(["int4", "fp4", "fp8", "unknown"]),
        st.sampled_from(["0.1", "0.2", "-1"]),
        st.sampled_from([0, -2, -5]),
    ),
    max_size=6,
)


@given(_entries, _entries)
def test_membership_events_add_up(before: list[Any], after: list[Any]) -> None:
    """Each endpoint is matched, moved, gone or new, exactly once, and every event prints."""
    old, new = read(*before), read(*after)
    changes = compare(old, new)
    count = {kind: sum(change.kind is kind for change in changes) for kind in ChangeKind}
    assert len(old) - count[ChangeKind.GONE] == len(new) - count[ChangeKind.APPEARED]
    moved_or_new = (ChangeKind.APPEARED, ChangeKind.RELABELLED, ChangeKind.GONE)
    keys = [(c.kind, c.key) for c in changes if c.kind in moved_or_new]
    assert len(keys) == len(set(keys))
    assert all("\n" not in str(change) for change in changes)
    assert {c.key for c in changes if c.kind is not ChangeKind.GONE} <= {e.key for e in new}
    assert {c.key for c in changes if c.kind is ChangeKind.GONE} <= {e.key for e in old}
