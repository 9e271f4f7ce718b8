"""The evidence table as a file: what is read, what is refused, which row wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy_support import AT, K25, make_endpoint
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError
from quantroute.policy import EvidenceTable

SERVING = """
[[serving]]
model = "m/x"
provider = "Host A"
quantization = "fp8"
source = "page"
date = 2026-01-01
expires = 2027-01-01
"""
HOST = make_endpoint("host-a/fp8", "HostA", "fp8", model="m/x")


def test_shipped_rows_have_a_source_and_a_term() -> None:
    """The built-in table keeps the rule it imposes on users."""
    table = EvidenceTable.builtin()
    for row in (*table.natives, *table.serving):
        assert row.source
        assert row.date < row.expires
        assert row.quantization is not Quantization.UNKNOWN
    assert not any("fireworks" in row.provider.lower() for row in table.serving)


def test_users_own_file(tmp_path: Path) -> None:
    """A file of the documented form is loaded and found under any spelling of the provider."""
    path = tmp_path / "mine.toml"
    path.write_text(SERVING)
    row = EvidenceTable.load(path).find(HOST, at=AT)
    assert row is not None
    assert row.quantization is Quantization.FP8


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("expires = 2027-01-01\n", ""), "[[serving]] row 1, field expires"),
        (("2027-01-01", '"soon"'), "[[serving]] row 1, field expires"),
        (("2027-01-01", "2025-01-01"), "expires 2025-01-01 is before date 2026-01-01"),
        (('"fp8"', '"fp7"'), "[[serving]] row 1, field quantization"),
        (('"page"', '""'), "[[serving]] row 1, field source"),
        (("provider", "provder"), "[[serving]] row 1, field provder"),
        (("[[serving]]", "[[served]]"), "served"),
        (("[[serving]]", "[[serving"), "not TOML"),
    ],
)
def test_errors_name_file_row_and_field(change: tuple[str, str], expected: str) -> None:
    """Whoever wrote the row finds it from the message."""
    with pytest.raises(ConfigurationError) as caught:
        EvidenceTable.parse(SERVING.replace(*change), name="mine.toml")
    assert "mine.toml" in str(caught.value)
    assert expected in str(caught.value)


def test_second_row_is_the_one_named() -> None:
    """Rows are counted from 1, as in the file."""
    with pytest.raises(ConfigurationError, match=r"row 2, field quantization"):
        EvidenceTable.parse(SERVING + SERVING.replace("fp8", "fp7"))


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable_file(tmp_path: Path, content: bytes | None) -> None:
    """A missing or undecodable file is a configuration error that names it."""
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"mine\.toml"):
        EvidenceTable.load(path)


def test_two_rows_of_one_date_contradict() -> None:
    """Which of two equal rows is right cannot be guessed; a later date can replace an earlier."""
    with pytest.raises(ConfigurationError, match="rows 1 and 2"):
        EvidenceTable.parse(SERVING + SERVING.replace("Host A", "hosta").replace("fp8", "bf16"))
    later = SERVING.replace("2026-01-01", "2026-06-01").replace("fp8", "bf16")
    row = EvidenceTable.parse(SERVING + later).find(HOST, at=AT)
    assert row is not None
    assert row.quantization is Quantization.BF16


def test_row_about_the_tag_precedes_one_about_the_provider() -> None:
    """The more specific row counts, even if it is older."""
    tagged = SERVING.replace("2026-01-01", "2025-12-01").replace("fp8", "bf16")
    row = EvidenceTable.parse(SERVING + tagged + 'tag = "host-a/fp8"\n').find(HOST, at=AT)
    assert row is not None
    assert row.quantization is Quantization.BF16


def test_users_rows_win_while_fresh() -> None:
    """A merged table asks the user's rows first, but an expired one does not hide a fresh one."""
    user = EvidenceTable.parse(SERVING.replace("fp8", "bf16"))
    base = EvidenceTable.parse(SERVING)
    row = base.merged(user).find(HOST, at=AT)
    assert row is not None
    assert row.quantization is Quantization.BF16
    stale = EvidenceTable.parse(SERVING.replace("fp8", "bf16").replace("2027", "2026"))
    row = base.merged(stale).find(HOST, at=AT)
    assert row is not None
    assert row.quantization is Quantization.FP8


def test_users_native_row_wins() -> None:
    """Native formats can be corrected or added as well."""
    user = EvidenceTable.parse(
        f'[[native]]\nmodel = "{K25}"\nquantization = "bf16"\nsource = "s"\n'
        "date = 2026-01-01\nexpires = 2027-01-01\n"
    )
    assert EvidenceTable.builtin().merged(user).native(K25, at=AT) is Quantization.BF16


def test_serving_row_applies_to_dated_name_of_the_model() -> None:
    """A listing asked for by its dated name is the same listing."""
    endpoint = make_endpoint("baseten/fp4", "BaseTen", "fp4", model="moonshotai/kimi-k2.5-0127")
    assert EvidenceTable.builtin().find(endpoint, at=AT) is not None
