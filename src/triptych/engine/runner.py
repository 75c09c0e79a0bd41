"""Executes a step of the engine in torch: packs it, runs the language model over the paged KV, returns logits.

Runs in prefill and decode workers, called by `engine/engine.py` on the engine's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from triptych.engine import varlen_attention
from triptych.engine.attention import NAME, register_attention, step_attention
from triptych.engine.batch import EmbeddingSlice, Ints, ScoredRows, SequenceChunk, StepBatch, StepLogits
from triptych.engine.decode_graphs import CudaRecorder, DecodeGraphs
from triptych.engine.kv_blocks import SCRATCH_BLOCK
from triptych.engine.logprobs import score
from triptych.engine.varlen_attention import VarlenAttention
from triptych.errors import ConfigError, EngineError
from triptych.messages import Logprobs
from triptych.models.family import Part
from triptych.models.language import LanguageModel
from triptych.models.native_language import NativeLanguage, QueryRows, StepRows, why_not_native
from triptych.models.registry import ModelSpec
from triptych.models.swaps import swap_linears, swap_rms_norms
from triptych.models.weights import Progress, load_part, resolve_device, torch_dtype
from triptych.types import WeightsReport

logger = logging.getLogger(__name__)

SCORED_ROWS = 64  # of a prompt, whose logits exist at a time


class ModelRunner:
    """Runs `language`, which lies on `device`.

    `kv` [num_blocks, layers, 2, KV heads, block_size, head_dim] is on that device and in the dtype of the spec; it may
    be memory that others read, and is written only at the slots of the chunks of a step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        kv: torch.Tensor,
        language: LanguageModel,
        report: WeightsReport,
        *,
        use_kernels: bool = False,
    ) -> None:
        """With `use_kernels` the decoder layers are run by `triptych.kernels`, and KV blocks hold tiles."""
        block_size = kv.shape[4]
        if kv.shape[1:] != spec.kv_block_shape(block_size) or kv.dtype != torch_dtype(spec) or not kv.is_contiguous():
            raise ValueError(f"KV of shape {tuple(kv.shape)} and {kv.dtype} does not fit the model")
        self.report = report
        self.embeds_dtype = torch_dtype(spec)
        self.embeds_width = spec.embed_width
        self._device = device
        self._kv = kv
        self._block_size = block_size
        self._language = language
        self._native = NativeLanguage(language, kv) if use_kernels else None
        self._graphs: DecodeGraphs | None = None
        if varlen_attention.can_run(kv):
            self._graphs = DecodeGraphs(kv, self._decode, spec.max_model_len, CudaRecorder())
        self._hidden = spec.family.text.hidden
        self._vocab = spec.family.text.vocab
        self._num_deepstack = spec.family.vision.num_deepstack

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        kv: torch.Tensor,
        *,
        device: torch.device | None = None,
        pack_linears: bool = False,
        progress: Progress | None = None,
    ) -> ModelRunner:
        """Reads the language part alone.

        Where the kernels cannot run, `pack_linears` copies the weights into a layout that decodes faster on a CPU.
        Raises ConfigError if the checkpoint does not fit, or the kernels are asked for and cannot run.
        """
        device = device or resolve_device(spec.device)
        register_attention()
        module, report = load_part(spec, Part.LANGUAGE, device, attention=NAME, progress=progress)
        language = cast(LanguageModel, module)
        swap_rms_norms(language)
        use_kernels = _use_kernels(spec, language, kv.shape[4])
        if pack_linears and not use_kernels and device.type == "cpu":
            language.untie_head()
            swap_linears(language)
        return cls(spec, device, kv, language, report, use_kernels=use_kernels)

    @property
    def is_native(self) -> bool:
        """Whether the decoder layers are run by `triptych.kernels`."""
        return self._native is not None

    @property
    def kv_layout(self) -> str:
        """How a KV block is laid out inside; blocks move only between workers that agree."""
        return "rows" if self._native is None else "tiles"

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk]) -> StepLogits:
        """Writes the KV of all chunks."""
        batch = StepBatch.pack(chunks, self._block_size)
        if self._graphs is not None and (logits := self._graphs.logits(batch)) is not None:
            return StepLogits(logits, [])
        embeds = self._language.embed(self._tensor(batch.token_ids))
        deepstack = self._merge(embeds, batch.embeddings)
        if self._native is not None:
            hidden = self._native.forward(embeds, _step_rows(batch), deepstack)
            sampled = hidden[torch.from_numpy(batch.sample_rows)] if batch.scored else hidden
        else:
            step = step_attention(self._kv, batch)
            masks = self._deepstack_masks(len(embeds), deepstack)
            hidden = self._language(embeds, self._tensor(batch.positions), step=step, **masks)
            sampled = hidden[self._tensor(batch.sample_rows)]
        scores = [self._scores(hidden, rows) for rows in batch.scored]
        tokens = self._likeliest(sampled, batch.greedy)
        if tokens:
            sampled = sampled[[place for place in range(len(sampled)) if place not in tokens]]
        return StepLogits(self._logits(sampled), scores, tokens)

    def _likeliest(self, hidden: torch.Tensor, places: Ints) -> dict[int, int]:
        """Of the rows at `places`, as far as it is known without their logits."""
        if self._native is None or not len(places):
            return {}
        found = self._native.likeliest(hidden[torch.from_numpy(places)])
        return {place: token for place, token in zip(places.tolist(), found, strict=True) if token is not None}

    def _decode(self, token_ids: torch.Tensor, positions: torch.Tensor, step: VarlenAttention) -> torch.Tensor:
        """Logits of all rows."""
        return self._language.logits(self._language(self._language.embed(token_ids), positions, step=step))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if not len(hidden):
            return torch.empty((0, self._vocab), device=self._device)
        return (self._native or self._language).logits(hidden)

    def _scores(self, hidden: torch.Tensor, rows: ScoredRows) -> list[Logprobs]:
        """A slice of rows at a time: logits of a whole prompt would take a gigabyte."""
        token_ids, num_top = rows.scoring
        scores: list[Logprobs] = []
        for start in range(0, len(token_ids), SCORED_ROWS):
            tokens = token_ids[start : start + SCORED_ROWS]
            first = rows.first_row + start
            scores += score(self._logits(hidden[first : first + len(tokens)]), tokens, num_top)
        return scores

    def _tensor(self, array: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _merge(self, embeds: torch.Tensor, slices: Sequence[EmbeddingSlice]) -> list[tuple[int, torch.Tensor]]:
        """Put embeddings in the place of their placeholders' rows; returns what deepstack adds to which rows."""
        deepstack: list[tuple[int, torch.Tensor]] = []
        for row, rows in slices:
            if rows.shape[1] != self.embeds_width or rows.dtype != self.embeds_dtype:
                raise ValueError(f"embedding of width {rows.shape[1]} and {rows.dtype} does not fit the model")
            rows = rows.to(self._device)
            embeds[row : row + len(rows)] = rows[:, : self._hidden]
            deepstack.append((row, rows[:, self._hidden :]))
        return deepstack if self._num_deepstack else []

    def _deepstack_masks(self, num_rows: int, deepstack: list[tuple[int, torch.Tensor]]) -> dict[str, Any]:
        """The same as transformers' models take it."""
        if not deepstack:
            return {}
        mask = torch.zeros(num_rows, dtype=torch.bool)
        for row, columns in deepstack:
            mask[row : row + len(columns)] = True
        layers = torch.cat([columns for _, columns in deepstack]).chunk(self._num_deepstack, dim=1)
        return {"visual_pos_masks": mask.to(self._device)[None], "deepstack_visual_embeds": list(layers)}

    def probe(self) -> None:
        """A forward of one token in the scratch block. Raises EngineError if it is not finite."""
        chunk = SequenceChunk([0], 0, np.zeros((3, 1), dtype=np.int64), [SCRATCH_BLOCK], [], sample=True)
        if not bool(self.forward([chunk]).logits.isfinite().all()):
            raise EngineError("the language model returned logits that are not finite")


def _use_kernels(spec: ModelSpec, language: LanguageModel, block_size: int) -> bool:
    reason = "model.kernels is torch" if spec.kernels == "torch" else why_not_native(language, block_size)
    if reason and spec.kernels == "native":
        raise ConfigError(f"model.kernels is native, and {reason}", param="model.kernels")
    if reason:
        logger.info("decoder layers run in torch: %s", reason)
    return not reason


def _step_rows(batch: StepBatch) -> StepRows:
    """The batch as the kernels read it."""
    first_blocks = np.cumsum([0, *(len(sequence.blocks) for sequence in batch.sequences)])
    queries = np.array(
        [
            (sequence.first_row, sequence.num_rows, sequence.num_context, first_block)
            for sequence, first_block in zip(batch.sequences, first_blocks, strict=False)
        ],
        dtype=np.int64,
    )
    sequence_of = np.searchsorted(queries[:, 0], batch.sample_rows, side="right") - 1
    sampled = queries[sequence_of]
    sampled[:, 2] += batch.sample_rows - sampled[:, 0]
    sampled[:, 0], sampled[:, 1] = np.arange(len(sampled)), 1
    return StepRows(
        positions=batch.positions,
        slots=batch.slots,
        block_table=np.concatenate([sequence.blocks for sequence in batch.sequences]),
        every=QueryRows(queries, None),
        last=QueryRows(queries, None) if batch.scored else QueryRows(sampled, batch.sample_rows),
    )
