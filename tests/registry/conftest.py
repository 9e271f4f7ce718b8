"""Fixtures of the registry's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from registry_support import FakeCatalogue, running


@pytest.fixture
async def catalogue() -> AsyncIterator[FakeCatalogue]:
    """A fake service, empty."""
    async with running() as fake:
        yield fake
