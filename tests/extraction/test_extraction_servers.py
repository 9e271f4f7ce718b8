"""Sources behind servers: right states in order, and every way to lose them is noticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from quantroute.errors import ConfigurationError, SourceError
from quantroute.extraction._records import LayerIds, States
from quantroute.extraction._sglang import SglangSource
from quantroute.extraction._source import Lost, probe, probe_examples
from quantroute.extraction._transformers import TransformersSource
from quantroute.extraction._vllm import VllmSource
from quantroute.testing import FakeClock
from states_servers import FakeSglang, FakeVllm, serving
from states_support import (
    by_key,
    example,
    examples,
    gathered,
    tiny_deepseek,
    tiny_llama,
)

torch = pytest.importorskip("torch", reason="needs quantroute[extract]")
pytest.importorskip("transformers", reason="needs quantroute[extract]")

LAYERS = LayerIds((2, 4, 5))
MANY = examples(12)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


async def ask(
    fake: FakeVllm, target: Path, rows: Any = None, **settings: Any
) -> list[States | Lost]:
    async with serving(fake) as server:
        source = VllmSource(
            target,
            LAYERS,
            server=str(server.make_url("/v1")),
            **{"dtype": "bfloat16", "clock": FakeClock(autojump=True), "file_timeout_s": 60.0}
            | settings,
        )
        try:
            return await gathered(source.states(MANY if rows is None else rows))
        finally:
            await source.close()


@pytest.mark.parametrize("make", [tiny_llama, tiny_deepseek])
async def test_vllm_gives_what_transformers_gives(make: Any, tmp_path: Path, shared: Path) -> None:
    target = make(tmp_path / "target")
    fake = FakeVllm(target, shared)
    found = by_key(await ask(fake, target, in_flight=4))  # type: ignore[arg-type]
    local = TransformersSource(target, LAYERS)
    wanted = by_key(await gathered(local.states(MANY)))
    assert found.keys() == wanted.keys()
    for key, hidden in found.items():
        assert torch.equal(hidden, wanted[key].bfloat16()) or torch.allclose(
            hidden.float(), wanted[key], rtol=2e-2, atol=2e-2
        )
    assert 1 < fake.most_open <= 4
    assert not os.listdir(shared)  # files and locks are gone


@pytest.mark.parametrize("fault", ["503", "429", "torn", "short", "other_ids", "file_of_another"])
async def test_vllm_is_asked_again_where_that_may_help(
    llama: Path, shared: Path, fault: str
) -> None:
    fake = FakeVllm(llama, shared, faults=[fault, fault])
    (found,) = await ask(fake, llama, [example(1, 9)])
    assert isinstance(found, States)
    assert len(fake.requests) == 3
    assert not os.listdir(shared)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("short", "--no-enable-prefix-caching"),
        ("no_keys", "the file holds"),
        ("never", "no file after"),
        ("other_ids", "other token ids"),
    ],
)
async def test_vllm_answers_that_stay_broken_are_lost_alone(
    llama: Path, shared: Path, fault: str, detail: str
) -> None:
    fake = FakeVllm(llama, shared, faults=([fault] * 3))
    rows = [example(1, 9), example(2, 9)]
    first, second = await ask(fake, llama, rows, in_flight=1, retries=2)
    assert isinstance(first, Lost)
    assert first.reason == "broken_answer"
    assert detail in first.detail
    assert isinstance(second, States)


async def test_vllm_refusals_are_final(llama: Path, shared: Path) -> None:
    fake = FakeVllm(llama, shared, faults=["400"])
    (found,) = await ask(fake, llama, [example(1, 9)])
    assert isinstance(found, Lost)
    assert (found.reason, len(fake.requests)) == ("refused", 1)


@pytest.mark.parametrize("status", ["401", "404"])
async def test_a_server_that_would_refuse_any_example_loses_none(
    llama: Path, shared: Path, status: str
) -> None:
    fake = FakeVllm(llama, shared, faults=[None, status])
    with pytest.raises(SourceError, match=f"refused with status {status}.*look at its address"):
        await ask(fake, llama, in_flight=1)


async def test_a_vllm_that_promises_and_dies_is_noticed(llama: Path, shared: Path) -> None:
    fake = FakeVllm(llama, shared, faults=[None, "dies"])
    with pytest.raises(SourceError, match=r"promised .* and then died"):
        await ask(fake, llama, in_flight=1)
    assert not os.listdir(shared)


async def test_a_vllm_that_is_dead_is_told_apart_from_one_that_is_busy(
    llama: Path, shared: Path
) -> None:
    fake = FakeVllm(llama, shared)
    fake.is_dead = True
    with pytest.raises(SourceError, match=r"failed 5 times .status 500.*does not answer"):
        await ask(fake, llama, in_flight=1)
    busy = FakeVllm(llama, shared, faults=(["503"] * 5))
    with pytest.raises(SourceError, match="it is up"):
        await ask(busy, llama, in_flight=1)


@pytest.mark.parametrize(
    ("fault", "told"),
    [("no_last_layer", r"\(3, 32\), not \(4, 32\).*0\.32"), ("no_path", r"\[2,4,5,8\]")],
)
async def test_a_vllm_that_was_started_wrongly_is_told_how(
    llama: Path, shared: Path, fault: str, told: str
) -> None:
    with pytest.raises(SourceError, match=told):
        await ask(FakeVllm(llama, shared, faults=[fault]), llama, in_flight=1)


async def test_the_servers_folder_may_have_another_name_here(llama: Path, shared: Path) -> None:
    fake = FakeVllm(llama, shared, named_folder="/elsewhere/states")
    (found,) = await ask(fake, llama, [MANY[0]], path_map=("/elsewhere/states", shared))
    assert isinstance(found, States)
    with pytest.raises(SourceError, match="correct the path map"):
        await ask(fake, llama, [MANY[0]], path_map=("/other", shared))


async def test_vllm_in_fp8_is_read_with_its_scales(llama: Path, shared: Path) -> None:
    (exact,) = await ask(FakeVllm(llama, shared), llama, [MANY[0]])
    (found,) = await ask(FakeVllm(llama, shared, fp8=True), llama, [MANY[0]])
    assert isinstance(exact, States)
    assert isinstance(found, States)
    assert found.hidden.dtype == torch.bfloat16
    span = exact.hidden.float().abs().amax()
    assert bool(((found.hidden - exact.hidden).float().abs() <= span / 16).all())


async def test_vllm_of_another_dtype_is_refused(llama: Path, shared: Path) -> None:
    with pytest.raises(SourceError, match=r"gives torch\.bfloat16; set dtype"):
        await ask(FakeVllm(llama, shared), llama, in_flight=1, dtype="float32")


async def test_the_probe_holds_vllm_against_transformers(llama: Path, shared: Path) -> None:
    reference = TransformersSource(llama, LAYERS)
    for boundary, is_right in (((2, 4, 5), True), ((3, 4, 5), False)):
        async with serving(FakeVllm(llama, shared, boundary=boundary)) as server:
            source = VllmSource(llama, LAYERS, server=str(server.make_url("")), dtype="bfloat16")
            chosen = probe_examples(MANY)
            if is_right:
                report = await probe(source, chosen, reference=reference)
                assert min(report.cosine) > 0.999
            else:
                with pytest.raises(SourceError, match="slot 0 of 4"):
                    await probe(source, chosen, reference=reference)
            await source.close()


async def test_sglang_gives_what_transformers_gives(llama: Path) -> None:
    async with serving(FakeSglang(llama)) as server:
        source = SglangSource(llama, LAYERS, server=str(server.make_url("")), dtype="float32")
        found = by_key(await gathered(source.states(MANY)))
        await probe(source, probe_examples(MANY), reference=TransformersSource(llama, LAYERS))
        await source.close()
    wanted = by_key(await gathered(TransformersSource(llama, LAYERS).states(MANY)))
    for key, hidden in found.items():
        torch.testing.assert_close(hidden, wanted[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [slice(4, None), slice(0, -1), slice(0, 1)])
async def test_rows_that_sglang_loses_silently_are_noticed(llama: Path, keep: slice) -> None:
    fake = FakeSglang(llama, loss=lambda rows: rows[keep])
    async with serving(fake) as server:
        source = SglangSource(llama, LAYERS, server=str(server.make_url("")))
        (found,) = await gathered(source.states([example(1, 9)]))
        await source.close()
    assert isinstance(found, Lost)
    assert found.reason == "missing_rows"


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"has_last": False}, "has 3 states of width 32, not 4"), ({"is_on": False}, "2 4 5 8")],
)
async def test_an_sglang_that_was_started_wrongly_is_told_how(
    llama: Path, settings: dict[str, bool], told: str
) -> None:
    async with serving(FakeSglang(llama, **settings)) as server:  # type: ignore[arg-type]
        source = SglangSource(llama, LAYERS, server=str(server.make_url("")))
        with pytest.raises(SourceError, match=told):
            await gathered(source.states([example(1, 9)]))
        await source.close()


def test_impossible_settings_are_refused(llama: Path) -> None:
    with pytest.raises(ConfigurationError):
        VllmSource(llama, LAYERS, server="http://127.0.0.1:1", in_flight=0)
    with pytest.raises(ConfigurationError):
        VllmSource(llama, LAYERS, server="no url")
