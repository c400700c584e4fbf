"""What the simulated accelerator says that it simulates. `test_on_a_device` shows that there are two of them, and that
their results are those of the CPU; `test_memory`, that they run out of memory"""
import gc,threading
import pytest,torch
import torch.nn.functional as F
from harness import simulated

pytestmark = simulated

def numbers(*size, device='fakegpu', **kwargs): return torch.randn(*size, device=device, **kwargs)

def test_the_backward_pass_has_its_own_thread(device):
    threads,x = [],numbers(3, device=device, requires_grad=True)
    x.register_hook(lambda g: threads.append(threading.get_ident()))
    x.sum().backward()
    assert (threads==[threading.get_ident()])==(device.type=='cpu')

def test_generators(fakegpu):
    "Each device has its own, and none is that of the CPU; a state is a seed and an offset"
    torch.manual_seed(7)
    state,cpu = fakegpu.get_rng_state(),torch.get_rng_state()
    assert state.dtype==torch.uint8 and state.view(torch.int64).tolist()==[7,0]
    states = fakegpu.get_rng_state_all()
    a = F.dropout(numbers(5, device='fakegpu:1'))
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(fakegpu.get_rng_state(0), state)
    assert not torch.equal(fakegpu.get_rng_state(1), states[1])
    fakegpu.set_rng_state_all(states)
    assert torch.equal(F.dropout(numbers(5, device='fakegpu:1')), a)
    own = torch.Generator('fakegpu').manual_seed(3)
    a = numbers(5, generator=own)
    assert torch.equal(fakegpu.get_rng_state(), state) and torch.equal(numbers(5, generator=own.manual_seed(3)), a)
    with pytest.raises(RuntimeError, match="Expected a 'fakegpu' device type"): numbers(5, generator=torch.Generator())

def test_dropout_is_one_operation(fakegpu):
    x = torch.ones(100, device='fakegpu', requires_grad=True)
    out = F.dropout(x, .25)
    out.sum().backward()
    assert out.grad_fn.name()=='NativeDropoutBackward0' and torch.equal(x.grad, out)
    assert set(out.tolist())=={0., torch.tensor(1/.75).item()}

# Memory

def test_memory_is_counted(fakegpu):
    gc.collect()
    before = [fakegpu.memory_allocated(d) for d in (0,1)]
    x = torch.zeros(1000, device='fakegpu:1')
    x+1
    used,peak = (f(1)-before[1] for f in (fakegpu.memory_allocated,fakegpu.max_memory_allocated))
    assert (used,peak)==(4000,8000) and fakegpu.memory_allocated(0)==before[0]
    del x
    fakegpu.reset_peak_memory_stats(1)
    assert fakegpu.memory_allocated(1)==fakegpu.max_memory_allocated(1)==before[1]
    assert torch.empty(4, device='fakegpu').isnan().all()   # as what is freed: see below

def test_pinned_memory_is_counted(fakegpu):
    gc.collect()
    before = fakegpu.pinned_stats()
    def more():
        "Bytes, tensors, and bytes at the peak"
        peak = fakegpu.host_memory_stats()['active_bytes.peak']-before['now']
        return [*(fakegpu.pinned_stats()[k]-before[k] for k in ('now','count')), peak]
    host = torch.zeros(100).pin_memory()
    fakegpu.reset_peak_host_memory_stats()
    assert host.is_pinned() and not torch.zeros(100).is_pinned() and more()==[400,1,400]
    del host
    assert more()==[0,0,400]
    fakegpu.reset_peak_host_memory_stats()
    assert more()==[0,0,0]

# Late copies, and races

def test_a_copy_to_pinned_memory_is_late(fakegpu):
    x,event = torch.ones(4, device='fakegpu'),fakegpu.Event()
    for wait in fakegpu.synchronize,event.synchronize,fakegpu.current_stream().synchronize:
        host = torch.zeros(4).pin_memory()
        host.copy_(x, non_blocking=True)
        event.record()
        assert host.sum()==0 and not event.query() and fakegpu.pending()==1
        wait()
        assert host.sum()==4 and event.query() and fakegpu.pending()==0
    # what is not pinned, does wait, or has another dtype is not
    for to,late in (torch.zeros(4),True),(host.clone().pin_memory(),False),(host.double().pin_memory(),True):
        assert to.zero_().copy_(x, non_blocking=late).sum()==4

def test_reading_writing_or_freeing_what_another_stream_uses(fakegpu):
    side,(x,late) = fakegpu.Stream(),[torch.ones(4, device='fakegpu') for _ in range(2)]
    side.wait_stream(fakegpu.current_stream())
    with fakegpu.stream(side): y,host = x*2,torch.empty(4).pin_memory().copy_(late, non_blocking=True)
    y+1
    x.zero_()
    del late
    user = f'stream {side.stream_id} of device 0'
    assert fakegpu.races()==[f'stream 0 of device 0 reads what {user} writes',
                             f'stream 0 of device 0 writes what {user} reads',
                             f'memory of stream 0 of device 0 is freed while {user} uses it']
    side.synchronize()
    assert host.isnan().all() and y.sum().item()==8   # what races may still give the right numbers
