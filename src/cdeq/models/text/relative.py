"""Attention by content and by distance (Dai et al. 2019, Transformer-XL, section 3.3).

Shapes: B texts, H heads, L tokens, K = M + L tokens with the memory before them, D width, E = D / H.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from cdeq.models.text.deq_transformer import SegmentContext


def sinusoids(length: int, width: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Encodings (K, D) of the distances K - 1, ..., 0: sines, then cosines (Vaswani et al. 2017)."""
    if width % 2:
        raise ValueError(f"encodings are pairs of sine and cosine: width must be even, not {width}")
    # In double precision: a phase of a thousand radians has few digits left in single.
    distances = torch.arange(length - 1, -1, -1, dtype=torch.float64, device=device)
    frequencies = 10_000.0 ** -(
        torch.arange(0, width, 2, dtype=torch.float64, device=device) / width
    )
    angles = torch.outer(distances, frequencies)
    return torch.cat((angles.sin(), angles.cos()), dim=-1).to(dtype)


def shifted(scores: Tensor) -> Tensor:
    """From scores (..., L, K) by distance K - 1, ..., 0 to scores by key, of which token i's own is M + i.

    Row i moves left by L - 1 - i; what enters on the right belongs to later tokens and has no meaning.
    """
    length, keys = scores.shape[-2:]
    return F.pad(scores, (1, 0)).flatten(-2)[..., length:].unflatten(-1, (length, keys))


def relative_attention(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """softmax(((q + b_c) k^T + (q + b_p) r^T) / sqrt(E)) v over the memory and the tokens up to each one.

    q (B, H, L, E); k, v (B, H, K, E); r (H, K, E), keys of the distances K - 1, ..., 0; biases (H, E).
    """
    length, keys, scale = q.shape[-2], k.shape[-2], q.shape[-1] ** -0.5
    by_distance = (q + position_bias[:, None]) @ r.transpose(-1, -2) * scale
    if length > 1:  # a single token is the last one: all keys are before it, by falling distance
        places = torch.arange(keys, device=q.device)
        later = places > places[keys - length :, None]
        by_distance = shifted(by_distance).masked_fill(later, -torch.inf)
    query = q + content_bias[:, None]
    if torch.is_grad_enabled() and any(
        t.requires_grad for t in (q, k, v, r, content_bias, position_bias)
    ):
        # Fused kernels have no second derivative on CPU, which a Jacobian penalty needs.
        scores = torch.add(by_distance, query @ k.transpose(-1, -2), alpha=scale)
        return scores.softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(query, k, v, attn_mask=by_distance)


def segment_attention(
    projected: Tensor, context: SegmentContext, content_bias: Tensor, position_bias: Tensor
) -> Tensor:
    """Relative attention (B, L, D) of a segment over its memory and itself; `projected` (B, L, 3 D) are q, k and v.

    Keys and values of the memory, and keys of distances, are the context's.
    """
    (batch, length, _), (heads, size) = projected.shape, content_bias.shape
    q, k, v = projected.view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
    keys = torch.cat((context.keys, k), dim=2)
    attended = relative_attention(
        q,
        keys,
        torch.cat((context.values, v), dim=2),
        context.positions[:, -keys.shape[2] :],
        content_bias,
        position_bias,
    )
    return attended.transpose(1, 2).reshape(batch, length, heads * size)
