"""Activations on the host, from a simulated accelerator: its copies are as late as they may be, races are reported,
and its memory is counted."""
import gc,pickle,pytest
from contextlib import nullcontext,suppress
from itertools import chain
from harness import *
from test_checkpointing import (Encoder,archs,assert_equal,bits,body,ender,ends,fitted,get_learner,images,odd,others,
                                pair_of,same_bits)
from fastai.vision.all import resnet18
from fastai_accum.memory.checkpointing import *
from fastai_accum.memory.offload import *
from fastai_accum.memory.offload import Host,Kept

# the learners are on the device
pytestmark = pytest.mark.parametrize('device', [GPU], indirect=True)

def same_offloaded(*args, **kwargs):
    a = bits(fitted(*args, **kwargs))
    n = Counter()
    put = Host.put
    def count(self, t):
        o = put(self, t)
        n[type(o).__name__] += 1
        return o
    with patched(Host, 'put', count):
        assert_equal(bits(fitted(*args, plain=False, on=Learner.offload_activations, **kwargs)), a)
    assert n['Kept']>0, n
    return n

@contextmanager
def patched(o, name, f):
    was = getattr(o, name)
    setattr(o, name, f)
    try: yield
    finally: setattr(o, name, was)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('arch', ['resnet18','encoder','awd_lstm'])
def test_offload_bit_for_bit(arch, device):
    make,data,*kw = archs[arch]
    same_offloaded(make, data, **(kw[0] if kw else {}))

@pytest.mark.parametrize('k', ['coupled','both','micro_batch_bf16'])
def test_offload_beside(k, device): same_offloaded(*odd, cbs=others[k])

def test_any_loss(device):
    "Also one that accumulation cannot cut: the root of the mean square"
    same_offloaded(*odd, loss_func=lambda pred, y: (pred-y[:,None]).pow(2).mean().sqrt())

def conv_norm(): return nn.Sequential(nn.Conv2d(3,16,3), nn.BatchNorm2d(16), nn.ReLU())

def test_put(device):
    "What moves comes back as it was; the rest stays"
    m = conv_norm().to(device)
    host,x = Host(m),torch.randn(8,3,16,16).to(device)
    last = x.contiguous(memory_format=torch.channels_last)
    for t in (x, x.double(), x.bfloat16(), x>0, x.to(torch.complex64), x.transpose(1,2), last, x.long(), x[2:]):
        o = host.put(t)
        b = host.get(o)
        assert isinstance(o, Kept) and torch.equal(b, t) and b.data_ptr()!=t.data_ptr()
        assert b.dtype==t.dtype and b.stride()==t.stride()
        assert host.put(o) is o and host.put(o.t) is o.t and host.get(t) is t
    assert torch.equal(host.get(host.put(x[:,:,::2])), x[:,:,::2])
    big = nn.Linear(64,64).to(device)
    host = Host(big)
    stay = [big.weight, big.weight.detach(), big.weight.T, big.weight[3:], x[0,0,:4],
            x[:1,:1,:1,:1].expand(8,3,64,64), torch.randn(64,64), torch.empty(9,999,device='meta')]
    for t in stay: assert host.put(t) is t
    bn = nn.BatchNorm1d(999).to(device)
    assert Host(bn).put(bn.running_mean) is bn.running_mean and isinstance(Host(big).put(bn.running_mean), Kept)

def test_parameters_stay(device):
    "No copy of a parameter or of a buffer is made, and none of the batch, which the learner holds"
    model,put = body(resnet18)().to(device),Host.put
    moved = []
    def count(self, t):
        o = put(self, t)
        if isinstance(o, Kept): moved.append(t)
        return o
    def address(o): return o.untyped_storage().data_ptr()
    x = torch.randn(4,3,32,32).to(device)
    ptrs = {address(o) for o in chain(model.parameters(), model.buffers(), [x])}
    with patched(Host, 'put', count), Host(model).hooks(x): model(x)
    assert moved and not any(address(t) in ptrs for t in moved)

def test_changed_in_place(device):
    "What stays and is changed before the backward pass is an error, as without"
    big = nn.Linear(64,64).to(device)
    for how in (nullcontext, Host(big).hooks):
        with how(): y = big(torch.randn(8,64).to(device).requires_grad_()).sum()
        with torch.no_grad(): big.weight.add_(1)
        with pytest.raises(RuntimeError, match='modified by an inplace operation'): y.backward()

def test_twice(device):
    "A graph that is gone through twice, and a gradient of a gradient"
    m = nn.Sequential(nn.Linear(64,64), nn.Tanh(), nn.Linear(64,1)).to(device)
    def f(how):
        torch.manual_seed(0)
        x = torch.randn(32,64).to(device).requires_grad_()
        with how(): y = m(x).sum()
        y.backward(retain_graph=True); y.backward(retain_graph=True)
        g, = torch.autograd.grad(y, x, create_graph=True)
        return [x.grad, g, *torch.autograd.grad(g.norm(), list(m.parameters()), allow_unused=True)]
    for a,b in zip(f(nullcontext), f(Host(m).hooks)): assert (a is None and b is None) or torch.equal(a, b)

@drawn(4, exc=ends[:4], event=['before_batch','after_pred','after_backward','after_epoch'])
def test_offload_ends(exc, event, device):
    learn = get_learner(*odd).offload_activations()
    with suppress(exc): learn.fit(2, cbs=ender(exc, event))
    assert is_returned(learn)
    learn.fit(1)
    assert is_returned(learn)

def test_offloaded_fits(device):
    def fit(learn): learn.lr_find(num_it=12, show_plot=False); learn.fit(1); learn.validate(); learn.fit(1)
    same_bits(*odd, fit=fit, on=Learner.offload_activations)

def test_root_sequential(device):
    "Beside `GradientCheckpointing`, whichever comes first, also where both are about the model's own `forward`"
    def make():
        stem = nn.Conv2d(3,8,3),nn.BatchNorm2d(8),nn.ReLU(),nn.MaxPool2d(2)
        return nn.Sequential(*stem, nn.Conv2d(8,8,3), nn.ReLU(), nn.Flatten(), nn.Linear(200,3))
    ons = [lambda l: l.gradient_checkpointing().offload_activations(),
           lambda l: l.offload_activations().gradient_checkpointing()]
    for on in ons:
        same_bits(make, images(16, 12), on=on)
        n,put = [],Host.put
        def count(self, t): o = put(self, t); n.append((o,tuple(t.shape))); return o
        learn = on(get_learner(make, images(16, 12)))
        learn.add_cb(NoValid())
        with patched(Host, 'put', count): learn.fit(1)
        moved = [s for o,s in n if isinstance(o, Kept)]
        # in both batches, what the second and the third block begin with; the first one has the batch
        assert len(moved)==4, moved

def test_replaces_itself(device):
    learn = get_learner(*odd).offload_activations().offload_activations()
    assert learn.cbs.map(type).count(OffloadActivations)==1 and isinstance(learn.offloading, OffloadActivations)
    assert isinstance(pickle.loads(pickle.dumps(learn.offloading)), OffloadActivations)
    learn.fit(1)

long_texts = pair_of(lambda: torch.randn(8,64,64), lambda: torch.randint(3, (8,)))

def test_memory_of_offload(device, fakegpu):
    "What a step allocates at its peak, and nothing of it stays, neither on the device nor on the host"
    def peak(on):
        learn = get_learner(partial(Encoder, 64, 6), long_texts, opt_func=SGD)
        learn.add_cb(NoValid()); on(learn)
        learn.fit(1)
        gc.collect()
        was = fakegpu.memory_allocated(),fakegpu.pinned_stats()['now']
        fakegpu.reset_peak_memory_stats()
        learn.fit(1)
        gc.collect()
        assert (fakegpu.memory_allocated(),fakegpu.pinned_stats()['now'])==was
        return fakegpu.max_memory_allocated()-was[0]
    a,b = peak(Learner.offload_activations),peak(noop)
    assert a/b<=.5, f'{a/b:.3f} of what the plain run allocates'
