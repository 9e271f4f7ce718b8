"""What all trainer formats share: one pass over the states, one file per example, a manifest.

A file is written beside its place and renamed, so a file that is there is whole. The manifest says
`complete` only when everything stands; until then it says `writing`, and nobody trains on that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quantroute._extra import need
from quantroute._version import __version__
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction._records import LayerConvention, LayerIds, States
from quantroute.extraction._vocabulary import DraftVocabulary, add_counts
from quantroute.storage import FileLock, atomic_file, atomic_write

if TYPE_CHECKING:
    import torch

__all__ = [
    "EXAMPLES",
    "MANIFEST",
    "WORK",
    "FormatReport",
    "Layout",
    "Norm",
    "StatesFacts",
    "write_format",
]

MANIFEST: Final = "manifest.json"
EXAMPLES: Final = "examples.jsonl"
#: What folders that are needed while files are made are called at first.
WORK: Final = ".work-"
KIND: Final = "quantroute trainer data"
VERSION: Final = 1


class Norm(Protocol):
    """The target's final norm."""

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """The last state [S, H] after the norm, in the dtype it came in."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesFacts:
    """Where states come from, as the manifest tells it.

    `model` is the target's folder or id, `provenance` any JSON values besides (hashes of tokenizer
    and template, versions). `states_sha256` tells these states from others of the same tokens: a
    pass goes on only where it is the same.
    """

    model: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    layers: LayerIds
    dtype: str = "bfloat16"
    states_sha256: str | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatReport:
    """What one pass did. `tokens` and `supervised_tokens` are of the examples that are in.

    `kept` files were there already, whole and of the same content. `non_finite` examples hold an
    infinity or a NaN, `duplicates` are equal to an earlier one: both are left out.
    """

    folder: Path
    examples: int
    tokens: int
    supervised_tokens: int
    longest_tokens: int
    written: int
    kept: int
    non_finite: int
    duplicates: int
    draft_vocab_size: int | None
    coverage: float | None


class Layout(Protocol):
    """How one trainer wants its files."""

    @property
    def trainer(self) -> str:
        """The trainer's name."""
        ...

    @property
    def convention(self) -> LayerConvention:
        """How it means layer ids."""
        ...

    @property
    def last_state(self) -> str:
        """`before final norm` or `after final norm`."""
        ...

    def path(self, index: int, states: States) -> str:
        """Where example `index` stands, relative to the folder."""
        ...

    def save(self, file: IO[bytes], states: States, dtype: torch.dtype) -> None:
        """Write one example."""
        ...

    def holds(self, path: Path, states: States, dtype: torch.dtype) -> bool:
        """Whether the file is readable and of this example: its tokens, shapes and dtype."""
        ...

    def finish(
        self, folder: Path, counts: NDArray[np.int64], vocabulary: DraftVocabulary | None
    ) -> None:
        """Write what goes with all examples: indexes, counts, the vocabulary's map."""
        ...


@dataclass(slots=True)
class _Totals:
    examples: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest_tokens: int = 0
    written: int = 0
    kept: int = 0
    non_finite: int = 0
    duplicates: int = 0

    def add(self, states: States, *, is_new: bool) -> None:
        length = len(states.example)
        self.examples += 1
        self.tokens += length
        self.supervised_tokens += int(states.example.loss_mask.sum())
        self.longest_tokens = max(self.longest_tokens, length)
        self.written += is_new
        self.kept += not is_new


def write_format(
    states: Iterable[States],
    folder: Path | str,
    *,
    layout: Layout,
    facts: StatesFacts,
    draft_vocab_size: int | None,
    forced: Iterable[int],
    on_example: Callable[[int], None] | None,
) -> FormatReport:
    """One pass over `states`, into `folder`. See `write_speculators` for what holds of all formats.

    Raises:
        ConfigurationError: the facts do not fit the states, or the vocabulary cannot be had.
        DatasetError: the folder holds something else, or there is no example to write.
    """
    folder, forced = Path(folder), tuple(forced)
    dtype = _dtype(facts.dtype)
    with FileLock(folder / ".lock"):
        head = _head(layout, facts, draft_vocab_size)
        _begin(folder, head)
        counts = np.zeros(facts.vocab_size, dtype=np.int64)
        totals, paths = _Totals(), set[str]()
        with atomic_file(folder / EXAMPLES) as index:
            for item in states:
                _check_shape(item, facts)
                if not _is_finite(item):
                    totals.non_finite += 1
                    continue
                path = layout.path(totals.examples, item)
                if path in paths:
                    totals.duplicates += 1
                    continue
                is_new = _place(folder / path, item, layout, dtype)
                add_counts(counts, item.example)
                totals.add(item, is_new=is_new)
                index.write(_index_line(item))
                paths.add(path)
                if on_example is not None:
                    on_example(totals.examples)
        if not totals.examples:
            raise DatasetError(
                path=str(folder),
                problem=f"no example to write ({totals.non_finite} hold infinities or NaN); the "
                "markers of a store's shards (shards/*.json) say why examples were lost",
            )
        _remove_others(folder, paths)
        vocabulary = _vocabulary(counts, draft_vocab_size, forced)
        layout.finish(folder, counts, vocabulary)
        report = _report(folder, totals, vocabulary)
        _write_manifest(folder, head | _summary(report, forced) | {"state": "complete"})
    return report


def save_tensors(path: Path, content: object) -> None:
    """`torch.save`, whole or not at all."""
    with atomic_file(path) as file:
        need("torch").save(content, file)


def _dtype(name: str) -> torch.dtype:
    if name not in ("bfloat16", "float16", "float32"):
        raise ConfigurationError(f"states are stored as bfloat16, float16 or float32, not {name!r}")
    return getattr(need("torch"), name)


def _check_shape(item: States, facts: StatesFacts) -> None:
    wanted = (len(item.example), len(facts.layers.boundary) + 1, facts.hidden_size)
    if tuple(item.hidden.shape) != wanted:
        raise ConfigurationError(
            f"states of example {item.example.key[:16]} are {list(item.hidden.shape)}, "
            f"but {facts.model} with layers {list(facts.layers.boundary)} gives {list(wanted)}"
        )


def _is_finite(item: States) -> bool:
    return bool(need("torch").isfinite(item.hidden).all())


def _place(path: Path, item: States, layout: Layout, dtype: torch.dtype) -> bool:
    """Write the file unless it is there already; True if it was written."""
    if path.exists() and layout.holds(path, item, dtype):
        return False
    with atomic_file(path) as file:
        layout.save(file, item, dtype)
    return True


def _index_line(item: States) -> bytes:
    """A row that `speculators prepare-data` takes as it is; the key lets others find it again."""
    row = {
        "key": item.example.key,
        "input_ids": item.example.input_ids.tolist(),
        "loss_mask": item.example.loss_mask.astype(np.int64).tolist(),
    }
    return (json.dumps(row, separators=(",", ":")) + "\n").encode()


def _vocabulary(
    counts: NDArray[np.int64], size: int | None, forced: tuple[int, ...]
) -> DraftVocabulary | None:
    return None if size is None else DraftVocabulary.choose(counts, size=size, forced=forced)


def _remove_others(folder: Path, paths: set[str]) -> None:
    """Take away example files of an earlier, longer pass: readers walk the folder."""
    roots = {folder / path.split("/", 1)[0] for path in paths}
    wanted = {folder / path for path in paths}
    for root in roots:
        for path in root.rglob("*"):
            if path.is_file() and path not in wanted:
                path.unlink()


# -- the manifest ---------------------------------------------------------------------------------


def _head(layout: Layout, facts: StatesFacts, draft_vocab_size: int | None) -> dict[str, Any]:
    """What has to be the same for a pass to go on where another one stopped."""
    return {
        "kind": KIND,
        "version": VERSION,
        "trainer": layout.trainer,
        "target": {
            "model": facts.model,
            "num_layers": facts.num_layers,
            "hidden_size": facts.hidden_size,
            "vocab_size": facts.vocab_size,
        },
        "layers": {
            "ids": list(facts.layers.ids(layout.convention)),
            "convention": layout.convention.value,
        },
        "last_state": layout.last_state,
        "dtype": facts.dtype,
        "states_sha256": facts.states_sha256,
        "draft_vocab_size": draft_vocab_size,
        "provenance": dict(facts.provenance),
    }


def _begin(folder: Path, head: dict[str, Any]) -> None:
    path = folder / MANIFEST
    if path.exists():
        try:
            old = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DatasetError(path=str(path), problem=f"not a manifest: {error}") from error
        fixed = head.keys() - {"draft_vocab_size", "provenance"}
        different = sorted(name for name in fixed if old.get(name) != head[name])
        if different:
            raise DatasetError(
                path=str(folder),
                problem=f"holds another export (different: {', '.join(different)}); "
                "choose another folder or empty this one",
            )
    elif any(item.name != ".lock" for item in folder.iterdir()):
        raise DatasetError(
            path=str(folder), problem=f"not empty and without {MANIFEST}; choose another folder"
        )
    for stray in folder.rglob(".*.tmp"):  # of a pass that was killed
        stray.unlink()
    for work in folder.glob(f"{WORK}*"):
        shutil.rmtree(work)
    _write_manifest(folder, head | {"state": "writing"})


def _summary(report: FormatReport, forced: tuple[int, ...]) -> dict[str, Any]:
    return {
        "examples": report.examples,
        "tokens": report.tokens,
        "supervised_tokens": report.supervised_tokens,
        "longest_tokens": report.longest_tokens,
        "left_out": {"non_finite": report.non_finite, "duplicates": report.duplicates},
        "coverage": report.coverage,
        "forced_token_ids": len(set(forced)),
        "quantroute": __version__,
    }


def _write_manifest(folder: Path, content: dict[str, Any]) -> None:
    atomic_write(folder / MANIFEST, (json.dumps(content, indent=2) + "\n").encode())


def _report(folder: Path, totals: _Totals, vocabulary: DraftVocabulary | None) -> FormatReport:
    return FormatReport(
        folder=folder,
        examples=totals.examples,
        tokens=totals.tokens,
        supervised_tokens=totals.supervised_tokens,
        longest_tokens=totals.longest_tokens,
        written=totals.written,
        kept=totals.kept,
        non_finite=totals.non_finite,
        duplicates=totals.duplicates,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
        coverage=None if vocabulary is None else vocabulary.coverage,
    )
