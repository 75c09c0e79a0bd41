"""What tests of memory share."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def unlogged() -> Iterator[None]:
    """pytest keeps every record that a test logs, and what its traceback holds: that is no growth of the server."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
