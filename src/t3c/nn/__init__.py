"""Elastic modules: layers that run at any point of their rank and bits."""

from t3c.nn.layers import (
    ElasticConv1d,
    ElasticConv2d,
    ElasticEmbedding,
    ElasticLayer,
    ElasticLinear,
)
from t3c.nn.view import at, dense_copy, elastic_layers, elastic_weights, sort_
from t3c.nn.weight import ElasticWeight, Relaxation

__all__ = [
    "ElasticConv1d",
    "ElasticConv2d",
    "ElasticEmbedding",
    "ElasticLayer",
    "ElasticLinear",
    "ElasticWeight",
    "Relaxation",
    "at",
    "dense_copy",
    "elastic_layers",
    "elastic_weights",
    "sort_",
]
