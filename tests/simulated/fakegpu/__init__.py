"""A simulated accelerator, `torch.device('fakegpu')`, on the memory of the host. `import fakegpu` is enough.

This module becomes `torch.fakegpu`, as `torch.cuda` is that of CUDA: what has a name there does the same here. The
rest, which is for tests, is at the end. CONTRIBUTING.md says how to use it."""
import contextlib,sys,types
import torch
from fakegpu import build

if build.missing(): raise ModuleNotFoundError(f'the simulated accelerator needs {build.missing()}', name='fakegpu')
_C = build.load()
torch.utils.rename_privateuse1_backend('fakegpu')

def _index(d=None):
    "The index of a device, however it is given"
    if isinstance(d, str): d = torch.device(d)
    if isinstance(d, torch.device):
        if d.type!='fakegpu': raise ValueError(f'Expected a fakegpu device, but got: {d}')
        d = d.index
    return _C.get_device() if d is None or d<0 else d

def _device(d=None): return torch.device('fakegpu', _index(d))

# Devices. PyTorch itself asks for the first three, and for `_initialized` where it saves generators.
_initialized = True
def _lazy_init(): pass
def _is_in_bad_fork(): return False
def is_initialized(): return True
def is_available(): return True
def device_count(): return 2
def current_device(): return _C.get_device()
def set_device(d): _C.set_device(_index(d))
def synchronize(d=None): torch.accelerator.synchronize(_index(d))
def get_device_name(d=None): return 'Fake GPU'
def get_device_properties(d=None):
    return types.SimpleNamespace(name=get_device_name(d), total_memory=mem_get_info(d)[1])

class device:
    "The current device within a `with`"
    def __init__(self, d): self.idx = _index(d)
    def __enter__(self):
        self.was = _C.get_device()
        _C.set_device(self.idx)
    def __exit__(self, *args): _C.set_device(self.was)

# Memory. There is no cache, so what is reserved is what is allocated.
def memory_allocated(d=None): return stats(d)['now']
def max_memory_allocated(d=None): return stats(d)['peak']
memory_reserved,max_memory_reserved = memory_allocated,max_memory_allocated
def reset_peak_memory_stats(d=None): _C.reset_peak(_index(d))
def mem_get_info(d=None): return _C.mem_get_info(_index(d))
def empty_cache(): pass
def memory_stats(d=None):
    s = stats(d)
    return {'allocated_bytes.all.current':s['now'], 'allocated_bytes.all.peak':s['peak'], 'num_ooms':s['ooms']}

def host_memory_stats():
    s = pinned_stats()
    return {'active_bytes.current':s['now'], 'active_bytes.peak':s['peak']}
def reset_peak_host_memory_stats(): _C.reset_pinned_peak()

# Generators
default_generators = tuple(_C.default_generator(i) for i in range(device_count()))
def get_rng_state(device='fakegpu'): return default_generators[_index(device)].get_state()
def get_rng_state_all(): return [g.get_state() for g in default_generators]
def set_rng_state(state, device='fakegpu'): default_generators[_index(device)].set_state(state)
def set_rng_state_all(states):
    for g,s in zip(default_generators, states): g.set_state(s)
def manual_seed(seed): default_generators[_index()].manual_seed(int(seed))
def manual_seed_all(seed):
    for g in default_generators: g.manual_seed(int(seed))
def initial_seed(): return default_generators[_index()].initial_seed()

# Streams
def Stream(device=None, priority=0): return torch.Stream(_device(device), priority=priority)
def Event(enable_timing=False): return torch.Event('fakegpu', enable_timing=enable_timing)
def current_stream(d=None): return torch.accelerator.current_stream(_device(d))
def default_stream(d=None): return torch.Stream(stream_id=0, device_index=_index(d), device_type=20)   # PrivateUse1
def set_stream(s): torch.accelerator.set_stream(s)

@contextlib.contextmanager
def stream(s):
    "The current stream within a `with`, and the current device, which is that of the stream"
    if s is None:
        yield
        return
    device,there = _C.get_device(),current_stream(s.device_index)
    torch.accelerator.set_stream(s)
    try: yield
    finally:
        torch.accelerator.set_stream(there)
        _C.set_device(device)

# Autocast
def get_amp_supported_dtype(): return [torch.float16, torch.bfloat16]
def is_bf16_supported(): return True

# For tests
def set_limit(n, d=None):
    "A device has `n` bytes from now on; without `n`, as many as it likes"
    _C.set_limit(_index(d), int(n or 0))

def stats(d=None):
    "Of a device: bytes `now`, at the `peak` and in `total`, the `limit`, and the `count` of blocks and of `ooms`"
    return _C.stats(_index(d))

def pinned_stats():
    "Of pinned memory: bytes `now` and at the `peak`, and the `count` of blocks"
    return _C.pinned_stats()

def races(clear=True):
    "What one stream did while another might still do something else with the same memory, in words"
    return _C.races(clear)

def pending():
    "How many copies are late"
    return _C.pending()

torch._register_device_module('fakegpu', sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_packed_sequence=True,
                                                     for_storage=True)
