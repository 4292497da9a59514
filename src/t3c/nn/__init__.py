"""Elastic modules: layers that run at any point of their rank and bits."""

from t3c.nn.layers import ElasticConv2d, ElasticLayer, ElasticLinear
from t3c.nn.view import at, dense_copy, elastic_layers

__all__ = ["ElasticConv2d", "ElasticLayer", "ElasticLinear", "at", "dense_copy", "elastic_layers"]
