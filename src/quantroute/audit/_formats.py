"""Weight formats as rounding: the target's own weights, brought to what another format can hold.

For an audit's hypotheses ("this endpoint serves a 4-bit float copy"), and to make dishonest
endpoints in tests. Values are rounded and kept in their dtype; nothing is packed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from quantroute.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "rounded", "served_as"]

#: Magnitudes a 4-bit float (E2M1) can hold.
_E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3_MAX: Final = 448.0
#: name: (bits as an integer grid, or None for E2M1; weights that share a scale)
FORMATS: Final = {"int4": (4, 32), "int8": (8, 32), "nvfp4": (None, 16), "mxfp4": (None, 32)}


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """The matrix [out, in] as `form` can hold it.

    int4, int8: symmetric, a scale per 32 inputs. nvfp4: E2M1 with an E4M3 scale per 16 inputs,
    under one scale for the matrix. mxfp4: E2M1 with a power of two per 32. fp8: E4M3 per row.

    Raises:
        ConfigurationError: the format is not known, or the inputs do not divide into groups.
    """
    import torch

    values = weight.detach().to(torch.float32)
    if form == "fp8":
        scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-12) / _E4M3_MAX
        return ((values / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale).to(weight.dtype)
    if form not in FORMATS:
        raise ConfigurationError(
            f"unknown weight format {form!r}; known: fp8, {', '.join(FORMATS)}"
        )
    bits, group = FORMATS[form]
    if values.shape[-1] % group:
        raise ConfigurationError(
            f"{form} shares a scale among {group} inputs; {values.shape[-1]} do not divide: "
            "leave it out of formats"
        )
    blocks = values.unflatten(-1, (-1, group))
    most = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-12)
    if bits is not None:
        steps = 2 ** (bits - 1) - 1
        scale = most / steps
        held = (blocks / scale).round().clamp(-steps, steps) * scale
    else:
        scale = _float_scale(most, form)
        held = _nearest_e2m1(blocks / scale) * scale
    return held.flatten(-2).to(weight.dtype)


@contextlib.contextmanager
def served_as(model: Any, form: str) -> Iterator[None]:
    """Inside, every linear layer but the head holds rounded weights; they come back afterwards."""
    import torch

    layers = [
        layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head")
    ]
    before = [layer.weight.data for layer in layers]
    try:
        for layer in layers:
            layer.weight.data = rounded(layer.weight.data, form)
        yield
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.weight.data = weight


def _float_scale(most: torch.Tensor, form: str) -> torch.Tensor:
    import torch

    if form == "mxfp4":
        return torch.exp2(torch.floor(torch.log2(most)) - 2)
    whole = most.amax() / (6.0 * _E4M3_MAX)
    scale = (most / 6.0 / whole).to(torch.float8_e4m3fn).to(torch.float32)
    return scale.clamp_min(2.0**-9) * whole


def _nearest_e2m1(values: torch.Tensor) -> torch.Tensor:
    import torch

    held = torch.tensor(_E2M1, dtype=values.dtype, device=values.device)
    middles = (held[1:] + held[:-1]) / 2
    return held[torch.bucketize(values.abs(), middles)] * values.sign()
