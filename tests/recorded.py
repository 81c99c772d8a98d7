"""A teacher that shows how it is recorded: its calls, its modes, states of one tensor or two."""

import torch
from torch import nn

from teachers import Plain

D = 5


class Affine(Plain):
    """f(z, x) = tanh(z W) + x, a contraction; dropout shows whether it is in evaluation mode."""

    def __init__(self, batched=True, scale=0.4, seed=0):
        super().__init__()
        self.batched = batched
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(D, D, generator=generator) * scale / D**0.5)
        self.dropout = nn.Dropout(0.5)
        self.calls = 0

    def inject(self, x):
        while not isinstance(x, torch.Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else x[0]
        return x

    def step(self, z, context):
        self.calls += 1
        return self.dropout(torch.tanh(z @ self.weight) + context)


class Pair(Affine):
    """A state of two tensors of different shapes."""

    def start(self, context):
        return torch.zeros_like(context), context.new_zeros(*context.shape[:-1], 2)

    def step(self, z, context):
        a, b = z
        return super().step(a, context) + 0.1 * b.sum(-1, keepdim=True), 0.5 * b + a[..., :2]


def batches(count=5, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, D, generator=generator), torch.randint(9, (size,), generator=generator))
        for _ in range(count)
    ]
