"""Memory: what a step takes, what happens when it runs out, and what is left.

The simulated accelerator counts every byte and has limits. A training step is measured with its gradients allocated
before, as a share of the same step with the large batch."""
import gc,operator,sys,weakref
import pytest
from nets import *
from kinds import Odd
from fastai_accum import loop
from fastai_accum.all import *
sys.path.insert(0, str(Path(__file__).resolve().parents[1]/'benchmarks'))
from common import peak_bytes

there = pytest.mark.parametrize('device', [GPU], indirect=True)

class Block(nn.Module):
    def __init__(self, c, norm):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(norm(c) for _ in range(2))
    def forward(self, x):
        a,b = zip(self.convs, self.norms)
        return F.relu(x + b[1](b[0](F.relu(a[1](a[0](x))))))   # no variable holds on to what is between

def tower(c=16, n=6, norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(c, 3)
    return nn.Sequential(nn.Conv2d(3, c, 3, padding=1), *[Block(c, norm) for _ in range(n)], *head)

def get_learner(*cbs, model=tower, n=32, px=32, n_batches=1, dtype=torch.float32, opt_func=SGD):
    set_seed(0)
    x,y = torch.randn(n*n_batches, 3, px, px).to(dtype),torch.randint(3, (n*n_batches,))
    dls = DataLoaders(*(DataLoader(Items(x, y), bs=n, device=here.device) for _ in range(2)), device=here.device)
    learn = Learner(dls, model().to(dtype), nn.CrossEntropyLoss(), opt_func, lr=1e-3, cbs=[NoValid(),*cbs])
    if dtype==torch.float64: learn.recorder.smooth_loss = AvgSmoothLoss64()
    return quiet(learn)

def let_go(learn):
    "Of the last batch and its graph, as the next fit would"
    learn._end_cleanup()
    learn.loss_grad = None
    gc.collect()

def fit_bytes(learn, fakegpu):
    "What the device holds before a fit, and at its peak"
    let_go(learn)
    before = fakegpu.memory_allocated()
    fakegpu.reset_peak_memory_stats()
    learn.fit(1)
    return before,fakegpu.max_memory_allocated()

def step_bytes(learn, fakegpu):
    "What a step takes at its peak; afterwards the device and the host are as before"
    learn.fit(1)   # with the proof, and with what stays
    let_go(learn)
    pinned = fakegpu.pinned_stats()['now']
    before,peak = fit_bytes(learn, fakegpu)
    let_go(learn)
    assert (fakegpu.memory_allocated(),fakegpu.pinned_stats()['now'])==(before,pinned)
    return peak-before

# ---- what a step takes

@there
@simulated   # on a real GPU, the workspaces of cuDNN are larger than these models
def test_a_step_takes_a_small_part(device, fakegpu, capsys):
    large = step_bytes(get_learner(), fakegpu)
    ways = MicroBatch(4, exact=True),MicroBatch(8, exact=True),OffloadActivations(),MicroBatch(8)
    found = [step_bytes(get_learner(o), fakegpu)/large for o in ways]
    assert found[0]<found[1]<=.11 and found[2]<=.16 and found[3]<=.26, found

# ---- memory runs out

def take(x): torch.empty(len(x)*64*1024, dtype=torch.uint8, device=x.device)   # memory for each sample

def needs(where, model):
    "Takes it in one place"
    def f(m, x):
        if where=='forward' or where=='validation' and not m.training: take(x)
        res = m.m(x)
        if where=='backward' and res.requires_grad: res.register_hook(take)
        return res
    return Odd(f, m=model())

def needy(pred, y):
    if pred.requires_grad: take(pred)
    return F.cross_entropy(pred, y)

@there
@pytest.mark.parametrize('where,model,kw', [
    *((o,small_model,{}) for o in ('forward','backward','loss','validation')),
    *((o,normed,dict(exact=True)) for o in ('forward','backward'))])
def test_a_real_limit(where, model, kw, device, fakegpu, capsys):
    "`MicroBatch()` finds a size that fits, and trains as with the whole batch; with `get_preds` too"
    def train(*cbs, limit=None):
        loss = needy if where=='loss' else F.cross_entropy
        learn = make_learner(make_dls(76, 32, valid_bs=24), needs(where, model), loss, cbs=cbs, **one_group)
        learn.model.to(device)
        gc.collect()   # what other tests have left is no room
        fakegpu.set_limit(limit and fakegpu.memory_allocated()+limit)
        try:
            learn.fit(2)
            return learn,learn.get_preds()
        finally: fakegpu.set_limit(None)
    (a,preds_a),(b,preds_b) = train(MicroBatch(**kw), limit=12*64*1024),train()
    assert_same(a, b)
    close(preds_a, preds_b)
    if where!='loss': assert 'memory ran out' in capsys.readouterr().out
    assert a.micro_batches.fits and max(a.micro_batches.fits.values())<=12

@there
def test_what_fits_counts_what_is_free(device, fakegpu, capsys):
    "The line that it suggests fits, where the whole batch does not"
    peak = step_bytes(get_learner(), fakegpu)
    learn = get_learner()
    fakegpu.set_limit(fakegpu.memory_allocated()+int(.4*peak))
    try:
        found = learn.what_fits()
        assert found.ways[0].fits is False and found.best.is_same and found.best.peak<=found.budget
        exec(found.best.line, dict(learn=learn))
        learn.fit(1)
        with pytest.raises(torch.OutOfMemoryError): get_learner().fit(1)
    finally: fakegpu.set_limit(None)

# ---- nothing stays

class Bomb(nn.Module):
    """Raises in its `n`th call, in the forward or in the backward pass; in the CPU's memory, it notes what is kept for
    the backward pass"""
    alive,n,at = [],0,''
    def forward(self, x):
        Bomb.n -= Bomb.at in ('forward','backward')
        if Bomb.at=='forward' and Bomb.n==0: self.explode()
        if Bomb.at=='backward' and Bomb.n<=0 and x.requires_grad:
            x = x.clone()
            x.register_hook(self.explode)
        if x.device.type!='cpu': return x
        ones = np.ones(x.shape, np.float32)
        Bomb.alive.append(weakref.ref(ones))
        return x*torch.from_numpy(ones)

def with_a_bomb(norm):
    m = tower(4, norm=norm)
    return nn.Sequential(m[0], m[1], nn.Dropout(.2), Bomb(), m[2], *m[7:])

ways = dict(accumulate=lambda: [AccumulateStep(2)], memory=lambda: [GradientCheckpointing(), OffloadActivations()],
            slices=lambda: [MicroBatch(8)], coupled=lambda: [MicroBatch(8, coupled=True)],
            exact=lambda: [MicroBatch(8, exact=True)])
stops = itertools.product([RuntimeError,KeyboardInterrupt,MemoryError,ValueError], [1,2,4],
                          ['forward','backward','after_pred','after_backward'], [nn.BatchNorm2d,nn.Identity], ways,
                          ['cpu',GPU])

@pytest.mark.parametrize('exc,n,at,norm,way,device', [*sample(stops, 11),
    *((KeyboardInterrupt, n, at, nn.BatchNorm2d, 'exact', GPU) for n,at in ((2,'forward'),(4,'backward')))],
    indirect=['device'])
def test_a_stop_leaves_nothing(exc, n, at, norm, way, device, fakegpu, capsys):
    """In a micro-batch, or in a slice while others wait: no activations, no threads and no pinned memory are left.
    Weights are as before the batch, and if it is shown as a whole and does not get through, buffers and generators"""
    was = []
    def state():   # on the host
        rng,(ws,bs) = [torch.get_rng_state(), fakegpu.get_rng_state()],(learn.model.parameters(),learn.model.buffers())
        ws,bs = ([o.detach().to('cpu', copy=True) for o in os] for os in (ws,bs))
        return ws,bs+rng
    def look(cb): was[:] = state()
    def stop(cb):
        Bomb.n -= cb.training
        if cb.training and Bomb.n==0: raise exc('stop')
    def explode(self, *_): raise exc('stop')
    Bomb.explode = explode
    learn = get_learner(*ways[way](), at_order(-100, before_batch=look), model=partial(with_a_bomb, norm), px=8,
                        n_batches=4)
    for cb in learn.cbs.filter(lambda o: hasattr(o, 'prove')): cb.prove = False
    def left():
        let_go(learn)
        fakegpu.synchronize()
        alive = sum(o() is not None for o in Bomb.alive)
        return fakegpu.memory_allocated(),fakegpu.pinned_stats()['count'],threads(),alive,fakegpu.pending()
    learn.fit(1)
    before,in_model = left(),'ward' in at and at!='after_backward'
    Bomb.at,Bomb.n = at,n+2*(way=='exact' and in_model)   # two calls plan the batch
    try:
        with pytest.raises(exc): learn.fit(1, cbs=[] if in_model else EachMicro(**{at:stop}))
    finally: Bomb.at = ''
    def comes_to(ok):
        for _ in range(50):   # the thread of the backward pass lets go a moment later
            if all(map(ok, now := left(), before)): return
            time.sleep(.1)
        assert False, (now, before)
    comes_to(operator.le)
    assert Bomb.n<=0
    ws,others = state()
    assert identical(was[0], ws) and (at!='forward' or way not in ('coupled','exact') or identical(was[1], others))
    left_alone(learn.model)
    learn.fit(1)
    comes_to(operator.eq)

# ---- what the proof takes

def heavy():
    "Nearly all memory is that of the weights"
    torch.manual_seed(0)
    return nn.Sequential(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, 1500), nn.BatchNorm1d(1500), nn.ReLU(),
                         nn.Linear(1500, 3))

def wide_first(norm=nn.BatchNorm2d):
    "As in a VGG, the first layers have nearly all activations"
    torch.manual_seed(0)
    def conv(i, o): return nn.Conv2d(i, o, 3, padding=1),norm(o),nn.ReLU()
    def convs(i, o): return *conv(i, o),*conv(o, o),nn.MaxPool2d(2)
    head = nn.AdaptiveAvgPool2d(1),nn.Flatten(),nn.Linear(64, 3)
    return nn.Sequential(*convs(3, 16), *convs(16, 32), *convs(32, 64), *head)
def without_norm(): return wide_first(lambda c: nn.Identity())

@there
@simulated
# heavy: gradients in float64 take as much again, while two are added up
@pytest.mark.parametrize('kw,model,copies', [
    (dict(exact=True),tower,1), (dict(coupled=True),heavy,3), (dict(exact=True),wide_first,1),
    (dict(coupled=True),wide_first,1), (dict(exact=True),without_norm,1)])
def test_what_the_proof_takes(kw, model, copies, device, fakegpu, capsys):
    "At its peak not more than the first real step, and copies of the model in float64"
    def peak(**more):
        learn = get_learner(MicroBatch(8, **kw, **more), model=model, px=64)
        learn.model.to(device)
        before,top = fit_bytes(learn, fakegpu)
        return top-before,8*sum(o.numel() for o in learn.model.state_dict().values())
    plain,copy = peak(prove=False)
    proved,_ = peak()
    assert 'is proved' in capsys.readouterr().out
    assert proved<=plain+copies*copy, f'{proved} bytes with the proof, {plain} without, and a copy has {copy}'

# ---- passes over the gradients, and graphs

# optimizer, and whether its `zero_grad` frees the gradients
@each(opt=[(Adam, False), (partial(OptimWrapper, opt=torch.optim.AdamW), True)])
def test_peak_memory(opt):
    """Peak memory of an epoch: that of a plain run at the micro-batch size, or for optimizers that free their
    gradients that of fastai's callback"""
    f,frees = opt
    def peak(*cbs):
        learn = get_learner(*cbs, opt_func=f, n=8, px=16, n_batches=8)
        learn.fit(1)
        return peak_bytes(partial(learn.fit, 1), torch.device('cpu'))
    ours,theirs = peak(AccumulateStep(4)),peak(*[GradientAccumulation(32)]*frees)
    assert ours<=1.01*theirs, (ours, theirs)

def test_passes_over_gradients(monkeypatch):
    "None for windows whose weight is known, one for others"
    calls = []
    mul = loop.multiply
    monkeypatch.setattr(loop, 'multiply', lambda ts,o: (calls.append(len(ts)), mul(ts,o)))
    def fit(n, **kw):
        calls.clear()
        make_learner(make_dls(n, 8), cbs=AccumulateStep(4), opt_func=SGD, **kw).fit(1)
        return list(calls)
    assert fit(96)==fit(80)==[]
    assert len(fit(96, loss_func=nn.CrossEntropyLoss(weight=torch.tensor([1.,2.,5.]).double())))==3

@pytest.mark.skipif(not torch.cuda.is_available(), reason='trains on a GPU, and this machine has none')
def test_no_synchronisation_inside_a_window():
    "CUDA raises at any synchronisation inside a window, unless the loss has to count its targets"
    def mode(event, order, to):
        return at_order(order, **{event: lambda cb: cb.training and torch.cuda.set_sync_debug_mode(to)})
    for kw in dict(weight=lambda pred, y: len(y)), dict(average=False):
        # after `AccumulateStep` has finished the gradients
        cbs = mode('before_batch', 1000, 'error'),mode('before_step', -1000, 'default')
        learn = get_learner(AccumulateStep(4, **kw), *cbs, n=8, px=16, n_batches=8)
        batches = to_device(list(learn.dls.train), 'cuda')
        learn.dls = of_batches(batches, device=torch.device('cuda'))
        learn.model.cuda()
        learn.loss_func = lambda pred, y: F.cross_entropy(pred, y)   # a function of one's own counts samples
        try: learn.fit(1)
        finally: torch.cuda.set_sync_debug_mode('default')
