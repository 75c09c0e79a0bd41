"""What every running request uses of the router, handed down from `router.py` to its choices and their attempts."""

from __future__ import annotations

from typing import NamedTuple

from triptych.clock import Clock
from triptych.config import RouterConfig
from triptych.observe.metrics import Metrics
from triptych.router.client import RouterMailbox
from triptych.router.encode_queue import EncodeQueue
from triptych.router.prefix_index import PrefixIndex
from triptych.router.registry import Registry


class RouterParts(NamedTuple):
    config: RouterConfig
    registry: Registry
    encodes: EncodeQueue
    prefixes: PrefixIndex
    mailbox: RouterMailbox
    metrics: Metrics
    clock: Clock
    eager_encode: bool = False
