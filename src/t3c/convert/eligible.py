"""Say which layers cannot become elastic, and why."""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from t3c.convert.config import ElasticConfig
from t3c.errors import ConvertError
from t3c.nn.layers import elastic_type, geometry, same_padding
from t3c.nn.observe import Observed


def check_weight(name: str, module: nn.Module) -> None:
    """Raise for a weight that no plan can be made for."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_quantized or not weight.is_floating_point():
        raise ConvertError(f"layer {name!r}: its weight is quantized ({weight.dtype})")
    if weight.numel() == 0:
        raise ConvertError(f"layer {name!r}: its weight is empty, of shape {tuple(weight.shape)}")
    if weight.dtype != torch.float32:
        raise ConvertError(
            f"layer {name!r}: its weight is {weight.dtype}: call model.float() first"
        )
    if not weight.is_meta and not bool(torch.isfinite(weight).all()):
        raise ConvertError(f"layer {name!r}: its weight holds NaN or infinite values")


def check_patterns(config: ElasticConfig, names: list[str]) -> None:
    """Raise for a pattern that matches none of the layers."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    for pattern in (*config.include, *config.exclude):
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise ConvertError(f"pattern {pattern!r} matches no layer: layers are {shown}")


def reason_to_skip(modules: dict[str, nn.Module], observed: Observed, config: ElasticConfig) -> str:
    """Return why the weight these modules share stays as it is; empty if it does not."""
    weight = next(iter(modules.values())).weight
    assert isinstance(weight, Tensor)
    for name, module in modules.items():
        if not any(fnmatchcase(name, pattern) for pattern in config.include):
            return "not included"
        if any(fnmatchcase(name, pattern) for pattern in config.exclude):
            return "excluded"
        own = set(module._parameters)
        if "weight" not in own or ("bias" not in own and getattr(module, "bias", None) is not None):
            return "its weight or bias is computed from others"
        if own - {"weight", "bias"} or any(True for _ in module.children()):
            return f"{type(module).__name__} has more than a weight and a bias"
        if module._forward_hooks or module._forward_pre_hooks:
            return "it has hooks of its own"
        reason = _unusual(module)
        if reason:
            return reason
    if not any(observed.runs(name) for name in modules):
        return "the example does not reach it"
    if weight.numel() < config.min_weights:
        return f"{weight.numel()} weights are fewer than min_weights={config.min_weights}"
    shapes = {str({**geometry(module)}) for module in modules.values()}
    kinds = {elastic_type(module) for module in modules.values()}
    if len(shapes) > 1 or (len(kinds) > 1 and kinds != {elastic_type(m) for m in _TIED}):
        return f"its weight is shared by layers of different kinds: {', '.join(modules)}"
    return ""


_TIED = (nn.Linear(1, 1, device="meta"), nn.Embedding(1, 1, device="meta"))


def _unusual(module: nn.Module) -> str:
    """Return what a layer does beside its weight's own map."""
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return f"max_norm={module.max_norm:g}"
    if isinstance(module, nn.Conv1d | nn.Conv2d):
        if module.padding_mode != "zeros":
            return f"padding_mode={module.padding_mode!r}"
        if not same_padding(module):
            return f"padding={module.padding!r} of an even kernel"
    return ""
