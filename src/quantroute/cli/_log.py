"""Log lines for people on stderr, never on stdout, where programs read."""

from __future__ import annotations

import logging
import sys

import structlog

__all__ = ["configure_logging"]


def configure_logging(*, verbose: bool) -> None:
    """Warnings by default, every failed attempt with `--verbose`; colours on terminals only."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.INFO if verbose else logging.WARNING
        ),
        # Looked up for each line: a progress bar puts its own stream there while it is shown.
        logger_factory=lambda *_: structlog.PrintLogger(file=sys.stderr),
    )
