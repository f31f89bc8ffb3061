// A CUDA device on host memory for a CPU-only torch: what torch asks of a device in C++. Everything that has to be decided
// (streams, events, memory) is asked of Python by callbacks; see scheduler.py and memory.py beside this file.
#include <Python.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>
#include <cstring>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

using namespace c10;

namespace {

constexpr int kMostDevices = 8;
constexpr int kStreamsAPriority = 32;  // as torch: the 33rd is the first again

// ---- asked of Python, which is set once and outlives everything; each returns 0 if all is well
struct Callbacks {
  void* (*allocate)(int device, size_t bytes, int64_t stream);
  void* (*allocate_pinned)(size_t bytes);
  int (*record)(int64_t event, int device, int64_t stream);
  int (*wait)(int64_t event, int device, int64_t stream);
  int (*query)(int64_t event);
  int (*synchronize_event)(int64_t event);
  int (*query_stream)(int device, int64_t stream);
  int (*synchronize_stream)(int device, int64_t stream);
  int (*synchronize_device)(int device);
  int (*use_on_stream)(void* memory, int device, int64_t stream);
  int (*use_pinned_on_stream)(void* memory, int device, int64_t stream);
};
Callbacks callbacks{};
int num_devices = 1;
std::pair<char*, char*> device_memory[kMostDevices], pinned_memory;

void check(int status, const char* what) {
  TORCH_CHECK(status >= 0, "CUDA error: ", what, " failed on the simulated device");
}

// The callbacks, once CUDA is initialised: C++ may be the first that asks, as when memory is pinned.
const Callbacks& asked() {
  if (!callbacks.allocate) {
    auto state = PyGILState_Ensure();
    PyObject* module = PyImport_ImportModule("torch.cuda");
    PyObject* done = module ? PyObject_CallMethod(module, "init", nullptr) : nullptr;
    PyErr_Clear();
    Py_XDECREF(done), Py_XDECREF(module);
    PyGILState_Release(state);
    TORCH_CHECK(done && callbacks.allocate, "CUDA error: the simulated device cannot be initialised");
  }
  return callbacks;
}

void check_index(DeviceIndex index) {
  if (index >= num_devices) {
    constexpr int kInvalidDevice = 101;
    SourceLocation here{__func__, __FILE__, __LINE__};
    throw AcceleratorError(here, kInvalidDevice, "CUDA error: invalid device ordinal");
  }
}

// ---- current device and streams of a thread
thread_local DeviceIndex current_device = 0;
thread_local StreamId current_stream[kMostDevices] = {};
std::atomic<unsigned> next_stream[kMostDevices][2];

Device gpu(DeviceIndex index) { return Device(DeviceType::CUDA, index); }

// ---- memory: freed blocks are told to Python at its next call, as they may be freed on any thread without the interpreter
std::mutex freed_mutex;
std::vector<std::pair<void*, int>> freed;  // and whether pinned
void free_block(void* memory) {
  std::lock_guard lock(freed_mutex);
  freed.emplace_back(memory, 0);
}
void free_pinned(void* memory) {
  std::lock_guard lock(freed_mutex);
  freed.emplace_back(memory, 1);
}
int device_of(const void* memory) {
  for (int index = 0; index < num_devices; ++index)
    if (memory >= device_memory[index].first && memory < device_memory[index].second) return index;
  return -1;
}

struct DeviceAllocator final : Allocator {
  DataPtr allocate(size_t bytes) override {
    auto index = current_device;
    if (!bytes) return {nullptr, nullptr, &free_block, gpu(index)};
    void* memory = asked().allocate(index, bytes, current_stream[index]);
    TORCH_CHECK_WITH(OutOfMemoryError, memory, "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ", int(index));
    return {memory, memory, &free_block, gpu(index)};
  }
  DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "storages are copied by copy_"); }
};
DeviceAllocator device_allocator;

struct PinnedAllocator final : at::HostAllocator {
  DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_pinned, Device(DeviceType::CPU)};
    void* memory = asked().allocate_pinned(bytes);
    TORCH_CHECK(memory, "CUDA error: out of pinned memory, or a stream is capturing");
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* memory, void*, Stream stream) override {
    return asked().use_pinned_on_stream(memory, stream.device_index(), stream.id()) == 1;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;

// ---- the guard: devices, streams and events as torch's C++ uses them, autograd above all
std::atomic<int64_t> next_event{1};

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device device) const override {
    check_index(device.index());
    auto before = current_device;
    current_device = device.index() < 0 ? before : device.index();
    return gpu(before);
  }
  Device getDevice() const override { return gpu(current_device); }
  void setDevice(Device device) const override {
    check_index(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  Stream stream(Device device, StreamId id) const { return Stream(Stream::UNSAFE, device, id); }
  Device own(Device device) const { return device.index() < 0 ? gpu(current_device) : device; }
  Stream getStream(Device device) const override { return stream(own(device), current_stream[own(device).index()]); }
  Stream getDefaultStream(Device device) const override { return stream(own(device), 0); }
  Stream getNewStream(Device device, int priority) const override {
    int high = priority < 0, index = own(device).index();
    check_index(index);
    StreamId id = 1 + high * kStreamsAPriority + next_stream[index][high]++ % kStreamsAPriority;
    return stream(own(device), id);
  }
  Stream getStreamFromGlobalPool(Device device, bool high) const override { return getNewStream(device, high ? -1 : 0); }
  Stream exchangeStream(Stream next) const override {
    return stream(next.device(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    check(asked().record(reinterpret_cast<int64_t>(*event), s.device_index(), s.id()), "recording an event");
  }
  void block(void* event, const Stream& s) const override {
    if (event) check(asked().wait(reinterpret_cast<int64_t>(event), s.device_index(), s.id()), "waiting for an event");
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    int found = asked().query(reinterpret_cast<int64_t>(event));
    check(found, "querying an event");
    return found;
  }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream& s) const override {
    int found = asked().query_stream(s.device_index(), s.id());
    check(found, "querying a stream");
    return found;
  }
  void synchronizeStream(const Stream& s) const override {
    check(asked().synchronize_stream(s.device_index(), s.id()), "synchronising a stream");
  }
  void synchronizeEvent(void* event) const override {
    if (event) check(asked().synchronize_event(reinterpret_cast<int64_t>(event)), "synchronising an event");
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    check(asked().synchronize_device(index), "synchronising the device");
  }
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& s) const override {
    if (memory.get()) check(asked().use_on_stream(memory.get(), s.device_index(), s.id()), "record_stream");
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// ---- generators: a seed and an offset, as Philox has; the numbers follow from both in Python
struct Generator final : GeneratorImpl {
  explicit Generator(DeviceIndex index) : GeneratorImpl(gpu(index), DispatchKeySet(DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    std::random_device any;
    set_current_seed((uint64_t(any()) << 20) ^ any());
    return seed_;
  }
  void set_state(const TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "RNG state is wrong size");
    auto from = static_cast<const uint64_t*>(state.data());
    seed_ = from[0], offset_ = from[1];
  }
  intrusive_ptr<TensorImpl> get_state() const override {
    auto memory = GetAllocator(DeviceType::CPU)->allocate(16);
    auto to = static_cast<uint64_t*>(memory.get());
    to[0] = seed_, to[1] = offset_;
    Storage storage(Storage::use_byte_size_t{}, 16, std::move(memory), nullptr, false);
    auto made = make_intrusive<TensorImpl>(
        std::move(storage), DispatchKeySet({DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::ADInplaceOrView}),
        caffe2::TypeMeta::Make<uint8_t>());
    made->set_sizes_contiguous({16});
    return made;
  }
  Generator* clone_impl() const override {
    auto made = new Generator(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = default_rng_seed_val, offset_ = 0;
};
at::Generator& default_generator(DeviceIndex index) {
  TORCH_CHECK(index < num_devices, "The device_index is invalid.");
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMostDevices; ++i) made.push_back(at::make_generator<Generator>(DeviceIndex(i)));
    return made;
  }();
  return all.at(index < 0 ? current_device : index);
}

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return num_devices > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex index) const override { return index < num_devices; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex index) const override {
    check_index(index);
    ::current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    check_index(index);
    return std::exchange(::current_device, index);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  int getNumGPUs() const override { return num_devices; }
  void deviceSynchronize(DeviceIndex index) const override { check(asked().synchronize_device(index), "synchronising"); }
  Device getDeviceFromPtr(void* memory) const override { return gpu(std::max(0, device_of(memory))); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  bool isPinnedPtr(const void* memory) const override {
    return memory >= pinned_memory.first && memory < pinned_memory.second;
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    TORCH_CHECK(index < num_devices, "The device_index is invalid.");
    return at::make_generator<Generator>(index < 0 ? ::current_device : index);
  }
};

}  // namespace

namespace at {
using SimulatedHooks = ::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}  // namespace at

static const bool registered = [] {
  SetAllocator(DeviceType::CUDA, &device_allocator, 255);
  at::setHostAllocator(at::kCUDA, &pinned_allocator, 255);
  return true;
}();

PyObject* THPVariable_Wrap(const at::TensorBase& tensor);
PyObject* THPGenerator_Wrap(const at::Generator& generator);

namespace {

using Pointer = intrusive_ptr<TensorImpl, UndefinedTensorImpl>;
PyObject* wrapped(Pointer tensor) { return THPVariable_Wrap(reinterpret_cast<const at::TensorBase&>(tensor)); }

DispatchKeySet keys(DispatchKey backend, DispatchKey autograd) {
  return DispatchKeySet({backend, autograd, DispatchKey::ADInplaceOrView});
}
const DispatchKeySet kOnCuda = keys(DispatchKey::CUDA, DispatchKey::AutogradCUDA);
const DispatchKeySet kOnHost = keys(DispatchKey::CPU, DispatchKey::AutogradCPU);
const DispatchKeySet kOnMeta = keys(DispatchKey::Meta, DispatchKey::AutogradMeta);

// A tensor of the geometry of `like` over other memory.
PyObject* over(const TensorImpl* like, DispatchKeySet set, DataPtr memory, size_t bytes, Allocator* allocator) {
  Storage storage(Storage::use_byte_size_t{}, bytes, std::move(memory), allocator, allocator != nullptr);
  auto made = make_intrusive<TensorImpl>(std::move(storage), set, like->dtype());
  made->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
  return wrapped(Pointer(std::move(made)));
}

}  // namespace

extern "C" {

void sim_devices(int count) { num_devices = count; }
void sim_begin(const Callbacks* given) { callbacks = *given; }
void sim_memory(int device, char* first, char* end) {
  (device < 0 ? pinned_memory : device_memory[device]) = {first, end};
}
int sim_next_freed(void** memory, int* pinned) {
  std::lock_guard lock(freed_mutex);
  if (freed.empty()) return 0;
  *memory = freed.front().first, *pinned = freed.front().second;
  freed.erase(freed.begin());
  return 1;
}
int sim_device() { return current_device; }
int sim_exchange_device(int index) { return index < 0 ? current_device : std::exchange(current_device, index); }
int64_t sim_stream(int device) { return current_stream[device]; }
void sim_set_stream(int device, int64_t id) { current_stream[device] = id; }
int64_t sim_new_event() { return next_event++; }
PyObject* sim_default_generator(int device) { return THPGenerator_Wrap(default_generator(device)); }
size_t sim_storage_bytes(const TensorImpl* tensor) { return tensor->storage().nbytes(); }
const void* sim_storage_data(const TensorImpl* tensor) { return tensor->storage().data(); }

// The same memory seen from the host, which does not keep it alive: addresses are all that a device knows.
// Conjugate and negative views stay what they are.
PyObject* sim_host(TensorImpl* tensor) {
  auto& storage = tensor->storage();
  auto bits = tensor->key_set() & DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
  return over(tensor, kOnHost | bits, DataPtr(storage.mutable_data(), Device(DeviceType::CPU)), storage.nbytes(), nullptr);
}
// A tensor without memory, to find out what an operator returns.
PyObject* sim_meta(TensorImpl* tensor) {
  auto& storage = tensor->storage();
  return over(tensor, kOnMeta, DataPtr(nullptr, Device(DeviceType::Meta)), storage.nbytes(), GetAllocator(DeviceType::Meta));
}
// A new tensor on a device, over memory that `allocate` gave.
PyObject* sim_new(void* memory, size_t bytes, int device, const TensorImpl* like) {
  auto deleter = memory ? &free_block : &detail::deleteNothing;
  return over(like, kOnCuda, DataPtr(memory, memory, deleter, gpu(device)), bytes, &device_allocator);
}
// A view of `base` with the geometry of `like`.
PyObject* sim_view(TensorImpl* base, const TensorImpl* like) {
  auto made = make_intrusive<TensorImpl>(TensorImpl::VIEW, Storage(base->storage()), base->key_set(), like->dtype());
  made->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
  return wrapped(Pointer(std::move(made)));
}
// Give a tensor another size, and other memory if `bytes` is not 0.
void sim_resize(TensorImpl* tensor, const TensorImpl* like, void* memory, size_t bytes) {
  if (bytes) {
    auto* storage = tensor->storage().unsafeGetStorageImpl();
    auto index = tensor->device().index();
    storage->set_data_ptr_noswap(DataPtr(memory, memory, &free_block, gpu(index)));
    storage->set_nbytes(bytes);
  }
  tensor->set_sizes_and_strides(like->sizes(), like->strides(), like->storage_offset());
}
void sim_as_number(TensorImpl* tensor) { tensor->set_wrapped_number(true); }
void sim_set(TensorImpl* tensor, StorageImpl* storage, const TensorImpl* like, int64_t offset) {
  tensor->set_storage_keep_dtype(Storage(intrusive_ptr<StorageImpl>::reclaim_copy(storage)));
  tensor->set_sizes_and_strides(like->sizes(), like->strides(), offset);
}

}  // extern "C"
