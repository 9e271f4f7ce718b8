"""Files of rows or of token ids as a stream of examples that can be started again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quantroute._rowfile import read_rows
from quantroute.errors import ConfigurationError, DatasetError
from quantroute.extraction._examples import TokenSettings, examples_from_rows
from quantroute.extraction._records import Example
from quantroute.extraction._rows import read_row_files
from quantroute.extraction._template import TemplateProfile
from quantroute.extraction._tokenizer import TargetTokenizer
from quantroute.extraction._tokens_report import TokensReport

__all__ = ["ExampleFiles", "read_pretokenized"]


def read_pretokenized(path: Path | str) -> Iterator[Example]:
    """Examples of a file whose rows have `input_ids` and `loss_mask`; the rest is provenance.

    Raises:
        DatasetError: a row that is not such an example.
    """
    for number, row in enumerate(read_rows(path), start=1):
        try:
            yield _example(row)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise DatasetError(path=str(path), line=number, problem=f"no example: {why}") from None


def _example(row: Mapping[str, Any]) -> Example:
    ids, mask = np.asarray(row["input_ids"]), np.asarray(row["loss_mask"])
    if ids.dtype.kind not in "iu" or mask.dtype.kind not in "iub":
        raise TypeError("input_ids must be integers, loss_mask 0 or 1")
    if not np.isin(mask, (0, 1)).all():
        raise ValueError("loss_mask must be 0 or 1")
    rest = {name: value for name, value in row.items() if name not in ("input_ids", "loss_mask")}
    return Example(input_ids=ids.astype(np.int64), loss_mask=mask.astype(np.bool_), provenance=rest)


@dataclass(slots=True, kw_only=True)
class ExampleFiles:
    """Exported rows, rendered and tokenised for the target; or rows of token ids as they are.

    Call it for a new reading. `report` is that of the latest one; it stays empty for token ids.
    """

    paths: Sequence[Path]
    tokenizer_folder: Path
    settings: TokenSettings = field(default_factory=TokenSettings)
    template: Path | None = None
    trust_remote_code: bool = False
    report: TokensReport = field(default_factory=TokensReport)
    _tokenizer: TargetTokenizer | None = field(default=None, repr=False)
    _profile: TemplateProfile | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigurationError("no files of rows are given")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know of the chat template, once it was used."""
        return () if self._profile is None else self._profile.notes

    def __call__(self) -> Iterable[Example]:
        """A new reading of all files, one after the other."""
        self.report = TokensReport()
        return self._read()

    def _read(self) -> Iterator[Example]:
        for path in self.paths:
            if _is_pretokenized(path):
                yield from read_pretokenized(path)
            else:
                yield from self._rendered(path)

    def _rendered(self, path: Path) -> Iterator[Example]:
        if self._tokenizer is None:
            self._tokenizer = TargetTokenizer.load(
                self.tokenizer_folder,
                template=self.template,
                trust_remote_code=self.trust_remote_code,
            )
            self._profile = self.settings.profile(self._tokenizer)
        results = examples_from_rows(
            read_row_files([path]),
            self._tokenizer,
            self.settings,
            profile=self._profile,
            report=self.report,
        )
        return (item for item in results if isinstance(item, Example))


def _is_pretokenized(path: Path) -> bool:
    if not path.is_file():
        raise DatasetError(path=str(path), problem="no such file; export the rows first")
    first = next(read_rows(path), None)
    return isinstance(first, dict) and "input_ids" in first
