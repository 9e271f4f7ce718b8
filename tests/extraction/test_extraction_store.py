"""The store: what goes in comes out, and whatever is torn, foreign or too big is noticed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from quantroute._shard import Shard
from quantroute.errors import ConfigurationError, DatasetError, JournalError, SourceError
from quantroute.extraction import TRAINERS, FormatReport, _filler, write_training_data
from quantroute.extraction._job import Extraction, ExtractionProgress, StoreSettings
from quantroute.extraction._plan import Selection
from quantroute.extraction._records import LayerIds
from quantroute.extraction._store import StateStore
from quantroute.extraction._target import Target
from quantroute.storage import FileLock, is_locked
from states_support import FakeSource, contents, examples, tiny_llama

torch = pytest.importorskip("torch", reason="needs quantroute[extract]")
pytest.importorskip("transformers", reason="needs quantroute[extract]")

LAYERS = LayerIds((2, 4, 5))
MANY = examples(30)
#: float32, 4 x 32 numbers and 9 bytes a token: about 100 tokens a shard.
SHARD_BYTES = 52_100
PLENTY = 10**15


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.read(tiny_llama(tmp_path_factory.mktemp("llama") / "target"))


def job(target: Target, out: Path, **changed: Any) -> Extraction:
    own = {name: changed.pop(name) for name in ("shard", "free_bytes") if name in changed}
    rows = changed.pop("rows", MANY)
    settings = {"dtype": "float32", "shard_bytes": SHARD_BYTES, "margin_bytes": 0} | changed
    return Extraction(
        target=target,
        layers=LAYERS,
        examples=lambda: rows,
        out=out,
        settings=StoreSettings(**settings),
        **{"free_bytes": lambda _: PLENTY} | own,
    )


async def test_what_goes_in_comes_out(target: Target, tmp_path: Path) -> None:
    source = FakeSource(target, LAYERS)
    report = await job(target, tmp_path / "s").run(source)
    assert report.is_complete
    assert (report.examples, report.shards > 3) == (30, True)
    store = StateStore.open(tmp_path / "s")
    store.verify()
    assert (len(store), store.tokens) == (30, sum(map(len, MANY)))
    for found, one in zip(store, MANY, strict=True):
        assert found.example.key == one.key
        assert dict(found.example.provenance) == dict(one.provenance)
        assert torch.equal(found.hidden, source.hidden(one))
    assert torch.equal(store[MANY[17].key].hidden, source.hidden(MANY[17]))
    assert list(store.keys()) == [one.key for one in MANY]
    with pytest.raises(KeyError):
        store["0" * 64]


async def test_the_manifest_says_what_the_states_are(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    manifest = json.loads((tmp_path / "s/manifest.json").read_bytes())
    assert manifest["layers"] == {
        "convention": "boundary",
        "ids": [2, 4, 5],
        "output_ids": [1, 3, 4],
    }
    assert manifest["last_state"] == {"norm": "pre_final_norm", "boundary_id": 8}
    assert manifest["states"]["shape"] == ["tokens", 4, 32]
    for shard in manifest["shards"]:
        raw = (tmp_path / "s" / shard["file"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == shard["sha256"]
        assert len(raw) == shard["size_bytes"]
    assert StateStore.open(tmp_path / "s").final_norm().eps == 1e-6


async def test_safetensors_reads_a_shard_by_itself(target: Target, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    shard = load_file(tmp_path / "s/shards/000000.safetensors")
    assert sorted(shard) == ["input_ids", "loss_mask", "offsets", "states"]
    assert shard["offsets"][1] == len(MANY[0])
    assert shard["input_ids"][: len(MANY[0])].tolist() == MANY[0].input_ids.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_fp8_keeps_its_bound(target: Target, tmp_path: Path, dtype: str) -> None:
    source = FakeSource(target, LAYERS, dtype=dtype)
    await job(target, tmp_path / "s", fp8=True, dtype=dtype).run(source)
    store = StateStore.open(tmp_path / "s")
    store.verify()
    assert store.manifest["states"]["stored_as"] == "float8_e4m3fn"
    for found in store:
        exact = source.hidden(found.example).double()
        scale = exact.abs().amax(-1, keepdim=True) / 448
        rounding = exact.abs() * (2**-7 if dtype == "bfloat16" else 2**-20)
        bound = torch.maximum(exact.abs() / 16, scale * 2**-10) + rounding
        assert found.hidden.dtype == getattr(torch, dtype)
        assert bool(((found.hidden.double() - exact).abs() <= bound).all())


async def test_resuming_gives_the_same_files(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "whole").run(FakeSource(target, LAYERS))
    broken = tmp_path / "broken"
    starts = 0
    while not (broken / "manifest.json").exists():
        starts += 1
        source = FakeSource(target, LAYERS, dies_after=11)
        try:
            await job(target, broken).run(source)
        except SourceError:
            assert not (broken / "manifest.json").exists()
    assert 2 < starts < 10
    assert contents(broken) == contents(tmp_path / "whole")


async def test_a_cancelled_run_leaves_no_thread_behind_that_still_writes(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    write = _filler._write

    def slowly(*arguments: Any) -> Any:
        began.set()
        assert go_on.wait(30)
        return write(*arguments)

    monkeypatch.setattr(_filler, "_write", slowly)
    task = asyncio.ensure_future(job(target, tmp_path / "s").run(FakeSource(target, LAYERS)))
    await asyncio.to_thread(began.wait, 30)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    assert is_locked(tmp_path / "s/locks/0-of-1.lock")
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (tmp_path / "s/shards/000000.json").exists()


async def test_a_finished_store_is_not_made_again(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    again = FakeSource(target, LAYERS)
    report = await job(target, tmp_path / "s").run(again)
    assert again.asked == report.shards == 0
    assert report.is_complete


@pytest.mark.parametrize("name", ["shards/000001.safetensors", "shards/000001.jsonl"])
async def test_a_torn_file_is_noticed_and_made_again(
    target: Target, tmp_path: Path, name: str
) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    before = contents(tmp_path / "s")
    path = tmp_path / "s" / name
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DatasetError):
        StateStore.open(tmp_path / "s").verify()
    report = await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    assert report.shards == 1
    assert contents(tmp_path / "s") == before


async def test_a_changed_byte_is_noticed(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    path = tmp_path / "s/shards/000001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-300] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DatasetError, match="differs from its checksum"):
        StateStore.open(tmp_path / "s").verify()


async def test_parts_by_many_workers_give_the_same_files(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "whole").run(FakeSource(target, LAYERS))
    out = tmp_path / "parts"
    for number in (1, 2, 0):
        report = await job(target, out, shard=Shard(number, 3)).run(FakeSource(target, LAYERS))
        assert report.is_complete is (number == 0)
        if number != 0:
            with pytest.raises(DatasetError, match="not finished"):
                StateStore.open(out)
    assert contents(out) == contents(tmp_path / "whole")


async def test_a_second_writer_is_refused(target: Target, tmp_path: Path) -> None:
    with (
        FileLock(tmp_path / "s/locks/0-of-1.lock"),
        pytest.raises(JournalError, match="in use by process"),
    ):
        await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    with (
        FileLock(tmp_path / "s/locks/2-of-4.lock"),
        pytest.raises(DatasetError, match="one of 4 parts"),
    ):
        await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"fp8": True}, r"plan\.sha256, .*states\.stored_as"),
        ({"rows": MANY[:-1]}, r"plan\.examples, plan\.sha256, plan\.tokens"),
        ({"selection": Selection(max_tokens=100)}, r"plan\..*selection\.max_tokens"),
        ({"source": {"kind": "vllm"}}, r"source\.kind"),
    ],
)
async def test_another_extraction_in_the_folder_is_refused(
    target: Target, tmp_path: Path, changed: dict[str, Any], what: str
) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    with pytest.raises(DatasetError, match=f"another extraction .{what} differ"):
        await job(target, tmp_path / "s", **changed).run(FakeSource(target, LAYERS))


async def test_another_target_of_the_same_shape_is_refused(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS, dies_after=None))
    other = Target.read(tiny_llama(tmp_path / "other", seed=1))
    with pytest.raises(DatasetError, match="its weights have changed"):
        await job(other, tmp_path / "s").run(FakeSource(other, LAYERS))


async def test_bad_states_are_left_out_and_counted(target: Target, tmp_path: Path) -> None:
    source = FakeSource(
        target, LAYERS, bad={MANY[3].key}, gone={MANY[9].key}, silent={MANY[20].key}
    )
    report = await job(target, tmp_path / "s").run(source)
    assert report.lost == {"not_finite": 1, "too_long": 1, "no_answer": 1}
    store = StateStore.open(tmp_path / "s")
    store.verify()
    assert len(store) == 27
    assert store.manifest["totals"]["lost"] == 3
    for found in store:
        assert torch.equal(found.hidden, source.hidden(found.example))


async def test_a_small_disk_is_refused_before_anything_is_written(
    target: Target, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match="are free"):
        await job(target, tmp_path / "s", free_bytes=lambda _: 300_000).run(
            FakeSource(target, LAYERS)
        )
    assert not (tmp_path / "s").exists()


async def test_a_disk_that_fills_up_stops_the_run_resumably(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "s"

    def free_bytes(_: Path) -> int:
        return 10 if (out / "shards/000001.json").exists() else PLENTY

    with pytest.raises(DatasetError, match="are free"):
        await job(target, out, free_bytes=free_bytes).run(FakeSource(target, LAYERS))
    report = await job(target, out).run(FakeSource(target, LAYERS))
    assert report.resumed_shards >= 2
    assert report.is_complete


async def test_no_space_while_writing_is_told_as_such(target: Target, tmp_path: Path) -> None:
    out = tmp_path / "s"
    await job(target, out, rows=MANY[:2]).run(FakeSource(target, LAYERS, gone={MANY[0].key}))
    (out / "shards/000000.json").unlink()
    (out / "shards/000000.safetensors").unlink()
    (out / "shards/000000.safetensors").mkdir()  # a rename onto a folder fails as a disk may
    with pytest.raises(DatasetError, match="make room and run again"):
        await job(target, out, rows=MANY[:2]).run(FakeSource(target, LAYERS))
    assert not list(out.rglob("*.tmp"))


async def test_asked_to_stop_it_finishes_what_it_began(target: Target, tmp_path: Path) -> None:
    first = job(target, tmp_path / "s")

    def stop(progress: ExtractionProgress) -> None:
        if progress.shards == 1:
            first.request_stop()

    report = await first.run(FakeSource(target, LAYERS), stop)
    assert report.was_stopped
    assert 0 < report.shards < report.shards + report.missing_shards
    assert (await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))).is_complete


async def test_nothing_to_do_and_a_wrong_source_are_errors(target: Target, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="30 row_class"):
        job(target, tmp_path, selection=Selection(row_classes={"good"})).prepare()
    with pytest.raises(ConfigurationError, match="the store wants float32"):
        await job(target, tmp_path).run(FakeSource(target, LAYERS, dtype="bfloat16"))


async def test_a_source_that_answers_for_others_is_refused(target: Target, tmp_path: Path) -> None:
    class Confused(FakeSource):
        async def states(self, examples: Any) -> Any:
            async for item in super().states(MANY[:1] * 2):
                yield item

    with pytest.raises(ConfigurationError, match="not asked for, or twice"):
        await job(target, tmp_path / "s").run(Confused(target, LAYERS))


async def test_a_changed_token_is_noticed_when_it_is_read(target: Target, tmp_path: Path) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    store = StateStore.open(tmp_path / "s")
    path = store.folder.shard(0)
    raw = bytearray(path.read_bytes())
    raw[raw.index(MANY[0].input_ids.tobytes())] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DatasetError, match=r"other tokens in its shard: delete it"):
        next(iter(store))


async def test_files_for_another_target_than_that_of_the_states_are_refused(
    target: Target, tmp_path: Path
) -> None:
    await job(target, tmp_path / "s").run(FakeSource(target, LAYERS))
    store = StateStore.open(tmp_path / "s")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((target.folder / "config.json").read_text()) | {"vocab_size": 500}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"not the target of these .*vocab_size differ"):
        write_training_data(store, tmp_path / "files", trainer="speculators", target=other)


async def test_the_report_counts_what_the_store_holds(target: Target, tmp_path: Path) -> None:
    gone = {one.key for one in MANY[:3]}
    report = await job(target, tmp_path / "s").run(FakeSource(target, LAYERS, gone=gone))
    store = StateStore.open(tmp_path / "s")
    assert (report.examples, report.tokens) == (len(store), store.tokens)
    assert report.lost == {"too_long": 3}


@pytest.mark.parametrize("trainer", TRAINERS)
async def test_files_of_another_store_with_the_same_tokens_are_not_kept(
    target: Target, tmp_path: Path, trainer: str
) -> None:
    class Retrained(FakeSource):
        def hidden(self, one: Any) -> Any:
            return -super().hidden(one)

    for name, source in (("a", FakeSource), ("b", Retrained)):
        await job(target, tmp_path / name, rows=MANY[:2]).run(source(target, LAYERS))
    one, other = StateStore.open(tmp_path / "a"), StateStore.open(tmp_path / "b")

    def write(store: StateStore) -> FormatReport:
        folder = target.folder
        return write_training_data(store, tmp_path / "files", trainer=trainer, target=folder)

    assert (write(one).written, write(one).kept) == (2, 2)
    with pytest.raises(DatasetError, match="different: states_sha256"):
        write(other)
