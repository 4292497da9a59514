"""Certifying an artifact that is there already, from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from t3c.artifact.card import write_card
from t3c.artifact.ledger import Certification
from t3c.certify.conformal import least_samples
from t3c.certify.drift import Measure
from t3c.certify.slices import sample_keys, split_unique
from t3c.errors import DataError
from t3c.evidence.certify import CertifyConfig, Slices, certify
from t3c.evidence.drifts import program_reference, session_reference
from t3c.evidence.original import NamelessError, beside, read_onnx
from t3c.progress import showing
from t3c.runtime.runtime import Runtime, load

SCALING = 1 / 4  # of the samples; the others score the bounds


def certify_artifact(
    path: str | Path,
    data: Any,
    original: str | Path,
    config: CertifyConfig | None = None,
    *,
    engine: str = "openvino",
    threads: int | None = None,
    labels: npt.NDArray[np.generic] | None = None,
    held_out: Any = None,
    own: Mapping[str, Measure] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Certification:
    """Certify an artifact on samples of one's own, and keep the certificates in its ledger.

    `data` are samples as a runtime takes them, `original` is the model in ONNX, `held_out` are
    samples to test the bounds on. `labels` (n,) put samples into slices; `own` are further measures
    of drift, by name. No sample may have set an activation range. How far it is is told on stderr
    unless `progress` is False.

    >>> certify_artifact("resnet.t3c", images, "resnet.onnx")  # doctest: +SKIP
    """
    config = config or CertifyConfig()
    model = read_onnx(Path(original))
    runtime = load(path, engine, threads)
    samples = runtime.check(data)
    test = None if held_out is None else runtime.check(held_out)
    scaling, scores = _split(samples, config.delta, seed)
    if labels is not None and labels.shape != (len(samples[0]),):
        raise DataError(f"{len(samples[0])} samples have labels of shape {labels.shape}")
    slices = Slices(
        [value[scaling] for value in samples],
        [value[scores] for value in samples],
        test,
        None if labels is None else labels[scores],
    )
    found, missing = None, ""
    try:
        found = beside(runtime.artifact, model)
        reference = program_reference(runtime.artifact, found)
    except NamelessError as differs:
        _check_inputs(runtime, model)
        reference, missing = session_reference(runtime.engine.compile(model)), str(differs)
    with showing(progress) as show:
        made = certify(
            runtime, reference, found, slices, config, own=own, missing=missing, watch=show.watch
        )
    runtime.artifact.add_certification(made)
    write_card(runtime.artifact)
    return made


def _split(
    samples: Sequence[npt.NDArray[Any]], delta: float, seed: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Indices of the samples that scale the bounds, and of those that score them."""
    keys = sample_keys(samples)
    needed = least_samples(delta)
    if len(keys) * (1 - SCALING) < needed:
        raise DataError(
            f"{len(keys)} samples are too few for delta={delta:g}: at least "
            f"{int(np.ceil(needed / (1 - SCALING)))} are needed"
        )
    share = int(len(keys) * SCALING) / len(keys)
    scaling, scores = split_unique(keys, (share, 1 - share), seed)
    return scaling, scores


def _check_inputs(runtime: Runtime, model: onnx.ModelProto) -> None:
    """A model that is known by its inputs alone has to take them by the same names in order."""
    weights = {i.name for i in model.graph.initializer}
    names = [value.name for value in model.graph.input if value.name not in weights]
    wanted = [entry.name for entry in runtime.inputs]
    if names != wanted:
        raise DataError(f"the original takes {', '.join(names)}, the artifact {', '.join(wanted)}")
