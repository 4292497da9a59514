"""The machine and engine that a table is of."""

from __future__ import annotations

import platform

from t3c.artifact.devices import Device
from t3c.engines import Engine
from t3c.measure.processor import cpu_fields

DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")


def describe(engine: Engine) -> Device:
    """Return the device: this machine, the engine and its threads."""
    return Device(
        cpu=cpu_name(),
        engine=engine.name,
        engine_version=engine.version,
        threads=engine.threads,
        weight_bits=_exact_weight_bits(engine),
    )


def cpu_name() -> str:
    """Return the processor, with the vector instructions that decide between int8 kernels."""
    fields = cpu_fields()
    flags = fields.get("flags", "").split()
    kernels = [flag for flag in ("avx2", "avx512f", *DOT_PRODUCTS) if flag in flags]
    return " ".join([fields.get("model name", platform.machine()), *kernels])


def _exact_weight_bits(engine: Engine) -> int:
    """Return 8, but for x86 without dot-product instructions 7.

    Its int8 kernels add u8 x s8 products in pairs in 16 bits, which 255 x 127 x 2 overflows and
    255 x 64 x 2 does not.
    """
    flags = cpu_fields().get("flags", "").split()
    if engine.name == "torch" or "avx2" not in flags:
        return 8
    return 8 if any(flag in flags for flag in DOT_PRODUCTS) else 7
