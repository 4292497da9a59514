"""devices/*.json and ledger.json: what was measured of an artifact after it was made.

Each names the content hash it belongs to, and lies outside of that hash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from t3c.artifact.manifest import Record
from t3c.cost.proxy import Proxy
from t3c.spec import Certificate, Form, Latency, LayerPoint, LayerSpec


class Device(Record):
    """A machine, an engine and a number of threads.

    `weight_bits` is how wide weights may be for the engine's int8 kernels to be exact on this
    machine: 7 where pairs of products are summed in 16 bits, which saturate, else 8.
    """

    cpu: str
    engine: str
    engine_version: str
    threads: int
    weight_bits: int

    @property
    def key(self) -> str:
        """A file name for it."""
        digest = hashlib.sha256(f"{self.cpu}/{self.engine_version}".encode()).hexdigest()[:8]
        return f"{self.engine}-{self.threads}t-{digest}"


class LayerTiming(Record):
    """Measured time of one layer point's rank, in each form, in milliseconds."""

    layer: str
    rank: int
    ms: dict[Form, float]


class DeviceTable(Record):
    """Everything calibrated on one device."""

    content: str
    device: Device
    layers: tuple[LayerTiming, ...]
    profiles: dict[str, Latency]
    proxy: Proxy | None = None
    energy: str = "unavailable"

    def forms(
        self, specs: Mapping[str, LayerSpec], points: Mapping[str, LayerPoint]
    ) -> dict[str, Form]:
        """The form of each layer at its point: whichever the table says is faster."""
        return choose_forms(self.layers, specs, points)


class Ledger(Record):
    """The certificates of an artifact."""

    content: str
    assumption: str
    data: str
    entries: tuple[Certificate, ...]


def choose_forms(
    timings: tuple[LayerTiming, ...],
    specs: Mapping[str, LayerSpec],
    points: Mapping[str, LayerPoint],
) -> dict[str, Form]:
    """Factored where it is measured no slower than dense; dense at full rank, as stored."""
    table = {(t.layer, t.rank): t.ms for t in timings}
    forms = {}
    for name, point in points.items():
        if Form.FACTORED not in specs[name].forms(point):
            forms[name] = Form.DENSE
            continue
        ms = table.get((name, point.rank), {})
        slower = ms.get(Form.FACTORED, 0.0) > ms.get(Form.DENSE, float("inf"))
        forms[name] = Form.DENSE if slower else Form.FACTORED
    return forms


def forms_key(forms: Mapping[str, Form], weight_bits: int) -> str:
    """A short name of what an engine executes, for a certificate to be keyed by."""
    text = ";".join([f"{name}={forms[name]}" for name in sorted(forms)] + [f"{weight_bits} bits"])
    return hashlib.sha256(text.encode()).hexdigest()[:12]
