"What the simulated accelerator says that it simulates"
import gc,threading
import pytest,torch
import torch.nn.functional as F
from torch import nn
from harness import each,simulated

pytestmark = simulated

def numbers(*size, device='fakegpu', **kwargs): return torch.randn(*size, device=device, **kwargs)

def test_the_result_is_that_of_the_cpu(fakegpu):
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(180, 2))
    res = []
    for device in 'cpu','fakegpu':
        model.to(device).zero_grad()
        model(x.to(device)).square().mean().backward()
        res.append([p.grad.to('cpu', copy=True) for p in model.parameters()])
    for a,b in zip(*res): torch.testing.assert_close(a, b)

def test_two_devices(fakegpu):
    x = numbers(3, device='fakegpu:1')
    assert fakegpu.device_count()==2 and x.device.index==1 and fakegpu.current_device()==0
    with fakegpu.device(1): assert numbers(3).device.index==1
    assert fakegpu.current_device()==0
    assert torch.equal(x.to('fakegpu:0').cpu(), x.cpu())
    with pytest.raises(RuntimeError, match='device'): x+numbers(3, device='fakegpu:0')
    with pytest.raises(RuntimeError, match='invalid device ordinal 2'): numbers(3, device='fakegpu:2')

def test_the_backward_pass_has_its_own_thread(device):
    threads = []
    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g):
            threads.append(threading.get_ident())
            return g
    Note.apply(numbers(3, device=device).requires_grad_()).sum().backward()
    assert (threads==[threading.get_ident()])==(device.type=='cpu')

# Generators

def test_a_state_that_is_set_draws_the_same(fakegpu):
    torch.manual_seed(7)
    state = fakegpu.get_rng_state()
    assert state.dtype==torch.uint8 and state.view(torch.int64).tolist()==[7,0]   # a seed and an offset
    a,b = numbers(5),numbers(5)
    fakegpu.set_rng_state(state)
    assert torch.equal(numbers(5), a) and not torch.equal(a, b)
    own = torch.Generator('fakegpu').manual_seed(3)
    before = fakegpu.get_rng_state()
    a = numbers(5, generator=own)
    assert torch.equal(fakegpu.get_rng_state(), before) and torch.equal(numbers(5, generator=own.manual_seed(3)), a)
    with pytest.raises(RuntimeError, match="Expected a 'fakegpu' device type"): numbers(5, generator=torch.Generator())

def test_each_device_has_its_generator_and_none_is_that_of_the_cpu(fakegpu):
    cpu,(first,second) = torch.get_rng_state(),fakegpu.get_rng_state_all()
    numbers(5, device='fakegpu:1')
    F.dropout(torch.ones(5, device='fakegpu:1'))
    assert torch.equal(torch.get_rng_state(), cpu) and torch.equal(fakegpu.get_rng_state(0), first)
    assert not torch.equal(fakegpu.get_rng_state(1), second)
    fakegpu.set_rng_state_all([first,second])
    assert torch.equal(fakegpu.get_rng_state(1), second)

def test_dropout_is_one_operation(fakegpu):
    x = torch.ones(100, device='fakegpu', requires_grad=True)
    out = F.dropout(x, .25)
    assert out.grad_fn.name()=='NativeDropoutBackward0'
    out.sum().backward()
    assert torch.equal(x.grad, out) and set(out.tolist())=={0., torch.tensor(1/.75).item()}

# Fused attention

def attend(q): return F.scaled_dot_product_attention(q, q, q, dropout_p=.5)

def test_fused_attention_draws_inside(fakegpu):
    q = numbers(2, 2, 5, 4, requires_grad=True)
    state = fakegpu.get_rng_state()
    out = attend(q)
    assert 'FusedAttention' in out.grad_fn.name() and not torch.equal(fakegpu.get_rng_state(), state)
    after = fakegpu.get_rng_state()
    out.sum().backward()   # draws the same mask once more, from the seed that it kept
    assert torch.equal(fakegpu.get_rng_state(), after)
    a,q.grad = q.grad,None
    fakegpu.set_rng_state(state)
    attend(q).sum().backward()
    torch.testing.assert_close(q.grad, a, rtol=0, atol=0)

# Memory

def test_memory_is_counted(fakegpu):
    gc.collect()
    before = [fakegpu.memory_allocated(d) for d in (0,1)]
    x = torch.zeros(1000, device='fakegpu:1')
    y = x+1
    del y
    used,peak = (f(1)-before[1] for f in (fakegpu.memory_allocated,fakegpu.max_memory_allocated))
    assert (used,peak)==(4000,8000) and fakegpu.memory_allocated(0)==before[0]
    del x
    assert fakegpu.memory_allocated(1)==before[1]
    fakegpu.reset_peak_memory_stats(1)
    assert fakegpu.max_memory_allocated(1)==before[1]

def test_new_and_freed_memory_is_nan(fakegpu):
    assert torch.empty(4, device='fakegpu').isnan().all()
    x,side = torch.ones(4, device='fakegpu'),fakegpu.Stream()
    host = torch.empty(4).pin_memory()
    with fakegpu.stream(side): host.copy_(x, non_blocking=True)   # too late: it does not wait, nor does it record
    fakegpu.races()
    del x
    user = f'stream {side.stream_id} of device 0'
    assert fakegpu.races()==[f'memory of stream 0 of device 0 is freed while {user} uses it']
    side.synchronize()
    assert host.isnan().all()

def test_a_limit_raises_and_nothing_is_lost(fakegpu):
    x,before = torch.ones(1000, device='fakegpu'),fakegpu.memory_allocated()
    fakegpu.set_limit(before+6000)
    assert fakegpu.mem_get_info()==(6000, before+6000)
    with pytest.raises(torch.OutOfMemoryError, match='out of memory. Tried to allocate'): (x+1)+(x+2)
    gc.collect()
    assert fakegpu.memory_allocated()==before and fakegpu.stats()['ooms']>0
    assert (x+1).sum().item()==2000
    torch.ones(10000, device='fakegpu:1')   # the limit is that of one device
    fakegpu.set_limit(None)
    assert ((x+1)+(x+2)).sum().item()==5000

# Late copies

def test_a_copy_to_pinned_memory_is_late(fakegpu):
    x,event = torch.ones(4, device='fakegpu'),fakegpu.Event()
    for wait in fakegpu.synchronize,event.synchronize,fakegpu.current_stream().synchronize:
        host = torch.zeros(4).pin_memory()
        host.copy_(x, non_blocking=True)
        event.record()
        assert host.sum()==0 and not event.query() and fakegpu.pending()==1
        wait()
        assert host.sum()==4 and event.query() and fakegpu.pending()==0

def test_a_copy_that_may_not_be_late_is_not(fakegpu):
    x = torch.ones(4, device='fakegpu')
    assert torch.zeros(4).copy_(x, non_blocking=True).sum()==4                 # not pinned
    assert torch.zeros(4).pin_memory().copy_(x).sum()==4
    assert torch.zeros(4).pin_memory().double().copy_(x, non_blocking=True).sum()==4

# Races

@each(waits=[False,True])
def test_reading_on_another_stream(waits, fakegpu):
    side = fakegpu.Stream()
    x = torch.ones(4, device='fakegpu')
    if waits: side.wait_stream(fakegpu.current_stream())
    with fakegpu.stream(side): y = x*2
    side.synchronize()
    assert y.sum().item()==8   # what races may still give the right numbers
    found = fakegpu.races()
    assert found==([] if waits else [f'stream {side.stream_id} of device 0 reads what stream 0 of device 0 writes'])

@each(waits=[False,True])
def test_writing_what_another_stream_reads(waits, fakegpu):
    side,x = fakegpu.Stream(),torch.ones(4, device='fakegpu')
    fakegpu.synchronize()
    with fakegpu.stream(side):
        y = x*2
        event = side.record_event()
    if waits: fakegpu.current_stream().wait_event(event)
    x.zero_()
    found = fakegpu.races()
    assert bool(found)!=waits and all('writes what' in o for o in found), found

@each(end=['nothing','record_stream','wait','synchronize'])
def test_freeing_what_another_stream_uses(end, fakegpu):
    side,x = fakegpu.Stream(),torch.ones(4, device='fakegpu')
    side.wait_stream(fakegpu.current_stream())
    with fakegpu.stream(side): host = torch.empty(4).pin_memory().copy_(x, non_blocking=True)
    if end=='record_stream': x.record_stream(side)
    if end=='wait':          fakegpu.current_stream().wait_stream(side)
    if end=='synchronize':   side.synchronize()
    del x
    found = fakegpu.races()
    assert bool(found)==(end=='nothing') and all('is freed while' in o for o in found), found
    side.synchronize()
    assert host.isnan().all() if end=='nothing' else host.sum()==4

# Autocast, and pinned memory

@each(dtype=[torch.float16,torch.bfloat16])
def test_autocast_on_the_device(dtype, fakegpu):
    x = numbers(4, 4)
    with torch.autocast('fakegpu', dtype=dtype):
        y = x@x
        assert y.dtype==dtype and y.softmax(1).dtype==torch.float32 and (y+x).dtype==torch.float32
    assert (x@x).dtype==torch.float32

def test_a_scaler_skips_what_overflows(fakegpu):
    w = torch.ones(1, device='fakegpu', requires_grad=True)
    opt,scaler = torch.optim.SGD([w], lr=.5),torch.amp.GradScaler('fakegpu', init_scale=4.)
    for loss,then,scale in (w.sum(),.5,4.),(w.sum()*torch.inf,.5,2.):
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        assert w.item()==then and scaler.get_scale()==scale

def test_pinned_memory_is_counted(fakegpu):
    gc.collect()
    before = fakegpu.pinned_stats()
    host = torch.zeros(100).pin_memory()
    assert host.is_pinned() and not torch.zeros(100).is_pinned()
    assert [fakegpu.pinned_stats()[k]-before[k] for k in ('now','count')]==[400,1]
    fakegpu.reset_peak_host_memory_stats()
    assert fakegpu.host_memory_stats()['active_bytes.peak']==before['now']+400
    del host
    assert [fakegpu.pinned_stats()[k]-before[k] for k in ('now','count')]==[0,0]
    assert fakegpu.host_memory_stats()['active_bytes.peak']==before['now']+400
    fakegpu.reset_peak_host_memory_stats()
    assert fakegpu.host_memory_stats()['active_bytes.peak']==before['now']
