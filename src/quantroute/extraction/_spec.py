"""`[extract]` of run.toml: what is extracted, from what, into which folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StrictBool, StrictInt, StrictStr

from quantroute._extra import need
from quantroute._runfile import RunFile, Table
from quantroute._shard import Shard
from quantroute.errors import ConfigurationError
from quantroute.extraction._examples import TokenSettings
from quantroute.extraction._inputs import ExampleFiles
from quantroute.extraction._job import Extraction, StoreSettings
from quantroute.extraction._plan import Plan, Selection
from quantroute.extraction._records import LayerConvention, LayerIds
from quantroute.extraction._sglang import SglangSource
from quantroute.extraction._source import StateSource
from quantroute.extraction._target import Target
from quantroute.extraction._transformers import TransformersSource
from quantroute.extraction._vllm import VllmSource
from quantroute.policy import EvidenceTable

__all__ = ["ExtractSpec", "load_extract_spec"]

_GB: Final = 10**9
#: Shards filled at a time: a server's batch has to stay full across the seams.
_SERVER_SHARDS: Final = 3

_Count = Annotated[int, Field(strict=True, ge=1)]
_Layer = Annotated[int, Field(strict=True, ge=0)]
_Gigabytes = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _ExtractTable(Table):
    target: StrictStr
    rows: StrictStr | tuple[StrictStr, ...] | None = None
    out: StrictStr | None = None
    source: Literal["transformers", "vllm", "sglang"] = "transformers"
    server: StrictStr | None = None
    server_folder: StrictStr | None = None
    local_folder: StrictStr | None = None
    layers: tuple[_Layer, ...] | None = None
    layer_convention: Literal["boundary", "output"] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    fp8: StrictBool = False
    device: StrictStr | None = None
    attention: StrictStr | None = None
    trust_remote_code: StrictBool = False
    batch_tokens: _Count = 16_384
    in_flight: _Count = 16
    timeout_s: _Seconds = 600.0
    file_timeout_s: _Seconds = 120.0
    shard_gb: _Gigabytes = 1.0
    margin_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    shards_at_once: _Count | None = None
    max_tokens: _Count | None = None
    max_tokens_per_dataset: _Count | None = None
    max_tokens_per_endpoint: _Count | None = None
    max_example_tokens: _Count | None = None
    too_long: Literal["refuse", "truncate"] = "refuse"
    classes: tuple[StrictStr, ...] = ("good",)
    thinking: Literal["auto", "on", "off"] = "auto"
    chat_template: StrictStr | None = None
    think_opener: StrictStr | None = None
    think_closer: StrictStr | None = None
    end_token: StrictStr | None = None
    special_text: Literal["text", "refuse", "control"] = "text"
    template_variables: dict[str, StrictStr | StrictBool | StrictInt] = Field(default_factory=dict)
    drop_failed_audit: StrictStr | None = None


class _File(Table):
    extract: _ExtractTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSpec:
    """An extraction as its file describes it."""

    table: _ExtractTable
    target: Target
    layers: LayerIds
    out: Path
    examples: ExampleFiles
    path_map: tuple[str, Path] | None
    failed: EvidenceTable | None = None

    @property
    def dtype(self) -> str:
        """Of the states."""
        return self.table.dtype or self.target.dtype

    def job(self, shard: Shard | None = None, *, plan: Plan | None = None) -> Extraction:
        """The work, or one worker's part of it; `plan` if it was made elsewhere."""
        table = self.table
        is_local = table.source == "transformers"
        # What moves the states, if but their last bits: it belongs to what the store is. A server
        # has weights of its own; the folder here may hold no more than the final norm.
        source: dict[str, Any] = {"kind": table.source}
        if is_local:
            source["batch_tokens"] = table.batch_tokens
            source["weights_sample_sha256"] = self.target.weights_sample_sha256()
        return Extraction(
            target=self.target,
            layers=self.layers,
            examples=self.examples,
            out=self.out,
            shard=shard,
            plan=plan,
            settings=StoreSettings(
                dtype=self.dtype,
                fp8=table.fp8,
                shard_bytes=int(table.shard_gb * _GB),
                margin_bytes=int(table.margin_gb * _GB),
                shards_at_once=table.shards_at_once or (1 if is_local else _SERVER_SHARDS),
                selection=Selection(
                    max_tokens=table.max_tokens,
                    max_tokens_per_dataset=table.max_tokens_per_dataset,
                    max_tokens_per_endpoint=table.max_tokens_per_endpoint,
                    max_example_tokens=table.max_example_tokens,
                    without_failed=self.failed,
                ),
                source=source,
            ),
        )

    def open_source(self) -> StateSource:
        """Load the model, or get ready to ask the server.

        Raises:
            SourceError: it cannot be loaded.
        """
        table, folder = self.table, self.target.folder
        if table.source == "transformers":
            return TransformersSource(
                folder,
                self.layers,
                device=table.device or _best_device(),
                dtype=self.dtype,
                batch_tokens=table.batch_tokens,
                attention=table.attention,
                trust_remote_code=table.trust_remote_code,
            )
        assert table.server is not None  # the reading of the file has seen to it
        if table.source == "vllm":
            return VllmSource(
                folder,
                self.layers,
                server=table.server,
                dtype=self.dtype,
                path_map=self.path_map,
                in_flight=table.in_flight,
                timeout_s=table.timeout_s,
                file_timeout_s=table.file_timeout_s,
            )
        return SglangSource(
            folder,
            self.layers,
            server=table.server,
            dtype=self.dtype,
            in_flight=table.in_flight,
            timeout_s=table.timeout_s,
        )


def load_extract_spec(path: Path | str, *, drop_failed_audit: Path | None = None) -> ExtractSpec:
    """The `[extract]` table of a file. Paths in it are relative to the file.

    Args:
        drop_failed_audit: an evidence table, in place of the one the file names.

    Raises:
        ConfigurationError: not readable, or a setting that cannot be meant.
    """
    file = RunFile.load(path)
    table = file.parse(_File).extract
    if (table.server is None) is (table.source != "transformers"):
        wanted = "names its server" if table.server is None else "has no server"
        raise file.error(("extract", "server"), f"source {table.source!r} {wanted}")
    if (table.server_folder is None) is not (table.local_folder is None):
        problem = "server_folder and local_folder name one folder, there and here: give both"
        raise file.error(("extract", "server_folder"), problem)
    try:
        target = Target.read(file.resolve(table.target))
    except ConfigurationError as error:
        raise file.error(("extract", "target"), error) from error
    run_folder = file.run_folder
    local = table.local_folder
    return ExtractSpec(
        table=table,
        target=target,
        layers=_layers(table, target, file),
        out=file.resolve(table.out) if table.out is not None else run_folder / "states",
        examples=ExampleFiles(
            paths=_rows(table, file, run_folder),
            tokenizer_folder=target.folder,
            settings=TokenSettings(
                classes=frozenset(table.classes),
                thinking=table.thinking,
                max_tokens=table.max_example_tokens,
                too_long=table.too_long,
                special_text=table.special_text,
                think_opener=table.think_opener,
                think_closer=table.think_closer,
                end_token=table.end_token,
                variables=table.template_variables,
            ),
            template=None if table.chat_template is None else file.resolve(table.chat_template),
            trust_remote_code=table.trust_remote_code,
        ),
        path_map=None if local is None else (str(table.server_folder), file.resolve(local)),
        failed=_failed(table, file, drop_failed_audit),
    )


def _rows(table: _ExtractTable, file: RunFile, run_folder: Path) -> tuple[Path, ...]:
    if table.rows is None:
        return (run_folder / "rows.jsonl",)
    names = (table.rows,) if isinstance(table.rows, str) else table.rows
    if not names:
        raise file.error(("extract", "rows"), "names no file")
    return tuple(file.resolve(name) for name in names)


def _failed(table: _ExtractTable, file: RunFile, given: Path | None) -> EvidenceTable | None:
    if given is not None:
        return EvidenceTable.load(given)
    if table.drop_failed_audit is None:
        return None
    try:
        return EvidenceTable.load(file.resolve(table.drop_failed_audit))
    except ConfigurationError as error:
        hint = "`quantroute audit --write-evidence` writes it"
        raise file.error(("extract", "drop_failed_audit"), f"{error}; {hint}") from None


def _layers(table: _ExtractTable, target: Target, file: RunFile) -> LayerIds:
    here = ("extract", "layers")
    try:
        if table.layers is None:
            return LayerIds.default(target.num_layers)
        if table.layer_convention is None:
            raise ConfigurationError(
                'layer_convention is missing: "boundary" if id k enters layer k (speculators, '
                'vLLM), "output" if it leaves layer k (SpecForge, ModelOpt, EAGLE)'
            )
        layers = LayerIds.of(table.layers, LayerConvention(table.layer_convention))
    except ConfigurationError as error:
        raise file.error(here, error) from error
    if layers.boundary[-1] >= target.num_layers:
        problem = f"the target has {target.num_layers} layers; the last state is taken besides"
        raise file.error(here, problem)
    return layers


def _best_device() -> str:
    return "cuda" if need("torch").cuda.is_available() else "cpu"
