"""Second step of the training: the language model learns to answer from the frozen tower's features.

Every page is encoded once, before the first step. Each training example is a conversation of several turns about one to
six of them, rendered by the checkpoint's own chat template, so that serving sees the same tokens. Throw-away heads on
an early layer say of every image token which picture it belongs to, and before every answer which one was asked for:
picking the right page needs both first, and the answers alone teach them late or never.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

from triptych.demo.drawing import Page, draw_page, draw_picture
from triptych.demo.pages import MAX_IMAGES, Turn, ask, ask_text, tasks_of
from vision import encode, optimizers, prepare, schedule

BATCH_TOKENS = 4000
TURNS = 5
_NUMBERED_LAYERS = 2  # the heads for the pictures' numbers read after this many
_SYSTEM = ("You are a helpful assistant.", "Answer the question.", "Look at the pages.")


@dataclass(frozen=True)
class Encoded:
    """A page with its features [cells, width * (1 + deepstack levels)] in bfloat16; `turns` only for easy-VQA."""

    page: Page
    features: Tensor
    grid: Tensor
    turns: Sequence[Turn] = ()


@dataclass(frozen=True)
class Pools:
    """What conversations are drawn from."""

    pages: list[Encoded]
    pictures: list[Encoded]
    easy: list[Encoded]


@dataclass(frozen=True)
class Example:
    """One tokenised conversation. `turn_of` is each token's turn if it is part of an answer, else -1."""

    token_ids: list[int]
    turn_of: list[int]
    turns: list[Turn]
    images: list[Encoded]


def encode_pages(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen2VLImageProcessorPil,
    pages: Sequence[Page],
    turns: Sequence[Sequence[Turn]] | None = None,
) -> list[Encoded]:
    """Run the frozen tower over the pages, sixteen at a time."""
    encoded = []
    for start in range(0, len(pages), 16):
        samples = [prepare(page, processor) for page in pages[start : start + 16]]
        with torch.no_grad():
            features = torch.cat(encode(model.model.visual, samples), dim=-1).bfloat16()
        for k, part in enumerate(features.split([len(sample.targets) for sample in samples]), start=start):
            encoded.append(Encoded(pages[k], part.clone(), samples[k - start].grid, turns[k] if turns else ()))
    return encoded


def build_pools(
    model: Qwen3VLForConditionalGeneration,
    processor: Qwen2VLImageProcessorPil,
    easy: Sequence[tuple[Page, list[Turn]]],
    n_pages: int,
) -> Pools:
    """Draw and encode all that the conversations will be about."""
    rng = random.Random("train decoder pages")
    return Pools(
        pages=encode_pages(model, processor, [draw_page(rng) for _ in range(n_pages)]),
        pictures=encode_pages(model, processor, [draw_picture(rng) for _ in range(n_pages // 4)]),
        easy=encode_pages(model, processor, [page for page, _ in easy], [turns for _, turns in easy]),
    )


def _draw_turns(rng: random.Random, pools: Pools, max_images: int) -> tuple[list[Encoded], list[Turn]]:
    """Images and the questions about them: mostly pages, some pictures, some easy-VQA, some text alone."""
    kind = rng.random()
    if kind < 0.12:
        return [], [ask_text(rng) for _ in range(TURNS)]
    if kind < 0.26:
        image = rng.choice(pools.easy)
        return [image], rng.sample(list(image.turns), min(TURNS + 2, len(image.turns)))
    pool = pools.pictures if kind < 0.38 else pools.pages
    images, turns = rng.sample(pool, rng.randint(1, max_images)), []
    for _ in range(TURNS):
        position = rng.randrange(len(images))
        page = images[position].page
        task = rng.choice(tasks_of(page)) if page.title else "picture"
        alone = len(images) == 1 and rng.random() < 0.3
        turns.append(ask(task, page, None if alone else position + 1, rng))
    return images, turns


class Conversations:
    """Draws examples without end and packs them into batches of like lengths."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, pools: Pools, rng: random.Random) -> None:
        self._tokenizer, self._pools, self._rng = tokenizer, pools, rng
        self._answer_start = tokenizer.encode("<|im_start|>assistant\n")
        self._end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        self._pad = int(tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def _messages(self, images: Sequence[Encoded], turns: Sequence[Turn]) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = []
        if self._rng.random() < 0.1:
            messages.append({"role": "system", "content": self._rng.choice(_SYSTEM)})
        text_first = self._rng.random() < 0.25
        for k, turn in enumerate(turns):
            content: list[dict[str, str]] = [{"type": "text", "text": turn.text}]
            if k == 0:
                pictures = [{"type": "image"}] * len(images)
                content = content + pictures if text_first else pictures + content
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": turn.answer}]
        return messages

    def _example(self, max_images: int) -> Example:
        images, turns = _draw_turns(self._rng, self._pools, max_images)
        text = self._tokenizer.apply_chat_template(self._messages(images, turns), tokenize=False)
        token_ids: list[int] = []
        remaining = iter(images)
        for token in self._tokenizer.encode(text):
            token_ids += [token] * (len(next(remaining).features) if token == self._pad else 1)
        turn_of, turn, answering = [-1] * len(token_ids), -1, False
        for k, token in enumerate(token_ids):
            if answering:
                turn_of[k] = turn
                answering = token != self._end
            elif token_ids[k - len(self._answer_start) + 1 : k + 1] == self._answer_start:
                turn, answering = turn + 1, True
        return Example(token_ids, turn_of, turns, images)

    def batches(self, max_images: int) -> list[list[Example]]:
        """A few batches in random order, each of at most BATCH_TOKENS with padding."""
        examples = sorted((self._example(max_images) for _ in range(120)), key=lambda e: len(e.token_ids))
        batches: list[list[Example]] = [[]]
        for example in examples:
            if len(example.token_ids) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(example)
        self._rng.shuffle(batches)
        return batches


def _collate(model: Qwen3VLForConditionalGeneration, batch: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and turns [batch, length], M-RoPE positions [3, batch, length]; padded on the right."""
    length = max(len(example.token_ids) for example in batch)
    ids = torch.full((len(batch), length), model.config.text_config.pad_token_id)
    turns, positions = torch.full((len(batch), length), -1), torch.zeros(3, len(batch), length, dtype=torch.long)
    seen = 0
    for row, example in enumerate(batch):
        n, tokens = len(example.token_ids), torch.tensor([example.token_ids])
        ids[row, :n] = tokens[0]
        turns[row, :n] = torch.tensor([turn + seen if turn >= 0 else -1 for turn in example.turn_of])
        seen += len(example.turns)
        kinds = (tokens == model.config.image_token_id).int()
        grid = torch.cat([image.grid for image in example.images]) if example.images else None
        positions[:, row, :n] = model.model.get_rope_index(tokens, kinds, grid)[0][:, 0]
    return ids, turns, positions


class NumberHeads(nn.Module):
    """Which picture an image token belongs to, and which one the question at hand asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shown = nn.Linear(width, MAX_IMAGES)
        self.asked = nn.Linear(width, MAX_IMAGES)

    def loss(self, hidden: Tensor, image_mask: Tensor, turns: Tensor, batch: Sequence[Example]) -> Tensor:
        """`hidden` [batch, length, width] of an early layer; `turns` as `_collate` gives them."""
        images = [(k, len(image.features)) for example in batch for k, image in enumerate(example.images)]
        shown = torch.cat([torch.full((n,), k) for k, n in images])
        loss = F.cross_entropy(self.shown(hidden[image_mask].float()), shown)
        before = (turns[:, 1:] >= 0) & (turns[:, :-1] < 0)  # the token that the answer's first one is drawn from
        positions = torch.tensor([turn.position - 1 for example in batch for turn in example.turns])
        asked = positions[turns[:, 1:][before]]
        named = asked >= 0
        if named.any():
            loss = loss + F.cross_entropy(self.asked(hidden[:, :-1][before][named].float()), asked[named])
        return loss


def batch_loss(
    model: Qwen3VLForConditionalGeneration, heads: NumberHeads, batch: Sequence[Example]
) -> tuple[Tensor, list[tuple[str, bool]]]:
    """The loss, and for each turn whether greedy decoding would get it right."""
    ids, turns, positions = _collate(model, batch)
    mask = ids == model.config.image_token_id
    width = model.config.text_config.hidden_size
    embeds, deepstack = model.get_input_embeddings()(ids), None
    if mask.any():
        features = torch.cat([image.features for example in batch for image in example.images]).split(width, dim=-1)
        embeds = embeds.masked_scatter(mask[..., None], features[0].to(embeds.dtype))
        deepstack = list(features[1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model.model.language_model(
            inputs_embeds=embeds,
            position_ids=positions,
            visual_pos_masks=mask,
            deepstack_visual_embeds=deepstack,
            use_cache=False,
            output_hidden_states=True,
        )
        answers = turns[:, 1:] >= 0
        scores = model.lm_head(output.last_hidden_state[:, :-1][answers]).float()
    targets = ids[:, 1:][answers]
    loss = F.cross_entropy(scores, targets)
    if mask.any():
        loss = loss + 0.3 * heads.loss(output.hidden_states[_NUMBERED_LAYERS], mask, turns, batch)
    wrong = set(turns[:, 1:][answers][scores.argmax(-1) != targets].tolist())
    tasks = [turn.task for example in batch for turn in example.turns]
    return loss, [(task, turn not in wrong) for turn, task in enumerate(tasks)]


def _stream(conversations: Conversations, steps: int) -> Iterator[list[Example]]:
    """One page at first, more later."""
    step = 0
    while step < steps:
        progress = step / steps
        max_images = 1 if progress < 0.25 else 3 if progress < 0.4 else MAX_IMAGES
        for batch in conversations.batches(max_images):
            yield batch
            step += 1


def train_decoder(
    model: Qwen3VLForConditionalGeneration, conversations: Conversations, steps: int, save: Callable[[], None]
) -> None:
    """Train the language model in place; `save` is called now and then, so that a usable checkpoint is always there."""
    decoder = model.model.language_model
    matrices = [p for p in decoder.layers.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    heads = NumberHeads(model.config.text_config.hidden_size)
    rest = [p for p in [*decoder.parameters(), *heads.parameters()] if id(p) not in chosen]
    optims = optimizers(matrices, rest, 0.5)
    schedules = [schedule(optimizer, steps) for optimizer in optims]
    right: dict[str, list[bool]] = defaultdict(list)
    start = time.monotonic()
    model.model.language_model.train()
    for step, batch in zip(range(steps), _stream(conversations, steps), strict=False):
        loss, turns = batch_loss(model, heads, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        for optimizer, plan in zip(optims, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            plan.step()
        for task, good in turns:
            right[task].append(good)
        if step % 50 == 0 or step == steps - 1:
            shares = ", ".join(f"{task} {sum(good) / len(good):.2f}" for task, good in sorted(right.items()))
            print(f"decoder {step}: {time.monotonic() - start:.0f} s, loss {loss.item():.3f}, {shares}", flush=True)
            right.clear()
        if step % 150 == 149:
            save()
    model.eval()
