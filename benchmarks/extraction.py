"""What extraction costs beside the model itself, and what writing costs beside the disk.

    python benchmarks/extraction.py            # a few minutes
    python benchmarks/extraction.py --quick    # a self-check

Three ratios, each within one run, the sides alternating:

- extraction of a store (states gathered, shards hashed and written) against the bare forward pass
  of the same decoder over the same batches;
- writing a shard, checksum included, against a plain sequential write of as many bytes, both with
  fsync;
- batches against one example at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from quantroute.extraction import (
    Example,
    Extraction,
    LayerIds,
    StoreSettings,
    Target,
    TransformersSource,
)
from quantroute.extraction._safetensors import write_tensors
from quantroute.extraction._transformers import batches

VOCAB = 2_000
PARTS = ("writing", "batching", "extraction")


def make_target(folder: Path, *, layers: int, hidden: int) -> Path:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=4_096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_examples(count: int, *, longest: int) -> list[Example]:
    """Lengths as answers have them: many short, some long."""
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(longest / 4), 0.7, count).astype(int), 8, longest)
    return [
        Example(
            input_ids=rng.integers(0, VOCAB, length).astype(np.int64),
            loss_mask=np.arange(length) >= length // 2,
        )
        for length in lengths
    ]


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def bare(source: TransformersSource, made: Sequence[Sequence[Example]]) -> None:
    """The decoder over the same padded batches; nothing is kept, no hook is set."""
    import torch

    decoder = source._model.get_decoder()
    for batch in made:
        longest = max(map(len, batch))
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, example in enumerate(batch):
            ids[row, : len(example)] = torch.from_numpy(example.input_ids)
            mask[row, : len(example)] = 1
        is_padded = bool((mask == 0).any())
        with torch.inference_mode():
            decoder(input_ids=ids, attention_mask=mask if is_padded else None, use_cache=False)


def extraction(target: Path, examples: list[Example], options: argparse.Namespace) -> None:
    """Extraction against the bare forward pass."""
    layers = LayerIds.default(options.layers)
    source = TransformersSource(
        target, layers, dtype=options.dtype, batch_tokens=options.batch_tokens
    )
    plain = TransformersSource(
        target, layers, dtype=options.dtype, batch_tokens=options.batch_tokens
    )
    plain._taps.remove()
    settings = StoreSettings(
        dtype=options.dtype, shard_bytes=int(options.shard_mb * 1e6), margin_bytes=0
    )
    rounds: list[tuple[float, float]] = []
    tokens = sum(map(len, examples))
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory(dir=options.folder) as out:
            job = Extraction(
                target=Target.read(target),
                layers=layers,
                examples=lambda: examples,
                out=out,
                settings=settings,
            )
            everything = set(range(len(job.plan.shards)))
            made = [
                batch
                for _, members in job.plan.members(lambda: examples, everything)
                for batch in batches(members, tokens=options.batch_tokens)
            ]
            bare_s = timed(lambda made=made: bare(plain, made))  # type: ignore[misc]
            whole_s = timed(lambda job=job: asyncio.run(job.run(source)))  # type: ignore[misc]
        if number:  # the first warms up
            rounds.append((bare_s, whole_s))
            print(f"  bare {bare_s:6.2f} s, extraction {whole_s:6.2f} s, {whole_s / bare_s:.3f}x")
    ratio = statistics.median(whole / forward for forward, whole in rounds)
    print(f"extraction / bare forward pass: {ratio:.3f} (wanted: at most 1.10)")
    print(f"  {tokens / statistics.median(whole for _, whole in rounds):,.0f} tokens/s")


def writing(options: argparse.Namespace) -> None:
    """A shard with its checksum against a plain write, both to the disk."""
    import torch

    rows = int(options.shard_mb * 1e6) // (4 * 1_024 * 2)
    tensors = {"states": torch.randn(rows, 4, 1_024).bfloat16()}
    raw = tensors["states"].view(torch.uint8).numpy().tobytes()
    folder = Path(tempfile.mkdtemp(dir=options.folder))

    def plain() -> None:
        with (folder / "plain").open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())

    ratios = []
    try:
        for number in range(2 * options.rounds + 1):
            plain_s = timed(plain)
            shard_s = timed(lambda: write_tensors(folder / "shard", tensors, {}))
            for path in folder.iterdir():
                path.unlink()
            if number:
                ratios.append(plain_s / shard_s)
                size = len(raw) / 1e9
                print(f"  plain {size / plain_s:5.2f} GB/s, shard {size / shard_s:5.2f} GB/s")
    finally:
        shutil.rmtree(folder)
    print(f"shard / plain write: {statistics.median(ratios):.2f} (wanted: at least 0.70)")


def batching(target: Path, examples: list[Example], options: argparse.Namespace) -> None:
    """32 examples a pass against one."""
    layers = LayerIds.default(options.layers)
    longest = max(map(len, examples))
    some = examples[: options.batch_examples]
    found = {}
    for count in (1, 32):
        budget = 1 if count == 1 else count * longest
        source = TransformersSource(target, layers, dtype=options.dtype, batch_tokens=budget)

        async def run(source: TransformersSource = source) -> None:
            async for _ in source.states(some):
                pass

        asyncio.run(run())
        seconds = statistics.median(timed(lambda: asyncio.run(run())) for _ in range(3))
        found[count] = sum(map(len, some)) / seconds
        print(f"  up to {count:2} a pass: {found[count]:,.0f} tokens/s")
    print(f"32 a pass / 1 a pass: {found[32] / found[1]:.2f}")


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--batch-examples", type=int, default=64)
    parser.add_argument("--batch-tokens", type=int, default=8_192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shard-mb", type=float, default=256.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None, help="of torch; default its own")
    parser.add_argument("--folder", type=Path, default=None, help="for files; a local disk")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--quick", action="store_true", help="a small model, one round")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.hidden, options.examples, options.longest = 8, 128, 40, 128
        options.shard_mb, options.rounds, options.batch_examples = 16.0, 1, 32
    return options


def main() -> None:
    """Make a target and print the three comparisons."""
    options = parsed()
    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        target = make_target(Path(folder) / "target", layers=options.layers, hidden=options.hidden)
        examples = make_examples(options.examples, longest=options.longest)
        tokens = sum(map(len, examples))
        print(f"{options.layers} layers of {options.hidden}, {options.dtype}, {tokens:,} tokens")
        parts = {
            "writing": lambda: writing(options),
            "batching": lambda: batching(target, examples, options),
            "extraction": lambda: extraction(target, examples, options),
        }
        for part in options.parts:
            parts[part]()


if __name__ == "__main__":
    main()
