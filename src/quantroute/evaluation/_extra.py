"""Heavy packages, asked for when they are needed."""

from __future__ import annotations

import importlib
from typing import Any

from quantroute.errors import ConfigurationError

__all__ = ["need"]


def need(name: str) -> Any:
    """The module.

    Raises:
        ConfigurationError: not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigurationError(
            f"{name} is not installed; this needs: pip install 'quantroute[extract]'"
        ) from None
