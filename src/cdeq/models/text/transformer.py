"""A causal transformer block as an equilibrium model.

Shapes: B texts, L tokens, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cdeq.models.arguments import arguments_of
from cdeq.models.text.windows import causal_windows, gelu


class TransformerDEQ(nn.Module):
    """y = LN(keep z + r + O attention(W z + u)), f = LN(y + W2 relu(W1 y)), after DEQ-Transformer.

    The injection (u, r) = Linear(embedding) is added to the queries, keys and values, and to the
    residual stream. Layer norms have no weights. Positions are relative (rotary), for at most
    `length` tokens. `keep` is the weight of z in the residual sum: 1 is DEQ-Transformer's, below 1
    damps the map. `gain` scales the block's weights at the start of training.
    """

    batched = True
    causal = True
    cosines: Tensor
    sines: Tensor

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int = 96,
        heads: int = 4,
        inner: int = 192,
        length: int = 64,
        keep: float = 0.5,
        gain: float = 1.0,
        tied: bool = False,
    ):
        super().__init__()
        self.config = arguments_of(locals())
        if width % (2 * heads):
            raise ValueError(f"width must be a multiple of 2 * heads = {2 * heads}, not {width}")
        self.width, self.heads, self.keep = width, heads, keep
        self.embedding = nn.Embedding(vocabulary, width)
        self.injection = nn.Linear(width, 4 * width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.expand = nn.Linear(width, inner)
        self.contract = nn.Linear(inner, width)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight
        cosines, sines = rotary_table(length, width // heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        nn.init.normal_(self.embedding.weight, std=width**-0.5 if tied else 1.0)
        with torch.no_grad():
            for layer in (self.qkv, self.out, self.contract):
                layer.weight.mul_(gain)

    def inject(self, x: Tensor) -> Tensor:
        """Tokens (B, L) to (B, L, 4 D)."""
        embedded = self.embedding(x)
        if self.config["tied"]:
            embedded = embedded * self.width**0.5
        return self.injection(embedded)

    def start(self, context: Tensor) -> Tensor:
        return torch.zeros_like(context[..., : self.width])

    def step(self, z: Tensor, context: Tensor) -> Tensor:
        batch, length, width = z.shape
        u, residual = context.split((3 * width, width), dim=-1)
        qkv = (self.qkv(z) + u).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, L, D / H)
        q, k = self._rotate(q), self._rotate(k)
        attended = causal_attention(q, k, v)
        attended = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        y = F.layer_norm(torch.add(residual + attended, z, alpha=self.keep), (width,))
        return F.layer_norm(y + self.contract(F.relu(self.expand(y))), (width,))

    def readout(self, z: Tensor, context: Tensor) -> Tensor:
        """Logits of the next token, (B, L, V)."""
        return self.head(z)

    def start_network(self) -> nn.Module:
        """A causal convolution over the injection into the residual stream."""
        return CausalConvStart(self.width)

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return x * self.cosines[:length] + swapped * self.sines[:length]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(dim)) v over the tokens up to each one; all (B, H, L, dim).

    Fused kernels are faster, but on CPU they have no second derivative, which a Jacobian penalty
    needs. So they serve wherever no gradient is asked for: in solvers and at inference.
    """
    if not (torch.is_grad_enabled() and q.requires_grad):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    length = q.shape[-2]
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    return scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ v


def rotary_table(length: int, dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines (L, dim) of rotary position embeddings (Su et al. 2021, equation 34)."""
    frequencies = base ** -(torch.arange(0, dim, 2) / dim)
    angles = torch.outer(torch.arange(length), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


class CausalConvStart(nn.Module):
    """s(u) = W gelu(conv(u)), over the injection u into the residual stream of a token and the `kernel` - 1 before it.

    At kernel 3 half the multiplications of a step without its attention. Zero before training.
    """

    def __init__(self, width: int, kernel: int = 3):
        super().__init__()
        self.width, self.kernel = width, kernel
        self.mix = nn.Linear(kernel * width, width)
        self.out = nn.Linear(width, width)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def output_layers(self) -> list[list[nn.Module]]:
        """The linear layers at the end, for the one tensor of the state."""
        return [[self.out]]

    def forward(self, context: Tensor) -> Tensor:
        return self.out(gelu(self.mix(causal_windows(context[..., -self.width :], self.kernel))))
