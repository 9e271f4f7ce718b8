"""A server of one's own as one more endpoint: vLLM, SGLang, llama.cpp, anything that speaks OpenAI.

It takes part in routing under the name `local/NAME`, with the price and the precision that its
owner declares; the policy judges that precision like any other. What differs from the service: no
`provider` object goes out and none comes back, the bill is made here from the server's token
counts, and its refusals are its own trouble, never the account's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import ROUND_CEILING, Decimal
from typing import Any, Final

from msgspec import structs

from quantroute._http import Service, SessionPool
from quantroute.client._classify import Classified, Kind
from quantroute.client._replay import ReplayForm
from quantroute.client._reply import Reply
from quantroute.client._settlement import Post, Settlement, Void
from quantroute.client._transport import Timeouts, Transport
from quantroute.clock import Clock
from quantroute.domain import Endpoint, EndpointKey, Quantization
from quantroute.errors import ConfigurationError
from quantroute.ledger import Basis, Charge
from quantroute.money import parse_price
from quantroute.pricing import Pricing
from quantroute.routing import LimitSettings
from quantroute.secrets import EnvKey

__all__ = ["LOCAL_PREFIX", "LocalEndpoint", "LocalRoute"]

#: How the ledger and the rows name such endpoints.
LOCAL_PREFIX: Final = "local/"
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_FINEST_PRICE: Final = Decimal("1e-18")
_PARAMETERS: Final = frozenset(
    {
        "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
        "frequency_penalty", "presence_penalty", "repetition_penalty", "reasoning",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEndpoint:
    """An OpenAI-compatible server that takes part in routing.

    Args:
        name: in lower case; the endpoint is called `local/NAME`, in policies too.
        base_url: up to and with `/v1`.
        serves: the model that it stands in for, as the service lists it.
        model: what the server calls it; `serves` by default.
        quantization: the format of the weights there, e.g. "int4"; "unknown" needs
            `accept_unknown`, as anywhere.
        input_usd_per_million, output_usd_per_million: prices; zero by default.
        output_tokens_per_s: what it makes with all requests together, as measured. Plans reckon
            their hours by it.
        usd_per_gpu_hour, gpus: with that rate, instead of prices: what the hardware costs. Input
            counts nothing then: its time is in the rate.
        max_in_flight: requests there at once; nobody else knows what the server bears.
        context_tokens, max_output_tokens: its limits, None if they are the model's own.
        key_variable: environment variable with a key for it, if it wants one. The service's own
            key never goes there.
        reasoning_switch: names in `chat_template_kwargs` that switch reasoning on and off;
            templates differ (Kimi: thinking; Qwen: enable_thinking) and ignore others' names.
        answers_as: another name that its answers may carry in `model`.
        replay_as: the field in which it reads the reasoning of earlier turns, "none" if it must not
            get any.
    """

    name: str
    base_url: str
    serves: str
    quantization: str
    model: str | None = None
    input_usd_per_million: str = "0"
    output_usd_per_million: str = "0"
    usd_per_gpu_hour: str | None = None
    gpus: int = 1
    output_tokens_per_s: int | None = None
    max_in_flight: int = 64
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    key_variable: str | None = None
    reasoning_switch: tuple[str, ...] = ("thinking", "enable_thinking")
    answers_as: str | None = None
    replay_as: str = ReplayForm.CONTENT.value
    endpoint: Endpoint = field(init=False, repr=False, compare=False)
    """As it stands among the others."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"a local endpoint's name is made of lower-case letters, digits and . _ -, "
                f"not {self.name!r}"
            )
        for limit in ("max_in_flight", "context_tokens", "max_output_tokens", "gpus"):
            count = getattr(self, limit)
            if count is not None and count < 1:
                raise ConfigurationError(f"local {self.name}: {limit} must be at least 1")
        if self.replay_as not in {item.value for item in ReplayForm}:
            known = ", ".join(item.value for item in ReplayForm)
            raise ConfigurationError(f"local {self.name}: replay_as must be one of {known}")
        quantization = Quantization.parse(self.quantization)
        if quantization is Quantization.UNKNOWN and self.quantization != "unknown":
            known = ", ".join(item.value for item in Quantization)
            raise ConfigurationError(
                f"local {self.name}: {self.quantization!r} is not a known format; use one of: "
                f"{known}"
            )
        Service(base_url=self.base_url)  # refuses what is none
        endpoint = Endpoint(
            model=self.serves,
            tag=LOCAL_PREFIX + self.name,
            provider_name=LOCAL_PREFIX + self.name,
            quantization=quantization,
            quantization_label=quantization.value,
            pricing=self._pricing(),
            context_tokens=self.context_tokens,
            max_output_tokens=self.max_output_tokens,
            supported_parameters=_PARAMETERS,
            is_local=True,
        )
        object.__setattr__(self, "endpoint", endpoint)

    @property
    def replay_form(self) -> ReplayForm:
        """How earlier reasoning is passed back to it."""
        return ReplayForm(self.replay_as)

    @property
    def is_free(self) -> bool:
        """Whether nothing is charged."""
        return all(price == 0 for price in self.endpoint.pricing.prices.values())

    def body(self, fields: Mapping[str, Any], *, is_streamed: bool) -> dict[str, Any]:
        """What to send, from what the service would be sent: no `provider`, plain fields only."""
        body = {name: value for name, value in fields.items() if name != "provider"}
        body["model"] = self.model or self.serves
        reasoning = body.pop("reasoning", None)
        if isinstance(reasoning, Mapping):
            is_on = reasoning.get("enabled", reasoning.get("effort") != "none")
            body["chat_template_kwargs"] = dict.fromkeys(self.reasoning_switch, is_on)
        if is_streamed:
            body["stream_options"] = {"include_usage": True}
        return body

    def served_flags(self, reply: Reply) -> tuple[str, ...]:
        """What does not fit the server that was asked; it names no provider, so only the model."""
        names = [name for name in (self.model, self.serves, self.answers_as) if name]
        if reply.model and _base(reply.model) not in map(_base, names):
            return ("model_mismatch",)
        return ()

    def judged(self, outcome: Classified) -> Classified:
        """The outcome as it concerns the account: trouble with this server is its own.

        A row that it refuses may be taken elsewhere, and a key that it does not like stops nothing.
        """
        match outcome.kind:
            case Kind.ACCOUNT_LIMITED:
                return structs.replace(outcome, kind=Kind.RATE_LIMITED)
            case Kind.REFUSED | Kind.OUT_OF_FUNDS | Kind.KEY_REJECTED | Kind.MISDIRECTED:
                return structs.replace(outcome, kind=Kind.TRANSIENT, is_endpoint_fault=True)
            case _:
                return outcome

    def settle(self, reply: Reply, *, bound_pusd: int, when: datetime) -> Settlement:
        """The bill, which nobody sends: by the server's token counts, else the reservation.

        Never zero for want of a count, unless the server is free.
        """
        if reply.usage is not None and not reply.usage.is_possible:
            return self.bound(bound_pusd, "usage_contradiction")
        if reply.usage is not None:
            try:
                amount_pusd = self.endpoint.pricing.charge_pusd(reply.usage, when=when)
            except ValueError:  # more than any journal can hold
                return self.bound(bound_pusd, "usage_contradiction")
            return Post(
                Charge(
                    amount_pusd=amount_pusd,
                    basis=Basis.PRICED,
                    usage=reply.usage,
                    generation_id=None,
                )
            )
        if not reply.has_text and (reply.error is not None or not reply.is_success):
            return Void(f"status {reply.http_status} before any token")
        return self.bound(bound_pusd, "usage_missing")

    @staticmethod
    def bound(bound_pusd: int, *flags: str) -> Post:
        """The charge when nobody can say more: what was reserved."""
        return Post(
            Charge(
                amount_pusd=bound_pusd,
                basis=Basis.BOUND,
                usage=None,
                generation_id=None,
                flags=flags,
            )
        )

    def _usd(self, setting: str) -> Decimal:
        price = parse_price(getattr(self, setting))
        if price is None:
            raise ConfigurationError(
                f"local {self.name}: {setting} is an amount in USD as text, like '0.40', "
                f"not {getattr(self, setting)!r}"
            )
        return price

    def _pricing(self) -> Pricing:
        prompt = self._usd("input_usd_per_million").scaleb(-6)
        output = self._usd("output_usd_per_million").scaleb(-6)
        if self.output_tokens_per_s is not None and self.output_tokens_per_s < 1:
            raise ConfigurationError(f"local {self.name}: output_tokens_per_s is at least 1")
        if self.usd_per_gpu_hour is not None:
            if self.output_tokens_per_s is None:
                raise ConfigurationError(
                    f"local {self.name}: usd_per_gpu_hour needs output_tokens_per_s"
                )
            if output or prompt:
                raise ConfigurationError(
                    f"local {self.name}: give prices or usd_per_gpu_hour, not both"
                )
            per_token = self._usd("usd_per_gpu_hour") * self.gpus / 3_600 / self.output_tokens_per_s
            output = per_token.quantize(_FINEST_PRICE, rounding=ROUND_CEILING)
        return Pricing(prices={"prompt": prompt, "completion": output})


def _base(model: str) -> str:
    """A model's own name: servers answer with a path, a repository or a file."""
    return model.rstrip("/").rsplit("/", 1)[-1].casefold()


@dataclass(slots=True, kw_only=True)
class LocalRoute:
    """A local endpoint with the road to it; the session is opened at first use."""

    spec: LocalEndpoint
    sessions: SessionPool
    transport: Transport

    @classmethod
    def to(
        cls, spec: LocalEndpoint, *, timeouts: Timeouts, clock: Clock, key: EnvKey
    ) -> LocalRoute:
        """The road; `key` is the service's, so that it is cut out of answers here, too."""
        service = Service(base_url=spec.base_url)
        sessions = SessionPool(service)
        own = EnvKey(spec.key_variable) if spec.key_variable else key
        transport = Transport(
            service=service, sessions=sessions, timeouts=timeouts, clock=clock, key=own
        )
        return cls(spec=spec, sessions=sessions, transport=transport)

    @property
    def key(self) -> EndpointKey:
        """Its key among the endpoints."""
        return self.spec.endpoint.key

    @property
    def limits(self) -> LimitSettings:
        """As many at once as its owner says, from the beginning."""
        most = self.spec.max_in_flight
        return LimitSettings(initial=most, ceiling=most)

    def headers(self) -> dict[str, str]:
        """Its own key, if it wants one.

        Raises:
            KeyRejected: the variable is not set.
        """
        return EnvKey(self.spec.key_variable).headers() if self.spec.key_variable else {}
