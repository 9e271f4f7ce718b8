"""The tables of run.toml that join the stages, and where each stage keeps what it makes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictStr

from quantroute._runfile import RunFile, Table
from quantroute.domain import canonical_json

__all__ = ["PipelineSpec", "load_pipeline_spec"]

_Count = Annotated[int, Field(strict=True, ge=1)]


class DataTable(Table):
    """`[data]`: from states to a trainer's files.

    `held_out_share` of the rows are kept from training and judge the drafter.
    """

    draft_vocab_size: _Count | None = None
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.1


class EvaluateTable(Table):
    """`[evaluate]`: `speculate_prompts` held-out prompts are decoded for real with the target.

    That loads the target on the CPU: 0, the default, leaves it out.
    """

    depth: _Count = 3
    speculate_prompts: Annotated[int, Field(strict=True, ge=0)] = 0
    speculate_tokens: _Count = 128


class DeployTable(Table):
    """`[deploy]`: the engine that will load the drafter."""

    engine: Literal["vllm", "sglang"] = "vllm"
    out: StrictStr | None = None


class _File(Table):
    data: DataTable = DataTable()
    evaluate: EvaluateTable = EvaluateTable()
    deploy: DeployTable = DeployTable()


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """One run.toml as a chain of files. All paths are resolved against the file's folder."""

    path: Path
    tables: Mapping[str, Any]
    data: DataTable
    evaluate: EvaluateTable
    deploy: DeployTable
    run_folder: Path
    prompts: tuple[Path, ...]
    target: Path
    rows: Path
    states: Path
    training_data: Path
    drafter: Path
    exported: Path

    @property
    def home(self) -> Path:
        """The stages' records."""
        return self.run_folder / "pipeline"

    @property
    def held_out(self) -> Path:
        """Keys of the examples that were kept from training, one a line."""
        return self.run_folder / "held-out.txt"

    @property
    def evaluation(self) -> Path:
        """What the drafter is worth, JSON."""
        return self.run_folder / "evaluation.json"

    def settings_sha256(self, names: tuple[str, ...]) -> str:
        """Hash of those tables as they stand in the file; `table.field` is one field of a table."""
        chosen = {name: self._setting(name) for name in names}
        return hashlib.sha256(canonical_json(chosen).encode()).hexdigest()

    def _setting(self, name: str) -> Any:
        table, _, field = name.partition(".")
        found = self.tables.get(table)
        return found.get(field) if field and isinstance(found, dict) else found


def load_pipeline_spec(path: Path | str) -> PipelineSpec:
    """Read the file; the stages check their own tables when they run.

    Raises:
        ConfigurationError: not readable, a table is missing, or a field cannot be meant.
    """
    file = RunFile.load(path)
    tables = file.tables
    joined = file.parse(_File)
    for name in ("run", "extract", "train"):
        if not isinstance(tables.get(name), dict):
            raise file.error((name,), "is required: a pipeline goes from prompts to a drafter")
    extract, train = tables["extract"], tables["train"]
    folder = file.run_folder
    rows = extract.get("rows")
    if rows is not None and not isinstance(rows, str):
        raise file.error(("extract", "rows"), "a pipeline has one file of rows; leave it out")
    for table, field in (("extract", "target"), ("train", "data")):
        if not isinstance(tables[table].get(field), str):
            raise file.error((table, field), "is required")
    deploy = joined.deploy
    return PipelineSpec(
        path=file.path,
        tables=tables,
        data=joined.data,
        evaluate=joined.evaluate,
        deploy=deploy,
        run_folder=folder,
        prompts=tuple(
            file.resolve(str(item["prompts"]))
            for item in tables.get("dataset", ())
            if item.get("prompts") not in (None, "builtin")
        ),
        target=file.resolve(extract["target"]),
        rows=folder / "rows.jsonl" if rows is None else file.resolve(rows),
        states=folder / "states" if extract.get("out") is None else file.resolve(extract["out"]),
        training_data=file.resolve(train["data"]),
        drafter=file.resolve(str(train.get("out", "drafter"))),
        exported=folder / f"for-{deploy.engine}"
        if deploy.out is None
        else file.resolve(deploy.out),
    )
