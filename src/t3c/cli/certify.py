"""`t3c certify`: how far an artifact's answers can be from the original's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from t3c.artifact.ledger import Certification
from t3c.artifact.reader import LEDGER, Artifact
from t3c.cli.console import (
    ArtifactArg,
    EngineOpt,
    JsonOpt,
    ThreadsOpt,
    need,
    out_console,
    print_json,
    say_kept,
)
from t3c.compression.kept import CALIBRATION, ORIGINAL, find_kept
from t3c.errors import DataError
from t3c.files import write_atomic
from t3c.report.terminal import cell
from t3c.runtime.reading import read_samples


def certify(
    artifact: ArtifactArg,
    data: Annotated[
        Path | None,
        typer.Option(help="An .npz of samples nothing was tuned on; default what compress kept"),
    ] = None,
    original: Annotated[
        Path | None, typer.Option(help="The original in ONNX; default what compress kept")
    ] = None,
    engine: EngineOpt = "openvino",
    threads: ThreadsOpt = None,
    delta: Annotated[float, typer.Option(help="The share of samples epsilon may miss")] = 0.05,
    measure: Annotated[
        list[str] | None, typer.Option(help="Further measures: absolute, kl, flip")
    ] = None,
    flip_cap: Annotated[
        float | None, typer.Option(help="Which profiles change at most this share of answers?")
    ] = None,
    slices: Annotated[
        str | None, typer.Option(help="An array in the data that puts samples into slices")
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="An .npz of other samples, to check the bounds on")
    ] = None,
    gain_samples: Annotated[int, typer.Option(min=1, help="Samples that estimates are from")] = 16,
    worst_case: Annotated[
        bool, typer.Option("--worst-case", help="Also a bound with no probability: takes long")
    ] = False,
    monitor: Annotated[
        bool, typer.Option("--monitor", help="Also model activations for a monitor")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="The picture to write; default certificates.svg inside")
    ] = None,
    as_json: JsonOpt = False,
) -> None:
    """Certify every profile on this engine: epsilon, first order, spectral.

    A quarter of the data scales the bounds, the rest makes them; none of it may have set an
    activation range. The ledger and the model card of the artifact are written anew.
    """
    need("torch", "train")
    from t3c.evidence.artifact import certify_artifact
    from t3c.evidence.certify import CertifyConfig
    from t3c.evidence.estimates import EstimateConfig
    from t3c.report.certificates import certificate_picture

    config = CertifyConfig(
        delta=delta,
        measures=tuple(dict.fromkeys(["absolute", *(measure or ())])),
        estimates=EstimateConfig(samples=gain_samples),
        worst_case=worst_case,
        monitor=monitor,
        flip_cap=flip_cap,
    )
    model = Artifact(artifact, verify=False).manifest.model
    certified = data or find_kept(artifact, CALIBRATION, "--data", beside=False)
    reference = original or find_kept(artifact, ORIGINAL, "--original")
    say_kept(artifact, certified, reference)
    samples, others = read_samples(certified, model)
    if slices is not None and slices not in others:
        held = ", ".join(others) or "no array beside the inputs"
        raise DataError(f"{certified}: no array {slices}: it holds {held}")
    found = certify_artifact(
        artifact, samples, reference, config,
        engine=engine, threads=threads, labels=others[slices] if slices else None,
        held_out=None if test is None else read_samples(test, model)[0],
    )  # fmt: skip
    picture = plot or artifact / "certificates.svg"
    write_atomic(picture, certificate_picture(found).encode())
    payload = found.model_dump(mode="json", exclude={"keys", "monitors", "forms"})
    payload |= {"ledger": str(artifact / LEDGER), "plot": str(picture)}
    if as_json:
        print_json(payload)
        return
    print_certification(found, payload)


def print_certification(found: Certification, payload: dict[str, Any]) -> None:
    console = out_console
    table = Table("profile", "mean", "p95", "epsilon", "first order", "spectral", "worst case")
    for c in found.entries:
        table.add_row(
            c.profile, f"{c.mean:.4f}", f"{c.p95:.4f}", f"{c.epsilon:.4f}",
            cell(c.first_order, ".4f"), cell(c.spectral, ".3g"), cell(c.worst_case, ".3g"),
        )  # fmt: skip
    console.print(table)
    console.print(
        f"drift ||z' - z|| / ||z|| on {found.engine}; epsilon holds for {1 - found.delta:.0%} of "
        f"new samples like the {found.entries[0].samples} it was made of, at all profiles at once"
    )
    for why in dict.fromkeys(c.unavailable for c in found.entries if c.unavailable):
        console.print(f"not available: {why}")
    for name in found.entries[0].measures:
        shown = ", ".join(
            f"{c.profile} {c.measures[name].mean:.3g} (bound {c.measures[name].epsilon:.3g})"
            for c in found.entries
        )
        console.print(f"{name}: {shown}")
    if found.capped is not None:
        kept = ", ".join(found.capped.profiles) or "no profile"
        console.print(
            f"at most {found.capped.cap:.1%} of answers change, at {1 - found.delta:.0%} "
            f"confidence: {kept}"
        )
    if found.held_out is not None:
        low, high = found.held_out.expected
        console.print(
            f"of {found.held_out.samples} other samples {found.held_out.coverage:.1%} are within "
            f"epsilon at all profiles ({low:.1%} to {high:.1%} expected)"
        )
    if found.slices:
        rows = Table("slice", "profile", "samples", "mean", "p95", "within epsilon", "flipped")
        for s in found.slices:
            within = f"{s.within:.1%} ({s.interval[0]:.0%} to {s.interval[1]:.0%})"
            rows.add_row(
                s.label, s.profile, str(s.samples), f"{s.mean:.4f}", f"{s.p95:.4f}", within,
                cell(s.flip_rate, ".1%"),
            )  # fmt: skip
        console.print(rows)
    console.print(f"{payload['ledger']}, {payload['plot']}", soft_wrap=True)
