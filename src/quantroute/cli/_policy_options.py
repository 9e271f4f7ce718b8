"""The options that say which endpoints may serve: declared once, taken by several commands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quantroute.cli import _options as options
from quantroute.policy import EvidenceTable, ExclusionPolicy

__all__ = ["PolicyOptions", "takes_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOptions:
    """Each field is an option, spelled with dashes."""

    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="NAME",
            help="Provider, slug or tag never to use, in any spelling; repeatable.",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="NAME", help="Use nothing but this provider, slug or tag; repeatable."
        ),
    ] = None
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="FORMAT",
            help="A format to accept beside the native one, e.g. fp8; repeatable.",
        ),
    ] = None
    accept_unknown: Annotated[
        list[str] | None,
        typer.Option(
            "--accept-unknown",
            metavar="NAME",
            help="A provider whose unlabelled endpoints you accept, or 'all'; repeatable.",
        ),
    ] = None
    native: options.Native = None
    evidence: Annotated[
        Path | None,
        typer.Option(
            "--evidence",
            exists=True,
            dir_okay=False,
            help="Your own evidence table (TOML), added to the built-in one.",
        ),
    ] = None
    max_input_price: Annotated[
        str | None,
        typer.Option(
            "--max-input-price", metavar="USD", help="Ceiling in USD per million input tokens."
        ),
    ] = None
    max_output_price: Annotated[
        str | None,
        typer.Option(
            "--max-output-price", metavar="USD", help="Ceiling in USD per million output tokens."
        ),
    ] = None

    def policy(self) -> ExclusionPolicy:
        """The exclusion policy that they describe.

        Raises:
            ConfigurationError: a format nobody knows, or an impossible price.
        """
        table = EvidenceTable.builtin()
        if self.evidence is not None:
            table = table.merged(EvidenceTable.load(self.evidence))
        unknown: bool | tuple[str, ...] = tuple(self.accept_unknown or ())
        if self.accept_unknown and "all" in self.accept_unknown:
            unknown = True
        return ExclusionPolicy(
            native=None if self.native is None else options.known_format(self.native),
            accept=tuple(options.known_format(label) for label in self.accept or ()),
            accept_unknown=unknown,
            only=tuple(self.only or ()),
            exclude=tuple(self.exclude or ()),
            max_input_usd_per_million=self.max_input_price,
            max_output_usd_per_million=self.max_output_price,
            evidence=table,
        )


def takes_policy(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with the fields of `PolicyOptions` as options instead of `policy_options`.

    typer makes options of a function's parameters; this hands it a signature in which each field
    is one, and gathers what was given.
    """
    names = {item.name for item in fields(PolicyOptions)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {name: given.pop(name) for name in names}
        command(**given, policy_options=PolicyOptions(**chosen))

    signature = inspect.signature(command, eval_str=True)
    parameters = list[Parameter]()
    for parameter in signature.parameters.values():
        parameters += _as_options() if parameter.name == "policy_options" else [parameter]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters} | {"return": None}
    return run


def _as_options() -> list[Parameter]:
    hints = get_type_hints(PolicyOptions, include_extras=True)
    return [
        Parameter(
            item.name, Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
        )
        for item in fields(PolicyOptions)
    ]
