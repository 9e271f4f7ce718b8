"""Rows out of the store as a folder that Hugging Face's `datasets` reads, with a dataset card."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from quantroute.errors import DatasetError
from quantroute.generation._card import CardSubject, dataset_card
from quantroute.generation._card_facts import CardFacts, DatasetFile
from quantroute.generation._quality import RowClass
from quantroute.generation._rowdata import row_data
from quantroute.generation._selection import Choice, Totals, choose, manifest_data
from quantroute.generation._shards import RowSource
from quantroute.generation._writers import HashingFile, ParquetWriter
from quantroute.ledger import StatementLine
from quantroute.storage import atomic_file, atomic_folder, atomic_write

__all__ = ["DatasetReport", "export_dataset"]

_CARD: Final = "README.md"
_MANIFEST: Final = "quantroute.json"
_DATA: Final = "data"
#: The hub's own tools cut at this size.
_SHARD_BYTES: Final = 500 * 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    """What was written. `left_out` counts rows by why: their state, or their class."""

    path: Path
    card_path: Path
    manifest_path: Path
    rows: int
    left_out: dict[str, int]
    files: tuple[DatasetFile, ...]


async def export_dataset(
    rows: RowSource,
    *,
    run: str,
    path: Path | str,
    classes: Set[RowClass] = frozenset({RowClass.GOOD}),
    without: Set[str] = frozenset(),
    statement: Sequence[StatementLine] = (),
    license: str | None = None,
    title: str | None = None,
    overwrite: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> DatasetReport:
    """Write the whole conversations of a run as a folder for `datasets.load_dataset`.

    Parquet files below `data/`, a dataset card (`README.md`) that says where every answer came
    from, and a manifest (`quantroute.json`) that says it to programs. With several datasets each is
    a configuration of its own, beside the default one with all rows. The folder appears only when
    it is complete. The same run gives the same bytes: nothing in it depends on when or where it
    was exported (but another version of quantroute or pyarrow may write other bytes).

    Args:
        without, classes, statement: as of `export_rows`.
        license: the licence's identifier on the hub, such as `cc-by-4.0`; left out, the card says
            that none is stated.
        title: what the card calls it; by default the run's name.
        overwrite: replace the folder of an earlier export, and nothing else.
        shard_bytes: a file that has reached this is followed by another; looked at after each
            group of at most 1,000 rows.
    Raises:
        ConfigurationError: pyarrow is not installed, or a class is quarantined.
        DatasetError: no such run, no row of it is chosen, or the folder is in use.
    """
    path, choice = Path(path), Choice.of(classes, without)
    _check_folder(path, overwrite=overwrite)
    await rows.prepare()
    stored = await rows.run(run)
    totals, facts = Totals(), CardFacts()
    with atomic_folder(path) as folder, contextlib.ExitStack() as stack:
        shards = _Shards(folder, stack, shard_bytes)
        async for found in choose(rows, stored, choice, totals):
            if found.is_whole:
                data = row_data(found.row, found.leading, model=str(stored.config["model"]))
                facts.count(found.row)
                shards.write(found.row.prompt.dataset, data)
        if not totals.rows:
            raise DatasetError(path=str(path), problem=_nothing(totals))
        files = shards.finish(is_one=len(totals.datasets) == 1)
        subject = CardSubject(
            stored=stored,
            choice=choice,
            totals=totals,
            facts=facts,
            files=files,
            statement=statement,
            license=license,
            title=title,
        )
        counts = await rows.counts(stored.run_id)
        manifest = manifest_data(stored, totals, choice, counts=counts, statement=statement) | {
            "license": license,
            "files": [asdict(file) for file in files],
        }
        atomic_write(folder / _CARD, dataset_card(subject).encode("utf-8", "replace"))
        atomic_write(folder / _MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
    return DatasetReport(
        path=path,
        card_path=path / _CARD,
        manifest_path=path / _MANIFEST,
        rows=totals.rows,
        left_out=dict(totals.left_out),
        files=files,
    )


def _nothing(totals: Totals) -> str:
    why = ", ".join(f"{rows:,} {name}" for name, rows in sorted(totals.left_out.items()))
    return f"no row is of the chosen classes ({why or 'the run has none'}); choose others"


def _check_folder(path: Path, *, overwrite: bool) -> None:
    """Refuse to write over anything but a folder that this module wrote."""
    if not path.exists():
        return
    if not path.is_dir():
        raise DatasetError(path=str(path), problem="is a file; a dataset is a folder")
    inside = {item.name for item in path.iterdir()}
    if not inside:
        return
    if foreign := inside - {_CARD, _MANIFEST, _DATA}:
        raise DatasetError(
            path=str(path),
            problem=f"holds {sorted(foreign)[0]!r}, which no export wrote; choose another name",
        )
    if _MANIFEST not in inside:
        raise DatasetError(
            path=str(path), problem="was not written by an export; choose another name"
        )
    if not overwrite:
        raise DatasetError(
            path=str(path), problem="exists; choose another name, or say overwrite=True"
        )


def _folder_name(dataset: str) -> str:
    """What readers take for hidden, or for the folder above, gets a letter before it."""
    return dataset if dataset[0].isalnum() else f"x{dataset}"


@dataclass(slots=True)
class _Shard:
    """A file that is being written; it gets its name when it is known how many there are."""

    dataset: str
    number: int
    path: Path
    file: HashingFile
    writer: ParquetWriter
    closing: contextlib.ExitStack
    rows: int = 0

    def described(self, path: str) -> DatasetFile:
        return DatasetFile(
            dataset=self.dataset,
            path=path,
            rows=self.rows,
            size_bytes=self.file.tell(),
            arrow_bytes=self.writer.arrow_bytes,
            sha256=self.file.sha256(),
        )


@dataclass(slots=True)
class _Shards:
    """The files of all datasets. Each dataset has one open at a time."""

    folder: Path
    stack: contextlib.ExitStack
    shard_bytes: int
    _open: dict[str, _Shard] = field(default_factory=dict)
    _closed: dict[str, list[_Shard]] = field(default_factory=dict)

    def write(self, dataset: str, row: Mapping[str, Any]) -> None:
        shard = self._open.get(dataset)
        if shard is None:
            shard = self._open[dataset] = self._begin(dataset)
        shard.writer.write(row)
        shard.rows += 1
        if shard.writer.arrow_bytes and shard.file.tell() >= self.shard_bytes:
            self._end(dataset)

    def finish(self, *, is_one: bool) -> tuple[DatasetFile, ...]:
        """Give the files their names; with one dataset they lie in `data` itself."""
        for dataset in list(self._open):
            self._end(dataset)
        return tuple(self._named(is_one=is_one))

    def _named(self, *, is_one: bool) -> Iterator[DatasetFile]:
        for dataset, shards in sorted(self._closed.items()):
            home = _DATA if is_one else f"{_DATA}/{_folder_name(dataset)}"
            while (self.folder / home).exists():  # that letter may make it another's name
                home += "-"
            (self.folder / home).mkdir(parents=True)
            for shard in shards:
                path = f"{home}/train-{shard.number:05d}-of-{len(shards):05d}.parquet"
                shard.path.rename(self.folder / path)
                yield shard.described(path)

    def _begin(self, dataset: str) -> _Shard:
        number = len(self._closed.get(dataset, ()))
        begun = len(self._open) + sum(map(len, self._closed.values()))
        path = self.folder / f"part-{begun}"
        closing = self.stack.enter_context(contextlib.ExitStack())
        file = HashingFile(closing.enter_context(atomic_file(path)))
        writer = ParquetWriter(file)
        closing.callback(writer.close)
        return _Shard(dataset, number, path, file, writer, closing)

    def _end(self, dataset: str) -> None:
        shard = self._open.pop(dataset)
        shard.closing.close()
        self._closed.setdefault(dataset, []).append(shard)
