"""What a target's own folder says about it, without loading it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quantroute.errors import ConfigurationError

__all__ = ["DTYPE_BYTES", "Target"]

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json")
_TOKENIZER_FILES_BESIDE: Final = ("merges.txt", "special_tokens_map.json", "added_tokens.json")
_WEIGHT_FILES: Final = ("*.safetensors", "pytorch_model*.bin")
_SAMPLES: Final = 32
_SAMPLE_BYTES: Final = 4_096


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model in a local folder. `dtype` is the one its weights are meant to run in."""

    folder: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    max_tokens: int | None
    architecture: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path | str) -> Target:
        """From `config.json`; of a multimodal model, its text part.

        Raises:
            ConfigurationError: not a model's folder, or sizes are missing.
        """
        folder = Path(folder)
        path = folder / "config.json"
        try:
            whole = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"{path}: {error}; `target` is the folder of the model, with its config.json"
            ) from error
        text = whole.get("text_config") or whole
        sizes = {}
        for name, others in _SIZES.items():
            found = [text[key] for key in (name, *others) if isinstance(text.get(key), int)]
            if not found:
                raise ConfigurationError(f"{path}: {name} is missing")
            sizes[name] = found[0]
        dtype = next(
            (
                str(part[key]).removeprefix("torch.")
                for part in (text, whole)
                for key in ("dtype", "torch_dtype")
                if part.get(key)
            ),
            "float32",
        )
        return cls(
            folder=folder,
            num_layers=sizes["num_hidden_layers"],
            hidden_size=sizes["hidden_size"],
            vocab_size=sizes["vocab_size"],
            dtype=dtype if dtype in DTYPE_BYTES else "bfloat16",
            max_tokens=next(
                (text[name] for name in _LONGEST if isinstance(text.get(name), int)), None
            ),
            architecture=(whole.get("architectures") or ["?"])[0],
            config=text,
        )

    def config_sha256(self) -> str:
        """Hash of `config.json` as it stands."""
        return hashlib.sha256((self.folder / "config.json").read_bytes()).hexdigest()

    def tokenizer_sha256(self) -> str | None:
        """Hash over the tokenizer's files, None if the folder holds none."""
        hasher, is_there = hashlib.sha256(), False
        for name in (*_TOKENIZER_FILES, *_TOKENIZER_FILES_BESIDE):
            path = self.folder / name
            if path.exists():
                is_there = is_there or name in _TOKENIZER_FILES
                hasher.update(name.encode() + b"\0" + path.read_bytes())
        return hasher.hexdigest() if is_there else None

    def weights_sample_sha256(self) -> str:
        """Hash over samples of the weight files: their sizes, and a block in each part of them.

        Two trainings of one model differ in it, unless they left most weights alone; hundreds of
        gigabytes are not read for that.
        """
        hasher = hashlib.sha256()
        for pattern in _WEIGHT_FILES:
            for path in sorted(self.folder.glob(pattern)):
                size = path.stat().st_size
                hasher.update(f"{path.name} {size}\0".encode())
                with path.open("rb") as file:
                    for part in range(_SAMPLES):
                        file.seek(size * part // _SAMPLES)
                        hasher.update(file.read(_SAMPLE_BYTES))
        return hasher.hexdigest()

    def template_sha256(self) -> str | None:
        """Hash of the chat template's text, None if there is none."""
        text = _template(self.folder)
        return None if text is None else hashlib.sha256(text.encode()).hexdigest()


_LONGEST: Final = ("max_position_embeddings", "n_positions", "max_seq_len")
_SIZES: Final[Mapping[str, tuple[str, ...]]] = {
    "num_hidden_layers": ("n_layer", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "vocab_size": (),
}


def _template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = config.get("chat_template")
    return template if template is None or isinstance(template, str) else json.dumps(template)
