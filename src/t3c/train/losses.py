"""The task losses of the full view, by name: what a model's outputs are worth against labels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from t3c.errors import DataError, SpecError

IGNORED = -100  # the label of a token that is not to be predicted

Loss = Callable[[Tensor, Tensor], Tensor]


def classification(logits: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits (n, classes) against classes (n,) or shares (n, classes)."""
    _check_smoothing(smoothing)
    if logits.dim() != 2 or logits.shape[0] == 0:
        raise DataError(f"classification takes logits (n, classes), got {tuple(logits.shape)}")
    if target.shape not in (logits.shape[:1], logits.shape):
        n, classes = logits.shape
        raise DataError(
            f"logits ({n}, {classes}) need targets ({n},) or ({n}, {classes}), "
            f"got {tuple(target.shape)}"
        )
    hard = target.dim() == 1
    target = _checked_classes(target, logits.shape[1]) if hard else target.to(logits.dtype)
    return F.cross_entropy(logits, target, label_smoothing=smoothing)


def language_modelling(logits: Tensor, tokens: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy of logits (n, t, vocabulary) at each token against the next of (n, t).

    Tokens of -100 are not predicted; where none is left the loss is 0, with a gradient of 0.
    """
    _check_smoothing(smoothing)
    if logits.dim() != 3 or logits.shape[:2] != tokens.shape:
        raise DataError(
            f"language modelling takes logits (n, t, vocabulary) and tokens (n, t), "
            f"got {tuple(logits.shape)} and {tuple(tokens.shape)}"
        )
    wanted = _checked_classes(tokens[:, 1:].flatten(), logits.shape[2], ignored=True)
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        wanted,
        ignore_index=IGNORED,
        label_smoothing=smoothing,
        reduction="sum",
    )
    return total / wanted.ne(IGNORED).sum().clamp_min(1)


def regression(outputs: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean squared error of outputs and targets of one shape; outputs (n, 1) fit targets (n,)."""
    if smoothing:
        raise SpecError(f"regression has no classes to smooth, got smoothing {smoothing:g}")
    if outputs.shape == (*target.shape, 1):
        outputs = outputs[..., 0]
    if outputs.shape != target.shape or outputs.numel() == 0:
        raise DataError(
            f"regression takes outputs and targets of one shape, "
            f"got {tuple(outputs.shape)} and {tuple(target.shape)}"
        )
    return F.mse_loss(outputs, target.to(outputs.dtype))


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "classification": classification,
    "sequence_classification": classification,
    "language_modelling": language_modelling,
    "regression": regression,
}


def loss_of(name: str, smoothing: float = 0.0) -> Loss:
    """The loss of that name, (outputs, target) -> scalar, with its labels smoothed."""
    if name not in LOSSES:
        raise SpecError(f"a loss is one of {', '.join(LOSSES)}, got {name!r}")
    _check_smoothing(smoothing)
    function = LOSSES[name]
    return lambda outputs, target: function(outputs, target, smoothing)


def _checked_classes(target: Tensor, classes: int, *, ignored: bool = False) -> Tensor:
    """Classes (n,) as int64, each within 0..classes - 1, or -100 where that is allowed."""
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise DataError(f"labels of classes are integers, got {target.dtype}")
    target = target.long()
    outside = (target < 0) | (target >= classes)
    if ignored:
        outside &= target != IGNORED
    if bool(outside.any()):
        got = int(target[outside][0])
        raise DataError(f"the model's classes are 0 to {classes - 1}, got the label {got}")
    return target


def _check_smoothing(smoothing: float) -> None:
    if not 0 <= smoothing < 1:
        raise SpecError(f"smoothing must be in [0, 1), got {smoothing:g}")
