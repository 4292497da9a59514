"""The report: what the artifact costs, how far it drifts, what its layers are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from importlib import resources

from t3c.artifact.reader import Artifact
from t3c.cost.work import stored_bytes
from t3c.evidence.bench import Result, Variant
from t3c.report.chart import Axis, Point, Series, chart, legend
from t3c.report.terminal import cell

STYLE = "\n" + (resources.files("t3c.report") / "page.css").read_text()


def render_report(result: Result, artifact: Artifact, choices: Sequence[str] = ()) -> str:
    """Render one self-contained HTML page; `choices` are sentences on what was measured."""
    model, device = artifact.manifest.model, result.device
    test = max(v.samples for v in result.variants)
    figures = [
        _quality_figure(result, "latency, p50 in ms (bar: 95% interval)", _speed_point),
        _quality_figure(result, "size, MB", _size_point),
        _drift_figure(result),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(model.name)} · T3C report</title><style>{STYLE}</style></head><body>",
            f"<h1>{escape(model.name)}</h1>",
            (
                f'<p class="soft">One artifact of {artifact.size_on_disk() / 1e6:.2f} MB, '
                f"{len(artifact.manifest.profiles)} profiles. Measured at batch 1 on "
                f"{escape(device.cpu)}, {escape(device.engine)} {escape(device.engine_version)}, "
                f"{device.threads} threads, all variants in turns in one process; quality and "
                f"drift on {test} test samples.</p>"
            ),
            f'<div class="charts">{"".join(figures)}</div>',
            "<h2>Variants</h2>",
            _variant_table(result),
            _choice_list(choices),
            "<h2>Layers: rank and bits per profile</h2>",
            (
                '<p class="soft">Rank, then bits; the shade is the share of the layer\'s full '
                "size that the profile needs. “dense” is full rank.</p>"
            ),
            _layer_table(artifact),
            "</body></html>",
        ]
    )


def _quality_figure(result: Result, against: str, point: Callable[[Variant], Point]) -> str:
    """Draw quality over what `point` says of a variant, as `against` calls it with its unit."""
    ours = [v for v in result.variants if v.name.startswith("t3c-")]
    others = [v for v in result.variants if v not in ours]
    rated = [v for v in result.variants if v.quality is not None]
    if not rated:
        return ""
    series = [
        Series("T3C profiles", "t3c", [point(v) for v in ours], line=True),
        *(
            Series(
                v.name, "full" if v.name == "full" else "other", [point(v)],
                shape="diamond" if v.name == "full" else "square",
            )
            for v in others
        ),
    ]  # fmt: skip
    x = Axis.around(against, [point(v).x for v in rated], 0.0)
    metric = str(rated[0].metric)
    y = Axis.around(metric, [v.quality for v in rated if v.quality is not None])
    title = f"{metric.capitalize()} against {against.partition(',')[0]}"
    return _figure(title, chart(title, x, y, series), series)


def _speed_point(variant: Variant) -> Point:
    times = variant.latency_ms
    assert variant.quality is not None
    return Point(times.p50, variant.quality, _short(variant), times.ci95)


def _size_point(variant: Variant) -> Point:
    assert variant.quality is not None
    return Point(variant.size_bytes / 1e6, variant.quality, _short(variant))


def _short(variant: Variant) -> str:
    return variant.name.removeprefix("t3c-")


def _drift_figure(result: Result) -> str:
    ours = [v for v in result.variants if v.drift.epsilon is not None]
    if not ours:
        return ""
    kinds = (
        ("epsilon: the guarantee", "bound", "diamond", [v.drift.epsilon for v in ours]),
        ("first order: the estimate", "estimate", "square", [v.drift.first_order for v in ours]),
        ("observed mean", "t3c", "circle", [v.drift.mean for v in ours]),
    )
    series = [
        Series(
            name, style, [Point(i, v) for i, v in enumerate(values) if v is not None], True, shape
        )
        for name, style, shape, values in kinds
    ]
    values = [p.y for s in series for p in s.points]
    names = [(i, _short(v)) for i, v in enumerate(ours)]
    x = Axis("profile", -0.4, len(ours) - 0.6, names)
    y = Axis.around("drift relative to the output", values, 0.0)
    return _figure(
        "Drift against certificate", chart("Drift against certificate", x, y, series), series
    )


def _figure(caption: str, drawing: str, series: list[Series]) -> str:
    return f"<figure><figcaption>{caption}</figcaption>{drawing}{legend(series)}</figure>"


def _variant_table(result: Result) -> str:
    base = next((v for v in result.variants if v.name.startswith("ptq8")), result.variants[0])
    head = (
        "variant", str(base.metric or "quality"), "p50 ms", "p90 ms", f"p50 / {base.name}",
        "size MB",
        f"size / {base.name}", "MFLOP", "mean drift", "epsilon", "coverage",
    )  # fmt: skip
    rows = [
        (
            v.name,
            cell(v.quality, ".3f"),
            f"{v.latency_ms.p50:.3f}",
            f"{v.latency_ms.p90:.3f}",
            f"{v.latency_ms.p50 / base.latency_ms.p50:.2f}",
            f"{v.size_bytes / 1e6:.3f}",
            f"{v.size_bytes / base.size_bytes:.2f}",
            cell(v.flops and v.flops / 1e6, ".1f"),
            cell(v.drift.mean, ".4f"),
            cell(v.drift.epsilon, ".4f"),
            cell(v.drift.coverage, ".3f"),
        )
        for v in result.variants
    ]
    return _table(head, [[f"<td>{escape(text)}</td>" for text in row] for row in rows])


def _layer_table(artifact: Artifact) -> str:
    manifest = artifact.manifest
    rows = []
    for entry in manifest.layers:
        spec = entry.spec
        cells = [
            f"<td>{escape(spec.name)}</td>",
            f"<td>{'x'.join(map(str, spec.dense_shape))}</td>",
        ]
        for profile in manifest.profiles:
            point = profile.points[spec.name]
            share = stored_bytes(spec, point) / stored_bytes(spec, entry.menu[-1])
            size = "width" if spec.narrows else "rank"
            rank = "dense" if spec.stored_dense(point) else f"{size} {point.rank}"
            cells.append(
                f'<td class="cell" style="--share:{share:.3f}">{rank}, {point.bits} b</td>'
            )
        rows.append(cells)
    return _table(("layer", "weight", *(p.name for p in manifest.profiles)), rows)


def _choice_list(choices: Sequence[str]) -> str:
    if not choices:
        return ""
    items = "".join(f"<li>{escape(choice)}</li>" for choice in choices)
    return f"<h2>Choices made by measuring</h2><ul>{items}</ul>"


def _table(head: tuple[str, ...], rows: list[list[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'
