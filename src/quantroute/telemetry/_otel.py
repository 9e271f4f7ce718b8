"""OpenTelemetry: a span and measurements per attempt, by the conventions for generative AI.

Names as of the semantic conventions of 2026 (gen-ai, status "development"): operation `chat`,
`gen_ai.client.operation.duration`, `gen_ai.client.token.usage`. What they have no word for stands
under `quantroute.`. Prompts and answers are never recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from quantroute._version import __version__
from quantroute.client import SettledAttempt
from quantroute.errors import ConfigurationError

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider

__all__ = ["OpenTelemetryObserver"]

Attributes = dict[str, Any]

_SCOPE: Final = "quantroute"
_OPERATION: Final = "chat"
#: The convention's list knows no aggregator; custom names are allowed.
_PROVIDER: Final = "openrouter"
_LOCAL_PROVIDER: Final = "local"
_TOKEN_BOUNDS: Final = [4.0**power for power in range(14)]
_DURATION_BOUNDS_S: Final = [0.01 * 2**power for power in range(14)]
_REQUEST_ATTRIBUTES: Final = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "frequency_penalty",
    "presence_penalty",
)


class OpenTelemetryObserver:
    """Tells OpenTelemetry of each settled attempt: `Client(observer=OpenTelemetryObserver())`.

    Spans are made at an attempt's end with its real times, under the span that is current then.

    Args:
        tracer_provider, meter_provider: the global ones by default.

    Raises:
        ConfigurationError: the extra is not installed.
    """

    def __init__(
        self,
        *,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        try:
            from opentelemetry import metrics, trace
        except ImportError as error:
            raise ConfigurationError(
                "OpenTelemetry is not installed: pip install 'quantroute[otel]'"
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
        self._duration = meter.create_histogram(
            "gen_ai.client.operation.duration",
            unit="s",
            description="How long an attempt took.",
            explicit_bucket_boundaries_advisory=_DURATION_BOUNDS_S,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of an answer, as they are billed.",
            explicit_bucket_boundaries_advisory=_TOKEN_BOUNDS,
        )
        self._charges = meter.create_counter(
            "quantroute.client.charge",
            unit="{pUSD}",
            description="Posted charges in pico-dollars (1e-12 USD).",
        )

    def __call__(self, attempt: SettledAttempt) -> None:
        """Record one attempt."""
        common = _common(attempt)
        self._record(attempt, common)
        self._span(attempt, common)

    def _record(self, attempt: SettledAttempt, common: Attributes) -> None:
        self._duration.record(attempt.elapsed_s, common)
        if attempt.charge_pusd:
            self._charges.add(attempt.charge_pusd, common)
        usage = attempt.usage
        if usage is not None:
            for kind, tokens in (("input", usage.input_tokens), ("output", usage.output_tokens)):
                self._tokens.record(tokens, {**common, "gen_ai.token.type": kind})

    def _span(self, attempt: SettledAttempt, common: Attributes) -> None:
        trace, began_ns = self._trace, int(attempt.began_at_s * 1e9)
        span = self._tracer.start_span(
            f"{_OPERATION} {attempt.request.model}",
            kind=trace.SpanKind.CLIENT,
            attributes={**common, **_asked(attempt), **_answered(attempt)},
            start_time=began_ns,
        )
        if not attempt.is_answered:
            span.set_status(trace.StatusCode.ERROR, attempt.problem)
        span.end(end_time=began_ns + int(attempt.elapsed_s * 1e9))


def _common(attempt: SettledAttempt) -> Attributes:
    """What spans and measurements share: few different values, as metrics need it."""
    found: Attributes = {
        "gen_ai.operation.name": _OPERATION,
        "gen_ai.provider.name": _LOCAL_PROVIDER if attempt.endpoint.is_local else _PROVIDER,
        "gen_ai.request.model": attempt.request.model,
        "quantroute.endpoint": str(attempt.endpoint.key),
    }
    if attempt.answer is not None and attempt.answer.provenance.served_model:
        found["gen_ai.response.model"] = attempt.answer.provenance.served_model
    if not attempt.is_answered:
        found["error.type"] = attempt.kind.replace(" ", "_")
    return found


def _asked(attempt: SettledAttempt) -> Attributes:
    parameters: Mapping[str, Any] = attempt.request.sampling.parameters()
    found: Attributes = {
        "gen_ai.request.max_tokens": attempt.max_output_tokens,
        "gen_ai.request.stream": attempt.request.is_streamed,
        "quantroute.account": str(attempt.request.account),
        "quantroute.request.id": attempt.request.request_id,
        "quantroute.attempt": attempt.attempt,
    }
    found |= {
        f"gen_ai.request.{name}": parameters[name]
        for name in _REQUEST_ATTRIBUTES
        if isinstance(parameters.get(name), int | float)
    }
    if attempt.status:
        found["http.response.status_code"] = attempt.status
    if attempt.charge_pusd is not None:
        found["quantroute.charge_pusd"] = attempt.charge_pusd
    return found


def _answered(attempt: SettledAttempt) -> Attributes:
    answer = attempt.answer
    if answer is None:
        return {}
    found: Attributes = {"quantroute.precision": answer.provenance.precision.quantization.value}
    if answer.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [answer.finish_reason]
    if answer.provenance.generation_id is not None:
        found["gen_ai.response.id"] = answer.provenance.generation_id
    if answer.provenance.served_provider is not None:
        found["quantroute.served_provider"] = answer.provenance.served_provider
    if attempt.request.is_streamed and answer.first_byte_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = answer.first_byte_s
    if (usage := answer.usage) is not None:
        found |= {
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens,
        }
    return found
