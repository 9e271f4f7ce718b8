"""States out of transformers, against a forward loop written out by hand."""

from __future__ import annotations

import importlib
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from quantroute.errors import ConfigurationError, SourceError
from quantroute.extraction._norm import FinalNorm, norm_of_module, read_norm
from quantroute.extraction._records import Example, LayerConvention, LayerIds
from quantroute.extraction._source import Lost, probe, probe_examples
from quantroute.extraction._target import Target
from quantroute.extraction._transformers import (
    TransformersSource,
    _parts,
    batches,
    windows,
)
from states_support import (
    by_key,
    example,
    examples,
    gathered,
    slow_states,
    tiny_deepseek,
    tiny_llama,
)

torch = pytest.importorskip("torch", reason="needs quantroute[extract]")
pytest.importorskip("transformers", reason="needs quantroute[extract]")
safetensors = pytest.importorskip("safetensors.torch", reason="needs quantroute[extract]")

MAKERS = {"llama": tiny_llama, "deepseek_v3": tiny_deepseek}


@pytest.fixture(scope="module", params=sorted(MAKERS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param) / "target")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "target")


async def test_layers_and_norm_state_equal_the_written_out_loop(target: Path) -> None:
    source = TransformersSource(target, LayerIds((2, 4, 5)))
    one = example(1, 23)
    (found,) = await gathered(source.states([one]))
    wanted = slow_states(target, one, (2, 4, 5))
    assert found.hidden.shape == (23, 4, 32)
    torch.testing.assert_close(found.hidden, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [(1, 4, 5), (2, 3, 5), (2, 4, 6)])
async def test_a_neighbouring_layer_is_told_apart(target: Path, wrong: tuple[int, ...]) -> None:
    source = TransformersSource(target, LayerIds(wrong))
    one = example(1, 23)
    (found,) = await gathered(source.states([one]))
    wanted = slow_states(target, one, (2, 4, 5))
    assert not torch.allclose(found.hidden, wanted, rtol=1e-2, atol=1e-3)


async def test_the_last_state_is_before_the_norm_and_the_stored_norm_leads_behind_it(
    target: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    source = TransformersSource(target, LayerIds((2, 4, 5)))
    one = example(1, 23)
    (found,) = await gathered(source.states([one]))
    model = AutoModelForCausalLM.from_pretrained(target, local_files_only=True).eval()
    with torch.no_grad():
        behind = model.model(torch.from_numpy(one.input_ids)[None]).last_hidden_state[0]
    last = found.hidden[:, -1]
    assert not torch.allclose(last, behind, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(source.final_norm().apply(last), behind, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_tokens", [1, 64, 200, 10_000])
async def test_padding_and_batching_change_nothing(target: Path, batch_tokens: int) -> None:
    source = TransformersSource(target, LayerIds((2, 4, 5)), batch_tokens=batch_tokens)
    many = examples(12)
    together = by_key(await gathered(source.states(many)))
    assert len(together) == 12
    for one in many:
        (alone,) = await gathered(source.states([one]))
        torch.testing.assert_close(together[one.key], alone.hidden, rtol=1e-4, atol=1e-5)


async def test_both_conventions_name_the_same_layers(llama: Path) -> None:
    one = example(1, 9)
    found = [
        by_key(await gathered(TransformersSource(llama, layers).states([one])))[one.key]
        for layers in (
            LayerIds.of((2, 4, 5), LayerConvention.BOUNDARY),
            LayerIds.of((1, 3, 4), LayerConvention.OUTPUT),
        )
    ]
    assert torch.equal(*found)


async def test_dtype_is_what_was_asked(llama: Path) -> None:
    source = TransformersSource(llama, LayerIds((2, 4, 5)), dtype="bfloat16")
    (found,) = await gathered(source.states([example(1, 9)]))
    assert found.hidden.dtype == torch.bfloat16
    with pytest.raises(ConfigurationError):
        TransformersSource(llama, LayerIds((2, 4, 5)), dtype="int8")


async def test_what_the_target_cannot_take_is_lost_alone(llama: Path) -> None:
    source = TransformersSource(llama, LayerIds((2, 4, 5)))
    foreign = Example(input_ids=np.array([5, 4_000]), loss_mask=np.array([False, True]))
    results = await gathered(source.states([example(1, 513), foreign, example(2, 8)]))
    lost = {item.reason for item in results if isinstance(item, Lost)}
    assert lost == {"too_long", "foreign_token_ids"}
    assert len(results) == 3


async def test_a_length_by_another_name_counts(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 8, "n_embd": 32, "n_head": 4, "n_positions": 16}
    ids = {"bos_token_id": None, "eos_token_id": None}
    GPT2LMHeadModel(GPT2Config(vocab_size=199, **sizes, **ids)).save_pretrained(tmp_path)
    source = TransformersSource(tmp_path, dtype="float32")
    results = await gathered(source.states([example(1, 8), example(2, 17)]))
    assert [item.reason for item in results if isinstance(item, Lost)] == ["too_long"]
    assert len(results) == 2


async def test_out_of_device_memory_halves_the_batch(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TransformersSource(llama, LayerIds((2, 4, 5)))
    forward = source._forward

    def small(batch: list[Example]) -> torch.Tensor:
        if len(batch) > 2 or len(batch[0]) > 30:
            raise torch.cuda.OutOfMemoryError
        return forward(batch)

    monkeypatch.setattr(source, "_forward", small)
    results = await gathered(source.states([example(n, 20) for n in range(9)] + [example(9, 31)]))
    assert [item.reason for item in results if isinstance(item, Lost)] == ["out_of_memory"]
    assert len(results) == 10


async def test_the_halves_of_a_batch_find_what_the_whole_one_took_free_again(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TransformersSource(llama, LayerIds((2, 4, 5)))
    run, taken = source._taps.run, list[weakref.ref[torch.Tensor]]()

    def small(ids: torch.Tensor, mask: torch.Tensor | None) -> list[torch.Tensor]:
        assert [ref() for ref in taken] == [None] * len(taken)
        states = run(ids, mask)
        if len(ids) > 2:
            taken.append(weakref.ref(states[0]))
            raise torch.cuda.OutOfMemoryError
        return states

    monkeypatch.setattr(source._taps, "run", small)
    results = await gathered(source.states([example(n, 20) for n in range(8)]))
    assert (len(results), len(taken)) == (8, 3)


def test_layers_that_are_not_there_are_refused(llama: Path) -> None:
    with pytest.raises(SourceError, match="must be below 8"):
        TransformersSource(llama, LayerIds((2, 4, 8)))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        TransformersSource(tmp_path)


@pytest.mark.parametrize("norm", [None, torch.nn.LayerNorm(16)])
def test_a_target_whose_final_norm_cannot_be_found_is_refused(
    llama: Path, norm: torch.nn.Module | None
) -> None:
    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8))
    decoder.norm = norm  # absent, or not as wide as the model
    model = SimpleNamespace(base_model=decoder)
    with pytest.raises(SourceError, match="no final norm found"):
        _parts(model, Target.read(llama))


async def test_a_good_source_passes_the_probe(target: Path) -> None:
    source = TransformersSource(target, LayerIds((2, 4, 5)))
    report = await probe(source, probe_examples(examples(9)))
    assert report.examples == 4
    assert report.min_cosine > 0.9999


async def test_the_probe_notices_swapped_layers(llama: Path) -> None:
    source = TransformersSource(llama, LayerIds((1, 4, 5)))
    reference = TransformersSource(llama, LayerIds((2, 4, 5)))
    with pytest.raises(SourceError, match="slot 0 of 4"):
        await probe(source, probe_examples(examples(9)), reference=reference)


def test_the_norm_read_from_the_checkpoint_is_that_of_the_module(
    target: Path, tmp_path: Path
) -> None:
    source = TransformersSource(target, LayerIds((2, 4, 5)))
    facts = Target.read(target)
    read, loaded = read_norm(target, facts.config), source.final_norm()
    assert (read.kind, read.eps) == (loaded.kind, loaded.eps) == ("rms", 1e-6)
    assert torch.equal(read.weight, loaded.weight)
    read.save(tmp_path / "norm.safetensors")
    again = FinalNorm.load(tmp_path / "norm.safetensors")
    assert again.eps == 1e-6
    assert torch.equal(again.weight, read.weight)


def test_norms_are_recognised_by_what_they_compute() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    hidden = torch.randn(5, 16) * 3 + 1
    for module in (torch.nn.LayerNorm(16), torch.nn.RMSNorm(16, eps=1e-5), Gemma3RMSNorm(16)):
        with torch.no_grad():
            module.weight.uniform_(0.5, 1.5)
            wanted = module(hidden)
        torch.testing.assert_close(norm_of_module(module).apply(hidden), wanted)
    with pytest.raises(ConfigurationError, match="neither"):
        norm_of_module(torch.nn.Linear(16, 16))


#: Model type, where transformers has its norm, the epsilon's name.
_ODD_NORMS = (
    ("qwen3_next", "qwen3_next.modeling_qwen3_next.Qwen3NextRMSNorm", "rms_norm_eps"),
    ("qwen3_5_text", "qwen3_5.modeling_qwen3_5.Qwen3_5RMSNorm", "rms_norm_eps"),
    ("nemotron", "nemotron.modeling_nemotron.NemotronLayerNorm1P", "norm_eps"),
    ("nemotron_h", "nemotron_h.modeling_nemotron_h.NemotronHRMSNorm", "layer_norm_epsilon"),
    ("cohere2", "cohere2.modeling_cohere2.Cohere2LayerNorm", "layer_norm_eps"),
    ("phimoe", "", "rms_norm_eps"),
)


@pytest.mark.parametrize(("model_type", "where", "eps_name"), _ODD_NORMS)
def test_a_norm_out_of_a_checkpoint_computes_what_the_model_type_does(
    tmp_path: Path, model_type: str, where: str, eps_name: str
) -> None:
    module = torch.nn.LayerNorm(16)
    if where:
        path, _, name = where.rpartition(".")
        module = getattr(importlib.import_module(f"transformers.models.{path}"), name)(16, eps=1e-5)
    state = {f"model.norm.{name}": item.uniform_(0.5, 1.5) for name, item in _detached(module)}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    norm = read_norm(tmp_path, {"model_type": model_type, eps_name: 1e-5})
    hidden = torch.randn(5, 16) * 3 + 1
    torch.testing.assert_close(norm.apply(hidden), module(hidden).detach())


def _detached(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, item.detach()) for name, item in module.named_parameters()]


def test_a_norm_that_cannot_be_told_from_a_checkpoint_is_refused(tmp_path: Path) -> None:
    safetensors.save_file({"model.norm.weight": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"final norm of a new.*source = .transformers"):
        read_norm(tmp_path, {"model_type": "new", "layer_norm_eps": 1e-5})


def test_large_weights_do_not_hide_that_one_is_added() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    module = Gemma3RMSNorm(16)
    module.weight.data.fill_(120.0)
    assert torch.equal(norm_of_module(module).weight, torch.full((16,), 121.0))


def test_batches_keep_to_the_budget_with_padding_counted() -> None:
    many = examples(50, longest=60)
    made = list(batches(many, tokens=120))
    assert sorted(one.key for batch in made for one in batch) == sorted(one.key for one in many)
    assert all(len(batch) * max(map(len, batch)) <= 120 for batch in made)
    assert [len(w) for w in windows(many[:5], tokens=1)] == [1] * 5
