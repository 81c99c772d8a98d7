"""A model written on torchdeq, trained the usual way, distilled, compared, certified and saved."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchdeq import get_deq
from torchdeq.norm import apply_norm, reset_norm

import cdeq


class Digits(nn.Module):
    """z = tanh(W z + U x), read out linearly; nothing in it knows of cdeq."""

    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, 10)
        self.deq = get_deq(f_solver="anderson", f_max_iter=30, f_tol=1e-4)
        apply_norm(self.layer, "spectral_norm", args={"norm_clip": True, "norm_clip_value": 0.95})

    def forward(self, x):
        reset_norm(self)
        injected = self.embed(x)

        def step(z):
            return torch.tanh(self.layer(z) + injected)

        z, _ = self.deq(step, torch.zeros_like(injected))
        return self.head(z[-1])


digits = load_digits()
pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target).long()
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1408], order[1408:]
batches = [(pixels[rows], labels[rows]) for rows in train.split(64)]
x, y = pixels[test], labels[test]

torch.manual_seed(0)
model = Digits()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for _ in range(6):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.eval()

teacher = cdeq.from_torchdeq(model)
student = cdeq.distill(teacher, batches, fit=cdeq.FitConfig(updates=100))


def accuracy(logits):
    return float((logits.argmax(dim=-1) == y).float().mean())


with torch.no_grad():
    context = teacher.inject(x)
    converged = cdeq.solve_model(teacher, context, cdeq.Anderson(), tol=1e-5, max_steps=100)
    star = converged.state
    print(f"torchdeq: {accuracy(model(x)):.1%}; {converged.steps.float().mean():.1f} steps to 1e-5")
    print("steps   student, distance   Anderson, distance")
    rows = []
    for steps in (1, 2, 3, 5):
        ours = student.trajectory(x, steps)[-1]
        plain = cdeq.solve_model(teacher, context, cdeq.Anderson(), tol=0.0, max_steps=steps).state
        row = [steps]
        for z in (ours, plain):
            row += [accuracy(teacher.readout(z, context)), float((z - star).norm() / star.norm())]
        rows.append(row)
        print(f"{row[0]:5d}   {row[1]:7.1%}  {row[2]:8.4f}   {row[3]:8.1%}  {row[4]:8.4f}")

result = student.solve(x, tol=1e-3, measure="residual")
with torch.no_grad():
    cold = cdeq.solve_model(teacher, context, cdeq.Anderson(), tol=1e-3)
spent, alone = result.steps.float().mean(), cold.steps.float().mean()
print(f"certified: {accuracy(result.output):.1%}, {spent:.1f} steps; Anderson alone: {alone:.1f}")
print(f"largest residual {float(result.residual.max()):.1e}, all within: {result.converged.all()}")

student.save("digits-student")
again = cdeq.Student.load("digits-student", teacher=cdeq.from_torchdeq(Digits().eval()))
assert torch.equal(again(x, steps=2), student(x, steps=2))
