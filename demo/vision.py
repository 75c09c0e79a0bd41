"""First step of the training: the vision tower alone learns to read what is on a page.

A throw-away linear head on every merged patch says what stands there: the kind of thing, which characters, word and
digits, which shape and colour, how many. So dense a target teaches the tower in minutes what the answers' tokens alone
would not teach it in hours. The deepstack features get heads of their own, so that they carry the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from triptych.demo.drawing import (
    COLOURS,
    MAX_COUNT,
    SHAPES,
    STAMPS,
    WORDS,
    Page,
    Region,
    centres,
    draw_page,
    draw_picture,
    draw_shape,
    draw_stamp,
    tint,
    write,
)

CELL = 32  # pixels a side of a merged patch
_KINDS = ("nothing", "title", "number", "item", "shapes", "stamp")
_NAMES = (*WORDS, *STAMPS)
# Target columns and their numbers of classes; -100 marks what a cell does not have.
_FIELDS = {
    "kind": len(_KINDS),
    "word": len(_NAMES),
    "digit 1": 10,
    "digit 2": 10,
    "digit 3": 10,
    "index": 3,
    "shape": len(SHAPES),
    "colour": len(COLOURS),
    "count": MAX_COUNT,
}
_COLUMN = {name: column for column, name in enumerate(_FIELDS)}
_CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"  # after the fields, one column each: does it stand in the cell
_NONE = -100
FEATURE_RMS = 0.5  # size of the features that the decoder gets, near that of its own residual stream


@dataclass(frozen=True)
class Sample:
    """A page ready for the tower: `patches` [h * w, 1536] float32 and `targets` [h * w / 4, fields] int64."""

    patches: Tensor
    grid: Tensor  # [1, 3]: time, height and width in patches
    targets: Tensor


def _covered(low: float, high: float, cells: int, share: float) -> list[int]:
    """The cells along one axis of which [low, high] covers enough."""
    enough = share * min(CELL, high - low)
    return [k for k in range(cells) if min(high, CELL * (k + 1)) - max(low, CELL * k) >= enough]


def _labels(region: Region, page: Page) -> dict[str, int]:
    labels = {"kind": _KINDS.index(region.kind)}
    if region.kind == "number":
        labels |= {f"digit {k}": int(digit) for k, digit in enumerate(region.value, start=1)}
    elif region.kind == "shapes":
        labels["shape"] = SHAPES.index(region.value) if region.value else _NONE
        labels["colour"] = list(COLOURS).index(region.colour) if region.colour else _NONE
        labels["count"] = page.count - 1 if page.title else _NONE
    else:
        labels["word"] = _NAMES.index(region.value)
    if region.kind == "item":
        labels["index"] = region.index
    return labels


def _targets(page: Page, rows: int, columns: int) -> Tensor:
    """What stands in each merged patch, row by row. [rows * columns, fields + characters]."""
    targets = np.full((rows, columns, len(_FIELDS) + len(_CHARACTERS)), _NONE, dtype=np.int64)
    targets[:, :, _COLUMN["kind"]] = 0
    targets[:, :, len(_FIELDS) :] = 0
    across, down = columns * CELL / page.image.width, rows * CELL / page.image.height  # the resizing's two scales
    for region in page.regions:
        left, top, right, bottom = region.box
        for row in _covered(top * down, bottom * down, rows, 0.5):
            for column in _covered(left * across, right * across, columns, 0.3):
                for name, label in _labels(region, page).items():
                    targets[row, column, _COLUMN[name]] = label
        if region.kind != "shapes":
            row = int((top + bottom) / 2 * down / CELL)
            for character, place in zip(region.value.lower(), centres(region.value), strict=True):
                column = int((left + (right - left) * place) * across / CELL)
                targets[row, column, len(_FIELDS) + _CHARACTERS.index(character)] = 1
    return torch.from_numpy(targets.reshape(rows * columns, -1))


def prepare(page: Page, processor: Qwen2VLImageProcessorPil) -> Sample:
    """Preprocess a page as a server would."""
    inputs = processor(images=[page.image], return_tensors="pt")
    _, height, width = inputs["image_grid_thw"][0].tolist()
    return Sample(inputs["pixel_values"], inputs["image_grid_thw"], _targets(page, height // 2, width // 2))


class Heads(nn.Module):
    """One linear reader for each of the tower's outputs: the merged features and every deepstack level."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.readers = nn.ModuleList(
            [nn.Linear(width, sum(_FIELDS.values()) + len(_CHARACTERS)) for _ in range(outputs)]
        )

    def losses(self, features: Sequence[Tensor], targets: Tensor) -> tuple[Tensor, dict[str, float]]:
        """The loss over all outputs, and for the merged features the share of cells read rightly, per field."""
        total, right = torch.zeros(()), {}
        for level, (reader, feature) in enumerate(zip(self.readers, features, strict=True)):
            weight = 1.0 if level == 0 else 0.3
            *scores, spelling = reader(feature.float()).split([*_FIELDS.values(), len(_CHARACTERS)], dim=-1)
            spelled = targets[:, len(_FIELDS) :].float()
            total = total + F.binary_cross_entropy_with_logits(spelling, spelled) * len(_CHARACTERS) * weight
            for name, column in _COLUMN.items():
                chosen = targets[:, column] != _NONE
                if not chosen.any():
                    continue
                score, target = scores[column][chosen], targets[chosen, column]
                total = total + F.cross_entropy(score, target) * weight
                if level == 0:
                    right[name] = (score.argmax(-1) == target).float().mean().item()
            if level == 0:
                right["characters"] = (spelling > 0)[spelled > 0].float().mean().item()
        return total, right


def encode(tower: Qwen3VLVisionModel, samples: Sequence[Sample]) -> list[Tensor]:
    """Merged features first, then the deepstack levels; each [cells of all samples, width]."""
    grid = torch.cat([sample.grid for sample in samples])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = tower(torch.cat([sample.patches for sample in samples]), grid_thw=grid)
    return [output.pooler_output, *output.deepstack_features]


def optimizers(
    matrices: Sequence[nn.Parameter], rest: Sequence[nn.Parameter], scale: float
) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for everything else."""
    return [
        torch.optim.Muon(matrices, lr=1e-2 * scale, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3 * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """A short warm-up, a plateau, and a linear descent to zero over the second half."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 40, 1.0, max(0.0, 2 * (steps - step) / steps))
    )


def draw_sheet(rng: random.Random) -> Page:
    """Four lines full of words, numbers, shapes and stamps: more to read a patch than a page has."""
    ground = tuple(rng.randint(232, 255) for _ in range(3))
    canvas = Image.new("RGB", (160, 140), ground)
    draw, regions = ImageDraw.Draw(canvas), []
    ink = rng.choice(("black", "navy", "#402010"))
    for line in range(4):
        x, y = rng.randint(2, 24), 2 + 34 * line + rng.randint(0, 3)
        while x < 100:
            colour = ""
            kind = rng.choice(("title", "number", "number", "item", "item", "shapes", "stamp"))
            if kind == "stamp":
                value = rng.choice(STAMPS)
                box = draw_stamp(canvas, value, x, y, rng)
            elif kind == "shapes":
                value, colour, size = rng.choice(SHAPES), rng.choice(list(COLOURS)), rng.randint(18, 30)
                box = (x, y, x + size, y + size)
                draw_shape(draw, value, tint(colour, rng), box)
            else:
                value = str(rng.randint(100, 999)) if kind == "number" else rng.choice(WORDS)
                size = 18 if kind == "item" else rng.randint(22, 26)
                box = write(draw, (x, y), value.capitalize() if kind == "title" else value, size, ink)
            if box[2] > 160:
                draw.rectangle((x - 4, y - 2, 160, y + 32), fill=ground)  # cut off at the edge: rub it out
                break
            regions.append(Region(kind, value, box, _NONE, colour))
            x = int(box[2]) + rng.randint(8, 20)
    return Page(canvas, tuple(regions))


def _draw(rng: random.Random, easy: Sequence[Page], progress: float) -> Page:
    kind = rng.random()
    if kind < 0.65:
        return draw_sheet(rng) if rng.random() < 1.2 - 1.6 * progress else draw_page(rng)
    return draw_picture(rng) if kind < 0.8 else rng.choice(easy)


def _normalise(tower: Qwen3VLVisionModel, samples: Sequence[Sample]) -> None:
    """Scale the tower's last layers so that its outputs have the size that the decoder starts well from."""
    mergers = [tower.merger, *tower.deepstack_merger_list]
    with torch.no_grad():
        for merger, feature in zip(mergers, encode(tower, samples), strict=True):
            factor = FEATURE_RMS / feature.float().pow(2).mean().sqrt()
            merger.linear_fc2.weight *= factor
            merger.linear_fc2.bias *= factor


def train_tower(
    tower: Qwen3VLVisionModel, processor: Qwen2VLImageProcessorPil, easy: Sequence[Page], steps: int
) -> None:
    """Train the tower in place on fresh pages, `steps` batches of 16."""
    heads = Heads(tower.config.out_hidden_size, 1 + len(tower.deepstack_merger_list))
    matrices = [p for name, p in tower.named_parameters() if p.ndim == 2 and "pos_embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in [*tower.parameters(), *heads.parameters()] if id(p) not in chosen]
    optims = optimizers(matrices, rest, 1.0)
    schedules = [schedule(optimizer, steps) for optimizer in optims]
    rng, start = random.Random("train vision"), time.monotonic()
    tower.set_attn_implementation("eager")  # faster than sdpa for pages this small
    tower.train()
    for step in range(steps):
        samples = [prepare(_draw(rng, easy, step / steps), processor) for _ in range(16)]
        loss, right = heads.losses(encode(tower, samples), torch.cat([sample.targets for sample in samples]))
        loss.backward()
        for optimizer, plan in zip(optims, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            plan.step()
        if step % 50 == 0 or step == steps - 1:
            shares = ", ".join(f"{name} {share:.2f}" for name, share in right.items())
            print(f"vision {step}: {time.monotonic() - start:.0f} s, loss {loss.item():.3f}, {shares}", flush=True)
    tower.eval().requires_grad_(False)
    _normalise(tower, samples)
