"""Bytes of media that all requests hold: counted, refused beyond the limit, given back once."""

from __future__ import annotations

import pytest

from triptych.errors import BadRequestError, OverloadedError
from triptych.media.staging import Staging


def test_what_is_closed_is_given_back() -> None:
    staging = Staging(100)
    with staging.open() as one, staging.open() as other:
        one.add(60)
        other.add(30)
        other.add(10)
        assert staging.used_bytes == 100
        with pytest.raises(OverloadedError, match="max_staged_bytes = 100 bytes; ask again"):
            other.add(1)
        one.close()
        one.close()
        assert staging.used_bytes == 40
        other.add(60)
    assert staging.used_bytes == 0


def test_one_that_can_never_fit_is_the_clients_mistake() -> None:
    staging = Staging(100)
    with staging.open("input") as staged:
        staged.add(50)
        with pytest.raises(BadRequestError, match="of this request are more than max_staged_bytes = 100") as caught:
            staged.add(51)
        assert caught.value.param == "input"
        assert staging.used_bytes == 50
