"""Questions with thought and answer, made from the docstrings of this Python's standard library.

The text is read where it is installed (PSF License Agreement) and not shipped here; another Python
version gives another corpus. Only the source files are parsed: nothing is imported or run.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["Dialogue", "Subject", "dialogues", "questions", "standard_library"]

#: Well documented, and pure Python everywhere; few enough to be learnt in a minute.
_MODULES: Final = [
    "argparse",
    "calendar",
    "configparser",
    "contextlib",
    "csv",
    "difflib",
    "fractions",
    "ftplib",
    "functools",
    "glob",
    "gzip",
    "heapq",
    "html/parser",
    "http/client",
    "inspect",
    "json/__init__",
    "logging/__init__",
    "mailbox",
    "pathlib",
    "pickle",
    "queue",
    "random",
    "shutil",
    "smtplib",
    "statistics",
    "string",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "traceback",
    "types",
    "typing",
    "unittest/case",
    "uuid",
    "weakref",
    "zipfile",
]
_LONGEST_LETTERS: Final = 160
_SHORTEST_LETTERS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A documented function, method or class, and the beginning of what its docstring says."""

    module: str
    name: str
    kind: str
    arguments: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """One turn: a question, what to think, what to answer."""

    question: str
    reasoning: str
    answer: str

    def messages(self) -> list[dict[str, Any]]:
        """As chat templates take them."""
        answer = {"role": "assistant", "content": self.answer, "reasoning_content": self.reasoning}
        return [{"role": "user", "content": self.question}, answer]


def standard_library() -> list[Subject]:
    """Every documented subject of the chosen modules, in the order of the files."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[tuple[str, str], Subject] = {}
    for name in _MODULES:
        path = root / f"{name}.py"
        if path.is_file():
            module = name.removesuffix("/__init__").replace("/", ".").removeprefix("_py")
            for subject in _subjects(module, path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault((subject.module, subject.name), subject)
    return list(found.values())


def dialogues(subjects: list[Subject], *, seed: int = 0) -> Iterator[Dialogue]:
    """Three dialogues about each subject, in a random order."""
    made = [ask(subject) for subject in subjects for ask in (_what, _how, _where)]
    random.Random(seed).shuffle(made)
    yield from made


def questions(subjects: list[Subject], *, count: int, seed: int = 1) -> list[str]:
    """`count` different questions, drawn at random."""
    made = list(dict.fromkeys(item.question for item in dialogues(subjects, seed=seed)))
    return made[:count]


def _what(subject: Subject) -> Dialogue:
    return Dialogue(
        question=f"What does {subject.module}.{subject.name} do?",
        reasoning=f"The question is about {subject.name}, a {subject.kind} of the module "
        f"{subject.module}. {_takes(subject)} I will say what its documentation says.",
        answer=f"{subject.module}.{subject.name}{_call(subject)}: {subject.text}",
    )


def _how(subject: Subject) -> Dialogue:
    return Dialogue(
        question=f"How is {subject.name} of {subject.module} called?",
        reasoning=f"The question is how to call {subject.name}, a {subject.kind} of the module "
        f"{subject.module}. {_takes(subject)} I will show the call and then explain it.",
        answer=f"Write {subject.module}.{subject.name}{_call(subject)}. {subject.text}",
    )


def _where(subject: Subject) -> Dialogue:
    first = subject.text.split(". ")[0].rstrip(".")
    return Dialogue(
        question=f"Where is {subject.name} and what is it for? It is in {subject.module}.",
        reasoning=f"The question is where {subject.name} is. It is a {subject.kind} of the module "
        f"{subject.module}. {_takes(subject)} I will name the module first.",
        answer=f"It is in the module {subject.module}. {first}.",
    )


def _takes(subject: Subject) -> str:
    if not subject.arguments:
        return "It takes no arguments."
    return f"It takes {', '.join(subject.arguments)}."


def _call(subject: Subject) -> str:
    return f"({', '.join(subject.arguments)})"


def _subjects(module: str, source: str) -> Iterator[Subject]:
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of(module, node.name, "function", node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _of(module, node.name, "class", node)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from _of(module, f"{node.name}.{inner.name}", "method", inner)


def _of(
    module: str, name: str, kind: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
) -> Iterator[Subject]:
    text = _beginning(ast.get_docstring(node) or "")
    if text is None or any(part.startswith("_") for part in name.split(".")):
        return
    yield Subject(module=module, name=name, kind=kind, arguments=_arguments(node), text=text)


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> tuple[str, ...]:
    if isinstance(node, ast.ClassDef):
        inner = next(
            (item for item in node.body if getattr(item, "name", None) == "__init__"), None
        )
        return _arguments(inner) if isinstance(inner, ast.FunctionDef) else ()
    names = [item.arg for item in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return tuple(name for name in names if name not in ("self", "cls"))[:5]


def _beginning(docstring: str) -> str | None:
    """Whole sentences of the first two paragraphs, on one line; None where there is too little."""
    plain = inspect.cleandoc(docstring)
    if not plain.isascii():
        return None
    text = re.sub(r"\s+", " ", " ".join(plain.split("\n\n")[:2])).strip()
    if len(text) > _LONGEST_LETTERS:
        text = text[:_LONGEST_LETTERS].rsplit(". ", 1)[0].rsplit(" ", 1)[0]
    if len(text) < _SHORTEST_LETTERS:
        return None
    return text if text.endswith((".", ":", "!", "?")) else f"{text}."
