"""speculators: an arrow dataset in our order, and `hidden_states/hs_{row}.safetensors` beside it.

Its own `prepare-data` shuffles, and hidden files are found by row number. So the dataset is written
here, in the order of the files; `examples.jsonl` is the same data in the form `prepare-data` takes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from quantroute._extra import need
from quantroute.extraction._formats._common import (
    EXAMPLES,
    WORK,
    FormatReport,
    StatesFacts,
    save_tensors,
    write_format,
)
from quantroute.extraction._records import LayerConvention, States
from quantroute.extraction._vocabulary import DraftVocabulary
from quantroute.storage import atomic_file

if TYPE_CHECKING:
    import torch

__all__ = ["write_speculators"]


def write_speculators(
    states: Iterable[States],
    folder: Path | str,
    *,
    facts: StatesFacts,
    draft_vocab_size: int | None = None,
    forced: Iterable[int] = (),
    on_example: Callable[[int], None] | None = None,
) -> FormatReport:
    """Write `folder` as the `--data-path` of `speculators train`.

    Stopped at any point, the same call goes on: files that are whole and of the same content are
    kept. States with an infinity or a NaN are left out and counted. The folder's `manifest.json`
    says what is in it and is `complete` only at the end.

    Args:
        states: one pass; the last state before the final norm, which is what this trainer wants.
        draft_vocab_size: tokens the drafter may propose; None keeps the target's whole vocabulary.
        forced: token ids that must be among them; see `special_token_ids`.
        on_example: called after each example with the number done.

    Raises:
        ConfigurationError: facts that do not fit the states, an impossible vocabulary, or a
            package that is not installed.
        DatasetError: the folder holds something else, or no example is left to write.
        JournalError: another process writes there.
    """
    return write_format(
        states,
        folder,
        layout=_Layout(),
        facts=facts,
        draft_vocab_size=draft_vocab_size,
        forced=forced,
        on_example=on_example,
    )


@dataclass(frozen=True, slots=True)
class _Layout:
    trainer: str = "speculators"
    convention: LayerConvention = LayerConvention.BOUNDARY
    last_state: str = "before final norm"

    def path(self, index: int, states: States) -> str:
        del states
        return f"hidden_states/hs_{index}.safetensors"

    def save(self, file: IO[bytes], states: States, dtype: torch.dtype) -> None:
        torch, safetensors = need("torch"), need("safetensors.torch")
        ids = torch.from_numpy(np.ascontiguousarray(states.example.input_ids, dtype=np.int64))
        hidden = states.hidden.to(dtype).contiguous()
        file.write(safetensors.save({"hidden_states": hidden, "token_ids": ids}))

    def holds(self, path: Path, states: States, dtype: torch.dtype) -> bool:
        safetensors = need("safetensors")
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                ids = file.get_tensor("token_ids")
                hidden = file.get_slice("hidden_states")
                shape, kind = hidden.get_shape(), hidden.get_dtype()
        except (OSError, safetensors.SafetensorError):
            return False
        return (
            np.array_equal(ids, states.example.input_ids)
            and list(shape) == list(states.hidden.shape)
            and kind == {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[_name(dtype)]
        )

    def finish(
        self, folder: Path, counts: NDArray[np.int64], vocabulary: DraftVocabulary | None
    ) -> None:
        _write_dataset(folder)
        used = np.flatnonzero(counts)
        save_tensors(folder / "token_freq.pt", {int(i): int(counts[i]) for i in used})
        for old in (*folder.glob("d2t-*.npy"), *folder.glob("t2d-*.npy")):
            old.unlink()
        if vocabulary is not None:
            # Under these names the trainer finds them by --draft-vocab-size alone.
            _save_array(folder / f"d2t-{len(vocabulary)}.npy", vocabulary.d2t)
            _save_array(folder / f"t2d-{len(vocabulary)}.npy", vocabulary.t2d)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _save_array(path: Path, array: NDArray[Any]) -> None:
    with atomic_file(path) as file:
        np.save(file, array)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            ids = row["input_ids"]
            yield {"input_ids": ids, "loss_mask": row["loss_mask"], "seq_len": len(ids)}


def _write_dataset(folder: Path) -> None:
    """The arrow dataset, row i for `hs_i`; written beside and moved, its `state.json` last."""
    datasets = need("datasets")
    numbers = datasets.Sequence(datasets.Value("int64"))
    features = datasets.Features(
        {"input_ids": numbers, "loss_mask": numbers, "seq_len": datasets.Value("int64")}
    )
    for old in folder.glob("data-*.arrow"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=folder, prefix=WORK) as work:
        had_bars = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            rows = datasets.Dataset.from_generator(
                _rows,
                features=features,
                cache_dir=f"{work}/cache",
                gen_kwargs={"path": folder / EXAMPLES},
            )
            rows.with_format("torch").save_to_disk(f"{work}/dataset")
        finally:
            if not had_bars:
                datasets.enable_progress_bars()
        made = sorted(Path(work, "dataset").iterdir(), key=lambda path: path.name == "state.json")
        for path in made:
            shutil.move(path, folder / path.name)
