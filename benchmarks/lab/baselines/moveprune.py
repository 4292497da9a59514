"""Movement pruning (Sanh, Wolf and Rush, arXiv 2005.07683), over the whole network."""

from __future__ import annotations

from torch import Tensor, nn

from lab.baselines.baseline import Baseline, Task
from lab.baselines.magprune import Masked, magnitudes, pruned

MOVED = 0.1  # in units of a layer's weights


def moveprune(task: Task, *, sparsity: float = 0.5, learning_rate: float = 1e-4) -> Baseline:
    """Remove the weights that training moves towards 0, then quantize to 8 bits.

    Scores start from magnitudes, not from 0: on little data, all that movement knows at first is
    noise, and a network that is trained already has its small weights for a reason. They learn at
    a rate that can carry them by `MOVED` before masks are fixed: movement decides between weights
    of about one size. At ten times that rate, minutes of training left 7% of ResNet-50's answers.
    """
    return pruned(task, "moveprune", sparsity, learning_rate, Scored)


class Scored(Masked):
    """A masked weight whose scores are trained as if they were its mask.

    A score's gradient is that of the masked weight times the weight: it rises while the weight
    moves away from 0, and those that are masked may come back.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        self.scores = nn.Parameter(magnitudes(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * (self.mask + (self.scores - self.scores.detach()))

    def scored(self, weight: Tensor) -> Tensor:
        return self.scores

    def faster(self, reach: float) -> dict[nn.Parameter, float]:
        return {self.scores: MOVED / reach}
