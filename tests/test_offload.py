"""Activations on the host, from a simulated accelerator: its copies are as late as they may be, races are reported,
and its memory is counted."""
import pickle,pytest
from contextlib import nullcontext
from harness import *
from test_checkpointing import Encoder,alike,archs,body,get_learner,others,pair_of,same_bits
from test_memory import step_bytes
from fastai.vision.all import resnet18
from fastai_accum.memory.checkpointing import *
from fastai_accum.memory.offload import *

# the learners are on the device
pytestmark = pytest.mark.parametrize('device', [GPU], indirect=True)

def address(t): return t.untyped_storage().data_ptr()

@contextmanager
def moved():
    "The addresses and shapes of the tensors that move to the host"
    res,put = [],Host.put
    def note(self, t):
        o = put(self, t)
        if isinstance(o, Kept): res.append((address(t), t.shape))
        return o
    Host.put = note
    try: yield res
    finally: Host.put = put

def any_loss(pred, y): return (pred-y[:,None]).pow(2).mean().sqrt()
def fits(learn): learn.lr_find(num_it=12, show_plot=False); learn.fit(1); learn.validate(); learn.fit(1)

cases = {**{k:alike[k] for k in (*archs,*others)}, 'any_loss':dict(loss_func=any_loss), 'fits':dict(fit=fits)}

@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('k', cases)
def test_offload_bit_for_bit(k, device):
    "Also beside other callbacks, and for a loss that accumulation cannot cut"
    with moved() as ts: same_bits(Learner.offload_activations, **cases[k])
    assert ts

def test_put(device):
    "What moves comes back as it was; the rest stays"
    m = nn.Sequential(nn.Conv2d(3,16,3), nn.BatchNorm2d(16), nn.ReLU()).to(device)
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
    for t in [big.weight, big.weight.detach(), big.weight.T, big.weight[3:], x[0,0,:4],
              x[:1,:1,:1,:1].expand(8,3,64,64), torch.randn(64,64), torch.empty(9,999,device='meta')]:
        assert host.put(t) is t
    bn = nn.BatchNorm1d(999).to(device)
    assert Host(bn).put(bn.running_mean) is bn.running_mean and isinstance(Host(big).put(bn.running_mean), Kept)

def test_parameters_stay(device):
    "No copy of a parameter or of a buffer is made, and none of the batch, which the learner holds"
    model,x = body(resnet18)().to(device),torch.randn(4,3,32,32).to(device)
    with moved() as ts, Host(model).hooks(x): model(x)
    assert ts and not dict(ts).keys() & {address(o) for o in (*model.parameters(), *model.buffers(), x)}

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

def test_root_sequential(device):
    "Beside `GradientCheckpointing`, whichever comes first, also where both are about the model's own `forward`"
    def make():
        stem = nn.Conv2d(3,8,3),nn.BatchNorm2d(8),nn.ReLU(),nn.MaxPool2d(2)
        return nn.Sequential(*stem, nn.Conv2d(8,8,3), nn.ReLU(), nn.Flatten(), nn.Linear(200,3))
    for on in (lambda l: l.gradient_checkpointing().offload_activations(),
               lambda l: l.offload_activations().gradient_checkpointing()):
        same_bits(on, make=make)
        learn = on(get_learner(make))
        learn.add_cb(NoValid())
        with moved() as ts: learn.fit(1)
        # in both batches, what the second and the third block begin with; the first one has the batch
        assert len(ts)==4, ts

def test_replaces_itself(device):
    learn = get_learner().offload_activations().offload_activations()
    assert learn.cbs.map(type).count(OffloadActivations)==1 and isinstance(learn.offloading, OffloadActivations)
    assert isinstance(pickle.loads(pickle.dumps(learn.offloading)), OffloadActivations)
    learn.fit(1)

def test_memory_of_offload(device, fakegpu):
    "What a step allocates at its peak, and nothing of it stays, neither on the device nor on the host"
    def peak(on):
        learn = get_learner(partial(Encoder, 64, 6), pair_of(lambda: torch.randn(8,64,64)), opt_func=SGD)
        return step_bytes(on(learn.add_cb(NoValid())), fakegpu)
    a,b = peak(Learner.offload_activations),peak(noop)
    assert a/b<=.5, f'{a/b:.3f} of what the plain run allocates'
