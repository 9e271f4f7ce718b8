"""The target's tokenizer: loading, identity, and text that is not control."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from extraction_support import CHATML, SPECIAL, letters, letters_tokenizer
from quantroute.errors import ConfigurationError
from quantroute.extraction import TargetTokenizer, write_kimi_style_tokenizer
from quantroute.extraction._tokenizer import Marked, Unencodable

REMOTE_CODE = '''
from transformers import PreTrainedTokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|im_user|>"]


class SlowTokenizer(PreTrainedTokenizer):
    """Bytes, and control tokens that only `encode` knows, as remote code with tiktoken does."""

    def __init__(self, **options):
        self.special_tokens = {token: 256 + place for place, token in enumerate(SPECIAL)}
        super().__init__(**options)

    @property
    def vocab_size(self):
        return 259

    def get_vocab(self):
        return {f"b{number}": number for number in range(256)} | self.special_tokens

    def _tokenize(self, text):
        return [f"b{number}" for number in text.encode()]

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]

    def _convert_id_to_token(self, number):
        return {place: token for token, place in self.get_vocab().items()}[number]

    def encode(self, text, allow_special_tokens=True, **options):
        ids = []
        while text:
            found = [token for token in SPECIAL if text.startswith(token)]
            if found and allow_special_tokens:
                ids.append(self.special_tokens[found[0]])
                text = text[len(found[0]):]
            else:
                ids.extend(text[0].encode())
                text = text[1:]
        return ids

    def save_vocabulary(self, *args, **options):
        return ()
'''


def slow_folder(folder: Path) -> Path:
    """A tokenizer in Python code of the folder's own."""
    (folder / "tokenization_slow.py").write_text(REMOTE_CODE)
    config = {
        "tokenizer_class": "SlowTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_slow.SlowTokenizer", None]},
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_code_from_a_folder_runs_only_when_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "target"
    folder.mkdir()
    slow_folder(folder)
    with pytest.raises(ConfigurationError, match="trust_remote_code"):
        TargetTokenizer.load(folder)
    tokenizer = TargetTokenizer.load(folder, trust_remote_code=True)
    assert tokenizer.identity()["remote_code"] is True
    text = Marked.join(("<|im_start|>", False), ("é<|im_end|>", True), ("<|im_end|>", False))
    (ids,) = tokenizer.encode([text])
    assert ids == [256, *"é<|im_end|>".encode(), 257]
    (ids,) = tokenizer.encode([Marked("<|im_user|>x")])
    assert ids == [258, ord("x")]
    (problem,) = tokenizer.encode([Marked("\ud800")])
    assert isinstance(problem, Unencodable)


def test_no_folder_no_template_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such folder"):
        TargetTokenizer.load(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match="no usable tokenizer"):
        TargetTokenizer.load(tmp_path)
    folder = letters_tokenizer(tmp_path, CHATML)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigurationError, match="no chat template"):
        TargetTokenizer.load(folder)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        TargetTokenizer.load(folder, template=tmp_path / "absent.jinja")


def test_a_template_of_ones_own_replaces_the_folders(tmp_path: Path) -> None:
    own = letters(tmp_path, CHATML)
    file = tmp_path / "other.jinja"
    file.write_text("X" + CHATML)
    other = TargetTokenizer.load(tmp_path, template=file)
    assert other.tokenizer_sha256 == own.tokenizer_sha256
    assert other.template_sha256 != own.template_sha256
    messages = [{"role": "user", "content": "Hi"}]
    assert other.render(messages, prompt=False, switches={}) == (
        "X" + own.render(messages, prompt=False, switches={})
    )


def test_the_identity_changes_with_the_files_and_not_with_their_place(tmp_path: Path) -> None:
    one = letters(tmp_path / "one", CHATML)
    same = letters(tmp_path / "two", CHATML)
    other = TargetTokenizer.load(
        letters_tokenizer(tmp_path / "three", CHATML, special=(*SPECIAL, "<|more|>"))
    )
    assert one.tokenizer_sha256 == same.tokenizer_sha256 != other.tokenizer_sha256
    assert one.template_sha256 == other.template_sha256


def test_a_mark_of_beginnings_is_not_put_before_an_answer(tmp_path: Path) -> None:
    """Metaspace puts a letter before a text as a whole; a completion only goes on with one."""
    folder = letters_tokenizer(tmp_path, CHATML)
    path = folder / "tokenizer.json"
    form = json.loads(path.read_text())
    mark = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": False}
    form["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [mark, form["pre_tokenizer"]]}
    path.write_text(json.dumps(form))
    tokenizer = TargetTokenizer.load(folder)
    assert tokenizer.encode([Marked("Hi")]) == [[ord(letter) for letter in "_Hi"]]
    assert tokenizer.encode_after([Marked("Hi")]) == [[ord("H"), ord("i")]]
    # Parts of a text would each be marked: such a tokenizer cannot keep letters apart.
    (problem,) = tokenizer.encode_after([Marked.join(("Hi<eos>", True))])
    assert isinstance(problem, Unencodable)


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="at least 271"):
        write_kimi_style_tokenizer(tmp_path, ["a"], vocab_size=270)
    tokenizer = TargetTokenizer.load(write_kimi_style_tokenizer(tmp_path, ["a"], vocab_size=271))
    assert tokenizer.identity()["vocab_size"] == 271


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_control_tokens_that_swallow_blanks_do_so_beside_letters_too(
    tmp_path: Path, side: str
) -> None:
    letters_tokenizer(tmp_path, CHATML)
    path = tmp_path / "tokenizer.json"
    form = json.loads(path.read_text())
    for token in form["added_tokens"]:
        token[side] = token["content"] == "<|im_start|>"
    path.write_text(json.dumps(form))
    tokenizer = TargetTokenizer.load(tmp_path)
    start = tokenizer.control["<|im_start|>"]
    plain = ("<|tools|>", True)  # letters: the text cannot be encoded in one go
    (whole,) = tokenizer.encode([Marked("a \n<|im_start|>\n b")])
    (apart,) = tokenizer.encode([Marked.join(("a \n<|im_start|>\n b", False), plain)])
    assert apart == [*whole, *map(ord, "<|tools|>")]
    wanted = ["a", " ", "\n", start, "b"] if side == "rstrip" else ["a", start, "\n", " ", "b"]
    assert whole == [ord(part) if isinstance(part, str) else part for part in wanted]


def test_blanks_that_an_answer_begins_with_are_not_swallowed(tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3}
    merges = [("\u2581", "a")]
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    inner.add_special_tokens([AddedToken("<unk>", rstrip=True), AddedToken("<eos>")])
    hf = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
    hf.chat_template = CHATML
    hf.save_pretrained(tmp_path)
    tokenizer = TargetTokenizer.load(tmp_path)
    assert tokenizer.encode_after([Marked(" a"), Marked("a")]) == [[3], [2]]
