"""OpenVINO on the CPU."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
import openvino as ov

from t3c.artifact.manifest import STATE
from t3c.engines.cache import Blob, CompileCache, Entry, graph_digest
from t3c.engines.decode import Declared, completed, declared_inputs
from t3c.engines.protocol import Array, contiguous
from t3c.errors import EngineError

Shapes = tuple[tuple[int, ...], ...]
KEPT = 8  # compiled batch sizes of one graph
FREE = -1  # a size that may vary from call to call


class OpenVINO:
    """The default engine: int8 kernels by QDQ, one compiled model per batch size."""

    name = "openvino"

    def __init__(self, threads: int, cache: CompileCache | None = None) -> None:
        self.cache = cache
        self.version = ov.__version__.split("-")[0]
        self.threads = threads
        self.core = ov.Core()
        self.config: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32",
            # Activations that are to stay float are not rounded behind our back.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
        if threads < (os.cpu_count() or threads):
            # Else what was compiled while the caller was pinned pins it again in every run.
            self.config["ENABLE_CPU_PINNING"] = False

    def compile(self, model: onnx.ModelProto) -> OpenVINOSession:
        raw = model.SerializeToString()
        # With a cache, a graph may never have to be read.
        return OpenVINOSession(self, raw if self.cache else self.read(raw), declared_inputs(model))

    def read(self, raw: bytes) -> ov.Model:
        """An OpenVINO model from ONNX bytes."""
        try:
            return self.core.read_model(raw)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot read the graph: {_reason(error)}") from error

    def compile_read(self, model: ov.Model) -> OpenVINOSession:
        """A session of a model that was read; of one with states, lengths stay free."""
        ports = _declared_ports(model)
        remembers = any(name.startswith(STATE) for name in ports)
        return OpenVINOSession(self, model, ports if remembers else None)

    def operations(self, model: onnx.ModelProto) -> OpenVINOOperations:
        """A graph compiled so that what each of its operations takes is known."""
        counting = OpenVINO(self.threads)
        counting.config = self.config | {"PERF_COUNT": True}
        return OpenVINOOperations(counting.compile(model))

    def build(self, model: ov.Model, shapes: Shapes) -> ov.CompiledModel:
        """A graph compiled for inputs of these shapes."""
        try:
            model = model.clone()
            named = zip(model.inputs, shapes, strict=True)
            model.reshape({port: list(shape) for port, shape in named})
            return self.core.compile_model(model, "CPU", self.config)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot compile: {_reason(error)}") from error

    def restore(self, blob: Blob) -> ov.CompiledModel:
        """Return the compiled model that `export_model` wrote; it keeps reading from the blob."""
        try:
            tensor = ov.Tensor(blob, shared_memory=True)
            return self.core.import_model(tensor, "CPU", self.config)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot restore it: {_reason(error)}") from error


class Compiled(NamedTuple):
    """A graph for inputs of some shapes, and the mapped file it may read its weights from.

    A tuple lets go of its last item first: what reads comes after what is read.
    """

    blob: Blob | None
    model: ov.CompiledModel


class OpenVINOSession:
    """Compiled for each batch size when it is first asked for, a few of them kept.

    Axes but the batch that are declared free stay so, or each length of a text would be compiled;
    with states a text is read once and written token by token, so one token is compiled apart.
    Of ONNX bytes, what is compiled comes from the engine's cache where it is there.
    """

    def __init__(
        self,
        engine: OpenVINO,
        model: ov.Model | bytes,
        declared: Mapping[str, Declared] | None = None,
    ) -> None:
        self.engine = engine
        self.model = model
        self.declared = declared or {}
        sizes = [size for shape, _ in self.declared.values() for size in shape[1:]]
        self.fixed = None not in sizes  # then it has no states either, whose length is free
        self.remembers = any(name.startswith(STATE) for name in self.declared)
        self.digest = graph_digest(model) if isinstance(model, bytes) else None
        self.lock = threading.Lock()
        self.compiled: dict[Shapes, Compiled] = {}
        self.local = threading.local()

    def run(self, inputs: Sequence[Array]) -> list[Array]:
        if self.fixed and len(inputs) == 1 and inputs[0].flags.c_contiguous:
            request = self.request((inputs[0].shape,))
            feeds = {0: inputs[0]}
        else:
            arrays = contiguous(completed(inputs, self.declared))
            request = self.request(self._compiled_for(arrays))
            feeds = dict(enumerate(arrays))
        try:
            if self.remembers:
                return _handed_over(request, list(feeds.values()))
            request.infer(feeds, share_inputs=True, share_outputs=True)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot run: {_reason(error)}") from error
        return [np.array(output.data) for output in request.output_tensors]

    def _compiled_for(self, arrays: Sequence[Array]) -> Shapes:
        """The sizes of the inputs, but for those that may vary."""
        shapes = [array.shape for array in arrays]
        for index, (name, (sizes, _)) in enumerate(self.declared.items()):
            if index < len(shapes) and len(sizes) == len(shapes[index]):
                one = self.remembers and not name.startswith(STATE)
                pairs = zip(sizes[1:], shapes[index][1:], strict=True)
                rest = (
                    FREE if own is None and not (one and size == 1) else size for own, size in pairs
                )
                shapes[index] = (*shapes[index][:1], *rest)
        return tuple(shapes)

    def request(self, shapes: Shapes) -> ov.InferRequest:
        """This thread's request for inputs of these shapes."""
        requests: dict[Shapes, tuple[Compiled, ov.InferRequest]]
        requests = self.local.__dict__.setdefault("requests", {})
        known = requests.get(shapes)
        if known is None:
            _make_room(requests)
            compiled = self._compile(shapes)
            # The request does not keep the mapped file, the pair does.
            known = requests[shapes] = compiled, compiled.model.create_infer_request()
        return known[1]

    def _compile(self, shapes: Shapes) -> Compiled:
        with self.lock:
            if shapes not in self.compiled:
                _make_room(self.compiled)
                self.compiled[shapes] = self._recall(shapes) or self._build(shapes)
            return self.compiled[shapes]

    def _recall(self, shapes: Shapes) -> Compiled | None:
        cache, restore = self.engine.cache, self.engine.restore
        if cache is None or self.digest is None:
            return None
        return cache.recall(self._entry(self.digest, shapes), lambda b: Compiled(b, restore(b)))

    def _build(self, shapes: Shapes) -> Compiled:
        if isinstance(self.model, bytes):
            self.model = self.engine.read(self.model)
        compiled = self.engine.build(self.model, shapes)
        cache = self.engine.cache
        if cache is not None and self.digest is not None:
            entry, written = self._entry(self.digest, shapes), io.BytesIO()
            try:
                compiled.export_model(written)
                cache.store(entry, written.getvalue())
            except RuntimeError as error:
                cache.tell(f"{cache.path(entry)}: OpenVINO cannot export it: {_reason(error)}")
        return Compiled(None, compiled)

    def _entry(self, digest: str, shapes: Shapes) -> Entry:
        engine = self.engine
        config = tuple(engine.config.items())
        return Entry(engine.name, ov.__version__, engine.threads, config, digest, shapes)


class OpenVINOOperations:
    """Times of the operations that a graph is executed by."""

    def __init__(self, session: OpenVINOSession) -> None:
        self.session = session
        self.parts: dict[str, tuple[str, ...]] = {}

    def run(self, inputs: Sequence[Array]) -> dict[tuple[str, ...], float]:
        """Run once: milliseconds by the names of the nodes that each operation stands for.

        A node without a name is known by its output's. Counting takes no time that shows.
        """
        arrays = contiguous(completed(inputs, self.session.declared))
        shapes = self.session._compiled_for(arrays)
        request = self.session.request(shapes)
        if not self.parts:
            self.parts = _parts(self.session.compiled[shapes].model)
        if self.session.remembers:
            _handed_over(request, arrays)
        else:
            request.infer(dict(enumerate(arrays)), share_inputs=True, share_outputs=True)
        found: dict[tuple[str, ...], float] = {}
        for one in request.profiling_info:
            if one.status == one.Status.EXECUTED:
                parts = self.parts.get(one.node_name, (one.node_name,))
                found[parts] = found.get(parts, 0.0) + one.real_time.total_seconds() * 1e3
        return found


def _parts(compiled: ov.CompiledModel) -> dict[str, tuple[str, ...]]:
    """Each executed operation with the nodes of the graph it was made of, itself first."""
    found = {}
    for node in compiled.get_runtime_model().get_ops():
        name, told = node.get_friendly_name(), node.get_rt_info()
        made_of = told["originalLayersNames"].astype(str) if "originalLayersNames" in told else ""
        found[name] = (name, *filter(None, made_of.split(",")))
    return found


def _handed_over(request: ov.InferRequest, arrays: Sequence[Array]) -> list[Array]:
    """The outputs of a request, which are left to the caller: the next run has others of its own.

    States are nearly all that a decoder reads and writes; copied, they take longer than a token.
    """
    for index, array in enumerate(arrays):
        request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
    for index, port in enumerate(request.model_outputs):
        made = ov.Tensor(port.element_type, port.partial_shape.get_min_shape())  # it grows
        request.set_output_tensor(index, made)
    request.start_async()
    request.wait()
    return [output.data for output in request.output_tensors]


def _declared_ports(model: ov.Model) -> dict[str, Declared]:
    """The inputs a model declares, in order; a size that is free is None."""
    found: dict[str, Declared] = {}
    for port in model.inputs:
        sizes = [size.get_length() if size.is_static else None for size in port.partial_shape]
        found[port.any_name] = sizes, port.element_type.to_dtype()
    return found


def _make_room(kept: dict[Shapes, Any]) -> None:
    """Forget the shapes seen first when there are too many."""
    while len(kept) >= KEPT:
        del kept[next(iter(kept))]


def _reason(error: Exception) -> str:
    """Return OpenVINO's message without the place in its source that it starts with."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("Exception from")]
    return (telling or lines or ["no reason given"])[0]
