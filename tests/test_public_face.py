"""What `import quantroute` promises: its names, and that it is light."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import structlog

import quantroute
from quantroute._log import get_logger

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


def test_a_client_costs_aiohttp_and_pydantic_and_nothing_for_the_eye() -> None:
    """What prints, draws, serves pages or computes is imported by those who do that."""
    code = (
        "from quantroute import Client; import sys;"
        "loaded = {name.partition('.')[0] for name in sys.modules} | set(sys.modules);"
        "unwanted = {'rich', 'pygments', 'structlog', 'typer', 'click', 'numpy', 'scipy',"
        "  'pyarrow', 'torch', 'transformers', 'redis', 'uvloop', 'opentelemetry', 'yaml',"
        "  'aiohttp.web',"
        "  'quantroute.cli', 'quantroute.generation', 'quantroute.report', 'quantroute.simulator',"
        "} & loaded;"
        "assert not unwanted, unwanted"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_model_of_an_answer_is_built_before_there_is_one() -> None:
    code = (
        "from quantroute import Client;"
        "from quantroute.client import _wire; from quantroute.registry import _wire as listing;"
        "models = [item for module in (_wire, listing) for name, item in vars(module).items()"
        "  if name.startswith(('Wire', 'Usual')) and hasattr(item, '__pydantic_complete__')];"
        "assert models; built = [item for item in models if item.__pydantic_complete__];"
        "assert not built, built"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_events_go_to_logging_until_an_application_configures_structlog(
    caplog: pytest.LogCaptureFixture,
) -> None:
    structlog.reset_defaults()  # a command in another test of this process has configured it
    log = get_logger("quantroute.test")
    with caplog.at_level(logging.INFO, logger="quantroute.test"):
        log.debug("unseen")
        log.warning("it happened", count=2, why="50% of it")
    (record,) = caplog.records
    assert record.getMessage() == "event='it happened' count=2 why='50% of it'"
    assert (record.name, record.levelno) == ("quantroute.test", logging.WARNING)
    assert record.pathname == __file__


def test_unknown_attributes_are_unknown() -> None:
    assert not hasattr(quantroute, "Clinet")
