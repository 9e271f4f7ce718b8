"""Half the disk: float8 (e4m3) with one scale per token and layer.

Error of a value x: at most |x| / 16 (three bits of mantissa), and for the smallest ones at most
2**-10 of the scale, where the scale is the largest magnitude of that token and layer over 448.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from quantroute._extra import need

if TYPE_CHECKING:
    import torch

__all__ = ["FP8_NAME", "from_fp8", "to_fp8"]

FP8_NAME: Final = "float8_e4m3fn"
_LARGEST: Final = 448.0


def to_fp8(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`hidden` [S, L+1, H] as float8 of the same shape, and its scales float32 [S, L+1]."""
    torch = need("torch")
    exact = hidden.float()
    scales = exact.abs().amax(-1) / _LARGEST
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    scaled = (exact / scales.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return scaled.to(torch.float8_e4m3fn), scales


def from_fp8(quantized: torch.Tensor, scales: torch.Tensor, dtype: str) -> torch.Tensor:
    """Back to `dtype`, a torch name."""
    torch = need("torch")
    restored = quantized.float() * scales.unsqueeze(-1)
    return restored.to(getattr(torch, dtype))
