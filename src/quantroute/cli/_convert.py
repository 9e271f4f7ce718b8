"""`quantroute convert`: extracted states as a trainer's own files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from quantroute.cli import _options as options
from quantroute.cli._output import print_json, say


def convert(
    states: Annotated[
        Path,
        typer.Argument(exists=True, file_okay=False, help="A folder that `extract` has finished."),
    ],
    out: Annotated[Path, typer.Argument(help="Where to write; the same command goes on there.")],
    target: Annotated[
        Path,
        typer.Option(
            exists=True, file_okay=False, help="The target's folder, in Hugging Face form."
        ),
    ],
    trainer: Annotated[
        str, typer.Option(help="Who will read it: speculators, specforge or modelopt.")
    ] = "speculators",
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens the drafter may propose, special ones always in; all by default."
        ),
    ] = None,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="First read every byte of STATES against its checksum."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Write the states that `extract` took as one trainer's files. `pipeline` does it by itself.

    quantroute convert runs/k25/states data/speculators --target models/kimi-k2.5 \
        --draft-vocab-size 32000
    """
    from quantroute import extraction

    store = extraction.StateStore.open(states)
    if verify:
        store.verify()
    report = extraction.write_training_data(
        store, out, trainer=trainer, target=target, draft_vocab_size=draft_vocab_size
    )
    if as_json:
        print_json(
            {
                "folder": str(report.folder),
                "trainer": trainer,
                "examples": report.examples,
                "tokens": report.tokens,
                "supervised_tokens": report.supervised_tokens,
                "non_finite": report.non_finite,
                "duplicates": report.duplicates,
                "draft_vocab_size": report.draft_vocab_size,
                "coverage": report.coverage,
            }
        )
        return
    say(
        f"{report.folder}: {report.examples:,} examples, {report.tokens:,} tokens "
        f"({report.supervised_tokens:,} trained) for {trainer}"
    )
    if report.coverage is not None:
        say(f"draft vocabulary of {draft_vocab_size:,}: {report.coverage:.2%} of what is learnt")
    for count, what in (
        (report.non_finite, "left out for an infinity or a NaN"),
        (report.duplicates, "left out as equal to an earlier one"),
    ):
        if count:
            say(f"{count:,} {what}")
