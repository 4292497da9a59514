"""README.md of an artifact: the model card."""

from __future__ import annotations

from t3c.artifact.ledger import Certification, Ledger
from t3c.artifact.reader import Artifact
from t3c.files import write_atomic

MOST_LAYERS = 5


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
    lines += _quality(ledger) if ledger and ledger.quality else []
    for certification in ledger.certifications if ledger else ():
        lines += _certificates(certification)
    return "\n".join([*lines, ""])


def _quality(ledger: Ledger) -> list[str]:
    """How good the profiles were on samples that placed none of them."""
    samples = dict.fromkeys((row.samples, row.data[:12]) for row in ledger.quality)
    of = "; ".join(f"{count} samples, data `{data}`" for count, data in samples)
    return [
        "",
        "## Quality beside the original",
        "",
        "| profile | engine | metric | value | original | drop | 95% interval |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.profile} | {row.engine} | {row.metric} | {row.value:.4g} "
            f"| {row.original:.4g} | {row.drop:.4f} | {row.ci95[0]:.4f} to {row.ci95[1]:.4f} |"
            for row in ledger.quality
        ),
        "",
        (
            f"Of {of}, the same for profile and original; `drop` is a share of samples, of "
            "perplexity its growth."
        ),
    ]


def _certificates(found: Certification) -> list[str]:
    """The figures of one engine, what they rest on, and the layers that matter most."""
    count = found.entries[0].samples
    lines = [
        "",
        f"## Drift from the original on {found.engine} {found.engine_version}",
        "",
        "Relative to the norm of the original's output.",
        "",
        "| profile | mean | 95th percentile | epsilon | first order | spectral | worst case |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {c.profile} | {c.mean:.4f} | {c.p95:.4f} | {c.epsilon:.4f} "
            f"| {_cell(c.first_order)} | {_cell(c.spectral)} | {_cell(c.worst_case)} |"
            for c in found.entries
        ),
        "",
        (
            f"`epsilon` holds for {1 - found.delta:.0%} of new samples (delta {found.delta:g}), "
            f"made of {count} samples, data `{found.data[:12]}`, and assumes: {found.assumption}. "
            "`first order` and `spectral` are estimates, `worst case` is a bound for every input "
            "it was evaluated at."
        ),
    ]
    for why in dict.fromkeys(c.unavailable for c in found.entries if c.unavailable):
        lines += ["", f"Not available: {why}."]
    if found.entries[0].measures:
        lines += ["", *_measures(found)]
    if found.held_out is not None:
        seen = found.held_out
        lines += [
            "",
            (
                f"On {seen.samples} samples that no step had seen, {seen.coverage:.1%} were within "
                f"epsilon at all profiles at once ({seen.expected[0]:.1%} to "
                f"{seen.expected[1]:.1%} expected)."
            ),
        ]
    if found.layers:
        lines += ["", *_layers(found)]
    if found.slices:
        lines += ["", *_slices(found)]
    return lines


def _measures(found: Certification) -> list[str]:
    names = list(found.entries[0].measures)
    titles = "".join(f" {name} mean | {name} bound |" for name in names)
    return [
        f"| profile |{titles}",
        "|---|" + "---|---|" * len(names),
        *(
            f"| {c.profile} |"
            + "".join(f" {c.measures[n].mean:.4g} | {c.measures[n].epsilon:.4g} |" for n in names)
            for c in found.entries
        ),
    ]


def _layers(found: Certification) -> list[str]:
    name = found.entries[0].profile
    terms = sorted(found.layers[name], key=lambda term: -term.first_order)[:MOST_LAYERS]
    return [
        f"The layers that move `{name}` most:",
        "",
        "| layer | gain | residual | input rms | first order | spectral |",
        "|---|---|---|---|---|---|",
        *(
            f"| {t.layer} | {t.gain:.3g} | {t.residual:.3g} | {t.rms:.3g} | {t.first_order:.4f} "
            f"| {t.spectral:.3g} |"
            for t in terms
        ),
    ]


def _slices(found: Certification) -> list[str]:
    return [
        "| slice | profile | samples | mean | 95th percentile | within epsilon | answers flipped |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {s.label} | {s.profile} | {s.samples} | {s.mean:.4f} | {s.p95:.4f} "
            f"| {s.within:.1%} ({s.interval[0]:.0%} to {s.interval[1]:.0%}) "
            f"| {_share(s.flip_rate)} |"
            for s in found.slices
        ),
    ]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _device_titles(artifact: Artifact) -> list[str]:
    return [f"p50 ms ({t.device.engine}, {t.device.threads} threads)" for t in artifact.devices()]


def _shape(shape: tuple[int | str | None, ...]) -> str:
    return "(" + ", ".join("batch" if size is None else str(size) for size in shape) + ")"
