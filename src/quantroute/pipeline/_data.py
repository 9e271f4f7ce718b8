"""From the store of states to a trainer's files, with some rows kept to judge by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quantroute.drafter import load_train_spec
from quantroute.errors import DatasetError
from quantroute.evaluation import is_held_out
from quantroute.pipeline import _contents as contents
from quantroute.pipeline._records import file_hashes
from quantroute.pipeline._spec import PipelineSpec
from quantroute.storage import atomic_write

if TYPE_CHECKING:
    from quantroute.extraction import FormatReport, States, StateStore

__all__ = ["held_out_states", "write_training_data"]


def write_training_data(spec: PipelineSpec) -> FormatReport:
    """Write `train.data` from the store, without the rows that are held out, and their keys.

    Raises:
        DatasetError: no finished store, or nothing is left on one of the two sides.
    """
    from quantroute import extraction

    store = extraction.StateStore.open(spec.states)
    held: list[str] = []
    report = extraction.write_training_data(
        store,
        spec.training_data,
        trainer=load_train_spec(spec.path).trainer,
        # From where the file stands: the folder may lie elsewhere on the next machine.
        target=spec.target,
        draft_vocab_size=spec.data.draft_vocab_size,
        states=_kept(store, spec, held),
        provenance=file_hashes({"states": contents.states(spec.states)}),
    )
    if not held:
        raise DatasetError(
            path=str(spec.states), problem="no row fell to evaluation; raise held_out_share"
        )
    atomic_write(spec.held_out, "".join(f"{key}\n" for key in held).encode())
    return report


def held_out_states(spec: PipelineSpec) -> Iterator[States]:
    """The states that no training saw."""
    from quantroute import extraction

    store = extraction.StateStore.open(spec.states)
    for key in spec.held_out.read_text(encoding="utf-8").split():
        yield store[key]


def _kept(store: StateStore, spec: PipelineSpec, held: list[str]) -> Iterator[States]:
    for item in store:
        # Rows of token ids without provenance have their own content for a key.
        row = str(item.example.provenance.get("row_key") or item.example.key)
        if is_held_out(row, share=spec.data.held_out_share):
            held.append(item.example.key)
        else:
            yield item
