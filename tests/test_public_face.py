"""What `import quantroute` promises: its names, and that it is light."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import quantroute

SOURCE = Path(quantroute.__file__).read_text()


def test_every_public_name_exists_and_is_declared_to_type_checkers() -> None:
    declared = re.search(r"if TYPE_CHECKING:(.*?)\n__all__", SOURCE, re.DOTALL)
    assert declared is not None
    for name in quantroute.__all__:
        assert getattr(quantroute, name) is not None
        assert name == "__version__" or re.search(rf"\b{name}\b", declared[1]), name


def test_all_is_what_the_lazy_table_offers() -> None:
    assert {*quantroute._MODULE_OF, "__version__"} == set(quantroute.__all__)


def test_import_loads_no_heavy_module() -> None:
    code = (
        "import quantroute, sys;"
        "heavy = {'torch', 'aiohttp', 'pydantic', 'pyarrow', 'rich', 'typer'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attributes_are_unknown() -> None:
    assert not hasattr(quantroute, "Clinet")
