"""What the site adds to the written pages: the command's help and the docstrings, as reference.

The navigation names every page there may be; those whose file is not there are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SOURCE: Final = Path(__file__).resolve().parents[1] / "src/quantroute"
#: No public names, or none that a reader would import.
_PRIVATE: Final = {"cli", "__main__"}
_CLI_PAGE: Final = "reference/cli.md"
_PYTHON: Final = "reference/python"
_LINK_UP: Final = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Leave out what does not exist; put in a page for each public package."""
    present = Path(config.docs_dir)
    made = {_CLI_PAGE, f"{_PYTHON}/index.md"}
    config.nav = _kept(config.nav or [], present, made)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make the reference pages."""
    files.append(File.generated(config, _CLI_PAGE, content=cli_page()))
    modules = dict(public_modules())
    files.append(File.generated(config, f"{_PYTHON}/index.md", content=_index(modules)))
    for name, names in modules.items():
        page = f"{_PYTHON}/{name}.md"
        files.append(File.generated(config, page, content=_module_page(name, names)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Links to files of the repository that are no pages become plain words."""
    here = (Path(config.docs_dir) / page.file.src_uri).parent
    docs = Path(config.docs_dir).resolve()

    def plain(link: re.Match[str]) -> str:
        target = (here / link[2].split("#")[0]).resolve()
        return link[0] if target.is_relative_to(docs) else link[1]

    return _LINK_UP.sub(plain, markdown)


def _kept(entries: list[Any], present: Path, made: set[str]) -> list[Any]:
    kept: list[Any] = []
    for entry in entries:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            kept.append({title: _kept(value, present, made)})
        elif value in made or (present / value).exists():
            kept.append(entry)
    return kept


# -- the command ----------------------------------------------------------------------------------


def cli_page() -> str:
    """Every command with its options, from the help texts."""
    from quantroute.cli._app import app
    from quantroute.cli._commands import COMMANDS, load

    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line\n",
        "`quantroute --help` and `quantroute COMMAND --help` say the same. `--json` prints what a "
        "program needs; errors then come as `{exit_code, kind, error}` on standard output too. "
        "Exit codes: see the README.\n",
        "`quantroute --install-completion` makes the shell complete commands, options and values; "
        "`--show-completion` prints the lines instead.\n",
        "## Before the command\n",
        _table(group),
    ]
    for name in COMMANDS:
        command = load(name)
        parts.append(f"## quantroute {name}\n")
        parts.append(_prose(command.help or ""))
        parts.append(_table(command))
    return "\n".join(parts)


def _prose(text: str) -> str:
    """A help text in Markdown: its example lines in a block."""
    unmarked = text.replace("\b", "")  # for the terminal: not to be wrapped
    paragraphs = [" ".join(part.split()) for part in unmarked.split("\n\n")]
    words = [part for part in paragraphs if not part.startswith("quantroute ")]
    calls = [part for part in paragraphs if part.startswith("quantroute ")]
    block = "```text\n" + "\n".join(calls) + "\n```\n" if calls else ""
    return "\n\n".join(words) + f"\n\n{block}"


def _table(command: Any) -> str:
    lines = ["| | default | meaning |", "|---|---|---|"]
    for parameter in command.params:
        if parameter.name in ("help", "install_completion", "show_completion"):
            continue
        lines.append(f"| {_names(parameter)} | {_default(parameter)} | {_meaning(parameter)} |")
    return "\n".join(lines) + "\n"


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{(parameter.metavar or parameter.name).strip('[]').upper()}`"
    return ", ".join(f"`{option}`" for option in (*parameter.opts, *parameter.secondary_opts))


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or callable(value):
        return ""
    return f"`{getattr(value, 'value', value)}`"


def _meaning(parameter: Any) -> str:
    text = (parameter.help or "").replace("|", "\\|")
    variable = parameter.envvar
    return f"{text} Environment: `{variable}`." if variable else text


# -- the packages ---------------------------------------------------------------------------------


def public_modules() -> Iterator[tuple[str, list[str]]]:
    """Name and public names of each package and module that is not private."""
    for path in sorted(SOURCE.iterdir()):
        name = path.stem
        if name.startswith("_") or name in _PRIVATE:
            continue
        file = path / "__init__.py" if path.is_dir() else path
        if file.suffix == ".py" and file.exists() and (names := _public_names(file)):
            yield name, names


def _public_names(file: Path) -> list[str]:
    """`__all__`, read without importing: some packages need an extra."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [str(item) for item in ast.literal_eval(node.value)]  # type: ignore[attr-defined]
    return []


def _purpose(name: str) -> str:
    path = SOURCE / name
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split())


def _index(modules: dict[str, list[str]]) -> str:
    rows = [f"| [`quantroute.{name}`]({name}.md) | {_purpose(name)} |" for name in modules]
    return "\n".join(
        [
            "# Python",
            "",
            "`from quantroute import Client` and the other names of the top level are loaded when "
            "they are first used. Everything else is in its package.",
            "",
            "| package | purpose |",
            "|---|---|",
            *rows,
        ]
    )


def _module_page(name: str, names: list[str]) -> str:
    purpose = _purpose(name)
    parts = [f"# quantroute.{name}\n", purpose + "\n"]
    parts += [f"::: quantroute.{name}.{item}\n" for item in names]
    return "\n".join(parts)
