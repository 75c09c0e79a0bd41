"""What is asked and how it is offered: the shape of a workload, the named ones, a load.

Made into requests by `requests.py`, sent by `load.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triptych.errors import ConfigError

ImageFormat = Literal["PNG", "JPEG"]
Count = Annotated[int, Meta(ge=0)]
PositiveInt = Annotated[int, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Size = tuple[Annotated[int, Meta(ge=64, le=8192)], Annotated[int, Meta(ge=64, le=8192)]]  # width, height in pixels


class Load(msgspec.Struct, frozen=True):
    """One of the two."""

    concurrency: Annotated[int, Meta(gt=0)] | None = None  # sessions at once, each next one as soon as one ends
    rate_per_s: Annotated[float, Meta(gt=0)] | None = None  # sessions that arrive a second, independent of answers

    @property
    def label(self) -> str:
        return f"c={self.concurrency}" if self.concurrency is not None else f"{self.rate_per_s:g}/s"


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares are exact in every round, not drawn: rounds and systems get equal work."""

    name: str
    image_counts: tuple[Count, Count] = (0, 0)  # least and most images of a request that has any, every count alike
    sizes: Annotated[tuple[Size, ...], Meta(min_length=1)] = ((336, 336),)  # one a request, every size alike
    share_with_images: Share = 1.0
    share_repeated: Share = 0.0  # of images: one that the round, or the primers, had before
    primed_images: Count = 0  # distinct images that the server sees, unmeasured, before each round
    share_large: Share = 0.0  # of requests: those with `large_images` images of `large_size` instead
    large_images: PositiveInt = 20
    large_size: Size = (544, 544)
    prompt_tokens: PositiveInt = 20  # of text, about
    output_tokens: PositiveInt = 5
    turns: PositiveInt = 1  # requests of one session; each resends all before it and brings text and images of its own
    image_format: ImageFormat = "PNG"

    def __post_init__(self) -> None:
        if self.image_counts[0] > self.image_counts[1]:
            raise ValueError("image_counts: the least is more than the most")
        if self.primed_images and not self.share_repeated:
            raise ValueError("primed_images: nothing repeats them, share_repeated is 0")


_W1 = Workload(name="W1", image_counts=(4, 6), sizes=((336, 336), (448, 448)))
_PRESETS = (
    _W1,
    msgspec.structs.replace(_W1, name="W1-336", sizes=((336, 336),)),
    msgspec.structs.replace(_W1, name="W1-448", sizes=((448, 448),)),
    Workload(name="W2", prompt_tokens=32, output_tokens=64),
    Workload(name="W3", prompt_tokens=5000, output_tokens=1),
    Workload(name="W4", image_counts=(4, 6), share_repeated=1.0, primed_images=24),
    Workload(name="W4-cold", image_counts=(4, 6)),  # W4 with new images: what W4 is compared with
    Workload(name="W5", image_counts=(1, 2), share_large=0.1),
    Workload(name="W6", image_counts=(4, 4), share_with_images=0.5, output_tokens=128),
    Workload(name="chat", prompt_tokens=64, output_tokens=32, turns=4),
    Workload(name="agent", image_counts=(1, 1), sizes=((448, 448),), output_tokens=32, turns=4),
)
PRESETS: dict[str, Workload] = {workload.name: workload for workload in _PRESETS}


def custom(fields: dict[str, Any]) -> Workload:
    """A workload of a file: all fields, or the name of another under `base` and what differs. Raises ConfigError."""
    fields = dict(fields)
    base = fields.pop("base", None)
    given = {} if base is None else msgspec.to_builtins(named(str(base)))
    try:
        return msgspec.convert(given | fields, Workload)
    except msgspec.ValidationError as error:
        raise ConfigError(f"workload {fields.get('name', '?')}: {error}") from None


def named(name: str, own: dict[str, Workload] | None = None) -> Workload:
    """Of the file's own ones or the presets. Raises ConfigError."""
    known = PRESETS | (own or {})
    if name not in known:
        raise ConfigError(f"workload: unknown {name!r}; known are {', '.join(known)}")
    return known[name]
