"""Any torch module as one artifact: `python examples/module.py OUT.t3c`.

From the shell: `t3c compress examples/module.py:network --data DATA.npz`, with arrays x and y.
"""

import sys

import numpy as np
import torch
from torch import nn

import t3c


def network() -> tuple[nn.Module, torch.Tensor]:
    """Your module, trained and in evaluation mode, and an example of its inputs."""
    torch.manual_seed(0)
    layers = nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)
    return nn.Sequential(*layers).eval(), torch.randn(2, 32)


def main(out: str, minutes: float = 5) -> None:
    model, example = network()
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(1))  # yours
    with torch.no_grad():
        y = model(x).argmax(dim=1)  # classes, if you know them; without them leave y out
    made = t3c.compress(model, [(x, y)], out, example=example, minutes=minutes)
    print(made)

    rt = t3c.load(out)  # from here on torch is not needed
    one = np.zeros((1, 32), dtype=np.float32)
    for budget in (t3c.Budget(), t3c.Budget(size_mb=0.1), t3c.Budget(drift=0.5)):
        logits = rt(one, budget=budget)
        print(f"{budget}: {rt.profile} answers {logits.argmax()}")


if __name__ == "__main__":
    main(sys.argv[1])
