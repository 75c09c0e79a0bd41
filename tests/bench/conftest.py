from __future__ import annotations

from collections.abc import Iterator

import pytest

from .mock_server import MockServer, serving


@pytest.fixture
def server() -> Iterator[MockServer]:
    with serving() as running:
        yield running
