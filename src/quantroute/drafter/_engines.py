"""How vLLM and SGLang read a drafter's config: which layers they will take, and what they ignore.

Read in vLLM 0.32.0 and SGLang 0.5.23. Both count layers by what enters them; they differ in what
they do to the ids of a config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from quantroute.errors import ConfigurationError

__all__ = ["Engine", "layers_as_read", "layers_to_write", "target_family"]

Engine = Literal["vllm", "sglang"]
Family = Literal["plus one", "plus one if the first is 1"]

#: SGLang classes that shift ids only if the first one is 1 (`deepseek_v2.py`, and those that
#: inherit from it or hold one).
_DEEPSEEK: Final = (
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "MistralLarge3ForCausalLM",
)
#: SGLang classes that always add one.
_PLUS_ONE: Final = (
    "BailingMoeForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration",
    "LlamaForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLForConditionalGeneration",
)


def target_family(architecture: str) -> Family:
    """What SGLang does to the ids with a target of this class.

    Raises:
        ConfigurationError: the class is not known here; guessing would cost acceptance silently.
    """
    if architecture in _DEEPSEEK:
        return "plus one if the first is 1"
    if architecture in _PLUS_ONE:
        return "plus one"
    raise ConfigurationError(
        f"it is not known how SGLang counts the layers of {architecture}; look at its "
        "set_eagle3_layers_to_capture and give --like LlamaForCausalLM (always adds one) "
        "or --like DeepseekV3ForCausalLM (adds one only if the first id is 1)"
    )


def layers_to_write(layers: tuple[int, ...], *, engine: Engine, family: Family) -> tuple[int, ...]:
    """The ids for the config, so that the engine takes the boundary ids `layers`.

    >>> layers_to_write((2, 30, 58), engine="sglang", family="plus one if the first is 1")
    (2, 30, 58)
    >>> layers_to_write((2, 16, 29), engine="sglang", family="plus one")
    (1, 15, 28)

    Raises:
        ConfigurationError: no ids would make the engine take them.
    """
    lower = tuple(layer - 1 for layer in layers)
    for ids in (layers, lower):
        if min(ids) >= 0 and _taken(ids, engine=engine, family=family) == layers:
            return ids
    raise ConfigurationError(f"{engine} cannot be made to take layers {list(layers)} ({family})")


def layers_as_read(
    config: Mapping[str, Any], *, engine: Engine, family: Family, num_layers: int
) -> tuple[int, ...]:
    """The boundary ids that the engine takes with this config."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    own = config.get("eagle_aux_hidden_state_layer_ids")
    ids = (own or nested) if engine == "vllm" else nested  # SGLang looks in eagle_config alone
    if not ids:
        return (2, num_layers // 2, num_layers - 3)
    return _taken(tuple(ids), engine=engine, family=family)


def _taken(ids: tuple[int, ...], *, engine: Engine, family: Family) -> tuple[int, ...]:
    if engine == "vllm" or (family == "plus one if the first is 1" and ids[0] != 1):
        return ids
    return tuple(layer + 1 for layer in ids)
