"""One SQLite file, one writer thread, many waiting tasks: group commit.

A durable commit costs an fsync; at 2,000 requests in flight one per request would be the whole
budget. So work is queued; the writer takes all that has gathered while the last commit ran,
executes it in one transaction, commits once, and only then tells the tasks. First in, first out.

One failure does not touch its neighbours: it rolls the transaction back, and what came before it
and after it is done again without it. A savepoint around each piece would spare that, at two more
statements for every piece that does not fail, which are all of them but a few. What costs in a
statement is less its work than its handing the interpreter lock to and fro: so statements are few.

WAL with synchronous=FULL: what was acknowledged survives `kill -9` and power loss, as far as the
disk tells the truth about fsync. WAL needs shared memory: keep the file on a local disk, never on
a network file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Protocol, Self, TypeVar

from quantroute._log import get_logger
from quantroute.errors import JournalError

__all__ = ["MEMORY", "Participant", "Schema", "SqliteStore", "Work"]

T = TypeVar("T")
P = TypeVar("P", bound="Participant")
Work = Callable[[sqlite3.Connection], T]
"""A piece of work inside a transaction; it runs on the writer thread and must not commit.

It may run more than once, each time from the same state, if a neighbour fails: what it changes
besides the database must bear that.
"""

MEMORY: Final = ":memory:"
_LARGEST_BATCH: Final = 1_024
#: Commits are this far apart while many tasks write and more work keeps coming; one or two that
#: write alone are not kept waiting. Measured 2026-11 on a fast disk at 700 rows/s: without it 2.6
#: pieces of work per commit and 1.35 ms of CPU time per row, with 10 ms 26 pieces and 1.0 ms. 20 ms
#: take another 5 % off, and add a hundredth to the second that an answer takes.
_COMMIT_EVERY_S: Final = 0.02
_LOOK_EVERY_S: Final = 0.005  # one as short as 1 ms cost 0.05 ms per row in wake-ups
_SEVERAL: Final = 4
#: So much work makes a batch that is worth a commit at once.
_WORTHWHILE_BATCH: Final = 128
_BUSY_TIMEOUT_S: Final = 60.0
#: 16 MiB of pages are copied from the log into the file at once. Rows are spread over an index, so
#: that the same pages are written again and again: the more at once, the fewer copies.
_CHECKPOINT_PAGES: Final = 4_096

log = get_logger("quantroute.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What a file must be: `application_id` marks it as ours, `version` its layout."""

    application_id: int
    version: int
    script: str


class Participant(Protocol):
    """Keeps a cache in step with the transactions of a store; called on the writer thread."""

    def on_begin(self, connection: sqlite3.Connection) -> None:
        """A transaction has begun; other processes may have written since the last one.

        If the one before it was not committed, it was rolled back.
        """

    def before_commit(self, connection: sqlite3.Connection) -> None:
        """Write what was gathered; the transaction commits next.

        An error that blames a value is laid at the door of the piece of work that brought it.
        """

    def on_commit(self) -> None:
        """The transaction is durable."""


@dataclass(slots=True)
class _Job(Generic[T]):
    work: Work[T]
    future: asyncio.Future[T]
    loop: asyncio.AbstractEventLoop
    result: T | None = None
    error: BaseException | None = None


class _PieceFailed(Exception):
    """A piece of work raised; internal."""

    def __init__(self, position: int, cause: Exception) -> None:
        super().__init__(position)
        self.position, self.cause = position, cause


@dataclass(slots=True)
class SqliteStore:
    """A file (or `MEMORY`) with its schema, opened by `open`/`close` or `async with`.

    Raises (from `open`):
        JournalError: not a database, another program's, a newer layout, not writable.
    """

    path: str
    schema: Schema
    participants: list[Participant] = field(default_factory=list)
    _connection: sqlite3.Connection | None = field(default=None, init=False)
    _reader: sqlite3.Connection | None = field(default=None, init=False)
    _reading: threading.RLock = field(default_factory=threading.RLock, init=False)
    _jobs: queue.SimpleQueue[_Job[Any] | None] = field(
        default_factory=queue.SimpleQueue, init=False
    )
    _thread: threading.Thread | None = field(default=None, init=False)
    _failure: JournalError | None = field(default=None, init=False)
    _next_commit_s: float = field(default=0.0, init=False)

    # -- opening and closing ----------------------------------------------------------------------

    def open(self) -> Self:
        """Open the file, create or check its layout, start the writer."""
        if self._thread is not None:
            raise JournalError(path=self.path, problem="opened twice; use one store per open")
        self._failure = None
        try:
            self._connection = self._connect()
            self._prepare(self._connection)
            self._reader = self._connection if self.path == MEMORY else self._connect()
            if self._reader is not self._connection:
                self._reader.execute("PRAGMA query_only=1").close()
                # Sums over a million rows are sorted on the disk, not in 150 MB of memory.
                self._reader.execute("PRAGMA temp_store=FILE").close()
        except (sqlite3.Error, OSError) as error:
            self._disconnect()
            raise self._explained(error) from error
        except JournalError:
            self._disconnect()
            raise
        self._thread = threading.Thread(
            target=self._write_forever, name=f"quantroute-writer {self.path}", daemon=True
        )
        self._thread.start()
        return self

    def close(self) -> None:
        """Finish what is queued and close the file; idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._jobs.put(None)
        thread.join()
        self._disconnect()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> Self:
        return self.open()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def participant(self, kind: type[P]) -> P:
        """The participant of that class, made and joined if there is none.

        It is first told of a transaction that begins after it has joined, and of no end before.
        """
        for found in self.participants:
            if isinstance(found, kind):
                return found
        made = kind()
        self.participants.append(made)
        return made

    # -- work -------------------------------------------------------------------------------------

    async def submit(self, work: Work[T]) -> T:
        """Run `work` in the next transaction; returns its result once that is durable.

        If the waiting task is cancelled the work is done all the same.
        Raises:
            JournalError: the transaction could not be committed; all that follows is refused.
            Whatever `work` raises; its own changes are rolled back, its neighbours' are not.
        """
        return await self.submit_nowait(work)

    def submit_nowait(self, work: Work[T]) -> asyncio.Future[T]:
        """Queue `work` behind what is queued; await the future, or leave it."""
        if self._failure is not None:
            raise JournalError(path=self.path, problem=self._failure.problem)
        if self._thread is None:
            raise JournalError(path=self.path, problem="the store is closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(work, future, loop))
        return future

    def read(self, work: Work[T]) -> T:
        """Run a read-only `work` now, on this thread; sees what is committed."""
        with self._reading:
            if self._reader is None:
                raise JournalError(path=self.path, problem="the store is closed")
            try:
                if self.path == MEMORY:
                    return work(self._reader)
                self._reader.execute("BEGIN")
                try:
                    return work(self._reader)
                finally:
                    self._reader.execute("ROLLBACK")
            except sqlite3.DatabaseError as error:
                raise self._explained(error) from error

    async def aread(self, work: Work[T]) -> T:
        """`read` on a worker thread, for queries that take long."""
        return await asyncio.to_thread(self.read, work)

    # -- the writer thread ------------------------------------------------------------------------

    def _write_forever(self) -> None:
        while True:
            batch, is_last = self._gather()
            if len(batch) >= _SEVERAL:
                self._next_commit_s = time.monotonic() + _COMMIT_EVERY_S
            if batch:
                self._commit_batch(batch)
                self._deliver(batch)
                batch.clear()  # work holds rows and their owners: not while waiting for more
            if is_last:
                return

    def _gather(self) -> tuple[list[_Job[Any]], bool]:
        """At least one job, and all that came meanwhile."""
        batch: list[_Job[Any]] = []
        job = self._jobs.get()
        if job is not None:
            self._let_gather()
        while job is not None:
            batch.append(job)
            if len(batch) >= _LARGEST_BATCH:
                return batch, False
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _let_gather(self) -> None:
        """Give others time to come along, as long as some do."""
        seen = -1
        while seen < self._jobs.qsize() < _WORTHWHILE_BATCH:
            if time.monotonic() >= self._next_commit_s:
                return
            seen = self._jobs.qsize()
            time.sleep(_LOOK_EVERY_S)

    def _commit_batch(self, batch: list[_Job[Any]]) -> None:
        pieces = [batch]
        try:
            while pieces and self._failure is None:
                pieces[-1:] = reversed(self._commit_or_split(pieces[-1]))
        except Exception as error:  # noqa: BLE001 - a dead writer would leave everybody waiting
            self._failure = self._explained(error)
            log.error("storage failed", path=self.path, problem=self._failure.problem)
        for jobs in pieces:
            for job in jobs:
                assert self._failure is not None
                job.error = JournalError(path=self.path, problem=self._failure.problem)

    def _commit_or_split(self, jobs: list[_Job[Any]]) -> list[list[_Job[Any]]]:
        """Commit all of `jobs`, or none; then what is left to be committed, in order."""
        try:
            self._commit(jobs)
            return []
        except _PieceFailed as failed:
            jobs[failed.position].error = failed.cause
            left = [jobs[: failed.position], jobs[failed.position + 1 :]]
        except (sqlite3.Error, UnicodeEncodeError, OverflowError) as error:
            if not _is_the_works_own(error):
                raise
            # A participant could not write what one of them brought: whose it was, halving finds.
            middle = len(jobs) // 2
            if middle == 0:
                jobs[0].error = error
            left = [jobs[:middle], jobs[middle:]] if middle else []
        return [jobs for jobs in left if jobs]

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        with self._exclusively() as connection:
            for participant in self.participants:
                participant.on_begin(connection)
            for position, job in enumerate(jobs):
                try:
                    job.result = job.work(connection)
                except Exception as error:  # handed to whoever awaits the job
                    if not connection.in_transaction or (
                        isinstance(error, sqlite3.Error) and not _is_the_works_own(error)
                    ):
                        raise  # a full disk or a damaged file is everybody's problem
                    raise _PieceFailed(position, error) from error
            for participant in self.participants:
                participant.before_commit(connection)
        for participant in self.participants:
            participant.on_commit()

    @contextlib.contextmanager
    def _exclusively(self) -> Iterator[sqlite3.Connection]:
        connection = self._connection
        assert connection is not None
        with self._reading if self.path == MEMORY else contextlib.nullcontext():
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # A commit that failed may leave the transaction open, and with it the file locked.
                with contextlib.suppress(sqlite3.Error):
                    connection.execute("ROLLBACK")
                raise

    @staticmethod
    def _deliver(batch: list[_Job[Any]]) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[_Job[Any]]] = {}
        for job in batch:
            by_loop.setdefault(job.loop, []).append(job)
        for loop, jobs in by_loop.items():
            with contextlib.suppress(RuntimeError):  # that loop is closed: nobody is waiting
                loop.call_soon_threadsafe(_resolve, jobs)

    # -- the file ---------------------------------------------------------------------------------

    def _connect(self) -> sqlite3.Connection:
        if self.path != MEMORY:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self.path,
            timeout=_BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions are begun and ended here, by name
            check_same_thread=False,
            cached_statements=256,
        )
        try:
            _switch_to_wal(connection)
            connection.execute("PRAGMA synchronous=FULL").close()
            connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}").close()
            connection.execute("PRAGMA temp_store=MEMORY").close()
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the layout in a new file, or check that an old one is ours and not newer."""
        connection.execute("BEGIN IMMEDIATE")
        try:
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if application_id != self.schema.application_id and tables:
                raise JournalError(
                    path=self.path,
                    problem="a database of another program; choose another file",
                )
            if version > self.schema.version:
                raise JournalError(
                    path=self.path,
                    problem=f"written by a newer quantroute (layout {version}, this one knows "
                    f"{self.schema.version}); upgrade quantroute",
                )
            if not tables:
                for statement in _statements(self.schema.script):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={self.schema.application_id:d}")
                connection.execute(f"PRAGMA user_version={self.schema.version:d}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")

    def _disconnect(self) -> None:
        # A cancelled `aread` leaves its thread reading: closing under it would crash the process.
        with self._reading:
            reader, self._reader = self._reader, None
            connection, self._connection = self._connection, None
            if reader is not None and reader is not connection:
                reader.close()
        if connection is not None:
            connection.close()

    def _explained(self, error: Exception) -> JournalError:
        if isinstance(error, JournalError):
            return error
        if not isinstance(error, sqlite3.Error | OSError):
            return JournalError(
                path=self.path,
                problem=f"{type(error).__name__} while writing: {error}; this is a bug, report it; "
                "nothing is lost that was acknowledged",
            )
        text = str(error)
        advice = next(
            (advice for symptom, advice in _ADVICE if symptom in text.lower()),
            "check the file and the disk; nothing is lost that was acknowledged",
        )
        return JournalError(path=self.path, problem=f"{text}; {advice}")


_ADVICE: Final = (
    ("full", "free space on the disk and rerun: nothing acknowledged is lost"),
    ("readonly", "make the file and its folder writable and rerun"),
    ("unable to open", "check that the folder exists and is writable"),
    ("not a database", "this is not a quantroute file; choose another"),
    ("locked", "another process has been writing for a minute; stop it and rerun"),
    ("malformed", "the file is damaged; restore a copy (`PRAGMA integrity_check` tells more)"),
)


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    # SQLite's busy handler does not cover this switch: two processes creating one file collide.
    for attempt in range(50):
        try:
            connection.execute("PRAGMA journal_mode=WAL").close()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or attempt == 49:
                raise
            time.sleep(0.02)


#: Result codes that blame the statement or its values, not the file: syntax or a missing table (1),
#: a value too large (18), a constraint (19), a type mismatch (20), a wrong bind index (25).
#: Source: sqlite.org/rescode.html, read 2026-11.
_STATEMENT_CODES: Final = frozenset({1, 18, 19, 20, 25})


def _is_the_works_own(error: Exception) -> bool:
    if not isinstance(error, sqlite3.Error):
        return True  # a value that SQLite's module cannot bind: text or a number beyond its range
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:  # raised by the module itself, which has not touched the file
        return isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError)
    return code & 0xFF in _STATEMENT_CODES  # the low byte; the rest details it


def _statements(script: str) -> Iterator[str]:
    return (statement for statement in script.split(";") if statement.strip())


def _resolve(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        if job.future.done():  # cancelled while waiting; the work was done all the same
            continue
        if job.error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(job.error)
