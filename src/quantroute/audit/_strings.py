"""Two-sample tests on answers alone, for models whose weights nobody has. Pure.

Answers of two endpoints to the same prompts are compared by a kernel that counts equal places; the
statistic is the maximum mean discrepancy, and its p-value comes from exchanging answers between the
endpoints within each prompt. Method: Gao, Liang and Guestrin, "Model Equality Testing: Which Model
Is This API Serving?" (ICLR 2025), whose Hamming kernel this is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quantroute.errors import ConfigurationError

__all__ = ["Agreement", "StringTest", "greedy_agreement", "string_test"]

_PLACES: Final = 1_000
_PAD: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StringTest:
    """Whether two sets of answers come from one distribution.

    Attributes:
        discrepancy: mean over prompts of the squared maximum mean discrepancy.
        usual, limit: what exchanging answers between the two makes of it: mean, and the value that
            one exchange in twenty exceeds.
    """

    answers: tuple[int, int]
    discrepancy: float
    p: float
    usual: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Greedy answers of two endpoints: `equal_share` of them are the same to the end, and
    `prefix_share` is the median share of the longer answer that comes before the first difference.

    Honest endpoints differ as well: rounding breaks ties in another way.
    """

    answers: int
    equal_share: float
    prefix_share: float


def string_test(
    found: Sequence[str],
    reference: Sequence[str],
    *,
    prompts: tuple[Sequence[Hashable], Sequence[Hashable]] | None = None,
    permutations: int = 1_000,
    seed: int = 0,
) -> StringTest:
    """The permutation test.

    Args:
        prompts: which prompt each answer belongs to, of `found` and of `reference`; only answers to
            one prompt are compared. Without, all are taken for answers to the same one.
    Raises:
        ConfigurationError: no prompt was answered by both.
    """
    texts = [*found, *reference]
    names = [*prompts[0], *prompts[1]] if prompts is not None else [0] * len(texts)
    if len(names) != len(texts):
        raise ConfigurationError(f"{len(texts)} answers, but prompts of {len(names)}")
    is_found = np.arange(len(texts)) < len(found)
    groups = _groups(names, is_found)
    if not groups:
        raise ConfigurationError("no prompt was answered by both endpoints: nothing to compare")
    rng = np.random.default_rng(seed)
    seen, drawn = 0.0, np.zeros(permutations)
    for members in groups:
        kernel = _hamming([texts[index] for index in members])
        own = is_found[members]
        labels = np.stack([own, *(rng.permutation(own) for _ in range(permutations))])
        values = _discrepancies(kernel, labels)
        seen += float(values[0])
        drawn += values[1:]
    p = (1 + int((drawn >= seen - 1e-12).sum())) / (1 + permutations)
    return StringTest(
        answers=(len(found), len(reference)),
        discrepancy=seen / len(groups),
        p=float(p),
        usual=float(drawn.mean()) / len(groups),
        limit=float(np.quantile(drawn, 0.95)) / len(groups),
    )


def greedy_agreement(found: Sequence[str], reference: Sequence[str]) -> Agreement:
    """How far answers at temperature 0 to the same prompts, in the same order, agree."""
    if len(found) != len(reference) or not found:
        raise ConfigurationError(
            f"{len(found)} and {len(reference)} greedy answers: both endpoints answer each prompt"
        )
    shares = [_common(*pair) for pair in zip(found, reference, strict=True)]
    return Agreement(
        answers=len(found),
        equal_share=sum(share == 1.0 for share in shares) / len(shares),
        prefix_share=float(np.median(shares)),
    )


def _common(one: str, other: str) -> float:
    longest = max(len(one), len(other))
    places = zip(one, other, strict=False)
    same = next((place for place, (a, b) in enumerate(places) if a != b), min(len(one), len(other)))
    return same / longest if longest else 1.0


def _groups(names: Sequence[Hashable], is_found: NDArray[np.bool_]) -> list[NDArray[np.int64]]:
    """Indices of the answers to each prompt that both endpoints answered."""
    by_name: dict[Hashable, list[int]] = {}
    for index, name in enumerate(names):
        by_name.setdefault(name, []).append(index)
    groups = [np.array(members) for members in by_name.values()]
    return [members for members in groups if 0 < is_found[members].sum() < len(members)]


def _hamming(texts: Sequence[str]) -> NDArray[np.float64]:
    """Share of equal places, [N, N], over the longest text's length; an end equals an end."""
    width = max(1, min(_PLACES, max(map(len, texts))))
    codes = np.full((len(texts), width), _PAD, dtype=np.int32)
    for row, text in enumerate(texts):
        points = np.array([ord(letter) for letter in text[:width]], dtype=np.int32)
        codes[row, : points.size] = points
    return np.stack([(codes == row).mean(-1) for row in codes])


def _discrepancies(kernel: NDArray[np.float64], labels: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Squared maximum mean discrepancy for each labelling [P, N]."""
    own = labels.sum(-1, keepdims=True)
    weights = np.where(labels, 1 / own, -1 / (labels.shape[-1] - own))
    values: NDArray[np.float64] = ((weights @ kernel) * weights).sum(-1)
    return values
