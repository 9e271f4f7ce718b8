"""SpecForge: one `data_{i}.ckpt` per example, the last state after the final norm.

Its reader walks the folder and sorts names as text, so numbers are padded; its head is the bare
`lm_head`, so the norm is applied here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

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
from quantroute.extraction._records import LayerConvention, States
from quantroute.extraction._vocabulary import DraftVocabulary

if TYPE_CHECKING:
    import torch

__all__ = ["write_specforge"]

_ROWS_PER_FOLDER: Final = 2_000


def write_specforge(
    states: Iterable[States],
    folder: Path | str,
    *,
    facts: StatesFacts,
    norm: Norm,
    draft_vocab_size: int | None = None,
    forced: Iterable[int] = (),
    on_example: Callable[[int], None] | None = None,
) -> FormatReport:
    """Write `folder/hidden_states` as SpecForge's `data.hidden_states_path`.

    With a draft vocabulary, `vocab_mapping/vocab_mapping.pt` is its `model.vocab_mapping_path`.
    `norm` is the target's final norm; the rest is as for `write_speculators`.
    """
    return write_format(
        states,
        folder,
        layout=_Layout(norm),
        facts=facts,
        draft_vocab_size=draft_vocab_size,
        forced=forced,
        on_example=on_example,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    norm: Norm
    trainer: str = "specforge"
    convention: LayerConvention = LayerConvention.OUTPUT
    last_state: str = "after final norm"

    def path(self, index: int, states: States) -> str:
        del states
        first = index - index % _ROWS_PER_FOLDER
        rows = f"rows_{first:09d}-{first + _ROWS_PER_FOLDER:09d}"
        return f"hidden_states/{rows}/data_{index:09d}.ckpt"

    def save(self, file: IO[bytes], states: States, dtype: torch.dtype) -> None:
        last = self.norm.apply(states.hidden[:, -1])
        content = tokens(states) | {
            "aux_hidden_state": auxiliary(states, dtype).unsqueeze(0),
            "hidden_state": last.to(dtype).unsqueeze(0).contiguous(),
        }
        need("torch").save(content, file)

    def holds(self, path: Path, states: States, dtype: torch.dtype) -> bool:
        length, slots, size = states.hidden.shape
        wanted = {
            "aux_hidden_state": (1, length, (slots - 1) * size),
            "hidden_state": (1, length, size),
        }
        return is_saved(path, states, wanted, dtype)

    def finish(
        self, folder: Path, counts: NDArray[np.int64], vocabulary: DraftVocabulary | None
    ) -> None:
        del counts
        path = folder / "vocab_mapping" / "vocab_mapping.pt"
        path.unlink(missing_ok=True)
        if vocabulary is not None:
            torch = need("torch")
            pair = {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
            save_tensors(path, {name: torch.from_numpy(array) for name, array in pair.items()})


def tokens(states: States) -> dict[str, torch.Tensor]:
    """`input_ids` and `loss_mask`, int64 [S]."""
    torch, example = need("torch"), states.example
    return {
        "input_ids": torch.tensor(example.input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(example.loss_mask, dtype=torch.int64),
    }


def auxiliary(states: States, dtype: torch.dtype) -> torch.Tensor:
    """The auxiliary layers side by side: [S, L*H]."""
    return states.hidden[:, :-1].to(dtype).flatten(1).contiguous()


def is_saved(
    path: Path, states: States, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> bool:
    """Whether a `torch.save` file is readable, of these tokens, and of these shapes and dtype."""
    torch = need("torch")
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        same = all(
            tuple(found[name].shape) == shape and found[name].dtype == dtype
            for name, shape in shapes.items()
        )
        own = tokens(states)
        return same and all(torch.equal(found[name], own[name]) for name in own)
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError):
        return False
