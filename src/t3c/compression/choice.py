"""Choices by measurement: the ways tried, the figure of each, the one taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Choice(BaseModel):
    """One choice by measurement: figures of every way that was tried, in `unit`, less is better."""

    model_config = ConfigDict(frozen=True)

    what: str
    tried: dict[str, float]
    unit: str
    taken: str
    why: str = ""

    def __str__(self) -> str:
        tried = ", ".join(f"{name} {value:.4g}" for name, value in self.tried.items())
        ending = f" ({self.why})" if self.why else ""
        return f"{self.what}: {tried} {self.unit}: {self.taken}{ending}"


def best(what: str, tried: Mapping[str, float], unit: str, why: str = "") -> Choice:
    """Return the choice of the way with the least figure; the first of those that are equal."""
    return Choice(what=what, tried=dict(tried), unit=unit, taken=min(tried, key=tried.__getitem__),
                  why=why)  # fmt: skip


def choices_of(result: Mapping[str, Any]) -> tuple[Choice, ...]:
    """Read the choices a finished stage has kept."""
    return tuple(Choice.model_validate(one) for one in result.get("choices", ()))
