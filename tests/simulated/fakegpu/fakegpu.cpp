// A simulated accelerator on the memory of the host. It is a backend of PyTorch under the name that PyTorch keeps for
// backends from outside, PrivateUse1; the Python side calls it 'fakegpu'. An operation runs at once, on the CPU, on the
// very memory of the tensor. What is simulated is all that surrounds operations on a GPU. Each part of this file says
// what of a GPU it stands for.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/csrc/utils/pybind.h>
#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace fake {
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
constexpr int N = 2; // devices, so that what looks at the current one only is found out
constexpr auto PU1 = DeviceType::PrivateUse1;
// one lock for all that is global here: the backward pass of each device runs in a thread of its own. It is never
// destroyed, as all that tensors need which outlive the program
auto& mu = *new std::recursive_mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

// ---------------------------------------------------------------- the current device
// As with CUDA, each thread has its own.
thread_local int current = 0;
int checked(int i) {
  TORCH_CHECK(i >= 0 && i < N, "fakegpu: invalid device ordinal ", i);
  return i;
}

// ---------------------------------------------------------------- streams, events, races
// Stands for: work that is queued, and done later than the host asks for it. Kernels run at once. A copy that
// may be late waits in the queue of its stream, until an event, a synchronization or the next kernel of that
// stream needs it: so who forgets to wait reads old values. To find races, each stream has a vector clock:
// for each stream, the last of its kernels that is known to be done before the next kernel here begins. An
// event carries the clock of its stream to whoever waits for it. Two kernels on the same memory, of which at
// least one writes, race if neither knows the other.
using Key = std::pair<int, int64_t>; // device, stream
using Clock = std::map<Key, uint64_t>;
// `a` knows what `b` knows, too
void join(Clock& a, const Clock& b) {
  for (auto& [k, v] : b) {
    auto& o = a[k];
    o = std::max(o, v);
  }
}
struct Task { // a copy, a wait or a wipe, which is late
  uint64_t at;
  std::function<void()> f;
};
struct StreamState {
  uint64_t clock = 0, seq = 0; // how many kernels it was given, and how many tasks
  Clock vc;
  std::deque<Task> queue;
  void push(std::function<void()> f) { queue.push_back({++seq, std::move(f)}); }
};
struct Event {
  Key key{0, -1};  // the stream that recorded it
  uint64_t at = 0; // the last task before it
  Clock vc;
  double time = 0;
};
auto& streams = *new std::map<Key, StreamState>;
auto& host = *new Clock; // what the host knows to be done
int64_t next_stream[N] = {1, 1};
thread_local int64_t current_stream[N] = {0, 0};
auto& races = *new std::vector<std::string>;

Key here(int d) { return {d, current_stream[d]}; }
// do what waits on a stream
void flush(Key k, uint64_t upto = UINT64_MAX) {
  auto& s = streams[k];
  while (!s.queue.empty() && s.queue.front().at <= upto) {
    auto f = std::move(s.queue.front().f);
    s.queue.pop_front();
    f();
  }
}
// the number of a new kernel
uint64_t tick(Key k) {
  auto& s = streams[k];
  join(s.vc, host);
  return s.vc[k] = ++s.clock;
}
void host_sync(Key k) {
  flush(k);
  join(host, streams[k].vc);
}
void sync_device(int d) {
  for (auto& [k, s] : streams)
    if (k.first == d) host_sync(k);
}
// whether stream `by` knows kernel `at` of stream `k` to be done
bool seen(Key by, Key k, uint64_t at) {
  if (by == k) return true;
  auto& vc = streams[by].vc;
  auto i = vc.find(k);
  return i != vc.end() && i->second >= at;
}

// ---------------------------------------------------------------- memory
// Stands for: the memory of each device, of which there is little, and pinned memory of the host, which
// copies may be late from and to. Both are counted by their bytes, without the rounding and caching of CUDA's
// allocator. Over the limit of a device, the error is PyTorch's own OutOfMemoryError. New memory is all NaN,
// and so is freed memory, as if someone else had written to it. It is freed in the order of the stream that
// it comes from, as by CUDA's allocator: a stream that still uses it, and was not named by `record_stream`,
// is a race.
struct Memory { // the bytes, which live as long as a late copy needs them
  void* p;
  size_t n;
  Memory(size_t n) : n(n) {
    TORCH_CHECK(!posix_memalign(&p, 64, std::max<size_t>(n, 64)), "fakegpu: the host has no memory");
  }
  ~Memory() { free(p); }
};
struct Block {
  std::shared_ptr<Memory> mem;
  size_t n;
  int dev;
  bool pinned;
  Key stream;
  std::map<Key, uint64_t> written, read; // by which kernels, since the last that wrote
  std::set<Key> recorded;                // by `record_stream`
};
struct Stats {
  int64_t now = 0, peak = 0, limit = 0, count = 0, ooms = 0, total = 0;
};
Stats stats[N], pinned;
auto& blocks = *new std::map<void*, Block*>; // by address
std::string name(Key k) {
  return "stream " + std::to_string(k.second) + " of device " + std::to_string(k.first);
}
// the block that an address is in
Block* find(const void* p) {
  auto i = blocks.upper_bound(const_cast<void*>(p));
  if (i == blocks.begin()) return nullptr;
  --i;
  return (const char*)p < (const char*)i->first + std::max<size_t>(i->second->n, 1) ? i->second : nullptr;
}
void race(std::string s) {
  if (races.size() < 1000) races.push_back(std::move(s));
}
// kernel `at` of stream `k` reads or writes a block
void touch(Block* b, Key k, uint64_t at, bool write) {
  if (!b || b->pinned) return;
  for (auto& [o, c] : b->written)
    if (!seen(k, o, c)) race(name(k) + (write ? " writes" : " reads") + " what " + name(o) + " writes");
  if (write) {
    for (auto& [o, c] : b->read)
      if (!seen(k, o, c)) race(name(k) + " writes what " + name(o) + " reads");
    b->written.clear();
    b->read.clear();
    b->written[k] = at;
  } else
    b->read[k] = at;
}
void release(void* ctx) {
  Lock l(mu);
  auto* b = (Block*)ctx;
  blocks.erase(b->mem->p);
  auto& s = b->pinned ? pinned : stats[b->dev];
  s.now -= b->n;
  s.count--;
  auto mem = b->mem;
  auto wipe = [mem] { memset(mem->p, 0xFF, mem->n); };
  if (!b->pinned) {
    join(streams[b->stream].vc, host); // it is the host that frees it
    std::map<Key, uint64_t> used = b->read;
    for (auto& [k, c] : b->written) used[k] = std::max(used[k], c);
    for (auto& [k, c] : used)
      if (!b->recorded.count(k) && !seen(b->stream, k, c))
        race("memory of " + name(b->stream) + " is freed while " + name(k) + " uses it");
    bool pending = false;
    for (auto& k : b->recorded)
      if (!streams[k].queue.empty()) {
        pending = true;
        streams[k].push(wipe);
      }
    auto& own = streams[b->stream];
    if (!pending && !own.queue.empty())
      own.push(wipe); // reused in the order of its stream
    else if (!pending)
      wipe();
  } // pinned memory keeps its values: PyTorch's allocator of it waits for the copies
  delete b;
}
c10::DataPtr reserve(size_t n, int dev, bool pin) {
  Lock l(mu);
  auto& s = pin ? pinned : stats[dev];
  if (!pin && s.limit > 0 && s.now + (int64_t)n > s.limit) {
    s.ooms++;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "fakegpu out of memory. Tried to allocate ", n / 1048576.0,
                     " MiB. GPU ", dev, " has a total capacity of ", s.limit / 1048576.0, " MiB of which ",
                     (s.limit - s.now) / 1048576.0, " MiB is free.");
  }
  Device device = pin ? Device(DeviceType::CPU) : Device(PU1, dev);
  if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
  auto mem = std::make_shared<Memory>(n);
  memset(mem->p, 0xFF, mem->n);
  Key k = here(dev);
  auto* b = new Block{mem, n, dev, pin, k, {}, {}, {}};
  blocks[mem->p] = b;
  s.now += n;
  s.count++;
  s.total += n;
  s.peak = std::max(s.peak, s.now);
  if (!pin) { // as in PyTorch's sanitizer for CUDA: what came before on this stream may still use the memory
    auto& st = streams[k];
    st.vc[k] = st.clock;
    b->written[k] = st.clock;
  }
  return {mem->p, b, &release, device};
}
struct DeviceAlloc final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override { return reserve(n, current, false); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& p, Stream s) override {
    Lock l(mu);
    if (auto* b = find(p.get())) b->recorded.insert({s.device_index(), s.id()});
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    Lock l(mu);
    c10::CachingDeviceAllocator::DeviceStats r;
    auto& s = stats[checked(d)];
    for (auto* a : {&r.allocated_bytes, &r.reserved_bytes, &r.active_bytes, &r.requested_bytes}) {
      (*a)[0].current = s.now;
      (*a)[0].peak = s.peak;
      (*a)[0].allocated = s.total;
      (*a)[0].freed = s.total - s.now;
    }
    r.num_ooms = s.ooms;
    return r;
  }
  void resetAccumulatedStats(DeviceIndex d) override {
    Lock l(mu);
    stats[checked(d)].total = 0;
  }
  void resetPeakStats(DeviceIndex d) override {
    Lock l(mu);
    auto& s = stats[checked(d)];
    s.peak = s.now;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    Lock l(mu);
    auto& s = stats[checked(d)];
    size_t t = s.limit ? s.limit : (size_t)16 << 30;
    return {t - std::min<size_t>(t, s.now), t};
  }
};
struct PinnedAlloc final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return reserve(n, current, true); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
};
DeviceAlloc device_alloc;
PinnedAlloc pinned_alloc;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_alloc);

// ---------------------------------------------------------------- the guard
// What PyTorch asks of a backend for devices, streams and events: torch.Stream, torch.Event,
// torch.accelerator, and the engine of autograd, which runs the backward pass of each device in a thread of
// its own, on the stream of the forward pass.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = PU1;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return PU1; }
  Device exchangeDevice(Device d) const override {
    int o = current;
    current = checked(d.index());
    return {PU1, (DeviceIndex)o};
  }
  Device getDevice() const override { return {PU1, (DeviceIndex)current}; }
  void setDevice(Device d) const override { current = checked(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  static int idx(Device d) { return d.has_index() ? checked(d.index()) : current; }
  static Stream make(int d, int64_t i) { return Stream(Stream::UNSAFE, Device(PU1, d), i); }
  Stream getStream(Device d) const override {
    int i = idx(d);
    return make(i, current_stream[i]);
  }
  Stream getDefaultStream(Device d) const override { return make(idx(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    Lock l(mu);
    int i = idx(d);
    return make(i, next_stream[i]++);
  }
  Stream exchangeStream(Stream s) const override {
    int i = s.device_index();
    auto o = make(i, current_stream[i]);
    current_stream[i] = s.id();
    return o;
  }
  DeviceIndex deviceCount() const noexcept override { return N; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Lock l(mu);
    if (!*e) *e = new Event;
    auto* v = (Event*)*e;
    Key k{s.device_index(), s.id()};
    auto& st = streams[k];
    join(st.vc, host);
    v->key = k;
    v->at = st.seq;
    st.vc[k] = st.clock;
    v->vc = st.vc;
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    v->time = std::chrono::duration<double, std::milli>(now).count();
  }
  void block(void* e, const Stream& s) const override {
    if (!e) return;
    Lock l(mu);
    auto v = *(Event*)e;
    Key k{s.device_index(), s.id()};
    auto& st = streams[k];
    join(st.vc, v.vc);
    if (v.key == k) return;
    if (st.queue.empty() && k.second == 0)
      flush(v.key, v.at);
    else
      st.push([v] { flush(v.key, v.at); });
  }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    Lock l(mu);
    auto* v = (Event*)e;
    auto& q = streams[v->key].queue;
    return q.empty() || q.front().at > v->at;
  }
  bool queryStream(const Stream& s) const override {
    Lock l(mu);
    return streams[{s.device_index(), s.id()}].queue.empty();
  }
  void synchronizeStream(const Stream& s) const override {
    Lock l(mu);
    host_sync({s.device_index(), s.id()});
  }
  void synchronizeEvent(void* e) const override {
    if (!e) return;
    Lock l(mu);
    auto* v = (Event*)e;
    flush(v->key, v->at);
    join(host, v->vc);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    Lock l(mu);
    sync_device(d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const Stream& s) const override {
    device_alloc.recordStream(p, s);
  }
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return ((Event*)b)->time - ((Event*)a)->time;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- generators
// Stand for: the generators of CUDA, one a device, whose state is a seed and an offset, 16 bytes. An
// operation that draws takes its numbers from both and moves the offset, by as much as CUDA moves it. The
// numbers are other ones than CUDA's.
struct Gen final : c10::GeneratorImpl {
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  explicit Gen(DeviceIndex d)
      : c10::GeneratorImpl(Device(PU1, d), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t s) override {
    seed_ = s;
    offset_ = 0;
  }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    auto s = c10::detail::getNonDeterministicRandom(true);
    set_current_seed(s);
    return s;
  }
  void set_state(const c10::TensorImpl& t) override {
    at::detail::check_rng_state(t);
    TORCH_CHECK(t.numel() == 16, "RNG state is wrong size");
    auto* p = (const uint64_t*)t.data();
    seed_ = p[0];
    offset_ = p[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::detail::empty_cpu({16}, at::kByte, {}, {}, {}, {});
    auto* p = (uint64_t*)t.data_ptr();
    p[0] = seed_;
    p[1] = offset_;
    return t.getIntrusivePtr();
  }
  Gen* clone_impl() const override {
    auto* g = new Gen(device().index());
    g->seed_ = seed_;
    g->offset_ = offset_;
    return g;
  }
  static DeviceType device_type() { return PU1; }
  // the seed of one operation that draws n numbers; the offset moves as CUDA's does
  uint64_t take(int64_t n) {
    uint64_t z = seed_ * 0x9E3779B97F4A7C15ull + offset_ * 0xBF58476D1CE4E5B9ull + 12345;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    offset_ += 4 * ((std::max<int64_t>(n, 1) - 1) / 884736 + 1);
    return z ^ (z >> 31);
  }
};
std::vector<at::Generator>& gens() {
  static auto& g = *new std::vector<at::Generator>([] {
    std::vector<at::Generator> r;
    for (int i = 0; i < N; i++) r.push_back(at::make_generator<Gen>(i));
    return r;
  }());
  return g;
}
// a generator of the CPU for one operation that draws `n` numbers
at::Generator cpu_gen(const std::optional<at::Generator>& g, int dev, int64_t n) {
  at::Generator o = g.has_value() && g->defined() ? *g : gens()[dev];
  TORCH_CHECK(o.device().type() == PU1, "Expected a 'fakegpu' device type for generator but found '",
              o.device().type(), "'");
  std::lock_guard<std::mutex> l(o.mutex());
  return at::detail::createCPUGenerator(static_cast<Gen*>(o.unsafeGetGeneratorImpl())->take(n));
}

// ---------------------------------------------------------------- the hooks
// What PyTorch asks of a backend beyond the guard: its generators, pinned memory, and storages that are
// resized.
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return N; }
  void setCurrentDevice(DeviceIndex d) const override { current = checked(d); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto o = current;
    current = checked(d);
    return o;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return d < 0 || d >= N ? (DeviceIndex)current : exchangeDevice(d);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    return gens()[d < 0 ? current : checked(d)];
  }
  at::Generator getNewGenerator(DeviceIndex d) const override {
    return at::make_generator<Gen>(d < 0 ? current : checked(d));
  }
  Device getDeviceFromPtr(void* p) const override {
    Lock l(mu);
    auto* b = find(p);
    return {PU1, (DeviceIndex)(b ? b->dev : current)};
  }
  bool isPinnedPtr(const void* p) const override {
    Lock l(mu);
    auto* b = find(p);
    return b && b->pinned;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_alloc; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    auto* impl = s.unsafeGetStorageImpl();
    c10::DeviceGuard g(s.device());
    auto p = n ? device_alloc.allocate(n)
               : c10::DataPtr(nullptr, nullptr, &c10::detail::deleteNothing, s.device());
    if (auto m = std::min(n, impl->nbytes())) {
      Lock l(mu);
      flush(here(s.device().index()));
      memcpy(p.get(), impl->data(), m);
    }
    impl->set_data_ptr_noswap(std::move(p));
    impl->set_nbytes(n);
  }
};
bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// ---------------------------------------------------------------- tensors
// Stands for: how tensors are made, viewed and copied. `cpu(t)` is the tensor of the device as one of the
// CPU, on the same memory, and notes that the current stream reads or writes it. The host waits for the
// device where it waits for a GPU: at `item()`, and at copies between the two, unless one is `non_blocking`,
// its memory of the host pinned, and no kernel needed.
bool is_ours(const Tensor& t) { return t.defined() && t.device().type() == PU1; }
thread_local int inside = 0; // in a fallback: its copies are no synchronization of the host
struct Inside {
  Inside() { inside++; }
  ~Inside() { inside--; }
};
Tensor cpu(const Tensor& t, bool write = false) {
  if (!is_ours(t)) return t;
  int d = t.device().index();
  {
    Lock l(mu);
    Key k = here(d);
    flush(k);
    if (t.numel()) touch(find(t.storage().data()), k, tick(k), write);
  }
  auto r = at::from_blob(t.numel() ? const_cast<void*>(t.const_data_ptr()) : nullptr, t.sizes(), t.strides(),
                         t.options().device(at::kCPU).requires_grad(false));
  if (t.is_conj()) r._set_conj(true);
  if (t.is_neg()) r._set_neg(true);
  return r;
}
std::optional<Tensor> cpu(const std::optional<Tensor>& t, bool write = false) {
  return t && t->defined() ? std::optional<Tensor>(cpu(*t, write)) : std::nullopt;
}
// a new tensor of the device with the values of `t`
Tensor back(const Tensor& t, Device d) {
  if (!t.defined()) return t;
  c10::DeviceGuard g(d);
  auto r = at::empty_strided(t.sizes(), t.strides(), t.options().device(d));
  cpu(r, true).copy_(t);
  return r;
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dt, std::optional<at::Layout> lay,
             std::optional<Device> dev, std::optional<bool> pin, std::optional<at::MemoryFormat> mf) {
  auto d = c10::device_or_default(dev);
  TORCH_CHECK(c10::layout_or_default(lay) == at::kStrided, "fakegpu: strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(d.has_index() ? d : Device(PU1, current));
  return at::detail::empty_generic(size, &device_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dt), mf);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef st, std::optional<at::ScalarType> dt,
                     std::optional<at::Layout> lay, std::optional<Device> dev, std::optional<bool> pin) {
  auto d = c10::device_or_default(dev);
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard g(d.has_index() ? d : Device(PU1, current));
  return at::detail::empty_strided_generic(
      size, st, &device_alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dt));
}
bool is_pinned_ptr(const Tensor& t) {
  Lock l(mu);
  auto* b = find(t.storage().data());
  return b && b->pinned;
}
// `dst.copy_(self)`, where at least one is on a device
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (!dst.numel()) return dst;
  Lock l(mu);
  // between devices: both streams wait for each other
  if (is_ours(self) && is_ours(dst) && self.device() != dst.device()) {
    auto a = here(self.device().index()), b = here(dst.device().index());
    flush(a);
    flush(b);
    join(streams[a].vc, streams[b].vc);
    auto r = cpu(self); // on the stream of the source
    touch(find(dst.storage().data()), a, tick(a), true);
    auto w = at::from_blob(dst.data_ptr(), dst.sizes(), dst.strides(),
                           dst.options().device(at::kCPU).requires_grad(false));
    w.copy_(r);
    join(streams[b].vc, streams[a].vc);
    return dst;
  }
  bool h2d = !is_ours(self), d2h = !is_ours(dst);
  Key k = here((h2d ? dst : self).device().index());
  bool simple =
      self.dtype() == dst.dtype() && self.strides() == dst.strides() && self.is_non_overlapping_and_dense();
  bool defer = non_blocking && !inside && simple &&
               ((h2d && is_pinned_ptr(self)) || (d2h && is_pinned_ptr(dst)) || (!h2d && !d2h && k.second));
  if (!defer) {
    auto r = cpu(self), w = cpu(dst, true);
    w.copy_(r);
    if ((h2d || d2h) && !inside) host_sync(k);
    return dst;
  }
  auto at_ = tick(k);
  auto *bs = find(self.storage().data()), *bd = find(dst.storage().data());
  touch(bs, k, at_, false);
  touch(bd, k, at_, true);
  auto ms = bs->mem, md = bd->mem; // alive, though maybe wiped
  auto* ps = self.const_data_ptr();
  auto* pd = dst.data_ptr();
  auto n = self.numel() * self.element_size();
  streams[k].push([ms, md, ps, pd, n] { memcpy(pd, ps, n); });
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  const_cast<Tensor&>(dst).copy_(self);
  return dst;
}
at::Scalar local_scalar_dense(const Tensor& t) {
  auto r = cpu(t);
  {
    Lock l(mu);
    if (!inside) host_sync(here(t.device().index()));
  }
  return r.item();
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef s, std::optional<at::MemoryFormat> mf) {
  c10::DeviceGuard g(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(s), mf);
}
Tensor& set_storage(Tensor& r, at::Storage s, int64_t off, at::IntArrayRef size, at::IntArrayRef st) {
  at::native::checkSetStorage<int64_t>(r, s, off, size, st, true);
  auto* i = r.unsafeGetTensorImpl();
  i->set_storage_offset(off);
  if (st.data() != nullptr)
    i->set_sizes_and_strides(size, st);
  else
    i->set_sizes_contiguous(size);
  return r;
}
Tensor& set_empty(Tensor& r) {
  auto e = at::empty({0}, r.options());
  return r.set_(e.storage(), 0, {0}, {});
}
Tensor& set_storage0(Tensor& r, at::Storage s) { return at::native::set_(r, s); }
Tensor& set_tensor(Tensor& r, const Tensor& s) { return at::native::set_tensor_(r, s); }
Tensor view(const Tensor& t, c10::SymIntArrayRef s) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(s));
}
Tensor as_strided(const Tensor& t, c10::SymIntArrayRef s, c10::SymIntArrayRef st,
                  std::optional<c10::SymInt> off) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st),
                                           off ? std::optional<int64_t>(off->guard_int(__FILE__, __LINE__))
                                               : std::nullopt);
}
Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef s, c10::SymIntArrayRef st) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(s), C10_AS_INTARRAYREF_SLOW(st));
}
// as on CUDA: `model.to(device)` keeps its parameters
bool compatible(const Tensor&, const Tensor&) { return true; }
void record_stream(Tensor& t, Stream s) { device_alloc.recordStream(t.storage().data_ptr(), s); }

// ---------------------------------------------------------------- all other operations
// Each runs on the CPU, with the generator of the device where it draws; PyTorch copies the arguments and the
// results.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto& args = op.schema().arguments();
  auto begin = stack->size() - args.size();
  int gen = -1, dev = current;
  int64_t n = 1;
  bool random = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < args.size(); i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor() && is_ours(v.toTensor())) {
      dev = v.toTensor().device().index();
      n = std::max(n, v.toTensor().numel());
    }
    if (args[i].name() == "generator") gen = i;
  }
  Inside in;
  if (gen >= 0) {
    auto& v = (*stack)[begin + gen];
    v = cpu_gen(v.isNone() ? std::nullopt : std::optional<at::Generator>(v.toGenerator()), dev, n);
    random = false;
  }
  if (!random) return at::native::cpu_fallback(op, stack);
  // draws, but takes no generator: so from that of the CPU, which is put back
  auto g = at::detail::getDefaultCPUGenerator();
  Tensor was;
  auto mine = cpu_gen(std::nullopt, dev, n);
  {
    std::lock_guard<std::mutex> l(g.mutex());
    was = g.get_state();
    g.set_state(mine.get_state());
  }
  struct Restore {
    at::Generator g;
    Tensor was;
    ~Restore() {
      std::lock_guard<std::mutex> l(g.mutex());
      g.set_state(was);
    }
  } r{g, was};
  at::native::cpu_fallback(op, stack);
}

// ---------------------------------------------------------------- operations that a GPU has of its own
// Stand for: where PyTorch takes another path on a GPU than on the CPU. Dropout is one operation that returns
// its mask, a convolution and batch norm have kernels of the device (batch norm moves its statistics without
// a new `_version`), the cells of an LSTM and a GRU are fused, and attention draws its dropout inside.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  c10::DeviceGuard g(x.device());
  Inside in;
  auto c = cpu(x);
  if (train && !*train)
    return {back(c.clone(), x.device()), back(at::ones_like(c, c.options().dtype(at::kBool)), x.device())};
  auto mask = at::empty_like(c, c.options().dtype(at::kBool))
                  .bernoulli_(1 - p, cpu_gen(std::nullopt, x.device().index(), x.numel()));
  double s = p == 1 ? 0 : 1 / (1 - p);
  return {back(c.mul(mask).mul_(s), x.device()), back(mask, x.device())};
}
Tensor conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef st,
            at::IntArrayRef pad, at::IntArrayRef dil, bool tr, at::IntArrayRef op, int64_t gr) {
  Inside in;
  return back(at::convolution(cpu(x), cpu(w), cpu(b), st, pad, dil, tr, op, gr), x.device());
}
std::tuple<Tensor, Tensor, Tensor> conv_backward(const Tensor& g, const Tensor& x, const Tensor& w,
                                                 at::IntArrayRef st, at::IntArrayRef pad, at::IntArrayRef dil,
                                                 bool tr, at::IntArrayRef op, int64_t gr,
                                                 std::array<bool, 3> m) {
  Inside in;
  auto d = x.device();
  auto [a, b, c] =
      at::convolution_backward(cpu(g), cpu(x), cpu(w), at::IntArrayRef({w.size(tr ? 1 : 0) * (tr ? gr : 1)}),
                               st, pad, dil, tr, op, gr, m);
  return {m[0] ? back(a, d) : Tensor(), m[1] ? back(b, d) : Tensor(), m[2] ? back(c, d) : Tensor()};
}
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const std::optional<Tensor>& w,
                                              const std::optional<Tensor>& b, const std::optional<Tensor>& rm,
                                              const std::optional<Tensor>& rv, bool train, double mom,
                                              double eps) {
  Inside in;
  auto d = x.device(); // the statistics change in place, without a new _version, as on CUDA
  auto [o, m, s] =
      at::native_batch_norm(cpu(x), cpu(w), cpu(b), cpu(rm, train), cpu(rv, train), train, mom, eps);
  return {back(o, d), back(m, d), back(s, d)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& ig, const Tensor& hg, const Tensor& cx,
                                             const std::optional<Tensor>& bi,
                                             const std::optional<Tensor>& bh) {
  Inside in;
  auto d = cx.device();
  auto g = cpu(ig) + cpu(hg);
  if (bi && bi->defined()) g = g + cpu(*bi);
  if (bh && bh->defined()) g = g + cpu(*bh);
  auto q = g.chunk(4, 1);
  auto i = q[0].sigmoid(), f = q[1].sigmoid(), c = q[2].tanh(), o = q[3].sigmoid();
  auto cy = f * cpu(cx) + i * c;
  return {back(o * cy.tanh(), d), back(cy, d), back(at::cat({i, f, c, o}, 1), d)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& ghy,
                                                      const std::optional<Tensor>& gcy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& ws, bool has_bias) {
  Inside in;
  auto d = cx.device();
  auto q = cpu(ws).chunk(4, 1);
  auto &i = q[0], &f = q[1], &c = q[2], &o = q[3];
  auto t = cpu(cy).tanh();
  auto gh = ghy && ghy->defined() ? cpu(*ghy) : at::zeros_like(t);
  auto gc = gh * o * (1 - t * t);
  if (gcy && gcy->defined()) gc = gc + cpu(*gcy);
  auto x = cpu(cx);
  auto gg =
      at::cat({gc * c * i * (1 - i), gc * x * f * (1 - f), gc * i * (1 - c * c), gh * t * o * (1 - o)}, 1);
  return {back(gg, d), back(gc * f, d), has_bias ? back(gg.sum(0), d) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& ig, const Tensor& hg, const Tensor& hx,
                                    const std::optional<Tensor>& bi, const std::optional<Tensor>& bh) {
  Inside in;
  auto d = hx.device();
  auto a = cpu(ig), b = cpu(hg);
  if (bi && bi->defined()) {
    a = a + cpu(*bi);
    b = b + cpu(*bh);
  }
  auto p = a.chunk(3, 1), q = b.chunk(3, 1);
  auto r = (p[0] + q[0]).sigmoid(), z = (p[1] + q[1]).sigmoid(), n = (p[2] + r * q[2]).tanh();
  auto h = cpu(hx);
  return {back((h - n) * z + n, d), back(at::cat({r, z, n, h, q[2]}, 1), d)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& ghy, const Tensor& ws,
                                                                     bool has_bias) {
  Inside in;
  auto d = ws.device();
  auto k = cpu(ws).chunk(5, 1);
  auto &r = k[0], &z = k[1], &n = k[2], &h = k[3], &q = k[4];
  auto g = cpu(ghy);
  auto gz = g * (h - n) * z * (1 - z), gn = g * (1 - z) * (1 - n * n), gr = gn * q * r * (1 - r);
  auto gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  return {back(gi, d), back(gh, d), back(g * z, d), has_bias ? back(gi.sum(0), d) : Tensor(),
          has_bias ? back(gh.sum(0), d) : Tensor()};
}

// fused attention: its mask is drawn inside, and once more in the backward pass, from the same seed
int64_t sdp_choice(const Tensor& q, const Tensor&, const Tensor&, const std::optional<Tensor>& m, double,
                   bool, std::optional<double>, bool) {
  auto& c = at::globalContext();
  bool may = c.userEnabledFlashSDP() || c.userEnabledMemEfficientSDP(); // `sdpa_kernel(MATH)` turns both off
  return (int64_t)(may && q.scalar_type() != at::kDouble && q.dim() == 4 && !(m && m->requires_grad())
                       ? at::SDPBackend::overrideable
                       : at::SDPBackend::math);
}
struct Parts {
  Tensor q, k, v, p, mask, drop;
  double scale;
};
Parts attend(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, double dp,
             bool causal, std::optional<double> scale, uint64_t seed) {
  Parts r{cpu(q), cpu(k), cpu(v), {}, {}, {}, scale.value_or(1 / std::sqrt((double)q.size(-1)))};
  auto wide = [](const Tensor& t) {
    return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16 ? t.to(at::kFloat) : t;
  };
  r.q = wide(r.q);
  r.k = wide(r.k);
  r.v = wide(r.v);
  auto s = at::matmul(r.q, r.k.transpose(-2, -1)) * r.scale;
  if (causal)
    s = s.masked_fill(at::ones({q.size(-2), k.size(-2)}, s.options().dtype(at::kBool)).tril().logical_not(),
                      -INFINITY);
  if (bias && bias->defined()) {
    auto b = cpu(*bias);
    s = b.scalar_type() == at::kBool ? s.masked_fill(b.logical_not(), -INFINITY) : s + b;
  }
  r.p = s.softmax(-1);
  r.drop = r.p;
  if (dp > 0) {
    r.mask = at::empty_like(r.p).bernoulli_(1 - dp, at::detail::createCPUGenerator(seed)).div_(1 - dp);
    r.drop = r.p * r.mask;
  }
  return r;
}
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
sdpa(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias, double dp,
     bool causal, bool, std::optional<double> scale) {
  Inside in;
  auto d = q.device();
  uint64_t seed = 0;
  if (dp > 0) {
    auto g = gens()[d.index()];
    std::lock_guard<std::mutex> l(g.mutex());
    seed = static_cast<Gen*>(g.unsafeGetGeneratorImpl())->take(q.size(0) * q.size(1) * q.size(2) * k.size(2));
  }
  auto r = attend(q, k, v, bias, dp, causal, scale, seed);
  auto o = at::matmul(r.drop, r.v).to(q.scalar_type());
  auto e = at::empty({0}, q.options());
  auto stat = back(at::zeros({q.size(0), q.size(1), q.size(2)}, at::kFloat), d);
  return {back(o, d),
          stat,
          Tensor(),
          Tensor(),
          q.size(2),
          k.size(2),
          at::scalar_tensor((int64_t)seed, at::kLong),
          at::scalar_tensor((int64_t)0, at::kLong),
          e};
}
std::tuple<Tensor, Tensor, Tensor, Tensor>
sdpa_backward(const Tensor& go, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
              std::array<bool, 4> mask, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
              c10::SymInt, c10::SymInt, double dp, bool causal, const Tensor& seed, const Tensor&,
              std::optional<double> scale) {
  Inside in;
  auto d = q.device();
  auto r = attend(q, k, v, bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, dp, causal, scale,
                  dp > 0 ? (uint64_t)seed.item<int64_t>() : 0);
  auto g = cpu(go).to(r.v.scalar_type());
  auto gv = at::matmul(r.drop.transpose(-2, -1), g);
  auto gp = at::matmul(g, r.v.transpose(-2, -1));
  if (dp > 0) gp = gp * r.mask;
  auto gs = r.p * (gp - (gp * r.p).sum(-1, true));
  auto t = q.scalar_type();
  return {back((at::matmul(gs, r.k) * r.scale).to(t), d),
          back((at::matmul(gs.transpose(-2, -1), r.q) * r.scale).to(t), d), back(gv.to(t), d), Tensor()};
}
} // namespace fake

// ---------------------------------------------------------------- which operation is whose
namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::sdp_choice)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace fake;
  m.impl("empty.memory_format", TORCH_FN(fake::empty));
  m.impl("empty_strided", TORCH_FN(fake::empty_strided));
  m.impl("as_strided", TORCH_FN(fake::as_strided));
  m.impl("view", TORCH_FN(fake::view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("set_.source_Storage", TORCH_FN(set_storage0));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(compatible));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("convolution_overrideable", TORCH_FN(conv));
  m.impl("convolution_backward_overrideable", TORCH_FN(conv_backward));
  m.impl("native_batch_norm", TORCH_FN(batch_norm));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  m.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  m.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(sdpa));
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(sdpa_backward));
}

// ---------------------------------------------------------------- autocast
// Stands for: torch.autocast('cuda'), with CUDA's own lists of what runs in half precision and what in float32.
namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define F32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define OPT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PRO(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(F32)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(PRO)
}
} // namespace at::autocast

// ---------------------------------------------------------------- what the Python side calls
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace fake;
  m.def("get_device", [] { return current; });
  m.def("set_device", [](int d) { current = checked(d); });
  m.def("default_generator", [](int d) { return gens()[checked(d)]; });
  m.def("stats", [](int d) {
    Lock l(mu);
    auto& s = stats[checked(d)];
    return std::map<std::string, int64_t>{{"now", s.now},     {"peak", s.peak}, {"limit", s.limit},
                                          {"count", s.count}, {"ooms", s.ooms}, {"total", s.total}};
  });
  m.def("pinned_stats", [] {
    Lock l(mu);
    return std::map<std::string, int64_t>{
        {"now", pinned.now}, {"peak", pinned.peak}, {"count", pinned.count}};
  });
  m.def("reset_peak", [](int d) {
    Lock l(mu);
    stats[checked(d)].peak = stats[d].now;
  });
  m.def("reset_pinned_peak", [] {
    Lock l(mu);
    pinned.peak = pinned.now;
  });
  m.def("set_limit", [](int d, int64_t n) {
    Lock l(mu);
    stats[checked(d)].limit = n;
  });
  m.def("mem_get_info", [](int d) { return device_alloc.getMemoryInfo(d); });
  m.def(
      "races",
      [](bool clear) {
        Lock l(mu);
        auto r = races;
        if (clear) races.clear();
        return r;
      },
      pybind11::arg("clear") = true);
  m.def("pending", [] {
    Lock l(mu);
    int64_t n = 0;
    for (auto& [k, s] : streams) n += s.queue.size();
    return n;
  });
}
