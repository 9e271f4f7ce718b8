"""`quantroute init`: a commented run file to start from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from os.path import relpath
from pathlib import Path
from typing import Annotated, Final

import typer

from quantroute.cli import _options as options
from quantroute.cli._job import check_prompts
from quantroute.cli._output import print_json, say
from quantroute.cli._wording import as_word
from quantroute.domain import Quantization
from quantroute.errors import ConfigurationError
from quantroute.generation import dataset_name, load_run_spec
from quantroute.money import cap_pusd
from quantroute.pipeline import preset as find_preset
from quantroute.policy import EvidenceTable

_HEADER: Final = """\
# A whole run in one file. Look before you spend, then run it:
#
#   quantroute doctor {word}           is everything there?
#   quantroute plan {word}             who serves, what it costs, how far the cap reaches
#   quantroute plan {word} --probe 20  buy twenty rows, and plan with what they show
#   quantroute generate {word}
#
# Add --simulate to each to rehearse it without a key and without cost. Lines that begin with
# "# name =" are off; take the "# " away to switch them on. docs/files.md lists every field.

[run]
{model}
{cap}# US dollars, as text; hard, for all datasets together
{out}# relative to this file, like every path here
{in_flight}# requests on the wire at once
# deadline = "45m"        # then only the cheapest endpoints that make it are used
# allocation = "equal"    # of the cap; or "weighted" (weight), or "priority" (lower numbers first)

[policy]
{native}
# exclude = ["Fireworks"]               # provider, slug or tag, in any spelling
# only = ["Moonshot AI"]
# accept = ["fp8"]                      # a format beside the native one
# accept_unknown = ["Novita"]           # providers whose unlabelled endpoints you accept
# max_output_usd_per_million = "3.50"
# data_collection = "deny"

[sampling]                # for all datasets, unless they say otherwise; left out: the model's own
temperature = 1.0
# top_p = 0.95
# reasoning = true        # or false; left out, the model's default
"""
_DATASET: Final = """
[[dataset]]
{name}
{prompts}
{limit}# of one answer, reasoning included
{target}
# rollouts = 2            # answers per prompt, each a row of its own
# cap_usd = "1.00"        # this dataset's own cap, below the run's
# sampling = {{ temperature = 0.7, reasoning = false }}
"""


def init(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file to write; it must not exist.")
    ] = Path("run.toml"),
    model: Annotated[str, typer.Option(help="Model id.")] = options.DEFAULT_MODEL,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="A prompt file (JSONL or .txt), which becomes a dataset; repeatable. The embedded "
            "set if none is given.",
        ),
    ] = None,
    cap: Annotated[str, typer.Option(metavar="USD", help="Hard cap of the run.")] = "5.00",
    native: options.Native = None,
    max_output_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of one answer, reasoning included.")
    ] = 4_096,
    target_output_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Accepted output tokens wanted of each dataset."),
    ] = None,
    max_in_flight: Annotated[int, typer.Option(min=1, help="Requests on the wire at once.")] = 200,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A known target instead: its whole pipeline, rows to drafter (kimi-k2.5)."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write a run file with comments, to be read and changed. Asks nobody, spends nothing.

    quantroute init

    quantroute init --preset kimi-k2.5

    quantroute init b3.toml --prompts b3.jsonl --cap 20 --target-output-tokens 10000000
    """
    if preset is not None:
        _write_preset(path, preset)
        return
    files = tuple(prompts or ())
    cap_pusd(cap)  # an impossible one, like an unknown format, is refused before a file is made
    if native is not None:
        options.known_format(native)
    if path.suffix != ".toml":
        raise ConfigurationError(f"{path}: a run file's name ends in .toml")
    if files:
        check_prompts(files)
    fits = Quantization.parse(native).value if native else _known_native(model)
    text = _head(path, model=model, cap=cap, max_in_flight=max_in_flight, native=fits) + "".join(
        _dataset(name, source, limit=max_output_tokens, target=target_output_tokens)
        for name, source in _sources(files, folder=path.parent)
    )
    _write_new(path, text)
    spec = load_run_spec(path)
    if as_json:
        names = [item.name for item in spec.datasets]
        print_json({"path": str(path), "out": str(spec.out), "datasets": names, "native": fits})
        return
    many = "1 dataset" if len(spec.datasets) == 1 else f"{len(spec.datasets):,} datasets"
    say(f"wrote {path}: {many}, cap ${cap}, rows go to {spec.out}")
    if fits is None:
        say(f"how {model} was made is not known here: set `native` in [policy], see its card")
    say(f"next: quantroute plan {as_word(path)} --simulate", bold=True)


def _write_preset(path: Path, name: str) -> None:
    found = find_preset(name)
    _write_new(path, found.text.replace("run.toml", as_word(path)))  # in the commands it shows
    say(f"{path}: set prompts, target and cap, then `quantroute plan {as_word(path)}`")
    for line in found.estimates():
        say(line)


def _known_native(model: str) -> str | None:
    known = EvidenceTable.builtin().native(model, at=datetime.now(UTC))
    return None if known is None else known.value


def _head(path: Path, *, model: str, cap: str, max_in_flight: int, native: str | None) -> str:
    if native is None:
        note = '# native = "FORMAT"       # NEEDED: how the model was made, from its card'
    elif native == _known_native(model):
        note = f"{f'# native = {_text(native)}':<26}# known for this model"
    else:
        note = f"native = {_text(native)}"
    return _HEADER.format(
        word=as_word(path),
        model=_setting("model", _text(model)).rstrip(),
        cap=_setting("cap_usd", _text(cap)),
        out=_setting("out", _text(f"runs/{path.stem}")),
        in_flight=_setting("max_in_flight", max_in_flight),
        native=note,
    )


def _setting(name: str, value: object) -> str:
    """A line of the file, with room for a comment."""
    return f"{f'{name} = {value}':<25} "


def _sources(files: Iterable[Path], *, folder: Path) -> list[tuple[str, str]]:
    """Name and place of each dataset; a path of the file is relative to the file."""
    found = [(dataset_name(item.stem), _beside(item, folder)) for item in files]
    names = [name for name, _ in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigurationError(
            f"two prompt files make a dataset called {', '.join(twice)}: rename one"
        )
    return found or [("chat", "builtin")]


def _beside(path: Path, folder: Path) -> str:
    return path.as_posix() if path.is_absolute() else Path(relpath(path, folder)).as_posix()


def _dataset(name: str, prompts: str, *, limit: int, target: int | None) -> str:
    wanted = "# target_output_tokens = 1_000_000   # accepted ones; or target_rows; or every prompt"
    if target is not None:
        wanted = f"target_output_tokens = {target}"
    return _DATASET.format(
        name=_setting("name", _text(name)).rstrip(),
        prompts=_setting("prompts", _text(prompts)).rstrip(),
        limit=_setting("max_output_tokens", limit),
        target=wanted,
    )


def _text(value: str) -> str:
    """A TOML string: JSON's escapes are among TOML's."""
    return json.dumps(value)


def _write_new(path: Path, text: str) -> None:
    if path.exists():
        raise ConfigurationError(
            f"{path} exists and is left as it is: name another file, or remove it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error
