"""Looking at a run from outside: the same figures as the run's own, however often one looks."""

from __future__ import annotations

import datetime as dt
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cli_support import quantroute
from quantroute.errors import DatasetError, JournalError
from quantroute.generation import Onlooker, RowClass, RunLook, merged_looks
from quantroute.report import RunWatcher, run_page
from quantroute.storage import FileLock
from sqlite_support import database


def fresh_look(folder: Path) -> RunLook:
    return Onlooker(folder / "run.sqlite", folder.name).look()


def test_a_look_agrees_with_the_runs_own_status(run_folder: Path) -> None:
    look, told = fresh_look(run_folder), quantroute("status", run_folder, "--json").data
    assert look.posted_pusd == told["posted_pusd"] == look.moments[-1].posted_pusd
    assert look.cap_pusd == told["cap_pusd"]
    assert sum(item.rows for item in look.counts) == sum(item["rows"] for item in told["rows"])
    assert [(item.endpoint, item.accepted_tokens) for item in look.qualities] == [
        (item["endpoint"], item["accepted_tokens"]) for item in told["quality"]
    ]
    assert sum(item.answers for item in look.speeds.values()) == sum(
        item["answers"] for item in told["quality"]
    )


def test_nothing_new_costs_no_new_look(run_folder: Path) -> None:
    onlooker = Onlooker(run_folder / "run.sqlite", run_folder.name)
    first = onlooker.look()
    assert onlooker.look() == first
    with FileLock(Path(f"{run_folder}/run.sqlite.run-{run_folder.name}.lock")):
        assert onlooker.look() == replace(first, is_live=True)


def test_a_row_that_fails_under_a_clock_set_back_is_seen(run_folder: Path) -> None:
    onlooker = Onlooker(run_folder / "run.sqlite", run_folder.name)
    before = onlooker.look()
    with database(run_folder / "run.sqlite") as writer:
        writer.execute(
            "UPDATE generation_rows SET state = 'refused', row_class = NULL, changed_at_s = 1 "
            "WHERE row_id = (SELECT min(row_id) FROM generation_rows)"
        )
    after = onlooker.look()
    assert after.counts != before.counts
    assert after.counts == fresh_look(run_folder).counts


def test_looking_on_while_rows_are_redone(run_folder: Path) -> None:
    onlooker = Onlooker(run_folder / "run.sqlite", run_folder.name)
    before = onlooker.look()
    cut = sum(item.rows for item in before.counts if item.row_class is RowClass.TRUNCATED)
    assert cut
    store = run_folder / "run.sqlite"
    with database(store) as writer:  # one truncated answer is had again, whole
        (row_id,) = writer.execute(
            "SELECT row_id FROM generation_rows WHERE row_class = 'truncated' LIMIT 1"
        ).fetchone()
        columns = [name for _, name, *_ in writer.execute("PRAGMA table_info(generation_turns)")]
        chosen = ", ".join(
            {"revision": "1", "row_class": "'good'"}.get(name, name) for name in columns
        )
        writer.execute(
            f"INSERT INTO generation_turns SELECT {chosen} FROM generation_turns WHERE row_id = ?",
            (row_id,),
        )
        writer.execute("UPDATE generation_rows SET row_class = 'good' WHERE row_id = ?", (row_id,))

    after = onlooker.look()

    assert sum(x.rows for x in after.counts if x.row_class is RowClass.TRUNCATED) == cut - 1
    assert after.qualities == fresh_look(run_folder).qualities
    assert sum(item.answers for item in after.qualities) == sum(
        item.answers for item in before.qualities
    )
    assert {name: item.answers for name, item in after.speeds.items()} == {
        name: item.answers for name, item in fresh_look(run_folder).speeds.items()
    }


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_pause_between_two_starts_is_cut_out(run_folder: Path, was_killed: bool) -> None:
    with database(run_folder / "run.sqlite") as writer:
        (half,) = writer.execute("SELECT max(seq) / 2 FROM journal").fetchone()
        if not was_killed:  # all that was open at that moment is closed by then
            writer.execute("DELETE FROM journal WHERE kind = 'reserved' AND seq <= ?", (half,))
        writer.execute("UPDATE journal SET at_s = at_s + 86400 WHERE seq > ?", (half,))
    watcher = RunWatcher(run_folder, [run_folder / "run.sqlite"], run_folder.name)
    page = run_page(watcher.picture(at=dt.datetime.now(dt.UTC)))
    assert "Dashed upright lines are pauses left out." in page
    assert 'class="cut"' in page
    assert "days under way" not in page


def test_a_run_in_shards_is_shown_as_one(run_folder: Path, tmp_path: Path) -> None:
    one = fresh_look(run_folder)
    run = tmp_path / "both" / run_folder.name
    for part in (0, 1):
        shutil.copytree(run_folder, run / f"shard-00{part}-of-002")
    stores = sorted(run.glob("shard-*/run.sqlite"))

    both = merged_looks([Onlooker(store, run_folder.name).look() for store in stores])

    assert both.cap_pusd is None
    assert both.posted_pusd == 2 * one.posted_pusd == both.moments[-1].posted_pusd
    assert sum(item.rows for item in both.counts) == 2 * sum(item.rows for item in one.counts)
    assert [item.answers for item in both.qualities] == [2 * x.answers for x in one.qualities]
    assert both.accepted["b4"].output_tokens == 2 * one.accepted["b4"].output_tokens
    assert both.statement[0].output_tokens == 2 * one.statement[0].output_tokens

    ended = quantroute("report", run)
    assert ended.code == 0
    page = (run / "report.html").read_text()
    failed = (run_folder / "events.jsonl").read_text().count('"attempt failed"')
    assert f"{2 * failed:,} attempts brought no answer" in page


def test_other_names_and_other_files_are_said(run_folder: Path) -> None:
    store = run_folder / "run.sqlite"
    assert Onlooker(store, "another").look().run.name == run_folder.name  # a folder was renamed
    with database(store) as writer:
        writer.execute(
            "INSERT INTO generation_runs SELECT 7, 'second', created_at_s FROM generation_runs"
        )
        writer.execute(
            "INSERT INTO generation_configs SELECT 7, config_hash, config, since_s "
            "FROM generation_configs LIMIT 1"
        )
    with pytest.raises(DatasetError, match=r"known: .*second"):
        Onlooker(store, "another").look()
    with database(store) as writer:
        writer.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="newer quantroute"):
        Onlooker(store).look()
