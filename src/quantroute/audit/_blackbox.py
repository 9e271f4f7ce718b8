"""The audit without weights: ask every endpoint the same, and compare what comes back.

Spends money, through the caller's ledger and never beyond its cap.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from quantroute._html import notebook_table
from quantroute._http import Service
from quantroute.audit._report import Finding, Outcome, plain
from quantroute.audit._statistics import holm
from quantroute.audit._strings import Agreement, StringTest, greedy_agreement, string_test
from quantroute.client import Answered, ChatRequest, Client
from quantroute.domain import Quantization, Sampling
from quantroute.errors import ConfigurationError, NoEligibleEndpoint
from quantroute.ledger import Account, BudgetLedger
from quantroute.policy import ExclusionPolicy
from quantroute.registry import ProviderRegistry
from quantroute.secrets import EnvKey

__all__ = ["PROBES", "StringsEndpoint", "StringsReport", "StringsSettings", "audit_strings"]

#: Prompts whose answers leave room: many likely words at every place.
PROBES: Final = (
    "Invent a short name for a bakery and say in one sentence why it fits.",
    "Describe a storm at sea in two sentences.",
    "Name any three objects on a desk, each with a colour.",
    "Begin a story about a lost key.",
    "Write two lines of a song about rain.",
    "Suggest an unusual hobby and how to start it.",
    "What might a cat think while it looks out of the window?",
    "Give a made-up weather report for tomorrow.",
    "Complete the sentence in a surprising way: The door opened and",
    "Choose a number between one and a thousand and say something about it.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StringsSettings:
    """What is asked.

    Attributes:
        reference: tag of the endpoint that the others are compared with.
        answers: sampled answers to each prompt from each endpoint.
        max_output_tokens: of each answer; short ones carry most of what the test sees.
        is_greedy: also ask each prompt twice at temperature 0: an endpoint that does not agree
            with itself does not honour it, and is not expected to agree with another.
    """

    reference: str
    prompts: tuple[str, ...] = PROBES
    answers: int = 10
    max_output_tokens: int = 64
    temperature: float = 1.0
    is_greedy: bool = True
    alpha: float = 0.05
    permutations: int = 2_000

    def __post_init__(self) -> None:
        if not self.prompts or self.answers < 2 or self.max_output_tokens < 1:
            raise ConfigurationError(
                "a comparison of strings needs prompts, at least 2 answers to each, and "
                "max_output_tokens of at least 1"
            )
        if self.temperature <= 0:
            raise ConfigurationError("sampled answers need a temperature above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class StringsEndpoint:
    """One endpoint against the reference.

    Attributes:
        greedy: of its greedy answers with the reference's; `greedy_own`: with its own second ones.
        failures: requests without an answer, by reason.
    """

    endpoint: str
    outcome: Outcome
    test: StringTest | None
    greedy: Agreement | None
    greedy_own: Agreement | None
    p_adjusted: float
    failures: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StringsReport:
    """All endpoints of a comparison of strings, and what it cost.

    `reference_failures` are requests to the reference without an answer, by reason.
    """

    model: str
    reference: str
    alpha: float
    endpoints: tuple[StringsEndpoint, ...]
    spent_pusd: int
    reference_failures: Mapping[str, int] = field(default_factory=dict)
    date: str = ""
    run: str = ""
    method: str = "strings"

    @property
    def failed(self) -> tuple[StringsEndpoint, ...]:
        """Endpoints whose answers are others than the reference's."""
        return tuple(item for item in self.endpoints if item.outcome is Outcome.FAILS)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Failures alone: answers that look alike prove little, so nothing passes by them."""
        return tuple(
            Finding(
                endpoint=item.endpoint,
                failed=True,
                served=Quantization.UNKNOWN,
                note=f"answers differ from those of {self.reference}: adjusted p "
                f"{item.p_adjusted:.2g}",
            )
            for item in self.failed
        )

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        return notebook_table(
            ("endpoint", "verdict", "answers", "discrepancy", "p"),
            (
                (
                    item.endpoint,
                    item.outcome.value,
                    f"{item.test.answers[0]:,}" if item.test else "0",
                    f"{item.test.discrepancy:.4f}" if item.test else "-",
                    f"{item.p_adjusted:.2g}",
                )
                for item in self.endpoints
            ),
            caption=f"{self.model}: answers against {self.reference}",
            numeric={2, 3, 4},
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dict(plain(self))


@dataclass(slots=True)
class _Asked:
    """What came back from one endpoint; greedy answers by prompt and round."""

    texts: list[str] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    greedy: dict[tuple[int, int], str] = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def greedy_of(self, round_: int) -> dict[int, str]:
        """Greedy answers of one round, by prompt."""
        return {number: text for (number, at), text in self.greedy.items() if at == round_}


async def audit_strings(
    model: str,
    settings: StringsSettings,
    *,
    ledger: BudgetLedger,
    registry: ProviderRegistry,
    policy: ExclusionPolicy | None = None,
    service: Service | None = None,
    key: EnvKey | None = None,
    date: str = "",
    run: str = "",
) -> StringsReport:
    """Ask every eligible endpoint, pinned, and compare each with the reference.

    Raises:
        NoEligibleEndpoint: the policy leaves nothing to ask.
        ConfigurationError: the reference is not among the eligible endpoints.
        BudgetExceeded: the ledger's cap is reached; what was asked is paid and recorded.
    """
    policy = policy or ExclusionPolicy()
    before_pusd = ledger.balance().posted_pusd

    def client(pinned: ExclusionPolicy) -> Client:
        return Client(ledger=ledger, policy=pinned, registry=registry, service=service, key=key)

    sampling = Sampling(temperature=settings.temperature)
    async with client(policy) as looking:
        bound = await looking.verdicts(model, sampling=sampling)
    if not bound.eligible:
        raise NoEligibleEndpoint(model=model, reasons=bound.reasons())
    tags = sorted({endpoint.tag for endpoint in bound.eligible})
    if settings.reference not in tags:
        raise ConfigurationError(
            f"reference {settings.reference!r} is not eligible; eligible are: {', '.join(tags)}"
        )
    asked: dict[str, _Asked] = {}
    for tag in tags:  # one after the other: the account's own limits are shared by all
        async with client(replace(policy, only=(tag,))) as pinned:
            asked[tag] = await _ask(pinned, model, settings)
    spent_pusd = ledger.balance().posted_pusd - before_pusd
    return StringsReport(
        model=model,
        reference=settings.reference,
        alpha=settings.alpha,
        endpoints=_judged(asked, settings),
        spent_pusd=spent_pusd,
        reference_failures=dict(asked[settings.reference].failures),
        date=date,
        run=run,
    )


async def _ask(client: Client, model: str, settings: StringsSettings) -> _Asked:
    found = _Asked()
    account = Account("audit")

    async def one(number: int, sampling: Sampling, *, round_: int = 0) -> None:
        completion = await client.complete(
            ChatRequest(
                model=model,
                messages=({"role": "user", "content": settings.prompts[number]},),
                max_output_tokens=settings.max_output_tokens,
                sampling=sampling,
                account=account,
            )
        )
        if not isinstance(completion, Answered):
            found.failures[completion.problem] += 1
            return
        answer = completion.answer
        if "served_mismatch" in answer.flags:
            found.failures["served by another endpoint"] += 1
            return
        text = (answer.reasoning or "") + answer.content
        if sampling.temperature == 0:
            found.greedy[number, round_] = text
        else:
            found.texts.append(text)
            found.prompts.append(number)

    try:
        async with asyncio.TaskGroup() as group:
            for number in range(len(settings.prompts)):
                for _ in range(settings.answers):
                    group.create_task(one(number, Sampling(temperature=settings.temperature)))
                for round_ in range(2 * settings.is_greedy):
                    group.create_task(one(number, Sampling(temperature=0.0), round_=round_))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return found


def _judged(asked: Mapping[str, _Asked], settings: StringsSettings) -> tuple[StringsEndpoint, ...]:
    reference = asked[settings.reference]
    others = [tag for tag in asked if tag != settings.reference]
    tests = {tag: _test(asked[tag], reference, settings) for tag in others}
    ps = [1.0 if test is None else test.p for test in tests.values()]
    found = [
        StringsEndpoint(
            endpoint=tag,
            outcome=_outcome(tests[tag], p, settings),
            test=tests[tag],
            greedy=_greedy(asked[tag].greedy_of(0), reference.greedy_of(0)),
            greedy_own=_greedy(asked[tag].greedy_of(0), asked[tag].greedy_of(1)),
            p_adjusted=p,
            failures=dict(asked[tag].failures),
        )
        for tag, p in zip(others, holm(ps), strict=True)
    ]
    return tuple(sorted(found, key=lambda item: (item.p_adjusted, item.endpoint)))


def _test(found: _Asked, reference: _Asked, settings: StringsSettings) -> StringTest | None:
    if not set(found.prompts) & set(reference.prompts):
        return None
    return string_test(
        found.texts,
        reference.texts,
        prompts=(found.prompts, reference.prompts),
        permutations=settings.permutations,
    )


def _outcome(test: StringTest | None, p: float, settings: StringsSettings) -> Outcome:
    if test is None or min(test.answers) < len(settings.prompts) * settings.answers / 2:
        return Outcome.TOO_FEW
    return Outcome.FAILS if p < settings.alpha else Outcome.PASSES


def _greedy(found: Mapping[int, str], reference: Mapping[int, str]) -> Agreement | None:
    both: Sequence[int] = sorted(found.keys() & reference.keys())
    if not both:
        return None
    return greedy_agreement([found[n] for n in both], [reference[n] for n in both])
