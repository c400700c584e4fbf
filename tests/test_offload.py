"""Activations on the host, from a simulated accelerator: its copies are as late as they may be, races are reported,
and its memory is counted."""
from contextlib import nullcontext
import test_checkpointing
from itertools import chain
from test_checkpointing import *
from fastai_accum.memory.offload import Host,Kept

@pytest.fixture(autouse=True)
def there(fakegpu, monkeypatch):
    "The learners are on the device"
    monkeypatch.setattr(test_checkpointing.where, 'device', 'fakegpu:0')
    return 'fakegpu:0'

def same_offloaded(*args, **kwargs):
    a = state(fitted(*args, **kwargs))
    n = Counter()
    put = Host.put
    def count(self, t):
        o = put(self, t)
        n[type(o).__name__] += 1
        return o
    with patched(Host, 'put', count):
        assert_equal(state(fitted(*args, plain=False, on=Learner.offload_activations, **kwargs)), a)
    assert n['Kept']>0, n
    return n

@contextmanager
def patched(o, name, f):
    was = getattr(o, name)
    setattr(o, name, f)
    try: yield
    finally: setattr(o, name, was)

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('arch', [o for o in archs if o not in ('vgg','densenet_body','timm_resnet50')])
def test_bit_for_bit(arch):
    make,data,*kw = archs[arch]
    same_offloaded(make, data, **(kw[0] if kw else {}))

others = {**{k:others[k] for k in ('accumulate','micro_batch','coupled','auto','bf16')},
          'checkpointing':lambda: GradientCheckpointing()}

@pytest.mark.parametrize('k', others)
def test_beside(k): same_offloaded(*odd, cbs=others[k])

def test_any_loss():
    "Also a loss that accumulation cannot cut: the root of the mean square"
    same_offloaded(*odd, loss_func=lambda pred, y: (pred-y[:,None]).pow(2).mean().sqrt())
    same_offloaded(*odd, loss_func=lambda pred, y: pred.var(0).sum()+F.cross_entropy(pred, y)**2)

def test_without_copies():
    "On the CPU it is the plain run, and nothing is copied"
    m,x = nn.Sequential(nn.Linear(64,64), nn.Tanh()),torch.randn(32,64)
    host = Host(m)
    assert host.put(x) is x
    with host.hooks(): m(x).sum().backward()
    assert host.most==0

def net(): return nn.Sequential(nn.Conv2d(3,16,3), nn.BatchNorm2d(16), nn.ReLU())

def test_put(there):
    "What moves comes back as it was; the rest stays"
    m = net().to(there)
    host,x = Host(m),torch.randn(8,3,16,16).to(there)
    last = x.contiguous(memory_format=torch.channels_last)
    for t in (x, x.double(), x.bfloat16(), x>0, x.to(torch.complex64), x.transpose(1,2), last, x.long(), x[2:]):
        o = host.put(t)
        b = host.get(o)
        assert isinstance(o, Kept) and torch.equal(b, t) and b.data_ptr()!=t.data_ptr()
        assert b.dtype==t.dtype and b.stride()==t.stride()
        assert host.put(o) is o and host.put(o.t) is o.t and host.get(t) is t
    assert torch.equal(host.get(host.put(x[:,:,::2])), x[:,:,::2])
    big = nn.Linear(64,64).to(there)
    host = Host(big)
    stay = [big.weight, big.weight.detach(), big.weight.T, big.weight[3:], x[0,0,:4],
            x[:1,:1,:1,:1].expand(8,3,64,64), torch.randn(64,64), torch.empty(9,999,device='meta')]
    for t in stay: assert host.put(t) is t
    bn = nn.BatchNorm1d(999).to(there)
    assert Host(bn).put(bn.running_mean) is bn.running_mean and isinstance(Host(big).put(bn.running_mean), Kept)

def test_parameters_stay(there):
    "No copy of a parameter or of a buffer is made, and none of the batch, which the learner holds"
    model,put = body(resnet18)().to(there),Host.put
    moved = []
    def count(self, t):
        o = put(self, t)
        if isinstance(o, Kept): moved.append(t)
        return o
    def address(o): return o.untyped_storage().data_ptr()
    x = torch.randn(4,3,32,32).to(there)
    ptrs = {address(o) for o in chain(model.parameters(), model.buffers(), [x])}
    with patched(Host, 'put', count), Host(model).hooks(x): model(x)
    assert moved and not any(address(t) in ptrs for t in moved)

def test_changed_in_place(there):
    "What stays and is changed before the backward pass is an error, as without"
    big = nn.Linear(64,64).to(there)
    for how in (nullcontext, Host(big).hooks):
        with how(): y = big(torch.randn(8,64).to(there).requires_grad_()).sum()
        with torch.no_grad(): big.weight.add_(1)
        with pytest.raises(RuntimeError, match='modified by an inplace operation'): y.backward()

def test_twice(there):
    "A graph that is gone through twice, and a gradient of a gradient"
    m = nn.Sequential(nn.Linear(64,64), nn.Tanh(), nn.Linear(64,1)).to(there)
    def f(how):
        torch.manual_seed(0)
        x = torch.randn(32,64).to(there).requires_grad_()
        with how(): y = m(x).sum()
        y.backward(retain_graph=True); y.backward(retain_graph=True)
        g, = torch.autograd.grad(y, x, create_graph=True)
        return [x.grad, g, *torch.autograd.grad(g.norm(), list(m.parameters()), allow_unused=True)]
    for a,b in zip(f(nullcontext), f(Host(m).hooks)): assert (a is None and b is None) or torch.equal(a, b)

@pytest.mark.parametrize('event', 'before_batch after_pred after_backward after_batch after_epoch'.split())
@pytest.mark.parametrize('exc', ends[:4], ids=lambda o: o.__name__)
def test_endings(exc, event):
    learn = get_learner(*odd).offload_activations()
    with suppress(exc): learn.fit(2, cbs=ender(exc, event))
    assert is_clean(learn)
    learn.fit(1)
    assert is_clean(learn)

def test_fits():
    def fit(learn): learn.lr_find(num_it=12, show_plot=False); learn.fit(1); learn.validate(); learn.fit(1)
    same(*odd, fit=fit, on=Learner.offload_activations)

def test_root_sequential():
    "Beside `GradientCheckpointing`, whichever comes first, also where both are about the model's own `forward`"
    def make():
        stem = nn.Conv2d(3,8,3),nn.BatchNorm2d(8),nn.ReLU(),nn.MaxPool2d(2)
        return nn.Sequential(*stem, nn.Conv2d(8,8,3), nn.ReLU(), nn.Flatten(), nn.Linear(200,3))
    ons = [lambda l: l.gradient_checkpointing().offload_activations(),
           lambda l: l.offload_activations().gradient_checkpointing()]
    for on in ons:
        same(make, images(16, 12), on=on)
        n,put = [],Host.put
        def count(self, t): o = put(self, t); n.append((o,tuple(t.shape))); return o
        learn = on(get_learner(make, images(16, 12)))
        learn.add_cb(NoValid())
        with patched(Host, 'put', count): learn.fit(1)
        moved = [s for o,s in n if isinstance(o, Kept)]
        # in both batches, what the second and the third block begin with; the first one has the batch
        assert len(moved)==4, moved

def test_replaces():
    learn = get_learner(*odd).offload_activations().offload_activations()
    assert learn.cbs.map(type).count(OffloadActivations)==1 and isinstance(learn.offloading, OffloadActivations)
    assert isinstance(pickle.loads(pickle.dumps(learn.offloading)), OffloadActivations)

long_texts = pair_of(lambda: torch.randn(16,96,128), lambda: torch.randint(3, (16,)))
of_memory = dict(resnet18=(body(resnet18), images(128, 16), .6), encoder=(partial(Encoder, 128, 6), long_texts, .5))

@pytest.mark.parametrize('k', of_memory)
def test_memory(k, fakegpu):
    "What a step allocates at its peak, and nothing of it stays, neither on the device nor on the host"
    make,data,most = of_memory[k]
    def peak(on):
        learn = get_learner(make, data, opt_func=SGD)
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
    assert a/b<=most, f'{a/b:.3f} of what the plain run allocates'
