"""The key is read late, kept nowhere, and cut out of what comes back."""

from __future__ import annotations

import base64
import pickle
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantroute.errors import KeyRejected
from quantroute.secrets import REDACTED, EnvKey, Redactor

KEY = "sk-or-v1-Zm9v+/bar_0123456789"


def test_the_key_is_read_at_call_time(monkeypatch: pytest.MonkeyPatch) -> None:
    key = EnvKey("SOME_KEY")
    with pytest.raises(KeyRejected, match="SOME_KEY"):
        key.read()
    monkeypatch.setenv("SOME_KEY", f" {KEY}\n")
    assert key.headers() == {"Authorization": f"Bearer {KEY}"}
    assert KEY not in repr(key)
    assert KEY not in str(pickle.dumps(key))


@pytest.mark.parametrize("bad", ["", "  ", "two words", "sk-\u00e4", "a\x00b"])
def test_what_cannot_be_a_key_is_refused_without_quoting_it(
    bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "\x00" not in bad:
        monkeypatch.setenv("SOME_KEY", bad)
    with pytest.raises(KeyRejected) as caught:
        EnvKey("SOME_KEY").read()
    if bad.strip():
        assert bad not in str(caught.value)


@given(st.binary(max_size=7), st.binary(max_size=7))
def test_base64_of_the_key_inside_anything_is_found(before: bytes, after: bytes) -> None:
    encoded = base64.b64encode(before + KEY.encode() + after).decode()
    redacted = Redactor((KEY,)).text(f"Basic {encoded}")
    assert REDACTED in redacted


@pytest.mark.parametrize("form", [KEY, quote(KEY, safe=""), f"Bearer {KEY},"])
def test_forms_of_the_key(form: str) -> None:
    redactor = Redactor((KEY,))
    assert not redactor.is_clean(form.encode())
    assert KEY not in redactor.answer(form)
    assert quote(KEY, safe="") not in redactor.answer(form)


def test_diagnostics_lose_foreign_keys_and_proxy_passwords() -> None:
    redactor = Redactor()
    assert "abcdef" not in redactor.text("invalid key sk-or-v1-abcdef0123456789")
    assert redactor.text("http://user:pass@proxy:3128/") == f"http://{REDACTED}@proxy:3128/"


def test_answers_keep_words_that_only_look_like_keys() -> None:
    text = "a risk-adj-performance, mail me at x://y, sk-or-v1-notmykey000"
    assert Redactor((KEY,)).answer(text) == text


def test_short_secrets_do_not_eat_text() -> None:
    assert Redactor(("x",)).text("excellent") == "excellent"


def test_a_redactor_shows_and_pickles_no_secret() -> None:
    redactor = Redactor((KEY,))
    assert KEY not in repr(redactor)
    assert KEY.encode() not in pickle.dumps(redactor)
