"""torch's operators on a simulated device: each is enqueued on the current stream and done later by its CPU kernel.

An operator's results are allocated when it is called, in shapes that its meta kernel tells. Its work sees addresses
alone, as a GPU does: nothing that it reads or writes is kept alive for it. Views are made at once; what
gives the host a value waits for the stream; random numbers follow from a generator's seed and offset, as Philox's do.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading

import torch

from tests.simulated_cuda.memory import OutOfMemoryError
from tests.simulated_cuda.races import extent
from tests.simulated_cuda.scheduler import CudaError, Event, Work

_HOST, _META = torch.device("cpu"), torch.device("meta")
# Operators that take indices from the host along with tensors of the device.
_MIXES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
# Matrix products, for which cuBLAS keeps a workspace for every stream that a thread uses.
_GEMM = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot"}
_QUIETLY_WRITTEN = {"aten::native_batch_norm": ["running_mean", "running_var"]}
WORKSPACE_BYTES = 1 << 16
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_CPU_NUMBERS = threading.Lock()  # torch's own generator, while an operator without a generator borrows it


class Operator:
    """An operator, and what its schema says about it."""

    def __init__(self, op, library):
        self._op, self._library, schema = op, library, op._schema
        if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"):
            raise NotImplementedError(f"there is no kernel of the simulated device for {schema.name}")
        self.name, arguments, returns = schema.name, schema.arguments, schema.returns
        self.mixes = schema.name in _MIXES
        written = [each.alias_info is not None and each.alias_info.is_write for each in returns]
        aliased = [each.alias_info is not None and not each.alias_info.is_write for each in returns]
        self.is_view = bool(returns) and all(aliased)
        gives_tensors = all("Tensor" in str(each.type) for each in returns)
        late = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
        self.waits = not gives_tensors or any(tag in op.tags for tag in late)
        # For each return: the argument it is, or None for a new tensor.
        self.same_as = []
        for each, is_written in zip(returns, written, strict=True):
            own = each.alias_info.before_set if is_written else None
            same = (a.name for a in arguments if is_written and a.alias_info and a.alias_info.before_set == own)
            self.same_as.append(next(same, None))
        self.positions = {each.name: index for index, each in enumerate(arguments)}
        self.written = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        self.written += _QUIETLY_WRITTEN.get(schema.name, [])
        self.outs = [each.name for each in arguments if each.is_out]
        self.is_random = torch.Tag.nondeterministic_seeded in op.tags
        self.takes_generator = "generator" in self.positions
        self.returns_new = any(name is None for name in self.same_as)
        self.is_gemm = schema.name in _GEMM
        self._takes_tensors = {i for i, a in enumerate(arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")}

    def __call__(self, *args, **kwargs):
        return self._op(*(self._as_declared(index, each) for index, each in enumerate(args)), **kwargs)

    def _as_declared(self, index, value):
        """A number that stands for a tensor, as in `x % 2`: a tensor that torch still promotes as a number."""
        if type(value) not in _NUMBERS or index not in self._takes_tensors:
            return value
        made = torch.tensor(value, dtype=_NUMBERS[type(value)], device=_HOST)
        self._library.sim_as_number(made._cdata)
        return made

    def writes(self, args, kwargs):
        """The arguments that are written, also those that a schema keeps quiet about."""
        return [self.argument(name, args, kwargs) for name in self.written]

    def argument(self, name, args, kwargs):
        if name in kwargs:
            return kwargs[name]
        index = self.positions[name]
        return args[index] if index < len(args) else None


def mapped(value, change):
    """The same structure with every tensor, device and generator changed."""
    if isinstance(value, torch.Tensor | torch.device | torch.Generator):
        return change(value)
    if isinstance(value, list | tuple):
        return [mapped(each, change) for each in value]
    return value


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def _key(value):
    if isinstance(value, torch.Tensor):
        place = value.storage_offset(), value.device.type
        return value.dtype, tuple(value.shape), value.stride(), *place, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, torch.Generator):
        return "generator"
    return type(value), value


class Operators:
    """Runs operators on simulated devices.

    Args:
        library: the C++ half, `device.cpp`.
        scheduler: does the work.
        memories: the memory of each device.
    """

    def __init__(self, library, scheduler, memories):
        self.library, self.scheduler, self.memories = library, scheduler, memories
        self._operators, self._shapes = {}, {}
        self._workspaces = {}
        self.num_calls = self.sync_debug_mode = 0

    def check_lost(self):
        """Raise torch's own error if a kernel has failed."""
        try:
            self.scheduler.check()
        except CudaError as error:
            raise torch_error(error) from None

    def synchronising(self):
        """Raise if the host must not wait for the device: `torch.cuda.set_sync_debug_mode("error")`."""
        if self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    # ---- devices, streams and memory

    def current_device(self):
        return self.library.sim_device()

    def current_stream(self, device=None):
        device = self.current_device() if device is None else device
        return self.scheduler.stream(device, self.library.sim_stream(device))

    def return_freed(self):
        """Tell the allocators what was freed since."""
        at, pinned = ctypes.c_void_p(), ctypes.c_int()
        with self.scheduler.lock:
            while self.library.sim_next_freed(ctypes.byref(at), ctypes.byref(pinned)):
                if pinned.value:
                    self.memories["pinned"].free(at.value)
                    continue
                next(m for i, m in self.memories.items() if i != "pinned" and at.value in m.blocks).free(at.value)

    def allocate(self, device, num_bytes, stream=None):
        """Return an address. Raises torch's own error if there is no memory."""
        if num_bytes == 0:
            return None
        with self.scheduler.lock:
            self.return_freed()
            memory = self.memories[device]
            try:
                return memory.allocate(num_bytes, stream or self.current_stream(device))
            except OutOfMemoryError:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {num_bytes / 2**20:.2f} MiB. GPU {device} has a total "
                    f"capacity of {memory.total_bytes / 2**30:.2f} GiB."
                ) from None

    def new(self, like, device):
        """A new tensor on a device, of the geometry of `like`, without values."""
        num_bytes = _bytes_up_to_end(like)
        at = self.allocate(device, num_bytes)
        return self.library.sim_new(at, num_bytes, device, like._cdata)

    def on_host(self, tensor):
        return self.library.sim_host(tensor._cdata)

    # ---- one operator

    def call(self, op, *args, **kwargs):
        """Run an operator whose arguments or results are on a device: the fallback of the dispatch key CUDA."""
        about = self._operators.get(op)
        if about is None:
            about = self._operators[op] = Operator(op, self.library)
        self.num_calls += 1
        self.check_lost()
        self.return_freed()
        if about.name == "aten::empty" or about.name == "aten::empty_strided":
            return self._empty(about, args, kwargs)
        if about.is_view:
            return self._view(about, args, kwargs)
        given = list(tensors_in([*args, *kwargs.values()]))
        device = self._device_of(about, given, args, kwargs)
        stream = self.current_stream(device)
        if about.waits:
            return self._at_once(about, stream, args, kwargs)
        if about.is_gemm:
            self._workspace(stream)
        found = self._results(about, device, args, kwargs)
        self._enqueue(about, stream, args, kwargs, found)
        return found

    def _device_of(self, about, given, args, kwargs):
        devices = {each.device.index for each in given if each.is_cuda}
        mixed = f"Expected all tensors to be on the same device ({about.name}), but found "
        if len(devices) > 1:
            raise RuntimeError(f"{mixed}cuda devices {sorted(devices)}!")
        others = [each for each in given if not each.is_cuda and each.device.type != "meta" and each.dim()]
        if devices and others and not about.mixes:
            raise RuntimeError(f"{mixed}at least two devices, cuda:{min(devices)} and cpu!")
        if devices:
            return devices.pop()
        asked = about.argument("device", args, kwargs) if "device" in about.positions else None
        return self._index(asked)

    def _index(self, device):
        """The index of the device that is asked for, the current one without any."""
        if device is None or device.index is None:
            return self.current_device()
        if device.index not in self.memories:
            raise torch_error(CudaError(101, "invalid device ordinal"))
        return device.index

    def _geometry(self, about, args, kwargs):
        """What the operator returns, on the meta device; remembered by the geometry of its arguments."""
        key = about, _key(args), tuple((name, _key(value)) for name, value in kwargs.items())
        found = self._shapes.get(key)
        if found is None:

            def change(value):
                if isinstance(value, torch.device):
                    return _META
                if isinstance(value, torch.Generator):
                    return None
                return self.library.sim_meta(value._cdata) if value.is_cuda else value.to(_META)

            with below():
                found = about(*mapped(args, change), **{name: mapped(value, change) for name, value in kwargs.items()})
            self._shapes[key] = found
        return found

    def _empty(self, about, args, kwargs):
        device = kwargs.get("device")
        index = self._index(device)
        kwargs = {**kwargs, "pin_memory": None}
        return self.new(self._geometry(about, args, kwargs), index)

    def _view(self, about, args, kwargs):
        base, like = args[0], self._geometry(about, args, kwargs)
        if isinstance(base, list | tuple):
            return [self.library.sim_view(b._cdata, each._cdata) for b, each in zip(base, like, strict=True)]
        if isinstance(like, torch.Tensor):
            return self.library.sim_view(base._cdata, like._cdata)
        return type(like)(self.library.sim_view(base._cdata, each._cdata) for each in like)

    def _results(self, about, device, args, kwargs):
        """Allocate what is new among the results, and give `out=` the size it needs."""
        if not about.returns_new:
            if about.outs:
                self._fit(about, args, kwargs)
            found = [about.argument(name, args, kwargs) for name in about.same_as]
        else:
            like = self._geometry(about, args, kwargs)
            found = []
            for each, name in zip(like if len(about.same_as) > 1 else [like], about.same_as, strict=True):
                if name is not None:
                    found.append(about.argument(name, args, kwargs))
                elif isinstance(each, list | tuple):
                    found.append([self.new(one, device) for one in each])
                else:
                    found.append(None if each is None else self.new(each, device))
        if not found:
            return None
        return found[0] if len(found) == 1 else tuple(found)

    def _fit(self, about, args, kwargs):
        outs = [about.argument(name, args, kwargs) for name in about.outs]
        if any(not isinstance(each, torch.Tensor) or each.numel() for each in outs):
            return  # it has its size: torch's own wrappers have given it
        like = self._geometry(about, args, kwargs)
        for out, each in zip(outs, like if isinstance(like, tuple) else (like,), strict=True):
            if out.shape != each.shape:
                self.resize(out, each)

    def resize(self, tensor, like):
        """Give a tensor the geometry of `like`. Memory that is too small is replaced, and copied to the new one."""
        need = _bytes_up_to_end(like)
        has = self.library.sim_storage_bytes(tensor._cdata)
        if need <= has:
            self.library.sim_resize(tensor._cdata, like._cdata, None, 0)
            return
        before, at = self.library.sim_storage_data(tensor._cdata), self.allocate(tensor.device.index, need)
        if has:
            copy = Work("resize", lambda: ctypes.memmove(at, before, has), [(before, before + has)], [(at, at + has)])
            self.scheduler.enqueue(self.current_stream(tensor.device.index), copy)
        self.library.sim_resize(tensor._cdata, like._cdata, at, need)

    def _enqueue(self, about, stream, args, kwargs, found):
        """Enqueue the work: the CPU kernel on the same addresses, and its new results copied to theirs."""
        draw = self._numbers(about, stream, args, kwargs) if about.is_random else None
        args = mapped(args, self._as_launched)
        kwargs = {name: mapped(value, self._as_launched) for name, value in kwargs.items()}
        results = found if isinstance(found, tuple) else (found,) if about.same_as else ()
        targets = [
            mapped(each, self.on_host) if name is None and each is not None else None
            for name, each in zip(about.same_as, results, strict=True)
        ]
        kernel = about if draw is None else _drawing(about, draw)

        def run():
            _store(kernel(*args, **kwargs), targets)

        self.scheduler.enqueue(stream, Work(about.name, run, *self._accesses(about, args, kwargs, targets)))

    def _as_launched(self, value):
        if isinstance(value, torch.device):
            return _HOST
        if isinstance(value, torch.Generator):
            return None
        if value.is_cuda:
            return self.on_host(value)
        return value.clone()  # a kernel takes a number of the host by value, when it is launched

    def _accesses(self, about, args, kwargs, targets):
        """The extents of memory that the work reads, and those that it writes."""
        written = {id(each) for argument in about.writes(args, kwargs) for each in tensors_in(argument)}
        reads, writes = [], [extent(each) for each in tensors_in(targets)]
        for each in tensors_in([*args, *kwargs.values()]):
            (writes if id(each) in written else reads).append(extent(each))
        return list(filter(self.is_on_device, reads)), list(filter(self.is_on_device, writes))

    def is_on_device(self, extent):
        return extent is not None and any(m.arena.holds(extent[0]) for m in self.memories.values())

    def _numbers(self, about, stream, args, kwargs):
        """Take random numbers from the generator: a function that gives the seed of this draw when it runs."""
        generator = about.argument("generator", args, kwargs) if about.takes_generator else None
        default = torch.cuda.default_generators[stream.device]
        generator = default if generator is None else generator
        if stream.capture is None:
            seed, offset = generator.initial_seed(), generator.get_offset()
            generator.set_offset(offset + 4)
            return lambda: _mixed(seed, offset)
        if generator is not default:  # others have to be registered with the graph
            raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")
        own = stream.capture.draws = stream.capture.draws or {"count": 0, "base": (0, 0)}
        relative, own["count"] = own["count"], own["count"] + 4
        return lambda: _mixed(own["base"][0], own["base"][1] + relative)

    def _at_once(self, about, stream, args, kwargs):
        """Run an operator that gives the host a value, or a shape that depends on one: host–device synchronisation."""
        self.synchronising()
        self.scheduler.note(stream, about.name, *self._accesses(about, args, kwargs, ()))
        self.scheduler.synchronize_stream(stream)
        outs = [about.argument(name, args, kwargs) for name in about.outs]

        def change(value):
            if isinstance(value, torch.device):
                return _HOST
            if any(value is each for each in outs):
                return torch.empty(0, dtype=value.dtype)
            return self.on_host(value) if isinstance(value, torch.Tensor) and value.is_cuda else value

        with below():
            found = about(*mapped(args, change), **{name: mapped(value, change) for name, value in kwargs.items()})
        if outs:
            for out, values in zip(outs, found if isinstance(found, tuple) else (found,), strict=True):
                if out.shape != values.shape:
                    self.resize(out, values)
                self._write(out, values, stream, about.name)
            return tuple(outs) if isinstance(found, tuple) else outs[0]

        def up(value):
            return self.on_device(value, stream, about.name) if isinstance(value, torch.Tensor) else value

        if isinstance(found, torch.Tensor):
            return up(found)
        return type(found)(map(up, found)) if isinstance(found, list | tuple) else found

    def on_device(self, values, stream, name):
        """A new tensor on a device that gets values of the host, as the results of the named operator."""
        made = self.new(values, stream.device)
        self._write(made, values, stream, name)
        return made

    def _write(self, tensor, values, stream, name):
        """Enqueue the values of a tensor, as its memory may be overwritten until its stream gets there."""
        if values.numel():
            target = self.on_host(tensor)
            self.scheduler.enqueue(stream, Work(name, lambda: target.copy_(values), (), [extent(target)]))

    def _workspace(self, stream):
        """The workspace that cuBLAS keeps for a thread and a stream, until it is told to clear all of them."""
        key = threading.get_ident(), stream
        if key not in self._workspaces:
            self._workspaces[key] = self.allocate(stream.device, WORKSPACE_BYTES, stream)

    def clear_workspaces(self):
        with self.scheduler.lock:
            for (_, stream), at in self._workspaces.items():
                self.memories[stream.device].free(at)
            self._workspaces.clear()

    # ---- copies

    def copy_(self, to, of, non_blocking=False):
        """`Tensor.copy_` where one side, or both, are on a device."""
        self.check_lost()
        if to.shape != of.shape:
            torch.empty(of.shape, device="meta").expand(to.shape)  # raises torch's own error if it cannot be
        if to.numel() == 0:
            return to
        if to.is_cuda and of.is_cuda:
            return self._copy_on_device(to, of)
        return self._copy_down(to, of, non_blocking) if of.is_cuda else self._copy_up(to, of, non_blocking)

    def _copy_on_device(self, to, of):
        here, there = self.current_stream(of.device.index), self.current_stream(to.device.index)
        target, source = self.on_host(to), self.on_host(of)
        if here is not there:
            self._order(there, here)
        self.scheduler.enqueue(here, Work("copy", lambda: target.copy_(source), [extent(source)], [extent(target)]))
        if here is not there:
            self._order(here, there)
        return to

    def _order(self, first, second):
        event = Event()
        self.scheduler.record(event, first)
        self.scheduler.wait(second, event)

    def _copy_up(self, to, of, non_blocking):
        """Copy from the host, as torch does (ATen/native/cuda/Copy.cu, in a version near 2.13).

        One transfer, if the dtype is the same and both sides are dense with the same strides, such as channels_last.
        Else what is transferred is contiguous: made so on the host, where it is a copy in pageable memory unless the
        source is contiguous already. A dtype is changed on the device if the copy is asynchronous, else on the host.
        """
        stream = self.current_stream(to.device.index)
        with below():
            source = of.detach().expand(to.shape)
            if not _is_one_transfer(to, source):
                source = (source if non_blocking else source.to(to.dtype)).contiguous()
        if non_blocking and not _is_one_transfer(to, source):
            between = self.new(_contiguous(of.dtype, to.shape), to.device.index)
            self._copy_up(between, source, non_blocking)
            return self._copy_on_device(to, between)
        is_pinned = self.memories["pinned"].arena.holds(source.data_ptr())
        if stream.capture is not None and not (is_pinned and non_blocking):
            self.scheduler.fail(stream.capture, "operation not permitted when stream is capturing")
        target = self.on_host(to)
        staged = self.on_host(source) if is_pinned else source.clone()  # pageable memory is read when the call is made
        reads = [extent(staged)] if is_pinned else []
        self.scheduler.enqueue(
            stream, Work("copy to the device", lambda: target.copy_(staged), reads, [extent(target)])
        )
        if is_pinned:
            self.memories["pinned"].use_on(source.data_ptr(), stream)
        if not non_blocking:
            self.synchronising()
            self.scheduler.synchronize_stream(stream)
        return to

    def _copy_down(self, to, of, non_blocking):
        """Copy to the host. Asynchronous to pinned memory, if it is dense and strided as the source, or contiguous.

        In the latter case the dtype and the strides are changed on the device, before the transfer. Other pinned memory
        is written by the host, from a copy that is contiguous and pageable, so that the host waits.
        """
        stream = self.current_stream(of.device.index)
        is_one = _is_one_transfer(to, of)
        late = non_blocking and self.memories["pinned"].arena.holds(to.data_ptr()) and (is_one or to.is_contiguous())
        if not late and stream.capture is not None:
            self.scheduler.fail(stream.capture, "operation not permitted when stream is capturing")
        if late and not is_one:
            between = self.new(_contiguous(to.dtype, to.shape), of.device.index)
            self._copy_on_device(between, of)
            return self._copy_down(to, between, non_blocking)
        source, target = self.on_host(of), self.on_host(to) if late else to.detach()
        writes = [extent(target)] if late else []
        self.scheduler.enqueue(stream, Work("copy to the host", lambda: target.copy_(source), [extent(source)], writes))
        if late:
            self.memories["pinned"].use_on(to.data_ptr(), stream)
        else:
            self.synchronising()  # torch's debug mode overlooks non_blocking=True, though the driver waits all the same
            self.scheduler.synchronize_stream(stream)
        return to


def _contiguous(dtype, shape):
    return torch.empty(shape, dtype=dtype, device=_META)


def _is_one_transfer(to, of):
    """Whether bytes need only be moved: dtype, shape and strides are the same, with nothing between elements."""
    if to.dtype != of.dtype or to.shape != of.shape:
        return False
    dims = sorted((s, n, other) for n, s, other in zip(to.shape, to.stride(), of.stride(), strict=True) if n > 1)
    dense = 1
    for stride, size, other in dims:
        if not stride == other == dense:
            return False
        dense *= size
    return True


def _bytes_up_to_end(like):
    """The bytes that a tensor of a geometry needs, those before its first element included."""
    if like.numel() == 0:
        return 0
    last = sum((n - 1) * s for n, s in zip(like.shape, like.stride(), strict=True))
    return (like.storage_offset() + last + 1) * like.element_size()


def _store(given, targets):
    """Copy the results of a kernel to where they have been promised to be."""
    for target, value in zip(targets, given if isinstance(given, tuple) else (given,), strict=False):
        if isinstance(target, list):
            for one, own in zip(target, value, strict=True):
                one.copy_(own)
        elif target is not None and target.numel() and value.numel():  # devices differ in what they leave empty
            target.copy_(value)


def _drawing(about, draw):
    """The operator with random numbers of the seed that `draw` gives, by a generator of its own, or by torch's."""

    def with_own(*args, **kwargs):
        own = torch.Generator()
        own.manual_seed(draw())
        return about(*args[: about.positions["generator"]], **{**kwargs, "generator": own})

    def with_torchs(*args, **kwargs):
        with _CPU_NUMBERS:
            before = torch.random.default_generator.get_state()
            torch.random.default_generator.manual_seed(draw())
            try:
                return about(*args, **kwargs)
            finally:
                torch.random.default_generator.set_state(before)

    return with_own if about.takes_generator else with_torchs


def _mixed(seed, offset):
    return int.from_bytes(hashlib.blake2b(f"{seed}/{offset}".encode(), digest_size=8).digest(), "little") >> 1


_KEYS = torch._C.DispatchKey
_ABOVE = torch._C.DispatchKeySet(_KEYS.Python)
for _name in (
    "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "Functionalize",
    "AutocastCPU", "AutocastCUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutogradMeta", "AutogradOther",
):  # fmt: skip
    _ABOVE = _ABOVE | torch._C.DispatchKeySet(getattr(_KEYS, _name))


def below():
    """A context in which operators go straight to their CPU kernels: no autograd, no modes, no autocast."""
    return torch._C._ForceDispatchKeyGuard(torch._C.DispatchKeySet(_KEYS.BackendSelect), _ABOVE)


def torch_error(error):
    """An error of the runtime as torch raises it."""
    raised = torch.AcceleratorError(str(error))
    raised.error_code = error.code
    return raised
