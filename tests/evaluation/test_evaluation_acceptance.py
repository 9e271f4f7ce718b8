"""Counting acceptance, and decoding with a drafter, on models with random weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
from quantroute.errors import ConfigurationError, DatasetError  # noqa: E402
from quantroute.evaluation import (  # noqa: E402
    DraftHead,
    LocalTarget,
    Sample,
    TargetWeights,
    Wiring,
    evaluate,
    is_held_out,
    measure,
    speculate,
    speed_up,
    stored_samples,
)
from quantroute.extraction import Example, FinalNorm, States  # noqa: E402
from quantroute.extraction._norm import norm_of_module  # noqa: E402

HIDDEN, VOCAB, LAYERS = 16, 6, (1, 2, 3)


def _head(*, vocabulary: tuple[int, ...] | None = None, window: int | None = None) -> DraftHead:
    generator = torch.Generator().manual_seed(5)
    size = VOCAB if vocabulary is None else len(vocabulary)
    shapes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "norm": (HIDDEN,),
        "lm_head": (size, HIDDEN),
        "layers.0.hidden_norm": (HIDDEN,),
        "layers.0.input_layernorm": (HIDDEN,),
        "layers.0.post_attention_layernorm": (HIDDEN,),
        "layers.0.self_attn.q_proj": (HIDDEN, 2 * HIDDEN),
        "layers.0.self_attn.k_proj": (HIDDEN // 2, 2 * HIDDEN),
        "layers.0.self_attn.v_proj": (HIDDEN // 2, 2 * HIDDEN),
        "layers.0.self_attn.o_proj": (HIDDEN, HIDDEN),
        "layers.0.mlp.gate_proj": (32, HIDDEN),
        "layers.0.mlp.up_proj": (32, HIDDEN),
        "layers.0.mlp.down_proj": (HIDDEN, 32),
    }
    weights = {
        f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    if vocabulary is not None:
        weights["d2t"] = torch.tensor(vocabulary) - torch.arange(size)
    wiring = Wiring(
        layers=LAYERS,
        hidden_size=HIDDEN,
        heads=4,
        key_heads=2,
        head_dim=4,
        eps=1e-6,
        rope_theta=10_000.0,
        window_tokens=window,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    return DraftHead(wiring, weights, embedding=embedding)


def _sample(*, length: int = 12, prompt: int = 4, dataset: str | None = None) -> Sample:
    generator = torch.Generator().manual_seed(length)
    return Sample(
        ids=torch.randint(0, VOCAB, (length,), generator=generator),
        mask=torch.arange(length) >= prompt,
        auxiliary=torch.randn(length, 3, HIDDEN, generator=generator),
        logits=torch.randn(length, VOCAB, generator=generator),
        dataset=dataset,
    )


@pytest.mark.parametrize("window", [None, 4])
def test_no_draft_sees_what_comes_later(window: int | None) -> None:
    head, sample = _head(window=window), _sample()
    tokens, fused = sample.ids[1:], head.fuse(sample.auxiliary[:-1])
    whole = [logits for logits, _ in head.unroll(tokens, fused, depth=3)]
    for last in range(len(tokens)):
        cut = head.unroll(tokens[: last + 1], fused[: last + 1], depth=3)
        for step, (logits, _) in enumerate(cut):
            torch.testing.assert_close(logits[-1], whole[step][last], rtol=1e-4, atol=1e-4)


def test_chains_start_after_each_answered_token_and_end_inside() -> None:
    (whole,) = measure(_head(), [_sample(length=12, prompt=4)], depth=3)
    # Token 4 is the target's own; chains begin behind tokens 4..8 and need three more.
    assert whole.chains == 5


def test_a_drafter_that_copies_the_target_is_always_right() -> None:
    head, sample = _head(), _sample()
    depth = 2
    logits = sample.logits.clone()
    steps = head.unroll(sample.ids[1:], head.fuse(sample.auxiliary[:-1]), depth=1)
    drafted = next(steps)[0]
    logits[1:] = drafted  # what step 0 drafts at t is what the target says at t + 1
    (whole,) = measure(head, [dataclasses.replace(sample, logits=logits)], depth=depth)
    assert whole.cumulative[0] == 1.0
    assert whole.sampled[0] == pytest.approx(1.0)
    assert whole.cumulative[1] == whole.conditional[1]


def test_tokens_outside_the_draft_vocabulary_are_misses() -> None:
    sample = _sample()
    sample.logits[:, 5] = 50.0  # the target always says 5
    (whole,) = measure(_head(vocabulary=(0, 1, 2)), [sample])
    assert (whole.length, whole.outside) == (1.0, 1.0)
    assert whole.sampled_length == pytest.approx(1.0)


def test_datasets_are_counted_apart_and_together() -> None:
    samples = [_sample(dataset="b"), _sample(length=20, dataset="a")]
    whole, first, second = measure(_head(), samples)
    assert [first.dataset, second.dataset, whole.dataset] == ["a", "b", None]
    assert whole.chains == first.chains + second.chains
    summed = first.length * first.chains + second.length * second.chains
    assert whole.length * whole.chains == pytest.approx(summed)


def test_answers_too_short_for_a_chain_are_an_error() -> None:
    with pytest.raises(DatasetError, match="generated tokens"):
        measure(_head(), [_sample(length=6, prompt=4)], depth=3)


def test_states_of_another_number_of_layers_are_refused() -> None:
    sample = _sample()
    wrong = dataclasses.replace(sample, auxiliary=sample.auxiliary[:, :2])
    with pytest.raises(ConfigurationError, match="takes 3 layers"):
        evaluate(_head(), [wrong])


def test_an_untrained_head_keeps_wiring_and_vocabulary() -> None:
    found = evaluate(_head(vocabulary=(1, 3, 4)), [_sample(length=30)])
    assert 1.0 <= found.untrained.length <= 4.0
    assert set(found.controls) == {
        "states of other places",
        "states one place late",
        "layers in another order",
    }


def test_controls_that_need_more_of_a_sample_are_there_when_it_has_it() -> None:
    sample = _sample(length=30)
    whole = dataclasses.replace(sample, last=sample.auxiliary[:, 2], normed=sample.auxiliary)
    found = evaluate(_head(), iter([whole]))  # read once
    assert found.controls["states after the final norm"] == found.trained[0]
    higher = sample.auxiliary[:, [1, 2, 2]]
    (wanted,) = measure(_head(), [dataclasses.replace(sample, auxiliary=higher)])
    assert found.controls["higher layers"] == wanted


@pytest.mark.parametrize(
    ("cumulative", "cost", "wanted"),
    [
        ((0.8, 0.5, 0.2), 0.0, (2.5, 3)),
        ((0.8, 0.5, 0.2), 0.5, (1.8 / 1.5, 1)),
        ((0.1, 0.0, 0.0), 0.5, (1.0, 0)),  # better without
    ],
)
def test_the_best_depth_depends_on_what_a_draft_costs(
    cumulative: tuple[float, ...], cost: float, wanted: tuple[float, int]
) -> None:
    gain, depth = speed_up(cumulative, draft_cost=cost)
    assert (gain, depth) == (pytest.approx(wanted[0]), wanted[1])


def test_held_out_rows_are_the_asked_share_and_stay_so() -> None:
    keys = [f"{number * 2_654_435_761 % 2**32:08x}" for number in range(2_000)]
    few = {key for key in keys if is_held_out(key, share=0.1)}
    more = {key for key in keys if is_held_out(key, share=0.2)}
    assert 150 < len(few) < 250
    assert few < more


def test_rows_whose_keys_are_no_hashes_are_held_out_too() -> None:
    keys = [f"b3-{number:04}" for number in range(2_000)]
    assert 150 < sum(is_held_out(key, share=0.1) for key in keys) < 250


def test_a_head_that_training_has_broken_is_not_judged(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {"fc.weight": torch.tensor([1.0, float("nan")]), "norm.weight": torch.ones(2)}
    safetensors.save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(DatasetError, match=r"fc\.weight: not finite.*earlier checkpoint"):
        DraftHead.load(tmp_path, embedding=torch.ones(3, 2))


def test_the_bias_of_a_targets_head_is_part_of_its_logits() -> None:
    bias = torch.tensor([5.0, 0.0, 0.0])
    weights = TargetWeights(embedding=torch.eye(3), head=torch.eye(3), bias=bias)
    example = Example(input_ids=np.array([0, 1]), loss_mask=np.array([False, True]))
    states = States(example=example, hidden=torch.ones(2, 4, 3))
    norm = FinalNorm(kind="rms", eps=0.0, weight=torch.ones(3))
    (sample,) = stored_samples([states], norm=norm, weights=weights)
    assert sample.logits.tolist() == [[6.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Granite", {"logits_scaling": 8.0, "tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 4}),
        ("Cohere", {"logit_scale": 0.25}),
    ],
)
def test_stored_states_give_the_logits_of_targets_that_scale_or_cap_them(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **changes)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 1)
    model.save_pretrained(tmp_path)
    ids, entered = np.arange(3, 9), list[torch.Tensor]()
    model.model.norm.register_forward_pre_hook(lambda _, args: entered.append(args[0][0]))
    with torch.inference_mode():
        wanted = model(torch.tensor(ids)[None]).logits[0]
    states = States(
        example=Example(input_ids=ids, loss_mask=ids > 5),
        hidden=entered[0].unsqueeze(1).repeat(1, 4, 1),
    )
    norm = norm_of_module(model.model.norm)
    (sample,) = stored_samples([states], norm=norm, weights=TargetWeights.read(tmp_path))
    torch.testing.assert_close(sample.logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.6,
        eos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("depth", [1, 3])
def test_the_text_is_the_targets_whatever_the_drafter_is_worth(target: Path, depth: int) -> None:
    model = LocalTarget(target)
    prompts: list[Any] = [[1, 2, 3], [5, 4], [2, 2, 2, 1]]
    found = speculate(model, _head(), prompts, tokens=40, depth=depth)
    assert found.identical == len(prompts)
    assert found.tokens == 40 * len(prompts)
    # With six tokens even chance is right now and then, and wrong now and then.
    assert found.tokens / (depth + 1) < found.target_passes < found.tokens


def test_decoding_stops_behind_the_end_token(target: Path) -> None:
    model = LocalTarget(target)
    plain = model.decode([1, 2, 3], tokens=40)
    end = plain.ids[7]
    cut = model.decode([1, 2, 3], tokens=40, end=end)
    assert cut.ids == plain.ids[: plain.ids.index(end) + 1]
    assert model.speculate(_head(), [1, 2, 3], tokens=40, end=end).ids == cut.ids
