"""The heavy packages, and one clear error where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from quantroute.errors import ConfigurationError

__all__ = ["need"]


def need(module: str, *, extra: str = "extract") -> Any:
    """The module, imported now and not earlier: `import quantroute` has to stay light.

    Raises:
        ConfigurationError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ConfigurationError(
            f"{package} is not installed; this needs it: pip install 'quantroute[{extra}]'"
        ) from None
