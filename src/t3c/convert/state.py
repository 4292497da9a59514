"""What an elastic model remembers of how it was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from t3c.convert.plan import ConversionPlan
from t3c.errors import ConvertError
from t3c.nn.inputs import Inputs

STATE = "_t3c_state"


@dataclass(frozen=True)
class ElasticState:
    """The original, frozen, and the plan the model was converted by; copies of a model share it."""

    original: nn.Module
    plan: ConversionPlan
    example: Inputs = field(repr=False)

    def __deepcopy__(self, memo: object) -> ElasticState:
        return self


def state_of(model: nn.Module) -> ElasticState:
    """The state `elasticize_` left on the model."""
    state = model.__dict__.get(STATE)
    if not isinstance(state, ElasticState):
        raise ConvertError("the model is not elastic: call t3c.elasticize_(model, example) first")
    return state
