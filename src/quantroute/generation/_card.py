"""A dataset card: what Hugging Face's hub and library read of it, then what people do; pure.

Made of the run alone, so that the same run gives the same card: no date of the export, no path, no
machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quantroute._version import __version__
from quantroute.generation._card_facts import CardFacts, DatasetFile
from quantroute.generation._quality import RowClass
from quantroute.generation._records import StoredRun
from quantroute.generation._selection import Choice, Totals, lines_of_run
from quantroute.ledger import StatementLine
from quantroute.money import format_usd

__all__ = ["CardSubject", "dataset_card"]

#: The hub's classes of size, by the number of rows below which each holds.
_SIZES: Final = (
    (10**3, "n<1K"),
    (10**4, "1K<n<10K"),
    (10**5, "10K<n<100K"),
    (10**6, "100K<n<1M"),
    (10**7, "1M<n<10M"),
    (10**8, "10M<n<100M"),
    (10**9, "100M<n<1B"),
    (10**10, "1B<n<10B"),
)
_DEFAULT: Final = "default"
_TAGS: Final = ("quantroute", "synthetic", "speculative-decoding")
_COLUMNS: Final = (
    ("id, dataset, rollout", "the prompt's name, its dataset, and which of several answers it is"),
    ("key", "hash of model, messages, sampling and rollout: no two rows share one"),
    ("messages", "the conversation; answers carry the model's reasoning in a field of its own"),
    (
        "turns",
        "of each answer: endpoint, provider, label and judged precision, prices, tokens, cost, "
        "sampling, limits, times, class",
    ),
    ("cost_pusd, cost_usd", "what the row's answers cost: pico-dollars, and exact text in dollars"),
    ("metadata", "the prompt's other fields, as JSON text"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSubject:
    """What a card is about. `statement` is the ledger's; licence and title are the user's word."""

    stored: StoredRun
    choice: Choice
    totals: Totals
    facts: CardFacts
    files: Sequence[DatasetFile]
    statement: Sequence[StatementLine]
    license: str | None = None
    title: str | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.title or self.stored.name

    @property
    def model(self) -> str:
        """Whose answers these are."""
        return str(self.stored.config["model"])

    @property
    def is_simulated(self) -> bool:
        """Whether a simulator wrote the answers: a rehearsal's rows are nobody's output."""
        return str(self.stored.config["policy_class"]).startswith("simulated:")

    @property
    def configs(self) -> dict[str, list[DatasetFile]]:
        """The files of each configuration: `default` has all, a dataset its own."""
        found = {_DEFAULT: list(self.files)}
        if len(self.totals.datasets) > 1:
            for file in self.files:
                # A configuration of that name is the default one, whatever the card says.
                name = "default-set" if file.dataset == _DEFAULT else file.dataset
                while name != file.dataset and name in self.totals.datasets:
                    name += "-"
                found.setdefault(name, []).append(file)
        return found


def dataset_card(subject: CardSubject) -> str:
    """The card's text: YAML between two lines of dashes, then Markdown."""
    sections = (
        _beginning(subject),
        _loading(subject),
        _model_and_precision(subject),
        _cost(subject),
        _sampling(subject),
        _filters(subject),
        _columns(),
        _origin(subject),
    )
    front = "\n".join(_yaml(_front_matter(subject)))
    return f"---\n{front}\n---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(subject: CardSubject) -> dict[str, Any]:
    licence = {} if subject.license is None else {"license": subject.license}
    return licence | {
        "pretty_name": subject.name,
        "task_categories": ["text-generation"],
        "size_categories": [_size(subject.totals.rows)],
        "tags": [*_TAGS, *(["simulated"] if subject.is_simulated else ())],
        "configs": [_config(name, files) for name, files in subject.configs.items()],
        "dataset_info": [_info(name, files) for name, files in subject.configs.items()],
    }


def _config(name: str, files: Sequence[DatasetFile]) -> dict[str, Any]:
    paths = [file.path for file in files]
    default = {"default": True} if name == _DEFAULT else {}
    return {"config_name": name, "data_files": [{"split": "train", "path": paths}], **default}


def _info(name: str, files: Sequence[DatasetFile]) -> dict[str, Any]:
    """Sizes: a reader that finds fewer rows than these reports it."""
    read_bytes = sum(file.arrow_bytes for file in files)
    rows = sum(file.rows for file in files)
    return {
        "config_name": name,
        "splits": [{"name": "train", "num_bytes": read_bytes, "num_examples": rows}],
        "download_size": sum(file.size_bytes for file in files),
        "dataset_size": read_bytes,
    }


def _size(rows: int) -> str:
    return next((name for below, name in _SIZES if rows < below), _SIZES[-1][1])


def _beginning(subject: CardSubject) -> str:
    totals = subject.totals
    licence = (
        f"Licence, as stated by whoever exported it: {_text(subject.license)}."
        if subject.license
        else "No licence is stated. Ask whoever published this, and mind the terms of the model "
        "and of the providers below."
    )
    verified = (
        "; answers that do not say who served them are among these"
        if RowClass.UNVERIFIED in subject.choice.classes
        else ", each of which said that it served its answers"
    )
    rehearsal = (
        "**A rehearsal: a simulator wrote these answers, not the model. Do not train on them.**\n\n"
        if subject.is_simulated
        else ""
    )
    return (
        f"# {_text(subject.name)}\n\n{rehearsal}"
        f"Answers of {_code(subject.model)}: {totals.rows:,} conversations with "
        f"{sum(totals.classes.values()):,} answers and {totals.tokens['output_tokens']:,} output "
        f"tokens ({totals.tokens['reasoning_tokens']:,} of them reasoning), generated "
        f"{subject.facts.dates} through endpoints whose precision was judged{verified}.\n\n"
        f"{licence}"
    )


def _loading(subject: CardSubject) -> str:
    rows = [
        (
            _code(name),
            f"{subject.totals.datasets[name]:,}",
            f"{subject.facts.output_tokens[name]:,}",
        )
        for name in sorted(subject.totals.datasets)
    ]
    extra = (
        "\n\nThe default configuration has all rows; each dataset is one of its own."
        if len(rows) > 1
        else ""
    )
    return (
        "## Read it\n\n```python\nfrom datasets import load_dataset\n\n"
        'rows = load_dataset("PATH_OR_NAME", split="train")\n```\n\n'
        + _table(("dataset", "rows", "output tokens"), rows)
        + extra
    )


def _model_and_precision(subject: CardSubject) -> str:
    answers = sum(subject.totals.classes.values())
    served = sorted(subject.facts.served.values(), key=lambda item: (-item.answers, item.endpoint))
    rows = [
        (
            _code(item.endpoint),
            f"{item.answers:,} ({item.answers / answers:.1%})",
            f"{item.output_tokens:,}",
            _text(item.label or "none"),
            _text(item.judgement()),
        )
        for item in served
    ]
    return (
        "## Endpoints and precision\n\nOne line per endpoint and judgement.\n\n"
        + _table(("endpoint", "answers", "output tokens", "label", "what the policy took"), rows)
        + f"\n\nThe policy, in a word (a host before it is a service other than "
        f"OpenRouter): {_code(subject.stored.config['policy_class'] or 'default')}."
    )


def _cost(subject: CardSubject) -> str:
    facts = subject.facts
    served = sorted(facts.served.values(), key=lambda item: (-item.cost_pusd, item.endpoint))
    rows = [
        (_code(item.endpoint), item.prices, format_usd(item.cost_pusd, places=6)) for item in served
    ]
    total = format_usd(sum(item.cost_pusd for item in served), places=6)
    spent = sum(line.posted_pusd for line in lines_of_run(subject.stored.name, subject.statement))
    unknown = (
        f" The charge of {facts.unknown_costs:,} of these answers is not known yet."
        if facts.unknown_costs
        else ""
    )
    whole = (
        f" The whole run, answers that are not here included, cost {format_usd(spent, places=6)}."
        if spent
        else ""
    )
    return (
        "## Prices and cost\n\n"
        + _table(("endpoint", "USD per million tokens, input / output", "paid"), rows)
        + f"\n\nThese answers cost {total} in all.{unknown}{whole}"
    )


def _sampling(subject: CardSubject) -> str:
    rows = [
        (_code(dataset), _code(asked.sampling), f"{asked.max_output_tokens:,}", asked.mode, count)
        for dataset, ways in sorted(subject.facts.asked.items())
        for asked, count in sorted(ways.items())
    ]
    return "## Sampling\n\nA parameter that is not named was not sent.\n\n" + _table(
        ("dataset", "parameters", "most output tokens", "thinking", "answers"),
        [(*row[:-1], f"{row[-1]:,}") for row in rows],
    )


def _filters(subject: CardSubject) -> str:
    choice, totals = subject.choice, subject.totals
    classes = ", ".join(sorted(_code(item.value) for item in choice.classes))
    failed = (
        "Answers of endpoints that failed an audit are left out: "
        + ", ".join(map(_code, sorted(choice.without)))
        + "."
        if choice.without
        else "No endpoint's answers were left out for a failed audit."
    )
    left_out = (
        _table(
            ("left out because of", "conversations"),
            [(why.replace("_", " "), f"{rows:,}") for why, rows in sorted(totals.left_out.items())],
        )
        if totals.left_out
        else "No conversation was left out."
    )
    return (
        f"## Filters\n\nOnly whole conversations whose every answer is of class {classes}. "
        "Answers from a provider that was not asked are never exported. "
        f"{failed}\n\n{left_out}"
    )


def _columns() -> str:
    return "## Columns\n\n" + _table(("column", "holds"), _COLUMNS)


def _origin(subject: CardSubject) -> str:
    stored = subject.stored
    files = [
        (_code(file.path), f"{file.rows:,}", f"{file.size_bytes:,}", _code(file.sha256))
        for file in subject.files
    ]
    sources = [
        (_code(item["name"]), _code(item["location"]), _code(item["sha256"]))
        for item in stored.config["sources"]
    ]
    prompts = (
        "\n\nThe prompts:\n\n" + _table(("dataset", "file", "SHA-256"), sources) if sources else ""
    )
    return (
        f"## Where it comes from\n\nquantroute {__version__}, run `{stored.name}`, settings "
        f"`{stored.config_hash}` (SHA-256). `quantroute.json` beside this card says the same for "
        "programs.\n\n" + _table(("file", "rows", "bytes", "SHA-256"), files) + prompts
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(words: str) -> str:
    """No new line, no new cell."""
    return " ".join(words.split()).replace("|", "\\|")


def _text(words: str) -> str:
    """Foreign words in a line of text: no new line, no markup."""
    return " ".join(words.split()).replace("<", "&lt;")


def _code(words: str) -> str:
    """Foreign words as code."""
    return f"`{' '.join(words.split()).replace('`', chr(39))}`"


def _yaml(value: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A mapping as YAML; scalars are written as JSON, which is YAML too."""
    for name, item in value.items():
        if isinstance(item, list) and item and isinstance(item[0], dict):
            yield f"{indent}{name}:"
            for entry in item:
                first, *rest = _yaml(entry)
                yield f"{indent}- {first}"
                yield from (f"{indent}  {line}" for line in rest)
        elif isinstance(item, list):
            yield f"{indent}{name}:"
            yield from (f"{indent}- {json.dumps(entry)}" for entry in item)
        else:
            yield f"{indent}{name}: {json.dumps(item)}"
