"""`ExclusionPolicy`: what a user wants, and the judgement of endpoints against it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Literal

from quantroute.domain import Endpoint, Provider, Quantization
from quantroute.errors import ConfigurationError
from quantroute.policy import _rules
from quantroute.policy._bound import BoundPolicy
from quantroute.policy._evidence import EvidenceTable
from quantroute.policy._names import Directory, Name, unknown_name, unmatched
from quantroute.policy._precision import judge_precision
from quantroute.policy._twins import without_inseparable_twins
from quantroute.policy._verdict import Verdict

__all__ = ["ExclusionPolicy"]

_DEAREST_USD_PER_MILLION: Final = Decimal(10_000)
_CHEAPEST_USD_PER_MILLION: Final = Decimal("0.000001")
_NO_DIRECTORY: Final = Directory()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExclusionPolicy:
    """Which endpoints may serve. The defaults admit the model's native format and nothing else.

    Args:
        native: the model's own format; by default what the evidence table says.
        accept: further formats to accept, e.g. `("fp8",)`.
        accept_unknown: what to do where neither label nor fresh evidence names a format: exclude
            (False or empty), accept (True), or accept at these providers or tags.
        only, exclude: providers, slugs or tags in any spelling; denial wins.
        allow_degraded: keep endpoints whose last half hour's success was 80-95 % (status -2).
        min_uptime_percent: least 30-minute uptime, 0-100; too little traffic is not held against.
        max_input_usd_per_million, max_output_usd_per_million: ceilings in USD per million tokens,
            as text or Decimal; overrides for long prompts or hours of the day count.
        min_context_tokens, min_output_tokens: least limits.
        required_parameters: request fields that must be supported, else they are silently dropped.
        data_collection, zdr, enforce_distillable_text: sent along; the service enforces them, since
            endpoint lists do not show data policies.
        requires_bounded_price: exclude what has no computable worst case; needed under a cap.
        evidence: the evidence table; the shipped one by default.
    Raises:
        ConfigurationError: a setting that cannot be meant; prices above $10,000 or below $0.000001
            per million are taken for a mistaken unit.
    """

    native: Quantization | str | None = None
    accept: Sequence[Quantization | str] = ()
    accept_unknown: bool | Sequence[str] = ()
    only: Sequence[str] = ()
    exclude: Sequence[str] = ()
    allow_degraded: bool = True
    min_uptime_percent: float | None = None
    max_input_usd_per_million: Decimal | str | None = None
    max_output_usd_per_million: Decimal | str | None = None
    min_context_tokens: int | None = None
    min_output_tokens: int | None = None
    required_parameters: frozenset[str] = frozenset()
    data_collection: Literal["allow", "deny"] | None = None
    zdr: bool = False
    enforce_distillable_text: bool = False
    requires_bounded_price: bool = True
    evidence: EvidenceTable = field(default_factory=EvidenceTable.builtin)
    _native: Quantization | None = field(init=False, repr=False, compare=False)
    _accept: frozenset[Quantization] = field(init=False, repr=False, compare=False)
    _only: tuple[Name, ...] = field(init=False, repr=False, compare=False)
    _exclude: tuple[Name, ...] = field(init=False, repr=False, compare=False)
    _unknown_at: tuple[Name, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # What was given in a friendly form is kept in a strict one, so that `replace` and equality
        # do not depend on the spelling.
        for name in ("accept", "only", "exclude"):
            self._set(name, _items(getattr(self, name), rule=name))
        if not isinstance(self.accept_unknown, bool):
            self._set("accept_unknown", _items(self.accept_unknown, rule="accept_unknown"))
        required = _items(self.required_parameters, rule="required_parameters")
        self._set("required_parameters", frozenset(required))
        for name in ("max_input_usd_per_million", "max_output_usd_per_million"):
            self._set(name, _ceiling(getattr(self, name), rule=name))
        self._check_numbers()
        self._set("native", None if self.native is None else _format(self.native, rule="native"))
        self._set("accept", tuple(_format(item, rule="accept") for item in self.accept))
        self._set("_native", self.native)
        self._set("_accept", frozenset(self.accept))
        self._set("_only", _names(self.only, rule="only"))
        self._set("_exclude", _names(self.exclude, rule="exclude"))
        names = () if isinstance(self.accept_unknown, bool) else self.accept_unknown
        self._set("_unknown_at", _names(names, rule="accept_unknown"))

    def judge(self, endpoint: Endpoint, *, at: datetime) -> Verdict:
        """The verdict on one endpoint at `at` (UTC). Never raises.

        Names are compared with the endpoint's own name, slug and tag; `bind` also knows the
        provider list, refuses names that match nothing, and looks at endpoints that share a tag.
        """
        return self._judge(endpoint, _NO_DIRECTORY, at)

    def bind(
        self,
        endpoints: Iterable[Endpoint],
        *,
        providers: Iterable[Provider] = (),
        at: datetime,
        must_match: bool = True,
    ) -> BoundPolicy:
        """The policy applied to one model's whole listing at `at` (UTC).

        Args:
            providers: the service's provider list; a name found only there is accepted, because a
                provider may join the model's listing later.
            must_match: refuse names that match nothing. Say False for a listing read again during
                a run, from which an endpoint may have gone; they are in `unmatched` either way.
        Raises:
            UnknownName: a name in `only`, `exclude` or `accept_unknown` matches nothing.
        """
        listed, known = tuple(endpoints), tuple(providers)
        directory = Directory.of(known)
        idle: list[str] = []
        for rule, names in (
            ("only", self._only),
            ("exclude", self._exclude),
            ("accept_unknown", self._unknown_at),
        ):
            for name in unmatched(names, listed, directory):
                # Against an empty listing without a provider list no name can be checked.
                if must_match and not directory.knows(name) and listed:
                    raise unknown_name(name, rule=rule, endpoints=listed, providers=known)
                idle.append(f"{rule}: {name.text}")
        verdicts = tuple(self._judge(endpoint, directory, at) for endpoint in listed)
        return BoundPolicy(
            policy=self,
            verdicts=without_inseparable_twins(verdicts),
            at=at,
            ignore=self._ignore(listed, known, directory),
            unmatched=tuple(idle),
        )

    @property
    def names_providers(self) -> bool:
        """Whether a rule holds names, so that `bind` wants the service's provider list."""
        return bool(self.only or self.exclude or self.accept_unknown)

    def as_dict(self) -> dict[str, Any]:
        """What was asked for, in plain JSON values, for a manifest; evidence is told per row."""
        return {
            "native": None if self._native is None else self._native.value,
            "accept": sorted(item.value for item in self._accept),
            "accept_unknown": (
                self.accept_unknown
                if isinstance(self.accept_unknown, bool)
                else list(self.accept_unknown)
            ),
            "only": list(self.only),
            "exclude": list(self.exclude),
            "allow_degraded": self.allow_degraded,
            "min_uptime_percent": self.min_uptime_percent,
            "max_input_usd_per_million": _text(self.max_input_usd_per_million),
            "max_output_usd_per_million": _text(self.max_output_usd_per_million),
            "min_context_tokens": self.min_context_tokens,
            "min_output_tokens": self.min_output_tokens,
            "required_parameters": sorted(self.required_parameters),
            "data_collection": self.data_collection,
            "zdr": self.zdr,
            "enforce_distillable_text": self.enforce_distillable_text,
            "requires_bounded_price": self.requires_bounded_price,
        }

    def _judge(self, endpoint: Endpoint, directory: Directory, at: datetime) -> Verdict:
        precision, about_precision = judge_precision(
            endpoint,
            native=self._native,
            accept=self._accept,
            accepts_unknown=self._accepts_unknown(endpoint, directory),
            evidence=self.evidence,
            at=at,
        )
        reasons = (
            *_rules.named(endpoint, self._only, self._exclude, directory),
            *about_precision,
            *_rules.availability(endpoint, self),
            *_rules.prices(endpoint, self),
            *_rules.limits(endpoint, self),
            *_rules.parameters(endpoint, self),
        )
        return Verdict.of(endpoint, reasons, precision)

    def _accepts_unknown(self, endpoint: Endpoint, directory: Directory) -> bool:
        if isinstance(self.accept_unknown, bool):
            return self.accept_unknown
        return any(directory.means(name, endpoint) for name in self._unknown_at)

    def _ignore(
        self, endpoints: Sequence[Endpoint], providers: Sequence[Provider], directory: Directory
    ) -> tuple[str, ...]:
        """The deny list in the service's spelling: slugs for providers, tags for endpoints."""
        entries: list[str] = []
        for name in self._exclude:
            if name.ordinal is not None:
                continue  # the service cannot tell endpoints of one tag apart; `only` must do
            hit = [endpoint for endpoint in endpoints if directory.means(name, endpoint)]
            if name.is_provider_wide:
                entries += [item.slug for item in providers if directory.lists(name, item)]
                # A base slug does not reach service-tier endpoints such as `openai/flex`.
                entries += [endpoint.provider_slug for endpoint in hit]
            entries += [endpoint.tag for endpoint in hit]
        return tuple(dict.fromkeys(entries))

    def _check_numbers(self) -> None:
        uptime = self.min_uptime_percent
        if uptime is not None and not 0 <= uptime <= 100:
            raise ConfigurationError(f"min_uptime_percent must be in [0, 100], not {uptime}")
        for name in ("min_context_tokens", "min_output_tokens"):
            tokens = getattr(self, name)
            if tokens is not None and tokens < 1:
                raise ConfigurationError(f"{name} must be at least 1, not {tokens}")
        if self.data_collection not in (None, "allow", "deny"):
            raise ConfigurationError(
                f"data_collection must be 'allow' or 'deny', not {self.data_collection!r}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _items(given: Any, *, rule: str) -> tuple[Any, ...]:
    # A lone string is a sequence too: of letters, each of which would match nothing.
    if isinstance(given, str | Quantization):
        raise ConfigurationError(f"{rule} takes a list: [{given!r}]")
    return tuple(given)


def _names(given: Iterable[str], *, rule: str) -> tuple[Name, ...]:
    return tuple(Name.parse(text, rule=rule) for text in given)


def _format(given: Quantization | str, *, rule: str) -> Quantization:
    found = given if isinstance(given, Quantization) else Quantization.parse(given)
    if found is not Quantization.UNKNOWN:
        return found
    if rule == "accept" and given in (Quantization.UNKNOWN, Quantization.UNKNOWN.value):
        raise ConfigurationError("accept names formats; say accept_unknown for unlabelled ones")
    known = ", ".join(item.value for item in Quantization if item is not Quantization.UNKNOWN)
    raise ConfigurationError(f"{rule}: {given!r} is not a known format; use one of: {known}")


def _ceiling(given: object, *, rule: str) -> Decimal | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, str | int | Decimal):
        raise ConfigurationError(
            f"{rule} is text or a Decimal, like '2.50', not {type(given).__name__}"
        )
    try:
        price = Decimal(given.strip().removeprefix("$") if isinstance(given, str) else given)
    except InvalidOperation:
        raise ConfigurationError(f"{rule} is a price like '2.50', not {given!r}") from None
    if not price.is_finite() or price < 0:
        raise ConfigurationError(f"{rule} must be finite and not negative, not {given}")
    if price > _DEAREST_USD_PER_MILLION or 0 < price < _CHEAPEST_USD_PER_MILLION:
        raise ConfigurationError(
            f"{rule}={given} is implausible; the unit is US dollars per million tokens"
        )
    return price


def _text(price: Decimal | str | None) -> str | None:
    return None if price is None else str(price)
