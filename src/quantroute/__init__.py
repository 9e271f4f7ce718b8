"""quantroute: cost-aware, precision-aware routing of LLM requests under a hard budget."""

from quantroute._version import __version__

__all__ = ["__version__"]
