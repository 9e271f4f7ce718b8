"""The target's own weights, and what they say about answers: forward passes in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quantroute.audit._formats import served_as
from quantroute.audit._rows import AuditRow
from quantroute.audit._scores import RowScores
from quantroute.audit._scoring import score_logits
from quantroute.errors import ConfigurationError
from quantroute.extraction import TargetTokenizer

if TYPE_CHECKING:
    import torch

__all__ = ["Target", "score_rows"]

_TOKENS_AT_ONCE: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A causal language model of transformers, in its published weights, and its tokenizer."""

    model: Any
    tokenizer: TargetTokenizer
    name: str = ""

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        device: str = "cpu",
        template: Path | str | None = None,
        trust_remote_code: bool = False,
    ) -> Target:
        """From a local folder in Hugging Face form; nothing is downloaded.

        Raises:
            ConfigurationError: transformers is not installed, or cannot load the folder.
        """
        tokenizer = TargetTokenizer.load(
            folder, template=template, trust_remote_code=trust_remote_code
        )
        model = load_model(folder, device=device, trust_remote_code=trust_remote_code)
        return cls(model=model, tokenizer=tokenizer, name=Path(folder).name)

    @contextlib.contextmanager
    def in_format(self, form: str | None) -> Iterator[None]:
        """Inside, the weights are rounded to `form` once more."""
        with served_as(self.model, form) if form is not None else contextlib.nullcontext():
            yield


def load_model(folder: Path | str, *, device: str, trust_remote_code: bool = False) -> Any:
    """The model alone, ready to score.

    Raises:
        ConfigurationError: transformers is not installed, or cannot load the folder.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigurationError(
            "an audit of weights needs transformers: pip install 'quantroute[audit]'"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{folder}: no model to score with: {error}") from error
    return model.to(device).eval()


def score_rows(
    model: Any,
    rows: Sequence[AuditRow],
    *,
    is_heated: bool = True,
    tokens_at_once: int = _TOKENS_AT_ONCE,
) -> list[RowScores]:
    """Scores of every row, in order; rows of like length share a forward pass.

    Args:
        is_heated: also score at other temperatures, which only the claim is asked about.
    """
    import torch

    order = sorted(range(len(rows)), key=lambda index: rows[index].input_ids.shape[0])
    found: dict[int, RowScores] = {}
    with torch.inference_mode(), _exact_head(model):
        for batch in _batches(order, rows, tokens_at_once):
            logits = _logits(model, [rows[index] for index in batch])
            for index, own in zip(batch, logits, strict=True):
                row = rows[index]
                ids = torch.as_tensor(row.input_ids[row.start :], device=own.device)
                found[index] = score_logits(own, ids, row.claim, is_heated=is_heated)
    return [found[index] for index in range(len(rows))]


def _batches(
    order: Sequence[int], rows: Sequence[AuditRow], tokens_at_once: int
) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in order:  # shortest first, so that the last one sets the width
        if batch and (len(batch) + 1) * rows[index].input_ids.shape[0] > tokens_at_once:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _logits(model: Any, rows: Sequence[AuditRow]) -> Iterator[torch.Tensor]:
    """For each row [T, V], the logits from which its answer's tokens were drawn.

    Rows are padded on the left, so that the answers stand at the end and only their logits are
    made.
    """
    import torch

    longest = max(row.input_ids.shape[0] for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        ids[place, longest - row.input_ids.shape[0] :] = torch.as_tensor(row.input_ids)
        mask[place, longest - row.input_ids.shape[0] :] = 1
    kept = max(row.answer_tokens for row in rows) + 1
    logits = model(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        position_ids=(mask.cumsum(-1) - 1).clamp_min(0).to(model.device),
        logits_to_keep=kept,
        use_cache=False,
    ).logits
    for row, own in zip(rows, logits, strict=True):
        yield own[-row.answer_tokens - 1 : -1]


@contextlib.contextmanager
def _exact_head(model: Any) -> Iterator[None]:
    """Inside, logits come in float32: bfloat16 holds those of likely tokens only to 0.06 or so."""
    import torch

    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear):  # a head of the model's own kind is left as it is
        yield
        return
    weight = head.weight.float()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), weight, bias)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward
