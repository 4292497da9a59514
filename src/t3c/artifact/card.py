"""README.md of an artifact: the model card."""

from __future__ import annotations

from t3c.artifact.folder import write_atomic
from t3c.artifact.reader import Artifact


def write_card(artifact: Artifact) -> None:
    """Write what the artifact is, what it costs and what it guarantees."""
    write_atomic(artifact.path / "README.md", render_card(artifact).encode())


def render_card(artifact: Artifact) -> str:
    """The model card in Markdown."""
    manifest, ledger = artifact.manifest, artifact.ledger()
    model = manifest.model
    lines = [
        f"# {model.name}",
        "",
        (
            f"A T3C artifact of {model.parameters:,} parameters in {len(manifest.layers)} elastic "
            f"layers; {len(manifest.profiles)} profiles in {artifact.size_on_disk() / 1e6:.2f} MB."
        ),
        "",
        *(f"- input `{t.name}`: {t.dtype} {_shape(t.shape)}" for t in model.inputs),
        *(f"- output `{t.name}`: {t.dtype} {_shape(t.shape)}" for t in model.outputs),
        "",
        "| profile | size (MB) | " + " | ".join(_device_titles(artifact)) + " |",
        "|---|---|" + "---|" * len(_device_titles(artifact)),
    ]
    tables = artifact.devices()
    for profile in manifest.profiles:
        times = [t.profiles.get(profile.name) for t in tables]
        cells = ["-" if time is None else f"{time.p50:.3f}" for time in times]
        lines.append(f"| {profile.name} | {profile.size_bytes / 1e6:.3f} | {' | '.join(cells)} |")
    if ledger is not None:
        lines += [
            "",
            "## Drift from the original, relative to the norm of its output",
            "",
            "| profile | engine | mean | first order | epsilon | delta | samples |",
            "|---|---|---|---|---|---|---|",
            *(
                f"| {c.profile} | {c.engine} | {c.mean:.4f} | {c.first_order:.4f} "
                f"| {c.epsilon:.4f} | {c.delta:g} | {c.samples} |"
                for c in ledger.entries
            ),
            "",
            f"`epsilon` assumes: {ledger.assumption}.",
        ]
    return "\n".join([*lines, ""])


def _device_titles(artifact: Artifact) -> list[str]:
    return [f"p50 ms ({t.device.engine}, {t.device.threads} threads)" for t in artifact.devices()]


def _shape(shape: tuple[int | None, ...]) -> str:
    return "(" + ", ".join("batch" if size is None else str(size) for size in shape) + ")"
