"""The `quantroute` command: printing only; every decision is made below."""

from quantroute.cli._app import main

__all__ = ["main"]
