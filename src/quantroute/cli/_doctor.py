"""`quantroute doctor`: is everything there that a run needs, before money is spent?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final

import typer

from quantroute._http import OPENROUTER_URL
from quantroute.cli import _loop
from quantroute.cli import _options as options
from quantroute.cli._checks import (
    Check,
    Level,
    failed,
    folder_checks,
    key_check,
    loop_check,
    machine_checks,
    passed,
    road_checks,
    warned,
)
from quantroute.cli._endpoints import judge
from quantroute.cli._exit import ExitCode
from quantroute.cli._output import print_json, say
from quantroute.cli._plan import read_spec
from quantroute.cli._rundir import RunFolder
from quantroute.cli._service import Target, opened_target
from quantroute.client import DEFAULT_MAX_IN_FLIGHT, KeyStatus, check_key
from quantroute.errors import (
    ConfigurationError,
    DatasetError,
    KeyRejected,
    QuantrouteError,
)
from quantroute.generation import RunSpec
from quantroute.ledger import BudgetLedger
from quantroute.money import cap_pusd, to_usd
from quantroute.policy import ExclusionPolicy
from quantroute.registry import ProviderRegistry

_LARGEST_SKEW_S: Final = 60.0
_SOON_S: Final = 24 * 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """The run that somebody has in mind."""

    model: str
    out: Path
    cap_usd: Decimal | None
    max_in_flight: int
    policy: ExclusionPolicy
    spec: RunSpec | None = None


def doctor(
    spec: Annotated[
        Path | None, typer.Argument(metavar="RUN.TOML", help="A run's file, to check it as well.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model id, without a run's file.")] = (
        options.DEFAULT_MODEL
    ),
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run's folder, without a run's file.")
    ] = Path("runs/default"),
    cap: Annotated[
        str | None,
        typer.Option(metavar="USD", help="The cap you have in mind, without a run's file."),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(min=1, help="Requests at once, without a run's file.")
    ] = DEFAULT_MAX_IN_FLIGHT,
    offline: Annotated[
        bool, typer.Option("--offline", help="Ask nobody: no key limits, clock or endpoints.")
    ] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Ask the embedded simulator; no key, no network.")
    ] = False,
    base_url: options.BaseUrl = OPENROUTER_URL,
    ca_file: options.CaFile = None,
    as_json: options.Json = False,
) -> None:
    """Check key, limits, network, disk, versions and clock. Spends nothing, changes nothing.

    Each line is ok, warn or fail, with the next step. Exit code 0 if nothing failed, else what a
    run would end with: 2 setting, 5 no endpoint, 6 key.

    quantroute doctor --simulate

    quantroute doctor run.toml

    quantroute doctor --cap 5.00 --out runs/kimi --json
    """
    checks: list[Check] = []
    wish = _Wish(
        model=model,
        out=out,
        cap_usd=None if cap is None else _usd(cap),
        max_in_flight=max_in_flight,
        policy=ExclusionPolicy(),
    )

    async def run() -> None:
        async for check in _examine(
            wish, spec, simulate=simulate, base_url=base_url, ca_file=ca_file, offline=offline
        ):
            checks.append(check)
            if not as_json:
                _print(check)

    _loop.run(run())
    code = next((check.code for check in checks if check.level is Level.FAIL), ExitCode.DONE)
    if as_json:
        print_json({"exit_code": int(code), "checks": [check.as_dict() for check in checks]})
    else:
        say(_verdict(checks), bold=True)
    raise typer.Exit(code)


def _usd(cap: str) -> Decimal | None:
    amount = cap_pusd(cap)
    return to_usd(amount) if isinstance(amount, int) else None


def _print(check: Check) -> None:
    say(f"{check.level.value:4}  {check.name:12}  {check.text}")
    if check.next_step:
        say(f"{'':20}next: {check.next_step}")


def _verdict(checks: list[Check]) -> str:
    fails = sum(check.level is Level.FAIL for check in checks)
    warns = sum(check.level is Level.WARN for check in checks)
    if fails:
        return f"{fails} of {len(checks)} checks failed; a run would not work"
    return f"{len(checks)} checks, {warns} warnings; a run can begin"


async def _examine(
    wish: _Wish,
    path: Path | None,
    *,
    simulate: bool,
    base_url: str,
    ca_file: Path | None,
    offline: bool,
) -> AsyncIterator[Check]:
    for check in machine_checks():
        yield check
    if path is not None:
        try:
            wish = _wish_of(read_spec(path, base_url=base_url, simulate=simulate))
        except QuantrouteError as error:
            yield failed("run file", error, "correct it; docs/files.md lists every field")
            return
        for check in _prompt_checks(wish.spec):
            yield check
    yield loop_check(wish.max_in_flight)
    for check in folder_checks(wish.out):
        yield check
    async with opened_target(base_url=base_url, ca_file=ca_file, simulate=simulate) as target:
        yield _descriptors(target, wish.max_in_flight)
        for check in road_checks(target.service):
            yield check
        yield (key := key_check(target.key, target.service))
        if offline:
            return
        if key.level is not Level.FAIL:
            async for check in _account_checks(target, wish):
                yield check
        yield await _endpoints(target, wish)


def _wish_of(spec: RunSpec) -> _Wish:
    return _Wish(
        model=spec.model,
        out=spec.out,
        cap_usd=to_usd(spec.cap_pusd),
        max_in_flight=spec.max_in_flight,
        policy=spec.policy,
        spec=spec,
    )


def _prompt_checks(spec: RunSpec | None) -> Iterator[Check]:
    assert spec is not None
    problems: list[DatasetError] = []
    try:
        count = sum(1 for item in spec.datasets for _ in item.read(on_error=problems.append))
    except DatasetError as error:
        yield failed("prompts", error)
        return
    if problems:
        step = f"correct the {len(problems):,} lines that cannot be used"
        yield failed("prompts", problems[0], step)
    else:
        yield passed("prompts", f"{count:,} in {len(spec.datasets):,} datasets can be used")


def _descriptors(target: Target, max_in_flight: int) -> Check:
    try:
        target.check_descriptors(max_in_flight)
    except ConfigurationError as error:
        return failed("descriptors", error)
    return passed("descriptors", f"enough for {max_in_flight:,} requests at once")


async def _account_checks(target: Target, wish: _Wish) -> AsyncIterator[Check]:
    try:
        status = await check_key(target.service, target.key)
    except KeyRejected as error:
        yield failed("account", error, "make a new key, or correct the variable")
        return
    except QuantrouteError as error:
        step = "check network, proxy and --base-url; --offline leaves it out"
        yield failed("account", error, step, code=ExitCode.NO_ENDPOINT)
        return
    yield passed("account", f"the key works; spent so far: ${status.usage.usage_usd:.4f}")
    yield _limit(status, await _still_to_spend(wish))
    if status.expires_at is not None:
        yield _expiry(status.expires_at)
    yield _clock(status)


async def _still_to_spend(wish: _Wish) -> Decimal | None:
    """What the cap leaves, after earlier starts of the same run."""
    store = RunFolder(wish.out).store
    if wish.cap_usd is None or not store.exists():
        return wish.cap_usd
    async with BudgetLedger.open(store) as ledger:
        return max(Decimal(0), wish.cap_usd - to_usd(ledger.balance().posted_pusd))


def _limit(status: KeyStatus, needed_usd: Decimal | None) -> Check:
    left_usd = status.usage.remaining_usd
    if status.usage.limit_usd is None or left_usd is None:
        return warned(
            "key limit",
            "the key has no limit of its own: only this program's cap stands",
            "make a key with a limit at the cap: the service's own safety net",
        )
    text = f"${left_usd:.2f} of ${status.usage.limit_usd:.2f} left"
    if status.limit_reset in ("daily", "weekly", "monthly"):
        text += f", anew {status.limit_reset}"
    if left_usd <= 0:
        error = KeyRejected(problem=f"{text}: every request will be refused", status=402)
        return failed("key limit", error, "raise the key's limit, or make another key")
    if needed_usd is not None and left_usd < needed_usd:
        return warned(
            "key limit",
            f"{text}, the cap leaves ${needed_usd:.2f} to spend: the key ends first (exit code 6)",
            f"raise the key's limit, or lower the cap to ${left_usd:.2f}",
        )
    return passed("key limit", text)


def _expiry(expires_at: datetime) -> Check:
    text = f"ends {expires_at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    if (expires_at - datetime.now(UTC)).total_seconds() < _SOON_S:
        return warned("key expiry", text, "make a new key before a long run")
    return passed("key expiry", text)


def _clock(status: KeyStatus) -> Check:
    skew_s = status.clock_skew_s
    if skew_s is None:
        return passed("clock", "the service does not tell its time")
    if abs(skew_s) > _LARGEST_SKEW_S:
        return warned(
            "clock",
            f"{abs(skew_s):,.0f} s {'ahead of' if skew_s > 0 else 'behind'} the service's",
            "set the clock (timedatectl set-ntp true): evidence and prices have dates and hours",
        )
    return passed("clock", "agrees with the service's")


async def _endpoints(target: Target, wish: _Wish) -> Check:
    step = f"quantroute endpoints {wish.model}"
    try:
        async with ProviderRegistry(service=target.service, key=target.key) as registry:
            _, bound = await judge(registry, wish.model, wish.policy)
    except QuantrouteError as error:
        return failed("endpoints", error, f"{step} asks again; --offline leaves it out")
    text = f"{len(bound.eligible)} of {len(bound.verdicts)} may serve {wish.model}"
    if bound.eligible:
        return passed("endpoints", text)
    return Check(
        name="endpoints",
        level=Level.FAIL,
        text=text,
        next_step=f"{step} shows the reasons",
        code=ExitCode.NO_ENDPOINT,
    )
