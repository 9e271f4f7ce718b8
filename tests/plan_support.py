"""Demands, plans and small run files for tests of planning."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from policy_support import K25, make_endpoint
from quantroute.domain import Endpoint
from quantroute.generation import Allocation, Census, DatasetSpec, Demand, Expectation, Plan
from quantroute.generation import make_plan as plan_of
from quantroute.money import PUSD_PER_USD
from quantroute.policy import ExclusionPolicy

AT = datetime(2026, 8, 22, 12, tzinfo=UTC)
INCEPTRON = make_endpoint("inceptron/int4", "Inceptron", usd_out="0.0000022")
MOONSHOT = make_endpoint("moonshotai/int4", "Moonshot AI", usd_in="0.0000006", usd_out="0.000003")
BASETEN = make_endpoint("baseten/fp4", "BaseTen", "fp4", usd_in="0.00000075", usd_out="0.00000375")
LISTED = (MOONSHOT, INCEPTRON, BASETEN)


def expectation(output_tokens: float = 1_000.0, **changes: Any) -> Expectation:
    """Nothing is cut, nothing lost, no reasoning; an answer takes ten seconds."""
    facts: dict[str, Any] = {
        "output_tokens": output_tokens,
        "low": output_tokens,
        "high": output_tokens,
        "reasoning_share": 0.0,
        "truncated_share": 0.0,
        "accepted_share": 1.0,
        "good_share": 1.0,
        "answer_s": 10.0,
    }
    return Expectation(**(facts | changes))


def demand(
    name: str = "b3",
    *,
    rows: int = 20_000,
    input_tokens: float = 250.0,
    expected: Expectation | None = None,
    endpoints: tuple[Endpoint, ...] = LISTED,
    facts: dict[str, Any] | None = None,
    **spec: Any,
) -> Demand:
    """A dataset of one-turn prompts; `spec` are fields of `DatasetSpec`, `facts` of `Demand`."""
    settings = {"name": name, "prompts": None, "max_output_tokens": 8_192} | spec
    bound = ExclusionPolicy(exclude=["BaseTen"]).bind(endpoints, at=AT, must_match=False)
    return Demand(
        spec=DatasetSpec(**settings),
        census=Census(
            dataset=name,
            prompts=rows,
            rows=rows,
            requests=rows,
            input_bytes=4 * rows * 242,
            input_bound_tokens=1_140 * rows,
            longest_bound_tokens=2_000,
        ),
        expectation=expected or expectation(input_tokens=input_tokens),
        bound=bound,
        **(facts or {}),
    )


def make_plan(*demands: Demand, cap_usd: int = 100, **changes: Any) -> Plan:
    """A plan of these demands."""
    settings: dict[str, Any] = {
        "model": K25,
        "cap_pusd": cap_usd * PUSD_PER_USD,
        "allocation": Allocation.EQUAL,
        "max_in_flight": 2_000,
        "at": AT,
    }
    return plan_of(demands, **(settings | changes))


def write_prompts(path: Path, questions: list[str]) -> Path:
    """One prompt per line."""
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    return path


def write_spec(folder: Path, datasets: str, *, cap: str = "1.00", run: str = "") -> Path:
    """A run file for the simulator's model; `datasets` and `run` are TOML."""
    path = folder / "run.toml"
    path.write_text(
        f'[run]\nname = "job"\nmodel = "{K25}"\ncap_usd = "{cap}"\nmax_in_flight = 16\n{run}\n'
        f"{datasets}\n"
    )
    return path
