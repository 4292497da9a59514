"""Any nn.Module to an elastic one: plan, apply, report."""

from t3c.convert.apply import elasticize_
from t3c.convert.config import ElasticConfig
from t3c.convert.layer import LayerPlan
from t3c.convert.plan import ConversionPlan, Params, plan_conversion
from t3c.convert.report import Report
from t3c.convert.settle import settle_
from t3c.convert.smooth import smooth_
from t3c.convert.state import ElasticState, state_of
from t3c.convert.unit import Unit, units
from t3c.convert.width import Units, order_units_

__all__ = [
    "ConversionPlan",
    "ElasticConfig",
    "ElasticState",
    "LayerPlan",
    "Params",
    "Report",
    "Unit",
    "Units",
    "elasticize_",
    "order_units_",
    "plan_conversion",
    "settle_",
    "smooth_",
    "state_of",
    "units",
]
