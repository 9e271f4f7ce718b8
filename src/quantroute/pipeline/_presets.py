"""Run files for known targets, with the facts that are easily got wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quantroute.errors import ConfigurationError

__all__ = ["PRESETS", "Preset", "preset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A target's run file, and what it will take.

    `bytes_per_token` of states: four of them in bfloat16.
    """

    name: str
    text: str
    num_layers: int
    hidden_size: int

    @property
    def bytes_per_token(self) -> int:
        """On the disk, before the trainer's own copy."""
        return 4 * self.hidden_size * 2

    def estimates(self) -> tuple[str, ...]:
        """What to expect, line by line. Rates are not guessed: the dry run measures them."""
        per_million = self.bytes_per_token * 10**6 / 10**9
        return (
            f"states: {self.bytes_per_token:,} bytes a token, {per_million:.1f} GB a million "
            "(half of that with fp8 = true), and the same again for the trainer's files",
            f"10 million tokens: {per_million * 10:,.0f} GB; with max_tokens = 2_000_000 as "
            f"written: {per_million * 2:,.0f} GB",
            "time of extraction: prompt processing alone; `quantroute extract run.toml --dry-run` "
            "times your server and says how many hours",
            "time of training: published Kimi K2.5 drafters took 2 x 20,000 steps over about "
            "300,000 answers, some 14 hours each on 32 H200",
        )


_KIMI_K25: Final = """\
# Kimi K2.5: from prompts to an EAGLE-3 drafter. Look, rehearse, then spend:
#
#   quantroute plan run.toml
#   quantroute pipeline run run.toml --only generate --simulate
#   quantroute pipeline run run.toml
#
# Facts about this target (November 2026):
#   weights are int4 from the start: int4 endpoints serve the model itself, fp4 and fp8 ones a
#   re-quantization. 61 layers, hidden size 7168, vocabulary 163,840.
#   It thinks unless told not to. Its chat template opens the thinking in the prompt (check with
#   your copy; quantroute probes it), switches it with `thinking`, and empties the thinking of
#   earlier turns: every answer is a row of its own, rendered behind the history it really saw.
#   Ids of control tokens differ between published configs; they are read from your tokenizer.

[run]
name = "kimi-k2.5"
model = "moonshotai/kimi-k2.5"
cap_usd = "100.00"
max_in_flight = 2000

[policy]
exclude = ["Fireworks", "BaseTen"]

[[dataset]]
name = "thinking"
prompts = "prompts.jsonl"
sampling = { temperature = 1.0, top_p = 0.95, reasoning = true }
max_output_tokens = 16384

[[dataset]]
name = "instant"
prompts = "prompts.jsonl"
sampling = { temperature = 0.6, top_p = 0.95, reasoning = false }
max_output_tokens = 4096

[extract]
target = "models/kimi-k2.5"        # the whole folder: the final norm's weights are read from it
source = "vllm"
server = "http://127.0.0.1:8000/v1"
layers = [2, 30, 58]               # the same tensors as [1, 29, 57] in output convention
layer_convention = "boundary"      # (SpecForge, ModelOpt); vLLM reads boundary ids
max_example_tokens = 16384
max_tokens = 2_000_000             # 57,344 bytes each: 115 GB; raise it as your disk allows

[data]
draft_vocab_size = 32000
held_out_share = 0.02

[train]
data = "training-data"
out = "drafter"
target = "models/kimi-k2.5"
trainer = "speculators"
head = "eagle3"                    # computed alike by vLLM and SGLang
epochs = 2
learning_rate = 0.00005
max_tokens = 16384
depth = 3

[evaluate]
depth = 3

[deploy]
engine = "vllm"                    # or "sglang": the layer ids are rewritten for it
"""

PRESETS: Final = {
    "kimi-k2.5": Preset(name="kimi-k2.5", text=_KIMI_K25, num_layers=61, hidden_size=7_168),
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if (found := PRESETS.get(name)) is None:
        raise ConfigurationError(f"no preset {name!r}; there are: {', '.join(sorted(PRESETS))}")
    return found
