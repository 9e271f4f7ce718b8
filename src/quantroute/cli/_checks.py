"""What `quantroute doctor` looks at on this machine. Each check says what to do next."""

from __future__ import annotations

import enum
import os
import platform
import re
import shutil
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from quantroute._http import OPENROUTER_URL, Service
from quantroute._version import __version__
from quantroute.cli import _loop
from quantroute.cli._exit import ExitCode, code_for
from quantroute.cli._wording import explain
from quantroute.errors import ConfigurationError, KeyRejected, QuantrouteError, RequestError
from quantroute.secrets import EnvKey

__all__ = [
    "Check",
    "Level",
    "failed",
    "folder_checks",
    "key_check",
    "loop_check",
    "machine_checks",
    "passed",
    "road_checks",
    "warned",
]

_LITTLE_SPACE_BYTES: Final = 2 * 2**30
_LEAST_SPACE_BYTES: Final = 200 * 2**20
#: Below so many connections the event loop makes no difference worth a word.
_MANY_CONNECTIONS: Final = 500
#: Filesystems whose files several machines may have open. SQLite's write-ahead log is shared
#: memory, which does not reach from one machine to another.
_NETWORK: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs"}
    | {"nfs4", "ocfs2", "smb2", "smb3", "smbfs", "wekafs"}
    | {"fuse.ceph", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs"}
)
#: Read by other programs for the same purpose, not by this one.
_FOREIGN_CA_VARIABLES: Final = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[([^]]*)\])?[^;]*?(?:>=\s*([0-9.]+))?[^;]*")
_EXTRA: Final = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")


class Level(enum.Enum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding. `code` is what a run would exit with, for those that failed."""

    name: str
    level: Level
    text: str
    next_step: str | None = None
    code: ExitCode = ExitCode.DONE

    def as_dict(self) -> dict[str, Any]:
        """The check in JSON values."""
        return {
            "name": self.name,
            "status": self.level.value,
            "text": self.text,
            "next_step": self.next_step,
        }


def passed(name: str, text: str) -> Check:
    """Nothing to do."""
    return Check(name=name, level=Level.OK, text=text)


def warned(name: str, text: str, next_step: str) -> Check:
    """A run will work; somebody should look."""
    return Check(name=name, level=Level.WARN, text=text, next_step=next_step)


def failed(
    name: str, error: QuantrouteError, next_step: str | None = None, *, code: ExitCode | None = None
) -> Check:
    """A run would end with this error, and with `code` if not with the error's own."""
    text = error.problem if isinstance(error, RequestError) else explain(error)
    return Check(
        name=name,
        level=Level.FAIL,
        text=text,
        next_step=next_step,
        code=code_for(error) if code is None else code,
    )


def machine_checks() -> Iterator[Check]:
    """Python, this package, what it stands on, and its extras."""
    yield passed("python", f"{platform.python_version()}, {platform.system()}")
    yield passed("quantroute", __version__)
    try:
        required = metadata.requires("quantroute") or []
    except metadata.PackageNotFoundError:
        yield warned(
            "packages",
            "quantroute is imported from a folder, not installed: versions cannot be compared",
            "pip install -e . in the checkout",
        )
        return
    wanted = _requirements(required)
    old = [_told(*item) for item in wanted[""] if not _is_enough(*item)]
    if old:
        error = ConfigurationError(f"too old or missing: {', '.join(old)}")
        yield failed("packages", error, "pip install --upgrade quantroute")
    else:
        yield passed("packages", f"{len(wanted['']):,} that it needs are there")
    yield _extras(wanted)


def _extras(wanted: Mapping[str, list[tuple[str, str]]]) -> Check:
    have: list[str] = []
    lack: list[str] = []
    for extra, items in sorted(wanted.items()):
        if extra and extra != "dev":
            (have if all(_is_enough(*item) for item in items) else lack).append(extra)
    text = f"installed: {', '.join(have) or 'none'}"
    if lack:
        text += f"; not: {', '.join(lack)} (pip install 'quantroute[NAME]' where you need one)"
    return passed("extras", text)


def _requirements(required: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Name and least version of what each extra needs; what everybody needs is under ""."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    nested: dict[str, list[str]] = {}
    for line in required:
        match, extra = _REQUIREMENT.match(line), _EXTRA.search(line)
        if match is None:
            continue
        group = extra[1] if extra else ""
        items = found.setdefault(group, [])
        if match[1] == "quantroute":  # an extra made of others
            nested.setdefault(group, []).extend((match[2] or "").split(","))
        else:
            items.append((match[1], match[3] or ""))
    for group, others in nested.items():
        found[group].extend(item for name in others for item in found.get(name.strip(), ()))
    return found


def _is_enough(package: str, least: str) -> bool:
    installed = _installed(package)
    return installed is not None and _numbers(installed) >= _numbers(least)


def _told(package: str, least: str) -> str:
    return f"{package} {_installed(package) or 'missing'} (needs {least or 'any'})"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def loop_check(max_in_flight: int) -> Check:
    """Which event loop a command runs on."""
    name = _loop.loop_name()
    if name == "asyncio" and max_in_flight > _MANY_CONNECTIONS:
        return warned(
            "event loop",
            f"asyncio; uvloop takes far less memory with {max_in_flight:,} TLS connections",
            "pip install 'quantroute[uvloop]'",
        )
    return passed("event loop", name)


def road_checks(service: Service) -> Iterator[Check]:
    """The way to the service: proxy variables and certificates, as far as no request tells."""
    try:
        service.proxy()
    except ConfigurationError as error:
        yield failed("route", error, "set it to http://HOST:PORT, or unset it")
    else:
        yield passed("route", service.route())
    try:
        service.ssl_context()
    except ConfigurationError as error:
        yield failed("certificates", error, "name a PEM file with --ca-file")
        return
    yield _certificates(service)


def _certificates(service: Service) -> Check:
    if service.base_url.startswith("http://"):
        return passed("certificates", "not needed: the service is asked without TLS")
    if service.ca_file is not None:
        return passed("certificates", f"trusts {service.ca_file} instead of the system's")
    paths = ssl.get_default_verify_paths()
    for variable in (paths.openssl_cafile_env, paths.openssl_capath_env):
        chosen = os.environ.get(variable)
        if chosen and not Path(chosen).exists():
            error = ConfigurationError(f"{variable} names {chosen}, which does not exist")
            return failed("certificates", error, f"correct or unset {variable}")
        if chosen:
            return passed("certificates", f"trusts {chosen}, named by {variable}")
    for variable in _FOREIGN_CA_VARIABLES:
        if os.environ.get(variable):
            return warned(
                "certificates",
                f"{variable} is set, but not read by this program",
                f'--ca-file "${variable}", or export SSL_CERT_FILE="${variable}"',
            )
    return passed("certificates", "trusts the system's")


def key_check(key: EnvKey, service: Service) -> Check:
    """Whether there is a key, and whether it looks like one of the service's."""
    try:
        secret = key.read()
    except KeyRejected as error:
        return failed("key", error, f"export {key.variable}=sk-or-v1-...")
    if service.base_url == OPENROUTER_URL and not secret.startswith("sk-or-v1-"):
        return warned(
            "key",
            f"{key.variable} is set, but does not begin with sk-or-v1- as the service's keys do",
            "make sure that it is not another company's key",
        )
    return passed("key", f"{key.variable} is set ({len(secret)} characters)")


def folder_checks(out: Path) -> Iterator[Check]:
    """The folder that a run would write to: rights, space, and whether SQLite may live there."""
    present = _nearest(out)
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as problem:
        error = ConfigurationError(f"{present} cannot be written to: {problem.strerror}")
        yield failed("out folder", error, "name another folder with --out")
        return
    there = "holds a run, which goes on" if (out / "run.sqlite").exists() else "can be written to"
    yield passed("out folder", f"{out}: {there}")
    yield _space(present)
    kind = filesystem_of(present)
    if kind in _NETWORK:
        yield warned(
            "filesystem",
            f"{out} lies on {kind}; SQLite's log does not work across machines there",
            "choose a local folder with --out, and copy the exported rows",
        )
    else:
        yield passed("filesystem", kind or "not told by this system; it should be a local disk")


def _space(folder: Path) -> Check:
    free_bytes = shutil.disk_usage(folder).free
    text = f"{free_bytes / 2**30:,.1f} GiB free"
    if free_bytes < _LEAST_SPACE_BYTES:
        error = ConfigurationError(f"{text}: a run would stop in its middle")
        return failed("disk", error, "free some space, or choose another folder with --out")
    if free_bytes < _LITTLE_SPACE_BYTES:
        return warned("disk", text, "watch it during a large run, or choose another --out")
    return passed("disk", text)


def _nearest(path: Path) -> Path:
    """The path itself, or the first of its parents that exists."""
    path = path.absolute()
    return next((item for item in (path, *path.parents) if item.exists()), Path("/"))


def filesystem_of(folder: Path, *, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The kind of filesystem, such as "ext4"; None where the system keeps no such list."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    resolved = folder.resolve()
    best: tuple[int, str] | None = None
    for line in lines:
        _, point, kind, *_ = line.split(" ")
        where = Path(point.replace("\\040", " "))
        if resolved.is_relative_to(where) and (best is None or len(where.parts) >= best[0]):
            best = (len(where.parts), kind)  # of two on one point, the later hides the other
    return None if best is None else best[1]
