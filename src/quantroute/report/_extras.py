"""What other stages left behind: audit, training, acceptance. Read tolerantly, shown if there.

Their files may come from another version or another tool: known figures become charts, everything
else that is plain becomes tables, and what cannot be read is said.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

__all__ = [
    "Acceptance",
    "Extras",
    "Found",
    "TrainingCurve",
    "audit_line",
    "find_extras",
    "is_number",
    "read_acceptance",
    "read_audit",
    "read_training",
]

_MOST_BYTES: Final = 64 << 20
#: Where the stages put their files below a run's folder.
_USUAL: Final = {
    "audit": ("audit.json", "audit/audit.json", "audit/report.json"),
    "training": ("metrics.jsonl", "train/metrics.jsonl", "drafter/metrics.jsonl"),
    "acceptance": ("acceptance.json", "evaluation.json", "evaluate/evaluation.json"),
}


@dataclass(frozen=True, slots=True)
class Found:
    """A file that was read, or why it was not."""

    path: Path
    data: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """One figure over the steps of one split ("train", "validation")."""

    split: str
    figure: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Tokens per pass of the target, by what was measured; at most `longest` are possible."""

    lengths: tuple[tuple[str, float], ...]
    longest: float | None = None
    rest: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The files, where there are any."""

    audit: Found | None = None
    training: Found | None = None
    acceptance: Found | None = None


def find_extras(
    folder: Path,
    *,
    audit: Path | None = None,
    training: Path | None = None,
    acceptance: Path | None = None,
) -> Extras:
    """Read what is named, else what lies at the usual places below `folder`."""
    return Extras(
        audit=_found(audit or _usual(folder, "audit"), _json),
        training=_found(training or _usual(folder, "training"), _json_lines),
        acceptance=_found(acceptance or _usual(folder, "acceptance"), _json),
    )


def _usual(folder: Path, what: str) -> Path | None:
    return next((folder / name for name in _USUAL[what] if (folder / name).is_file()), None)


def _found(path: Path | None, read: Any) -> Found | None:
    if path is None:
        return None
    try:
        if path.stat().st_size > _MOST_BYTES:
            return Found(path, problem=f"larger than {_MOST_BYTES >> 20} MiB")
        return Found(path, data=read(path.read_text(encoding="utf-8", errors="replace")))
    except OSError as error:
        return Found(path, problem=error.strerror or "cannot be read")
    except (ValueError, RecursionError) as error:
        return Found(path, problem=f"not what it should be: {error}")


def _json(content: str) -> Any:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")
    return found


def _json_lines(content: str) -> list[dict[str, Any]]:
    """Objects, one a line; a torn or odd line is left out."""
    rows = []
    for line in content.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    if not rows:
        raise ValueError("no line of it is a JSON object")
    return rows


def is_number(value: object) -> TypeGuard[float]:
    """A number that is no truth value, finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON has integers of any length
        return False


def read_audit(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """The audit's own facts, and one mapping per endpoint, whatever its list is called."""
    for name in ("endpoints", "results", "findings"):
        listed = data.get(name)
        if isinstance(listed, Mapping):
            listed = [
                {"endpoint": key, **value}
                for key, value in listed.items()
                if isinstance(value, Mapping)
            ]
        if isinstance(listed, list) and listed and all(isinstance(x, Mapping) for x in listed):
            return {key: value for key, value in data.items() if key != name}, listed
    return data, ()


def audit_line(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """One endpoint in a few words, if it is as `quantroute audit` writes it; else as it is."""
    if not isinstance(item.get("outcome"), str):
        return item
    line: dict[str, Any] = {"endpoint": item.get("endpoint"), "verdict": item["outcome"]}
    cause, effect, test, greedy = (
        found if isinstance(found := item.get(name), Mapping) else {}
        for name in ("cause", "effect", "test", "greedy")
    )
    if cause:
        line |= {"cause": cause.get("text"), "rows": item.get("rows"), "tokens": item.get("tokens")}
    if effect:
        line["effect, nats a token"] = _signed(effect.get("mean_nats"))
        line["95% interval"] = f"{_signed(effect.get('low'))} to {_signed(effect.get('high'))}"
    if test:
        answers = test.get("answers")
        line["answers"] = answers[0] if isinstance(answers, list) and answers else answers
        line |= {"discrepancy": test.get("discrepancy"), "1 in 20 above": test.get("limit")}
    line["p"] = item.get("p_adjusted")
    if greedy:
        line["greedy answers equal"] = greedy.get("equal_share")
    if hints := item.get("hints"):
        line["hints"] = "; ".join(map(str, hints)) if isinstance(hints, list) else hints
    return line


def _signed(value: object) -> str:
    return f"{value:+.4f}" if is_number(value) else "-"


def read_training(rows: Iterable[Mapping[str, Any]]) -> tuple[TrainingCurve, ...]:
    """Loss, accuracy at the first position ahead and what follows from it, over the steps."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for number, row in enumerate(rows):
        step = row.get("step")
        at = float(step) if is_number(step) else float(number)
        split = str(row.get("split", "train"))
        for figure, value in _figures(row):
            curves.setdefault((split, figure), []).append((at, value))
    return tuple(
        TrainingCurve(split, figure, tuple(sorted(points)))
        for (split, figure), points in curves.items()
    )


def _figures(row: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    if is_number(loss := row.get("loss")):
        yield "loss", float(loss)
    accuracy = row.get("accuracy")
    if is_number(accuracy):
        accuracy = [accuracy]
    if isinstance(accuracy, list) and accuracy and is_number(accuracy[0]):
        yield "accuracy", float(accuracy[0])
    length, cumulative = row.get("accept_length"), row.get("cumulative")
    if is_number(length):
        yield "acceptance length", float(length)
    elif isinstance(cumulative, list) and cumulative and all(map(is_number, cumulative)):
        yield "acceptance length", 1.0 + sum(cumulative)


def read_acceptance(data: Mapping[str, Any]) -> Acceptance:
    """Acceptance lengths of the drafter, of each dataset, of an untrained one and of controls."""
    lengths: list[tuple[str, float]] = []
    for item in _listed(data.get("trained")):
        _add(lengths, f"trained, {item.get('dataset') or 'all rows'}", item)
    _add(lengths, "untrained", data.get("untrained"))
    controls = data.get("controls")
    if isinstance(controls, Mapping):
        for name, item in controls.items():
            _add(lengths, f"control: {str(name).replace('_', ' ')}", item)
    depth = data.get("depth")
    known = ("trained", "untrained", "controls", "depth")
    return Acceptance(
        lengths=tuple(lengths),
        longest=depth + 1.0 if is_number(depth) else None,
        rest={key: value for key, value in data.items() if key not in known},
    )


def _listed(value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        return [value]
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _add(lengths: list[tuple[str, float]], name: str, item: object) -> None:
    if isinstance(item, Mapping) and is_number(length := item.get("length")):
        lengths.append((name, float(length)))
