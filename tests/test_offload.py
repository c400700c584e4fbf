"""Activations on the host, from a simulated accelerator: its copies are as late as they may be, races are reported,
and its memory is counted."""
import pytest
from contextlib import nullcontext,suppress
from harness import *
from test_checkpointing import alike,archs,get_learner,others,same_bits
from test_memory import get_learner as tower_learner,heavy,let_go,tower
from torch.autograd.graph import saved_tensors_hooks
from fastai_accum.memory.checkpointing import *
from fastai_accum.memory.offload import *
from fastai_accum.turns import Saved

# the learners are on the device
pytestmark = pytest.mark.parametrize('device', [GPU], indirect=True)

def address(t): return t.untyped_storage().data_ptr()

@contextmanager
def moved():
    "The addresses and shapes of the tensors that move to the host"
    res,move = [],Host._move
    def note(self, o):
        if o is not None and o.here is not None and o.t is None: res.append((address(o.here), o.here.shape))
        move(self, o)
    Host._move = note
    try: yield res
    finally: Host._move = move

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
    for on in (lambda l: l.gradient_checkpointing().offload_activations(0),
               lambda l: l.offload_activations(0).gradient_checkpointing()):
        same_bits(on, make=make)
        learn = on(get_learner(make))
        learn.add_cb(NoValid())
        with moved() as ts: learn.fit(1)
        # in both batches, what the second and the third block begin with; the first one has the batch
        assert len(ts)==4, ts

# ---- what fits stays

def test_the_smallest_room_counts_for_both(device):
    rooms = []
    def note(cb): rooms.append((cb.offloading.left,cb.checkpointing.left))
    learn = get_learner().offload_activations('8 GB').gradient_checkpointing()
    learn.fit(1, cbs=[NoValid(), Callback(after_pred=note)])
    assert rooms and all(a is b and a.most==8*2**30 for a,b in rooms)

class InEachStep(Callback):
    """Adds up in each step what is counted when some `methods` are called; at step `at` of the fit, `n` bytes are taken
    for good"""
    order = 1000
    def __init__(self, methods, at=None, n=0): store_attr(); self.steps,self.taken = [],[]
    def before_fit(self):
        self.was = [(o,k,getattr(o, k)) for o,k,_ in self.methods]
        for (o,k,plain),(*_,count) in zip(self.was, self.methods): setattr(o, k, self.counting(plain, count))
    def counting(self, plain, count):
        def f(*args): self.now += count(*args); return plain(*args)
        return f
    def before_batch(self): self.now = 0
    def after_batch(self):
        self.steps.append(self.now)
        if len(self.steps)==self.at: self.taken = torch.empty(self.n, dtype=torch.uint8, device=here.device)
    def after_fit(self):
        for o in self.was: setattr(*o)
# the bytes that go to the host and come back, and the blocks that run again
Bytes = partial(InEachStep, [(Copies, '_send', lambda o, t, host: t.nbytes),
                             (Copies, '_start', lambda o, kept: kept.t.nbytes)])
Runs = partial(InEachStep, [(Saved, 'run', lambda o: 1)])

def saved_bytes(learn):
    "What a step of the model saves: each storage once, without parameters, buffers, the batch and what is small"
    x,_ = learn.dls.one_batch()
    learn.model.to(x.device).train()
    ts = []
    with saved_tensors_hooks(lambda t: ts.append(t.detach()), noop): learn.model(x)
    own = {address(o) for o in (*learn.model.parameters(), *learn.model.buffers(), x)}
    return sum({address(t):t.nbytes for t in ts if address(t) not in own and t.nbytes>=Host.least}.values())

def steps_in(fakegpu, share, *cbs, sizes=(32,)*2, bytes=Bytes, **kwargs):
    "What moves in each step in `share` of what a plain fit takes at its peak, its weights, and both peaks"
    def fit(limit=None, *cbs):
        learn = tower_learner(px=16, **kwargs)
        xs,ys = learn.dls.one_batch()
        learn.dls.train = DataLoader([(xs[:n], ys[:n]) for n in sizes], bs=None, device=here.device)
        learn.add_cbs(cbs)
        let_go(learn)
        fakegpu.reset_peak_memory_stats()
        fakegpu.set_limit(limit)
        try: learn.fit(2)
        finally: fakegpu.set_limit(None)
        let_go(learn)
        return fakegpu.max_memory_allocated(),weights(learn)
    peak,plain = fit()
    bytes = bytes()
    mine,found = fit(int(share*peak), bytes, *cbs)
    assert all(map(torch.equal, found, plain)) and not fakegpu.races()
    return bytes.steps,peak,mine

@simulated
def test_each_tensor_moves_once_and_what_fits_stays(device, fakegpu):
    saved = saved_bytes(tower_learner(px=16))
    steps,peak,_ = steps_in(fakegpu, 2, OffloadActivations())
    assert steps[0]==2*saved and steps[2:]==[0]*2, (saved, steps)   # the second one, with gradients, shows the peak
    moves = [steps_in(fakegpu, o, OffloadActivations()) for o in (.5,.75,.97)]
    for share,(steps,_,mine) in zip((.5,.75,.97), moves):
        missing = (1-11/12*share)*peak + 4*2**19   # and four activations, of which some are on their way
        assert mine<=share*peak and 0<steps[-1]<=2*missing, (share, steps, peak)
    all_of_it = steps_in(fakegpu, 2, OffloadActivations(room=0))[0]
    given,_,mine = steps_in(fakegpu, 2, OffloadActivations(room=int(.75*peak)))
    assert min(all_of_it)==max(all_of_it) and 0<given[-1]<=moves[1][0][-1] and mine<=.75*peak

@simulated
@each(case=[dict(sizes=(4,16,8,32,12)), dict(sizes=(32,16,4)), dict(bytes=partial(Bytes, 3, 2**20)),
            dict(opt_func=Adam)],
      way=[(.5, OffloadActivations, {}), (.6, GradientCheckpointing, dict(model=partial(tower, 16, 12)))])
def test_what_comes_later_has_its_room(case, way, device, fakegpu):
    "Larger batches, memory that somebody takes in the second epoch, and the state of the optimizer"
    least,cb,kwargs = way
    for share in least,1.: steps_in(fakegpu, share, cb(), **case, **kwargs)

@simulated
def test_gradients_that_are_freed(device, fakegpu):
    "In windows of two, each step leaves gradients or frees them, and what fits stays all the same"
    learn = tower_learner(AccumulateStep(2), OffloadActivations(), bytes := Bytes(), model=heavy, n_batches=8,
                          opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    learn.fit(1)
    assert bytes.steps[0]>0 and bytes.steps[2:]==[0]*2, bytes.steps

@simulated
def test_blocks_that_fit_do_not_run_again(device, fakegpu):
    "Twelve blocks and the stem: what eleven twelfths of the memory miss runs again, and at most one block more"
    def runs(share, *cbs): return steps_in(fakegpu, share, *cbs, bytes=Runs, model=partial(tower, 16, 12))
    least,peak,low = runs(2, GradientCheckpointing(room=0))
    assert least[1:]==[13]*3 and least[0]>13   # with the proof
    saves = (peak-low)/12   # by a block that runs again; the largest one has its memory then
    assert runs(1.1, GradientCheckpointing())[0][2:]==[0]*2
    for share in .5,.75,1.:
        (_,second,*_,last),peak,mine = runs(share, GradientCheckpointing())
        missing = (1-11/12*share)*peak
        assert second==13 and mine<=share*peak and last<=missing/saves+1, (share, last, missing/saves)
    both,_,_ = runs(.6, GradientCheckpointing(), OffloadActivations())
    assert both[-1]<=6, both   # blocks stay before tensors move

@simulated
def test_blocks_of_a_step_share_the_room(device):
    "Also if the model runs twice before the backward pass"
    room = Room(nn.Linear(2,2).to(device))
    room.begin(())
    room.costs,room.n,room.start = [[1],[1],[1]],2,None
    assert not room.has_block()
    room.begin(())
    assert room.has_block() and room.has_block()

@simulated
@each(cb=[OffloadActivations, GradientCheckpointing], when=['forward', 'backward'])
def test_nothing_stays_once_memory_has_run_out(cb, when, device, fakegpu):
    "Somebody else takes the memory in a later step, and the batch comes again"
    class Full(Callback):
        def before_batch(self): self.learn.room = getattr(self.learn, cb.name).left; self.ns.append(self.room.n)
        def before_fit(self): self.ns = []
        def after_pred(self): self.out('forward')
        def after_backward(self): self.out('backward')
        def out(self, at):
            if at!=when or len(self.ns)!=4: return
            with suppress(torch.OutOfMemoryError): torch.empty(2**40, dtype=torch.uint8, device=here.device)
            if at=='forward': raise CancelBatchException
    learn = tower_learner(cb(), Full(), px=16)
    b = learn.dls.one_batch()
    learn.dls.train = DataLoader([b]*6, bs=None, device=here.device)
    fakegpu.set_limit(2**30)
    try: learn.fit(1)
    finally: fakegpu.set_limit(None)
    assert learn.full.ns[3]>0 and learn.full.ns[5]==0 and learn.room.device is None, learn.full.ns
