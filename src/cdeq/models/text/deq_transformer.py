"""DEQ-Transformer (Bai et al. 2019): a transformer of one block, applied until nothing changes, with memory.

Shapes: B texts, L tokens, M tokens of memory (0 at the start of a text), K = M + L, D width, H heads, V words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from cdeq.equilibrium.memory import Memory, Segment
from cdeq.models.arguments import arguments_of
from cdeq.models.text.adaptive import AdaptiveVocabulary
from cdeq.models.text.relative import segment_attention, sinusoids
from cdeq.models.text.segment_start import SegmentStart


class SegmentContext(NamedTuple):
    """All that a step needs of a segment.

    `injection` (B, L, 3 D or 4 D): added to queries, keys and values, and to the residual stream. `keys`, `values`
    (B, H, M, E) of the memory; `positions` (H, K or more, E), the keys of distances ..., 1, 0. `attention_mask`
    (B, 1, D) and `inner_mask` (B, 1, inner): dropout, one for the whole solve; None outside training. `memory` is the
    segment's.
    """

    injection: Tensor
    keys: Tensor
    values: Tensor
    positions: Tensor
    attention_mask: Tensor | None
    inner_mask: Tensor | None
    memory: Memory


class DEQTransformer(nn.Module):
    """y = LN(keep z + r + O attention(W [z_mem; z] + u)), f = LN(y + W2 relu(W1 y)).

    u = Linear(embedding) is added to queries, keys and values. Layer norms have no weights; all products of the
    block have normalised weights. Two choices are not DEQ-Transformer's: `keep` below 1 damps the map, and
    `direct` injects the embedding into the residual stream too (r above; 0 without it). A model with either learns
    faster and converges sooner, so that there is less to distil.

    Keys and values of the memory and keys of distances do not change during a solve: `inject` makes them, and `follow`
    takes those of older tokens from the context before.
    `memory` is how many tokens are remembered, `fading` how much less a token counts for the mixing weights of each one
    after it, in solvers and students. The readout gives features (B, L, D), which `words.nll` scores
    against the next tokens and `words.log_probabilities` turns into a distribution.
    """

    batched = True
    causal = True
    known_keys: Tensor | None

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = 128,
        heads: int = 4,
        inner: int = 768,
        memory: int = 64,
        cutoffs: Iterable[int] = (),
        divisor: int = 4,
        dropout: float = 0.0,
        keep: float = 1.0,
        direct: bool = False,
        fading: float = 1.0,
    ):
        super().__init__()
        cutoffs = list(cutoffs)
        self.config = arguments_of(locals())
        if min(heads, inner) < 1:
            raise ValueError(f"heads and inner must be at least 1, not {heads} and {inner}")
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, not {width}")
        if memory < 0:
            raise ValueError(f"memory must not be negative, not {memory}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not {dropout}")
        self.width, self.heads, self.inner = width, heads, inner
        self.memory, self.dropout, self.keep, self.direct = memory, dropout, keep, direct
        self.fading = fading
        self.words = AdaptiveVocabulary(
            vocabulary=vocabulary, width=width, cutoffs=tuple(cutoffs), divisor=divisor
        )
        self.injection = nn.Linear(width, (4 if direct else 3) * width)
        self.qkv = weight_norm(nn.Linear(width, 3 * width, bias=False))
        self.positions = weight_norm(nn.Linear(width, width, bias=False))
        self.content_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.position_bias = nn.Parameter(torch.zeros(heads, width // heads))
        self.out = weight_norm(nn.Linear(width, width, bias=False))
        self.expand = weight_norm(nn.Linear(width, inner))
        self.contract = weight_norm(nn.Linear(inner, width))
        self.register_buffer("known_keys", None, persistent=False)

    def inject(self, x: Segment | Tensor) -> SegmentContext:
        """A segment, or tokens (B, L) alone, which are the beginning of a text."""
        tokens, memory = x if isinstance(x, Segment) else Segment(x)
        memory = self._checked(tokens, memory)
        positions = self._distance_keys(memory[0].shape[1] + tokens.shape[1])
        embedded = self._embedded(tokens)
        return self._context(embedded, memory, *self._keys_and_values(*memory), positions)

    def follow(self, x: Segment, last: SegmentContext) -> SegmentContext:
        """`inject(x)` after the segment of `last`, whose tokens alone get new keys and values."""
        tokens, memory = x.tokens, self._checked(x.tokens, x.memory)
        kept, length = memory[0].shape[1], tokens.shape[1]
        new = min(last.injection.shape[1], kept)
        added = self._keys_and_values(*(part[:, kept - new :] for part in memory))
        keys, values = (
            torch.cat((old[:, :, old.shape[2] - (kept - new) :], more), dim=2)
            for old, more in zip((last.keys, last.values), added, strict=True)
        )
        positions = last.positions
        if positions.shape[1] < kept + length:
            positions = self._distance_keys(
                max(self.memory, kept) + length
            )  # for all tokens to come
        return self._context(self._embedded(tokens), memory, keys, values, positions)

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Word vectors (B, L, D); a single token, as when text is generated, costs its own cluster alone."""
        if torch.compiler.is_compiling() or tokens.numel() != 1:
            return self.words.embed(tokens)
        return self.words.embed_one(int(tokens)).view(1, 1, -1)

    def _context(
        self, embedded: Tensor, memory: Memory, keys: Tensor, values: Tensor, positions: Tensor
    ) -> SegmentContext:
        batch, _, width = embedded.shape
        if self.training and self.dropout:
            embedded = embedded * self._mask(batch, width, embedded)
        u = self.injection(embedded)
        masks: tuple[Tensor | None, Tensor | None] = (None, None)
        if self.training and self.dropout:
            masks = (self._mask(batch, width, u), self._mask(batch, self.inner, u))
        return SegmentContext(u, keys, values, positions, *masks, memory)

    def _keys_and_values(self, state: Tensor, injected: Tensor) -> tuple[Tensor, Tensor]:
        """Those (B, H, M, E) of remembered states (B, M, D), with what the input added to them (B, M, 2 D)."""
        batch, _, width = state.shape
        keys, values = (
            (F.linear(state, self.qkv.weight[width:]) + injected)
            .view(batch, -1, 2, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        return keys, values

    def _distance_keys(self, count: int) -> Tensor:
        """Keys (H, count, E) of the distances count - 1, ..., 0."""
        if self.known_keys is not None and count <= self.known_keys.shape[1]:
            return self.known_keys[:, self.known_keys.shape[1] - count :]
        like = self.content_bias
        encodings = sinusoids(count, self.width, device=like.device, dtype=like.dtype)
        keys = self.positions(encodings).view(-1, self.heads, self.width // self.heads)
        return keys.transpose(0, 1)

    @torch.no_grad()
    def tabulate(self, count: int) -> None:
        """Compute the keys of so many distances once for all; for a model whose weights never change again."""
        self.known_keys = self._distance_keys(count).contiguous()

    def _checked(self, tokens: Tensor, memory: Memory) -> Memory:
        """The memory of a segment, or none; refuses one of other texts or of another model."""
        if tokens.ndim != 2:
            raise ValueError(f"tokens must be of shape (B, L), not {tuple(tokens.shape)}")
        batch, width = tokens.shape[0], self.width
        if not memory:
            return self.no_memory(batch)
        given = [tuple(part.shape) for part in memory]
        kept = given[0][1] if len(given[0]) == 3 else 0
        if given != [(batch, kept, width), (batch, kept, 2 * width)]:
            raise ValueError(
                f"memory of shapes {given} is not of this model and {batch} texts: "
                f"expected ({batch}, M, {width}) and ({batch}, M, {2 * width}), as `remember` gives it"
            )
        return memory

    def no_memory(self, batch: int) -> Memory:
        """The memory at the beginning of a text: states (B, 0, D) and injections (B, 0, 2 D)."""
        like = self.content_bias
        return like.new_zeros(batch, 0, self.width), like.new_zeros(batch, 0, 2 * self.width)

    def _mask(self, batch: int, width: int, like: Tensor) -> Tensor:
        """Variational dropout: what is dropped is dropped for all tokens of a text (Gal & Ghahramani 2016)."""
        return F.dropout(like.new_ones(batch, 1, width), self.dropout)

    def start(self, context: SegmentContext) -> Tensor:
        return torch.zeros_like(context.injection[..., : self.width])

    def step(self, z: Tensor, context: SegmentContext) -> Tensor:
        width = self.width
        projected = self.qkv(z) + context.injection[..., : 3 * width]
        biases = self.content_bias, self.position_bias
        attended = self.out(segment_attention(projected, context, *biases))
        if context.attention_mask is not None:
            attended = attended * context.attention_mask
        if self.direct:
            attended = attended + context.injection[..., 3 * width :]
        y = F.layer_norm(torch.add(attended, z, alpha=self.keep), (width,))
        hidden = F.relu(self.expand(y))
        if context.inner_mask is not None:
            hidden = hidden * context.inner_mask
        return F.layer_norm(y + self.contract(hidden), (width,))

    def readout(self, z: Tensor, context: SegmentContext) -> Tensor:
        """Features of the next words, (B, L, D), for `words.nll` or `words.log_probabilities`."""
        return z

    def loss(self, features: Tensor, targets: Tensor) -> Tensor:
        """Mean negative log-likelihood of the targets (B, L) that are not negative."""
        return self.words.loss(features, targets)

    @torch.no_grad()
    def remember(self, z: Tensor, context: SegmentContext) -> Memory:
        """The last M states (B, M, D), and what the input added to their keys and values (B, M, 2 D)."""
        new = (z, context.injection[..., self.width : 3 * self.width])
        if not torch.compiler.is_compiling():
            from_old = max(context.memory[0].shape[1] + z.shape[1] - self.memory, 0)
            from_new = max(z.shape[1] - self.memory, 0)
            return tuple(
                torch.cat((old[:, from_old:], part[:, from_new:]), dim=1)
                for old, part in zip(context.memory, new, strict=True)
            )
        whole = [torch.cat(pair, dim=1) for pair in zip(context.memory, new, strict=True)]
        size = whole[0].shape[1]
        # Picked by index, not sliced: an exported model must not care whether there is more than it remembers.
        last = torch.arange(torch.sym_max(size - self.memory, 0), size, device=z.device)
        return tuple(part.detach().index_select(1, last) for part in whole)

    def start_network(self) -> nn.Module:
        """Attention over a first guess, which is a causal convolution over the injection."""
        return SegmentStart(self.width, self.heads)
