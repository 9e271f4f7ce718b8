"""A run's folder: one SQLite file with ledger and rows; the folder's name is the run's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantroute.errors import DatasetError
from quantroute.generation import dataset_name
from quantroute.report import FACTS_FILE

__all__ = ["RunFolder"]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where a run lives."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name: the folder's, made fit for an account."""
        return dataset_name(self.path.resolve().name)

    @property
    def store(self) -> Path:
        """The file with the ledger and the rows."""
        return self.path / "run.sqlite"

    @property
    def events(self) -> Path:
        """The file with the run's events."""
        return self.path / "events.jsonl"

    @property
    def facts(self) -> Path:
        """The file with the verdicts and targets of the last start."""
        return self.path / FACTS_FILE

    def existing_store(self) -> Path:
        """The file, which must exist.

        Raises:
            DatasetError: there is no run in that folder.
        """
        if not self.store.exists():
            raise DatasetError(
                path=str(self.path),
                problem="no run here (run.sqlite is missing); start one with `quantroute generate`",
            )
        return self.store
