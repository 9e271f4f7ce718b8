"""ModelOpt: one `{conversation_id}.pt` per example, named by its content."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quantroute._extra import need
from quantroute.extraction._formats._common import (
    FormatReport,
    Norm,
    StatesFacts,
    save_tensors,
    write_format,
)
from quantroute.extraction._formats._specforge import auxiliary, is_saved, tokens
from quantroute.extraction._records import LayerConvention, States
from quantroute.extraction._vocabulary import DraftVocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["write_modelopt"]


def write_modelopt(
    states: Iterable[States],
    folder: Path | str,
    *,
    facts: StatesFacts,
    norm: Norm | None = None,
    draft_vocab_size: int | None = None,
    forced: Iterable[int] = (),
    on_example: Callable[[int], None] | None = None,
) -> FormatReport:
    """Write `folder/hidden_states/*.pt` for ModelOpt's offline EAGLE training.

    With `norm`, the last state is written after it, which this trainer takes for granted; without,
    before it and marked so (`hidden_states_prenorm`, read by ModelOpt 0.47). The loss mask counts
    only if its `answer_only_loss` is on. The rest is as for `write_speculators`; examples of equal
    content have one name and are written once.
    """
    return write_format(
        states,
        folder,
        layout=_Layout(norm, "before final norm" if norm is None else "after final norm"),
        facts=facts,
        draft_vocab_size=draft_vocab_size,
        forced=forced,
        on_example=on_example,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    norm: Norm | None
    last_state: str
    trainer: str = "modelopt"
    convention: LayerConvention = LayerConvention.OUTPUT

    def path(self, index: int, states: States) -> str:
        del index
        return f"hidden_states/{states.example.key}.pt"

    def save(self, file: IO[bytes], states: States, dtype: torch.dtype) -> None:
        last = states.hidden[:, -1]
        content: dict[str, object] = {
            **tokens(states),
            "conversation_id": states.example.key,
            "aux_hidden_states": auxiliary(states, dtype),
        }
        if self.norm is None:
            content["hidden_states_prenorm"] = True
        else:
            last = self.norm.apply(last)
        content["hidden_states"] = last.to(dtype).contiguous()
        need("torch").save(content, file)

    def holds(self, path: Path, states: States, dtype: torch.dtype) -> bool:
        length, slots, size = states.hidden.shape
        wanted = {
            "aux_hidden_states": (length, (slots - 1) * size),
            "hidden_states": (length, size),
        }
        return is_saved(path, states, wanted, dtype)

    def finish(
        self, folder: Path, counts: NDArray[np.int64], vocabulary: DraftVocabulary | None
    ) -> None:
        del counts
        path = folder / "d2t.pt"
        path.unlink(missing_ok=True)
        if vocabulary is not None:
            save_tensors(path, need("torch").from_numpy(vocabulary.d2t))
