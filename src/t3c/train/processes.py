"""One run in several processes: each takes its rows of every batch, gradients are averaged.

All processes go through the same batches and draw the same profiles and noise, so that a run does
not depend on how many there are. Norms are frozen, so no sample sees another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from t3c.errors import DataError, MissingExtraError, TrainError
from t3c.nn.inputs import Inputs, select, tensors


class Processes:
    """The processes of a run, as Accelerate's launcher started them; one if nothing did."""

    def __init__(self) -> None:
        self.rank, self.count = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import PartialState
            except ImportError as missing:
                raise MissingExtraError("accelerate", "train") from missing
            state = PartialState(cpu=not torch.cuda.is_available())
            self.rank, self.count = state.process_index, state.num_processes

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and tells."""
        return self.rank == 0

    @property
    def rows(self) -> slice:
        """The rows of every batch that are this process's."""
        return slice(self.rank, None, self.count)

    def share(self, inputs: Inputs) -> tuple[Inputs, float]:
        """This process's rows of a batch, and what they weigh in the mean of all."""
        total = len(tensors(inputs)[0])
        if total < self.count:
            raise DataError(f"a part of {total} samples cannot be shared by {self.count} processes")
        mine = len(range(self.rank, total, self.count))
        return select(inputs, self.rows), mine * self.count / total

    def average_(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make every gradient the mean of all processes'."""
        if self.count == 1:
            return
        known = [p for p in parameters if p.requires_grad]
        # What no process used is to have no gradient: the optimizer would move it by one of zeros.
        used = self._mean(torch.tensor([float(p.grad is not None) for p in known]))
        known = [p for p, share in zip(known, used.tolist(), strict=True) if share]
        if not known:
            return
        for parameter in known:  # the same set everywhere, whatever each process used
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = self._mean(torch.cat([p.grad.flatten() for p in known if p.grad is not None]))
        at = 0
        for parameter in known:
            assert parameter.grad is not None
            size = parameter.numel()
            parameter.grad.copy_(flat[at : at + size].view_as(parameter))
            at += size

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """The means of figures over the processes."""
        if self.count == 1:
            return dict(values)
        flat = self._mean(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, flat.tolist(), strict=True))

    def check_same(self, what: bytes) -> None:
        """Refuse to go on if processes do not start from the same."""
        if self.count == 1:
            return
        digest = hashlib.sha256(what).digest()
        mine = torch.tensor(list(digest), dtype=torch.float64)
        if not torch.equal(self._mean(mine), mine):
            raise TrainError(
                "the processes do not start from the same weights, profiles and step: "
                "give them the same folder, data and versions"
            )

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def _mean(self, value: Tensor) -> Tensor:
        from accelerate import PartialState
        from accelerate.utils import reduce

        mean: Tensor = reduce(value.to(PartialState().device), reduction="mean")
        return mean.to(value.device)
