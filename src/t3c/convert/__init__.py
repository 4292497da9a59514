"""Any nn.Module to an elastic one: plan, apply, report."""

from t3c.convert.apply import elasticize_
from t3c.convert.config import ElasticConfig
from t3c.convert.plan import ConversionPlan, LayerPlan, Params, plan_conversion
from t3c.convert.report import Report
from t3c.convert.settle import settle_
from t3c.convert.smooth import smooth_
from t3c.convert.state import ElasticState, state_of
from t3c.convert.unit import Unit, units

__all__ = [
    "ConversionPlan",
    "ElasticConfig",
    "ElasticState",
    "LayerPlan",
    "Params",
    "Report",
    "Unit",
    "elasticize_",
    "plan_conversion",
    "settle_",
    "smooth_",
    "state_of",
    "units",
]
