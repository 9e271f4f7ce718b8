"""From a finished store of states to one trainer's files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from quantroute.errors import ConfigurationError
from quantroute.extraction._formats import (
    FormatReport,
    StatesFacts,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from quantroute.extraction._records import States
from quantroute.extraction._store import StateStore
from quantroute.extraction._target import Target
from quantroute.extraction._vocabulary import special_token_ids

__all__ = ["TRAINERS", "write_training_data"]

TRAINERS: Final = ("speculators", "specforge", "modelopt")

#: SpecForge (0.2.0) computes its frozen head in bfloat16, whatever the target runs in, and fails on
#: states of another dtype; the others cast what they read.
_DTYPES: Final = {"specforge": "bfloat16"}


def write_training_data(
    store: StateStore,
    folder: Path | str,
    *,
    trainer: str,
    target: Path | str,
    draft_vocab_size: int | None = None,
    states: Iterable[States] | None = None,
    provenance: Mapping[str, Any] | None = None,
    on_example: Callable[[int], None] | None = None,
) -> FormatReport:
    """Write `folder` as `trainer` reads it; stopped at any point, the same call goes on.

    Args:
        trainer: one of `TRAINERS`. SpecForge and ModelOpt want the last state after the final norm,
            which is applied here; speculators wants it before. SpecForge's files are bfloat16.
        target: the target's folder: its sizes, and its special tokens, which a draft vocabulary
            must have.
        draft_vocab_size: tokens the drafter may propose; None keeps the target's whole vocabulary.
        states: those of the store to write, in their order; all of them by default.
        provenance: JSON values for the folder's manifest.

    Raises:
        ConfigurationError: no such trainer, an impossible vocabulary, or another target than that
            of the states.
        DatasetError: the folder holds something else, such as files of another store, or no example
            is left to write.
        JournalError: another process writes there.
    """
    if trainer not in TRAINERS:
        raise ConfigurationError(f"no trainer is called {trainer!r}; known: {', '.join(TRAINERS)}")
    sizes = Target.read(Path(target))
    _check_target(sizes, store)
    facts = StatesFacts(
        model=str(target),
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=store.layers,
        dtype=_DTYPES.get(trainer, store.dtype),
        states_sha256=store.sha256,
        provenance=provenance or {},
    )
    forced = () if draft_vocab_size is None else special_token_ids(Path(target))
    chosen = store if states is None else states
    if trainer == "speculators":
        return write_speculators(
            chosen,
            folder,
            facts=facts,
            draft_vocab_size=draft_vocab_size,
            forced=forced,
            on_example=on_example,
        )
    write = write_specforge if trainer == "specforge" else write_modelopt
    return write(
        chosen,
        folder,
        facts=facts,
        norm=store.final_norm(),
        draft_vocab_size=draft_vocab_size,
        forced=forced,
        on_example=on_example,
    )


def _check_target(target: Target, store: StateStore) -> None:
    """Refuse a target whose sizes or tokenizer are others than those the states were made with."""
    found = {
        "architecture": target.architecture,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tokenizer_sha256": target.tokenizer_sha256(),
    }
    of_states = store.manifest["target"]
    differing = [name for name, value in found.items() if of_states.get(name) != value]
    if differing:
        raise ConfigurationError(
            f"{target.folder} is not the target of these states ({', '.join(differing)} differ); "
            "name the folder they were extracted with"
        )
