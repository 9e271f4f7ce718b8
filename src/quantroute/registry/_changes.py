"""What changed between two reads of one endpoint list, as events.

Prices rise over night, labels are corrected (and the tag with them), statuses flip within minutes,
endpoints go and come back. A run pins endpoints by tag, so each of these matters to it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final

from quantroute.domain import Endpoint, EndpointKey, Quantization
from quantroute.errors import ConfigurationError
from quantroute.money import usd_per_million
from quantroute.pricing import Pricing
from quantroute.registry._endpoints import EndpointList

__all__ = ["Change", "ChangeKind", "compare"]


class ChangeKind(enum.Enum):
    """Which side of an endpoint changed."""

    PRICE = "price"
    LABEL = "label"  # another quantization label under the same tag
    RELABELLED = "relabelled"  # the tag changed with the label: a pinned tag no longer matches
    STATUS = "status"
    LIMITS = "limits"
    PARAMETERS = "parameters"
    GONE = "gone"
    APPEARED = "appeared"  # new, or back


#: Prices per request, per image or per search; all others are per token.
_PER_PIECE: Final = frozenset({"request", "web_search", "image"})
_QUANTIZATION_WORDS: Final = frozenset(member.value for member in Quantization)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference; `before` and `after` are the values of `field`.

    `key` is the endpoint's key in the later list, except for GONE. For GONE and APPEARED the values
    are the endpoint or None; for RELABELLED they are the two endpoints; prices are `Decimal` USD as
    published or None (unknown or not listed); parameters are sets; others are as in `Endpoint`.
    """

    kind: ChangeKind
    key: EndpointKey
    provider_name: str
    field: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key.model} {self.key}: {self._what()}"

    def _what(self) -> str:
        match self.before, self.after:
            case Endpoint() as before, Endpoint() as after:
                labels = f"{before.quantization_label} -> {after.quantization_label}"
                return f"relabelled {labels}, tag {before.key} -> {after.key}"
            case Endpoint(), None:
                return "gone"
            case None, Endpoint() as after:
                return f"appeared, {_listed(after)}"
            case frozenset() as before, frozenset() as after:
                signed = [*(f"-{p}" for p in sorted(before - after))]
                signed += [f"+{p}" for p in sorted(after - before)]
                return f"{self.field} {' '.join(signed)}"
            case before, after if self.kind is ChangeKind.PRICE:
                return f"{self.field} {_prices(self.field, before, after)}"
        return f"{self.field} {_plain(self.before)} -> {_plain(self.after)}"


def compare(before: EndpointList, after: EndpointList) -> tuple[Change, ...]:
    """Every difference that can matter to routing or money, in the later list's order, gone last.

    Uptimes are left out: they move with every read, and `status` follows them.

    Raises:
        ConfigurationError: the lists are of two models.
    """
    if before.model != after.model:
        raise ConfigurationError(f"cannot compare {before.model} with {after.model}")
    pairs, gone, appeared = _pair(before.endpoints, after.endpoints)
    moved = _relabelled(gone, appeared)
    changes: list[Change] = []
    for endpoint in after.endpoints:
        if (old := moved.get(endpoint.key)) is not None:
            changes.append(_change(ChangeKind.RELABELLED, endpoint, "tag", old, endpoint))
            changes.extend(_differences(old, endpoint, same_tag=False))
        elif (old := pairs.get(endpoint.key)) is not None:
            changes.extend(_differences(old, endpoint, same_tag=True))
        else:
            changes.append(_change(ChangeKind.APPEARED, endpoint, "endpoint", None, endpoint))
    moved_away = {endpoint.key for endpoint in moved.values()}
    changes.extend(
        _change(ChangeKind.GONE, endpoint, "endpoint", endpoint, None)
        for endpoint in gone
        if endpoint.key not in moved_away
    )
    return tuple(changes)


def _pair(
    before: Sequence[Endpoint], after: Sequence[Endpoint]
) -> tuple[dict[EndpointKey, Endpoint], list[Endpoint], list[Endpoint]]:
    """The earlier endpoint of each later key, those gone, those that appeared.

    Twins are matched by equal prices first: when the cheaper of two goes, the dearer takes its
    ordinal and must not be reported as a price rise.
    """
    pairs: dict[EndpointKey, Endpoint] = {}
    gone: list[Endpoint] = []
    for tag in dict.fromkeys(endpoint.tag for endpoint in before):
        olds = sorted((e for e in before if e.tag == tag), key=lambda e: e.ordinal)
        news = sorted((e for e in after if e.tag == tag), key=lambda e: e.ordinal)
        if len(olds) > 1 or len(news) > 1:
            for new in list(news):
                twin = next((old for old in olds if old.pricing == new.pricing), None)
                if twin is not None:
                    pairs[new.key] = twin
                    olds.remove(twin)
                    news.remove(new)
        pairs |= {new.key: old for old, new in zip(olds, news, strict=False)}
        gone.extend(olds[len(news) :])
    return pairs, gone, [endpoint for endpoint in after if endpoint.key not in pairs]


def _relabelled(
    gone: Sequence[Endpoint], appeared: Sequence[Endpoint]
) -> dict[EndpointKey, Endpoint]:
    """Later key -> earlier endpoint, where one provider's only move is to another label's tag."""
    moved: dict[EndpointKey, Endpoint] = {}
    for new in appeared:
        stem = _stem(new)
        olds = [old for old in gone if _stem(old) == stem]
        rivals = [other for other in appeared if _stem(other) == stem]
        if len(olds) == len(rivals) == 1:
            moved[new.key] = olds[0]
    return moved


def _stem(endpoint: Endpoint) -> tuple[str, str]:
    """Provider and tag without its quantization word: what stays when only the label moves."""
    head, slash, last = endpoint.tag.rpartition("/")
    stem = head if slash and last in _QUANTIZATION_WORDS else endpoint.tag
    return endpoint.provider_name, stem


def _differences(old: Endpoint, new: Endpoint, *, same_tag: bool) -> Iterator[Change]:
    if same_tag and old.quantization_label != new.quantization_label:
        yield _change(
            ChangeKind.LABEL, new, "quantization", old.quantization_label, new.quantization_label
        )
    yield from _price_differences(old.pricing, new)
    for kind, name in (
        (ChangeKind.STATUS, "status"),
        (ChangeKind.LIMITS, "context_tokens"),
        (ChangeKind.LIMITS, "max_output_tokens"),
        (ChangeKind.LIMITS, "max_input_tokens"),
        (ChangeKind.PARAMETERS, "supported_parameters"),
    ):
        was, now = getattr(old, name), getattr(new, name)
        if was != now:
            yield _change(kind, new, name, was, now)


def _price_differences(old: Pricing, new: Endpoint) -> Iterator[Change]:
    for name in dict.fromkeys((*old.prices, *new.pricing.prices)):
        was, now = old.prices.get(name), new.pricing.prices.get(name)
        if was != now or (name in old.prices) != (name in new.pricing.prices):
            yield _change(ChangeKind.PRICE, new, name, was, now)
    if old.overrides != new.pricing.overrides:
        yield _change(ChangeKind.PRICE, new, "overrides", old.overrides, new.pricing.overrides)


def _change(kind: ChangeKind, of: Endpoint, field: str, before: object, after: object) -> Change:
    return Change(
        kind=kind,
        key=of.key,
        provider_name=of.provider_name,
        field=field,
        before=before,
        after=after,
    )


def _listed(endpoint: Endpoint) -> str:
    price = endpoint.pricing
    prompt = _price("prompt", price.input_usd_per_token)
    completion = _price("completion", price.output_usd_per_token)
    return f"{endpoint.quantization_label}, {prompt} in, {completion} out"


def _prices(field: str, before: object, after: object) -> str:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return f"changed ({len(before)} -> {len(after)})"
    shown = f"{_price(field, before)} -> {_price(field, after)}"
    if isinstance(before, Decimal) and isinstance(after, Decimal) and before:
        shown += f" ({(after / before - 1) * 100:+.0f}%)"
    return shown


def _price(field: str, price: object) -> str:
    """A price for people: per million tokens, or per piece for fees."""
    if not isinstance(price, Decimal):
        return "unpriced"
    return f"${price:f}" if field in _PER_PIECE else f"${usd_per_million(price):f}/M"


def _plain(value: object) -> str:
    return "none" if value is None else str(value)
