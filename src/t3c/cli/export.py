"""`t3c export`: a part of an artifact, or one of its profiles as a file for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.cli.console import ArtifactArg, JsonOpt, out_console, print_json
from t3c.errors import SpecError


def export(
    artifact: ArtifactArg,
    profiles: Annotated[
        str | None, typer.Option(help="Keep these, by commas, and the bytes they need")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The folder to write; default beside the artifact")
    ] = None,
    onnx: Annotated[
        Path | None, typer.Option(help="Write one profile as an ONNX QDQ file for TensorRT")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="Which one, with --onnx")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Write an artifact with some of its profiles alone, or one profile for TensorRT."""
    if (profiles is None) == (onnx is None):
        raise SpecError("say what to export: --profiles tiny,med or --onnx FILE --profile med")
    if (onnx is None) != (profile is None):
        raise SpecError("--onnx FILE and --profile NAME go together")
    opened = Artifact(artifact)
    payload: dict[str, Any]
    if onnx is not None and profile is not None:
        from t3c.graph.tensorrt import write_tensorrt

        write_tensorrt(opened, opened.manifest.chain[profile], onnx)
        payload = {"file": str(onnx), "profile": profile, "bytes": onnx.stat().st_size}
        said = f"{onnx}: {profile} for TensorRT, {payload['bytes'] / 1e6:.3f} MB"
    else:
        names = [name.strip() for name in (profiles or "").split(",") if name.strip()]
        path = out or artifact.with_name(f"{artifact.stem}-{'-'.join(names)}.t3c")
        part = trim(opened, names, path)
        before, after = (one.content_bytes() for one in (opened, part))
        kept = [entry.name for entry in part.manifest.profiles]
        payload = {
            "artifact": str(path), "profiles": kept, "bytes": after, "bytes_before": before,
        }  # fmt: skip
        said = f"{path}: {', '.join(kept)}, {after / 1e6:.3f} MB of {before / 1e6:.3f}"
    if as_json:
        print_json(payload)
    else:
        out_console.print(said, soft_wrap=True)
