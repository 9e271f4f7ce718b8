"""Our forward pass against the trainers' own models, in this process and for tests alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from quantroute.evaluation import DraftHead  # noqa: E402

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # the trainers' own
]
HIDDEN, VOCAB, DRAFT, DEPTH, LENGTH = 32, 96, 40, 3, 24
FLAGS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
]


def _llama(**fields: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
        **fields,
    )


def _maps() -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.randperm(VOCAB)[:DRAFT].sort().values
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(DRAFT), t2d


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "classic")
def test_speculators_drafts_the_same_tokens(flags: dict[str, bool], tmp_path: Path) -> None:
    eagle3 = pytest.importorskip("speculators.models.eagle3")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    torch.manual_seed(0)
    config = eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=_llama(),
        draft_vocab_size=DRAFT,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    model = Eagle3DraftModel(config)
    with torch.no_grad():
        for item in model.parameters():
            item.copy_(torch.randn_like(item) * 0.3)
    d2t, t2d = _maps()
    model.d2t.copy_(d2t)
    model.t2d.copy_(t2d)
    model.save_pretrained(tmp_path)
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].detach()))
    ids = torch.randint(0, VOCAB, (LENGTH,))
    states = torch.randn(LENGTH, 3, HIDDEN)
    with torch.no_grad():
        model(
            hidden_states=states.flatten(1).unsqueeze(0),
            input_ids=ids.unsqueeze(0),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            ttt_steps=DEPTH,
        )
    head = DraftHead.load(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN))
    assert head.wiring.layers == (2, 4, 5)
    _compare(head, ids, states, [item[0] for item in seen])


def test_specforge_drafts_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    draft = pytest.importorskip("specforge.modeling.draft.llama3_eagle")
    torch.manual_seed(1)
    config = _llama(draft_vocab_size=DRAFT, pad_token_id=0)
    model = draft.LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
    with torch.no_grad():
        for item in model.parameters():
            item.copy_(torch.randn_like(item) * 0.3)
    d2t, t2d = _maps()
    model.d2t.copy_(d2t)
    model.t2d.copy_(t2d)
    ids = torch.randint(0, VOCAB, (LENGTH,))
    states = torch.randn(LENGTH, 3, HIDDEN)
    with torch.no_grad():
        hidden = model.project_hidden_states(states.flatten(1).unsqueeze(0))
        cache: list[Any] = [[], []]
        mask = draft.prepare_decoder_attention_mask(
            torch.ones(1, LENGTH, dtype=torch.bool), (1, LENGTH), hidden, 0
        )
        wanted, tokens = [], ids
        for step in range(DEPTH):
            hidden = model.backbone(
                input_embeds=model.embed_input_ids(tokens.unsqueeze(0)),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=mask,
                position_ids=torch.arange(LENGTH).unsqueeze(0),
                use_cache=True,
            )
            wanted.append(model.compute_logits(hidden)[0])
            tokens = torch.cat([ids[1 + step :], ids.new_zeros(1 + step)])
    from safetensors.torch import save_file

    weights = {name: item.contiguous() for name, item in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    content = config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}
    (tmp_path / "config.json").write_text(json.dumps(content))
    head = DraftHead.load(tmp_path, embedding=torch.zeros(VOCAB, HIDDEN), layers=(2, 4, 5))
    _compare(head, ids, states, wanted)


def _compare(
    head: DraftHead, ids: torch.Tensor, states: torch.Tensor, wanted: list[torch.Tensor]
) -> None:
    assert len(wanted) == DEPTH
    fused = head.fuse(states)
    for step, (logits, handed) in enumerate(head.unroll(ids, fused, depth=DEPTH)):
        inside = LENGTH - step  # behind it the trainers are given padding
        torch.testing.assert_close(logits[:inside], wanted[step][:inside], rtol=1e-4, atol=1e-4)
        handed.ids = torch.cat([ids[1 + step :], ids.new_zeros(1 + step)])
