"""Real artifacts changed in memory: values of their JSON, nodes of their graph, headers and numbers
of their tensors, with the hashes made to fit again. The same seed makes the same case."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import TensorProto, helper

from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import CONTENT, DENSE, ELASTIC_DOMAIN, FACTORS, GRAPH
from t3c.artifact.reader import DEVICES, LEDGER

Content = dict[str, bytes]  # the files of an artifact, by their paths in it
Mutation = Callable[[bytes, Random], bytes]

OUTSIDE = "../../etc/passwd"
EDGES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1,
    2**63, -(2**63), 2**64, 10**40, 10**400, 0.5, -0.0, 1e-308, 1e308, -1e308, math.nan, math.inf,
    -math.inf, "", "NaN", "0", "\x00", "\n", "\u202e\U0001f600", "\ud800",
    OUTSIDE, "/etc/passwd", "file:///etc/passwd", "C:\\x", "__import__('os').getpid()",
    "{0.__class__}", "%s%n", [], {}, [[]], [{}], [None], [1, 1], {"": None}, {"__class__": "x"},
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, -1.0, 1e-45, 1e38, -3e38, math.inf, -math.inf, math.nan)


def read_folder(folder: Path) -> Content:
    """Every file of an artifact."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def write_folder(content: Content, folder: Path) -> None:
    """The files of a case, at their places."""
    for name, raw in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def sealed(content: Content) -> Content:
    """The same with sizes and hashes that fit, wherever there is a place for them."""
    made = dict(content)
    with suppress(ValueError, RecursionError, TypeError, KeyError):
        manifest = json.loads(made[MANIFEST])
        for name in CONTENT:
            digest = hashlib.sha256(made[name]).hexdigest()
            manifest["files"][name] = {"sha256": digest, "bytes": len(made[name])}
        made[MANIFEST] = json.dumps(manifest).encode()
    digest = hashlib.sha256(made.get(MANIFEST, b"")).hexdigest()
    for name in made:
        if name == LEDGER or name.startswith(f"{DEVICES}/"):
            with suppress(ValueError, RecursionError, TypeError):
                evidence = json.loads(made[name])
                evidence["content"] = digest
                made[name] = json.dumps(evidence).encode()
    return made


def mutate(content: Content, rng: Random) -> Content:
    """A case: one or two files changed, and mostly sealed."""
    made = dict(content)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(made))
        if name not in CONTENT and rng.random() < 0.1:
            del made[name]
        else:
            made[name] = mutation_of(name)(made[name], rng)
    return sealed(made) if rng.random() < 0.97 else made


def mutation_of(name: str) -> Mutation:
    """How a file of an artifact is changed, by its name."""
    if name == GRAPH:
        return mutate_graph
    if name in (FACTORS, DENSE):
        return mutate_tensors
    return mutate_json if name.endswith(".json") else mutate_bytes


def mutate_json(raw: bytes, rng: Random) -> bytes:
    """JSON with some values changed, moved, doubled or gone; now and then no JSON at all."""
    if rng.random() < 0.1:
        return mutate_bytes(raw, rng)
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError):
        return mutate_bytes(raw, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = change(data, rng)
    text = json.dumps(data)
    return _doubled_key(text, rng) if rng.random() < 0.02 else text.encode()


def change(data: Any, rng: Random) -> Any:
    """JSON data with one change, in place where it can be."""
    if not isinstance(data, dict | list) or not data or rng.random() < 0.01:
        return rng.choice(EDGES)
    (holder, key), (other, there) = _place(data, rng), _place(data, rng)
    kind = rng.randrange(10)
    if kind <= 2:
        holder[key] = _edge(rng)
    elif kind == 3:
        holder[key], other[there] = _copy(other[there]), _copy(holder[key])
    elif kind == 4:
        holder[key] = _copy(other[there])
    elif kind == 5:
        del holder[key]
    elif kind == 6:
        holder[key] = rng.choice(([holder[key]], {"x": holder[key]}, str(holder[key])[:99], None))
    elif kind == 7 and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), _copy(holder[key]))
        if rng.random() < 0.5:
            rng.shuffle(holder)
    elif kind == 8 and isinstance(holder, dict):
        holder[rng.choice((key + "x", "", OUTSIDE, str(there)))] = _copy(other[there])
    else:
        holder[key] = _nudged(holder[key], rng)
    return data


def _place(data: Any, rng: Random) -> tuple[Any, Any]:
    """Some (holder, key or index) of JSON data, found from the top down."""
    holder = data
    while True:
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
        value = holder[key]
        if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
            return holder, key
        holder = value


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def _edge(rng: Random) -> Any:
    if rng.random() < 0.02:
        nested: Any = 0
        for _ in range(rng.choice((50, 300, 450, 900))):
            nested = [nested] if rng.random() < 0.5 else {"x": nested}
        return rng.choice((nested, "x" * 100_000))
    return _copy(rng.choice(EDGES))


def _nudged(value: Any, rng: Random) -> Any:
    """A value of the same type, near."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, 2 * value, value // 2, -value, value + 8))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e6, value / 1e6, value * 1e300, 1 - value))
    if isinstance(value, str):
        return rng.choice((value + "/..", value.upper(), value[1:], value[::-1], value + "#2"))
    return list(reversed(value)) if isinstance(value, list) else dict(reversed(value.items()))


def _doubled_key(text: str, rng: Random) -> bytes:
    at = [i for i, letter in enumerate(text) if letter == "{"]
    extra = rng.choice(('"schema_version":3,', '"name":"x",', '"rank":99,', '"":{},'))
    place = rng.choice(at) + 1 if at else 0
    return (text[:place] + extra + text[place:]).encode()


def mutate_bytes(raw: bytes, rng: Random) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 2, 4, 16, 64))
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + size] = rng.randbytes(size)
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            data[at:at] = rng.choice(
                (b"NaN", b"1e999", b"-", b"9" * 5000, b"[" * 3000, b'{"a":' * 2000, b"\xff\xfe",
                 b"\\ud800", b"\x00" * 8, b"\xff" * 8, b"../../", b"Infinity,")
            )  # fmt: skip
        elif rng.random() < 0.2:
            del data[at:]
    return bytes(data)


def mutate_tensors(raw: bytes, rng: Random) -> bytes:
    """A safetensors file: its header says something else, or its numbers are others."""
    size = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + size], raw[8 + size :]
    kind = rng.randrange(6)
    try:
        entries = json.loads(header)
        named = [name for name in entries if name != "__metadata__"]
        entry = entries[rng.choice(named)]
        start, end = entry["data_offsets"]
        assert 0 <= start <= end <= len(body)
    except (ValueError, RecursionError, LookupError, TypeError, AssertionError):
        kind = 5
    if kind == 0:
        header = mutate_json(header, rng)
    elif kind == 1:
        header = json.dumps(_changed_entry(entries, entry, rng)).encode()
    elif kind == 2:
        body = body[:start] + rng.randbytes(end - start) + body[end:]
    elif kind == 3 and end - start >= 4:
        at = rng.randrange(start, end - 3, 4)
        body = body[:at] + struct.pack("<f", rng.choice(FLOATS)) + body[at + 4 :]
    elif kind == 4:
        value = struct.pack("<f", rng.choice(FLOATS))
        body = body[:start] + (value * (end - start))[: end - start] + body[end:]
    else:
        return mutate_bytes(raw, rng)
    length = len(header) if rng.random() < 0.98 else rng.choice((0, 2**31, 2**63, len(raw)))
    return length.to_bytes(8, "little") + header + body


def _changed_entry(entries: dict[str, Any], entry: dict[str, Any], rng: Random) -> dict[str, Any]:
    """A header with one tensor of another shape, type, place or name."""
    kind, names = rng.randrange(6), list(entries)
    if kind == 0:
        entry["shape"] = [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
    elif kind == 1:
        shape = entry["shape"]
        entry["shape"] = rng.choice((shape[::-1], [math.prod(shape)], [1, *shape], [*shape, 1]))
    elif kind == 2:
        entry["dtype"] = rng.choice(
            ("F64", "F32", "F16", "BF16", "I64", "U64", "I8", "U8", "BOOL", "F8_E4M3", "C64", "X")
        )
    elif kind == 3:
        entry["data_offsets"] = [rng.choice((*NUMBERS, 8, 64)) for _ in range(2)]
    elif kind == 4:
        one, other = rng.choice(names), rng.choice(names)
        entries[one], entries[other] = entries[other], entries[one]
    else:
        entries[rng.choice((OUTSIDE, "x", ""))] = entries.pop(rng.choice(names))
    return entries


def mutate_graph(raw: bytes, rng: Random) -> bytes:
    """A topology that is still ONNX but says something else; now and then only bytes."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(raw)
    except DecodeError:
        return mutate_bytes(raw, rng)
    if rng.random() < 0.25 or not model.graph.node:
        return mutate_bytes(raw, rng)
    for _ in range(rng.choice((1, 1, 2))):
        rng.choice(GRAPH_EDITS)(model, rng)
    return bytes(model.SerializeToString())


def _rewire(model: onnx.ModelProto, rng: Random) -> None:
    """A name of an input, an output or a node is another: a cycle, a loose end, a double."""
    nodes, values = model.graph.node, [*model.graph.input, *model.graph.output]
    known = [value.name for value in values] + [name for node in nodes for name in node.output]
    node, name = rng.choice(nodes), rng.choice([*known, "", "nobody", OUTSIDE])
    kind = rng.randrange(5)
    if kind == 0 and node.input:
        node.input[rng.randrange(len(node.input))] = name
    elif kind == 1 and node.output:
        node.output[rng.randrange(len(node.output))] = name
    elif kind == 2:
        rng.choice((node.input, node.output)).append(name)
    elif kind == 3:
        del rng.choice((node.input, node.output))[:]
    elif values:
        rng.choice(values).name = name


def _reorder(model: onnx.ModelProto, rng: Random) -> None:
    """Nodes, inputs, outputs or constants shuffled, doubled or gone."""
    graph = model.graph
    parts: Any = rng.choice((graph.node, graph.input, graph.output, graph.initializer))
    items = list(parts)
    kind = rng.randrange(3)
    if kind == 0:
        rng.shuffle(items)
    elif items and kind == 1:
        items.insert(rng.randrange(len(items)), rng.choice(items))
    elif items:
        items.pop(rng.randrange(len(items)))
    del parts[:]
    parts.extend(items)


def _retype(model: onnx.ModelProto, rng: Random) -> None:
    """An operation, a domain or a version is another one."""
    node = rng.choice(model.graph.node)
    kinds = (
        "Relu", "Gather", "Softmax", "Tile", "Expand", "NonZero", "Unknown", "Elastic", "",
        "QuantizeLinear", "DequantizeLinear", "ConstantOfShape", "MatMul", "Transpose",
    )  # fmt: skip
    domains = ("", "ai.onnx", ELASTIC_DOMAIN, "com.microsoft", "ai.onnx.ml", "x")
    kind = rng.randrange(4)
    if kind == 0:
        node.op_type = rng.choice(kinds)
    elif kind == 1:
        node.domain = rng.choice(domains)
    elif kind == 2:
        model.opset_import.append(helper.make_opsetid(rng.choice(domains), rng.choice(NUMBERS)))
    else:
        model.ir_version = rng.choice(NUMBERS)


def _reattribute(model: onnx.ModelProto, rng: Random) -> None:
    """An attribute is another number, text, list, tensor or body."""
    node = rng.choice(model.graph.node)
    values: tuple[Any, ...] = (
        rng.choice(NUMBERS), [rng.choice(NUMBERS) for _ in range(rng.randrange(1, 6))],
        rng.choice(FLOATS), OUTSIDE, b"\xff\xfe", "embedding", "linear", "conv", "nobody",
        _external(rng), helper.make_graph([], "body", [], []), model.graph,
    )  # fmt: skip
    names = [attribute.name for attribute in node.attribute]
    name = rng.choice([*names, "layer", "kind", "axis", "value", "body", "to", "perm", "x"])
    kept = [a for a in node.attribute if a.name != name or rng.random() < 0.1]
    copied = [onnx.AttributeProto.FromString(a.SerializeToString()) for a in kept]
    del node.attribute[:]
    node.attribute.extend(copied)
    if rng.random() < 0.9:
        node.attribute.append(helper.make_attribute(name, rng.choice(values)))


def _external(rng: Random) -> TensorProto:
    """A tensor that says it lies in another file."""
    tensor = TensorProto(name="outside", data_type=TensorProto.FLOAT, dims=[rng.choice((1, 4, 99))])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", rng.choice((OUTSIDE, "/etc/passwd", DENSE))), ("offset", "0")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def _reconstant(model: onnx.ModelProto, rng: Random) -> None:
    """A constant is huge, elsewhere, of another type, or of other numbers."""
    graph = model.graph
    tensor = rng.choice(graph.initializer) if graph.initializer else graph.initializer.add()
    kind = rng.randrange(6)
    if kind == 0:
        name = tensor.name
        tensor.CopyFrom(_external(rng))
        tensor.name = name
    elif kind == 1:
        tensor.dims[:] = [rng.choice(NUMBERS) for _ in range(rng.randrange(5))]
    elif kind == 2:
        tensor.data_type = rng.randrange(-1, 28)
    elif kind == 3:
        values = np.array([rng.choice(NUMBERS) for _ in range(max(1, sum(tensor.dims) % 9))])
        tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    elif kind == 4:
        tensor.raw_data = rng.randbytes(rng.randrange(40))
    else:
        sparse = graph.sparse_initializer.add()
        sparse.values.CopyFrom(tensor)
        sparse.dims.append(rng.choice(NUMBERS))


def _extend(model: onnx.ModelProto, rng: Random) -> None:
    """A node more, a function, a body of a branch or loop, or a value of another shape."""
    graph = model.graph
    source = rng.choice(graph.node[0].input or ["input"])
    kind, at = rng.randrange(5), rng.randrange(len(graph.node))
    if kind == 0:
        body = helper.make_graph([helper.make_node("Identity", [source], ["b"])], "b", [], [])
        node = helper.make_node(rng.choice(("If", "Loop", "Scan")), [source], ["made"], body=body)
    elif kind == 1:
        node = helper.make_node("Constant", [], ["made"], value=_external(rng))
    elif kind == 2:
        shape = helper.make_tensor("s", TensorProto.INT64, [1], [rng.choice((2**29, 2**40, -1))])
        graph.node.insert(0, helper.make_node("Constant", [], ["s"], value=shape))
        node = helper.make_node("ConstantOfShape", ["s"], ["made"])
    elif kind == 3:
        node = helper.make_node(graph.node[at].op_type, [source], ["made"], domain="x")
        inner = helper.make_node(graph.node[at].op_type, ["a"], ["b"], domain="x")
        version = [helper.make_opsetid("x", 1)]
        name = graph.node[at].op_type
        model.functions.append(helper.make_function("x", name, ["a"], ["b"], [inner], version))
    else:
        value = rng.choice([*graph.input, *graph.output])
        size = value.type.tensor_type.shape.dim.add()
        size.dim_value = rng.choice(NUMBERS)
        return
    graph.node.insert(at, node)
    if rng.random() < 0.5:
        graph.node[-1].input[:] = [*graph.node[-1].input[:-1], "made"]


GRAPH_EDITS: tuple[Callable[[onnx.ModelProto, Random], None], ...] = (
    _rewire, _reorder, _retype, _reattribute, _reconstant, _extend,
)  # fmt: skip
