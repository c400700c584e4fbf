"""`MicroBatch(exact=True)`: batch norm, dropout and every other draw are the whole batch's.

Everything is float64 and compared with the large batch, the state of the random generators included."""
import gc,signal,threading
import pytest
from torch.nn.utils import prune
from nets import *
from kinds import Odd
from fastai.text.models import WeightDropout
from fastai.callback.mixup import CutMix,MixUp
from fastai_accum.all import *
from fastai_accum.proof.dry import Dry
from fastai_accum.exact.lockstep import _stats
from fastai_accum.memory.offload import Slab
from unittest import mock
from torchvision.ops import stochastic_depth

X,Y = features(20),classes(20)
X2,Y2 = features(40),classes(40)   # enough of them for two norms, one after the other

def train(model, x=X, y=Y, cbs=None, bs=None, lr=1e-3, epochs=2, drop_last=False, loss_func=None, fit='fit_one_cycle',
          splitter=params, **kwargs):
    "A fit of a copy of `model`, and the state of the generators after it"
    set_seed(0)
    bs = bs or 2*len(y)//5   # two whole batches and a smaller one
    dls = make_dls(len(y), bs, y=y, x=x, drop_last=drop_last, valid_bs=bs)
    model = deepcopy(model) if isinstance(model, nn.Module) else model()
    learn = make_learner(dls, model.double(), loss_func, partial(SGD, mom=.9), cbs, lr=lr, splitter=splitter, **kwargs)
    set_seed(1)
    getattr(learn, fit)(epochs, lr)
    learn.rng = torch.get_rng_state(),random.getstate(),np.random.get_state()[1].tolist(),np.random.get_state()[2]
    if here.device and here.device.type!='cpu':
        learn.rng += torch.get_device_module(here.device).get_rng_state(here.device),
    return learn

def assert_exact(a, b):
    "All that is recorded is the same, the generators end at the same place, and nothing is left in the model"
    assert_same(a, b)
    assert identical(a.rng, b.rng), 'the generators end elsewhere'
    left_alone(a.model)

def same_slices(model, x=X, y=Y, n=3, cbs=None, **kwargs):
    "Whether slices of `n` samples train as the whole batch"
    a,b = (train(model, x, y, L(cbs)+o, **kwargs) for o in (L(), L(MicroBatch(n, exact=True))))
    assert_exact(b, a)

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
labels = classes(20)

def flat(f, *ms):
    "A model around the function `f` of the features of a batch and the modules `ms`"
    torch.manual_seed(2)
    return Odd(lambda m, x: m.head(m.inner(m.inp(x), *m.ms)), inner=f, ms=nn.ModuleList(ms),
               inp=nn.Linear(6,8,bias=False), head=nn.Linear(8,3))
def bn8(**kwargs): return nn.BatchNorm1d(8, **kwargs)
def normed(): return flat(lambda h, bn: bn(h), bn8())
def bn_drop(): return flat(lambda h, bn, d: d(bn(h).tanh()), bn8(), nn.Dropout(.3))

# ---- what users meet

class PictureNet(nn.Module):
    "Batch norm, dropout, a skip connection, and a mask of its own"
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        conv = partial(nn.Conv2d, kernel_size=3, bias=False)   # batch norm would leave only rounding to a bias
        self.stem = nn.Sequential(conv(3, 4, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(.2))
        self.blocks = nn.ModuleList([nn.Sequential(conv(4, 4, padding=1), nn.BatchNorm2d(4)) for _ in range(2)])
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(.3), nn.Linear(196,3))
    def forward(self, x):
        x = self.stem(x)
        for m in self.blocks: x = F.relu(x+m(x)*torch.rand(len(x),1,1,1, device=x.device))
        return self.head(x)

def of_pictures(*cbs, model=PictureNet, bs=8, **kwargs): return train(model, images, labels, cbs, bs, **kwargs)

def no_norms():
    m = PictureNet()
    m.stem[1] = m.blocks[0][1] = m.blocks[1][1] = nn.Identity()
    return m
def flattened():
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.Tanh(), nn.Linear(8,3))
def rmse(pred, y): return ((pred-F.one_hot(y,3))**2).mean().sqrt()

pictures = dict(   # arguments of `MicroBatch`, callbacks beside it, and of `train`
    exact   = (dict(bs=3, exact=True), noop, {}),
    auto    = (dict(exact=True), noop, {}),
    windows = (dict(bs=2, exact=True), lambda: AccumulateStep(2), dict(model=no_norms, bs=5)),   # norms would see less
    loss    = (dict(bs=3, exact=True), noop, dict(model=flattened, loss_func=rmse)),   # of the whole batch
    coupled = (dict(bs=3, coupled=True), noop, dict(model=flattened, loss_func=rmse)),
    both    = (dict(bs=3, coupled=True, exact=True), noop, {}))

@pytest.mark.parametrize('k', pictures)
def test_exact(k, device):
    args,also,kw = pictures[k]
    assert_exact(*(of_pictures(*L(also()), *o, **kw) for o in ([MicroBatch(**args)],[])))

# ---- batch norm

def conv(bn, nd=2):
    torch.manual_seed(2)
    C = (nn.Conv1d,nn.Conv2d,nn.Conv3d)[nd-1]
    return nn.Sequential(C(2,4,3,bias=False), bn, nn.ReLU(), nn.Flatten(), nn.Linear(4*2**nd, 3))

class Standardised(nn.Linear):
    "As in NFNets, a batch norm of the weights, whose gain is computed"
    def forward(self, x):
        gain = self.bias.exp()*.5
        return x@F.batch_norm(self.weight[None], None, None, gain, training=True, momentum=0., eps=1e-6)[0].T

def statistics(h): return torch.batch_norm(h, None, None, None, None, True, .1, 1e-5, False)
P = features(20, 32).view(20,2,4,4)
def norms(): return conv(nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2,4), nn.Tanh(), nn.BatchNorm2d(4)))
weighted = nn.CrossEntropyLoss(torch.tensor([1.,5,.1]).double())

# masks are filled in the order of memory
def last(): return Odd(lambda m, x: F.dropout(x.to(memory_format=torch.channels_last), .3))

def masked():
    "A buffer that stays as it is, and of which a difference is not a number"
    def f(m, x): return (x[:,None]+m.mask.to(x)).softmax(-1).sum(1)
    return Odd(f, mask=nn.Buffer(torch.full((8,8), -math.inf).triu(1)))

def two_heads():
    "The norms of the second have no gradient, and their parameters keep none"
    def f(m, x): h = m.body(x); return m.b(h),m.a(h)
    return Odd(f, body=bn_drop(), a=nn.Sequential(nn.Linear(3,3), nn.BatchNorm1d(3)),
               b=nn.Sequential(nn.Tanh(), nn.Linear(3,3,bias=False), nn.BatchNorm1d(3), nn.Linear(3,3)))

X_gap = X.clone(); X_gap[:,0] = X[:,0].abs()+.1; X_gap[5,0] = -1
def gap():
    "With slices of one, a sample has no row at the norm"
    def f(m, x):
        h,keep = m.lin(x),x[:,0]>0
        return m.head(torch.zeros_like(h).masked_scatter(keep[:,None], m.bn(h[keep])))
    torch.manual_seed(2)
    return Odd(f, lin=nn.Linear(6,8,bias=False), bn=bn8(), head=nn.Linear(8,3))

uses = dict(   # models, and arguments of `same_slices`
    twice      = (lambda: flat(lambda h, bn: bn(bn(h).relu()+h), bn8(momentum=None)), {}),
    input      = (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6,3)), {}),
    functional = (lambda: flat(lambda h: F.batch_norm(h, None, None, training=True)), {}),
    torch      = (lambda: flat(statistics), {}),
    a_view     = (lambda: flat(lambda h, bn: F.batch_norm(h, None, None, bn.weight.view(-1), bn.bias.detach(), True),
                               bn8()), {}),
    standard   = (lambda: flat(lambda h, bn, m: m(bn(h)), bn8(), Standardised(8,8)), {}),
    # a hook that sets a weight on a layer of PyTorch
    pruned     = (lambda: flat(lambda h, l, bn: l(bn(h)),
                               prune.l1_unstructured(nn.Linear(8, 8, bias=False), 'weight', .3), bn8()), {}),
    unused     = (lambda: flat(lambda h, bn: (bn(h), h)[1], bn8()), {}),
    skips      = (lambda: flat(lambda h, a, b, c: c((h+b(a(h).tanh())).tanh())+h, bn8(), bn8(), bn8()),
                  dict(x=X2, y=Y2)),
    slices_1   = (norms, dict(x=P, n=1)),
    slices_7   = (norms, dict(x=P, n=7)),
    memory     = (lambda: conv(nn.Sequential(last(), nn.BatchNorm2d(4), last())), dict(x=P)),
    dropped    = (normed, dict(drop_last=True)),
    # of two samples, batch norm leaves nearly nothing of a gradient, and rounding all of it; eps keeps some
    last_two   = (lambda: flat(lambda h, bn: bn(h), bn8(eps=.1)), dict(x=X[:18], y=Y[:18], n=1, bs=8)),
    evaluation = (normed, dict(cbs=BatchNormEval())),
    flat_cos   = (bn_drop, dict(fit='fit_flat_cos', cbs=GradientClip(.1), loss_func=weighted)),
    norm_mask  = (lambda: flat(lambda h, bn, m, d: d(m(bn(h))), bn8(), masked(), nn.Dropout(.3)), {}),
    # batch norm needs two samples, so the plan takes one of them twice
    two        = (lambda: conv(nn.BatchNorm2d(4)), dict(x=P[:6], y=Y[:6], n=1, bs=2)),
    heads      = (two_heads, dict(x=X2, y=Y2, n=5, wd=.1, loss_func=lambda p, y: F.cross_entropy(p[0], y))),
    gap        = (gap, dict(x=X_gap, n=1, bs=10)))

@each(k=uses)
def test_how_a_norm_is_used(k): same_slices(uses[k][0], **uses[k][1])

arguments = [{}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False),
             dict(affine=False, track_running_stats=False), dict(eps=.1, momentum=.7)]

@drawn(6, nd=[1,2,3], kw=arguments)
def test_norms(nd, kw):
    norm = (nn.BatchNorm1d,nn.BatchNorm2d,nn.BatchNorm3d)[nd-1]
    same_slices(conv(norm(4, **kw), nd), torch.randn(20,2,*[4]*nd).double())

@pytest.mark.parametrize('kw,layer', [(dict(exact=True),nn.BatchNorm1d(8)), (dict(coupled=True),nn.Dropout())])
def test_no_batch_waits_for_the_garbage_collector(kw, layer):
    "When a batch is over, its tensors are gone: nothing leads from them to themselves"
    learn = train(flat(lambda h, m: m(h), layer), cbs=MicroBatch(4, **kw))
    # frozen, what other tests have left is no garbage of this fit, whenever it is let go
    gc.collect(); gc.freeze(); gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        learn.fit(1)   # the proof is done
        gc.collect()
        assert not [o.shape for o in gc.garbage if isinstance(o, Tensor)]
    finally: gc.set_debug(0); gc.garbage.clear(); gc.unfreeze()

@each(train_bn=[True,False])
def test_a_frozen_group(train_bn):
    body = nn.Sequential(nn.Linear(6,8,bias=False), nn.BatchNorm1d(8))
    m = nn.Sequential(body, nn.Sequential(nn.Tanh(), nn.Linear(8,8,bias=False), nn.BatchNorm1d(8), nn.Linear(8,3)))
    def freeze(cb): cb.learn.freeze()
    same_slices(m, cbs=Callback(before_fit=freeze), splitter=lambda m: [params(m[0]),params(m[1])], train_bn=train_bn)

def test_one_sample_is_refused_as_without():
    for cb in None,MicroBatch(3, exact=True),AccumulateStep(2):
        with pytest.raises(ValueError, match='more than 1 value per channel') as e:
            train(normed, X[:17], Y[:17], cb, bs=8)
        assert cb is None or f'{cb}: batch norm needs two samples' in e.value.__notes__[-1]

# ---- draws

def rows_first(x, *ms): return x+torch.rand(len(x), 8).double()
# stochastic depth as timm writes it
def by_timm(x): return x*x.new_empty((len(x),)+(1,)*(x.ndim-1)).bernoulli_(.5)

def three(h): return [h]*3
def in_a_closure(g): return flat(lambda h: h+torch.rand(len(h), 1, generator=g).double())
draws = dict(
    dropout      = lambda: flat(lambda h, d: d(h), nn.Dropout(.3)),
    inplace      = lambda: flat(lambda h, d: d(h*2), nn.Dropout(.3, inplace=True)),
    dropout2d    = lambda: flat(lambda h, d: d(h[:,:,None,None]).flatten(1), nn.Dropout2d(.3)),
    alpha        = lambda: flat(lambda h, d, e: e(d(h)), nn.AlphaDropout(.3), nn.FeatureAlphaDropout(.3)),
    weight       = lambda: flat(lambda h, d: d(h[:,None])[0][:,0], WeightDropout(nn.LSTM(8,8,batch_first=True), .5)),
    by_hand      = lambda: flat(rows_first),
    once         = lambda: flat(lambda h: h*(1+torch.rand(1).double())),
    like         = lambda: flat(lambda h: h+torch.randn_like(h)+torch.rand_like(h)),
    batch_depth  = lambda: flat(lambda h: stochastic_depth(h, .5, 'batch')),
    timm_depth   = lambda: flat(lambda h, d: d(h), Odd(lambda m, x: by_timm(x) if m.training else x)),
    second       = lambda: flat(lambda h: F.dropout(h.t(), .3).t()),
    heads        = lambda: flat(lambda h: F.dropout(h.view(-1,4,2).flatten(0,1), .3).view(-1,8)),
    python       = lambda: flat(lambda h: h*(2 if random.random()<.5 else 1)*(1+np.random.rand())),
    own          = lambda: in_a_closure(torch.Generator().manual_seed(3)),
    attention    = lambda: flat(lambda h, a: a(*three(h.view(-1,2,4)))[0].flatten(1),
                                nn.MultiheadAttention(4, 2, dropout=.3, batch_first=True)),
    attention_t  = lambda: flat(lambda h, a: a(*three(h.view(-1,2,4).transpose(0,1)))[0].transpose(0,1).flatten(1),
                                nn.MultiheadAttention(4, 2, dropout=.3)),
    scaled       = lambda: flat(lambda h: F.scaled_dot_product_attention(*three(h.view(-1,1,2,4)),
                                                                         dropout_p=.3).flatten(1)))

@drawn(len(draws), k=draws, norm=[False,True], bs=[1,3])
def test_draws(k, norm, bs):
    "Alone and between norms"
    def make():
        m = draws[k]()
        if norm:
            m.inp  = nn.Sequential(m.inp, nn.BatchNorm1d(8), nn.Tanh())
            m.head = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout(.2), m.head)
        return m
    same_slices(make, X2, Y2, 2*bs-1)

# ---- beside other callbacks

@each(mix=[MixUp,CutMix], way=['exact','coupled'])
def test_mixup_and_cutmix(mix, way):
    "They draw as without slices; plain slices draw each for itself, and still train"
    layer = nn.Sequential(nn.BatchNorm2d(4), nn.Dropout2d(.2)) if way=='exact' else nn.Tanh()
    def mixer(): cb = mix(.4); cb.distrib = torch.distributions.Beta(*torch.tensor([.4,.4])); return cb
    def run(*cbs): return train(conv(layer), P, Y, [mixer(),*cbs], loss_func=StackedCE())
    torch.set_default_dtype(torch.float64)   # of λ
    try: a,b,c = run(MicroBatch(3, **{way:True})),run(),run(MicroBatch(4))
    finally: torch.set_default_dtype(torch.float32)
    assert_same(a, b)
    assert len(c.spy.steps)==len(b.spy.steps) and 0<rel(c.recorder.losses, b.recorder.losses)[0]<1

@each(dtype=HALF)
def test_autocast(dtype):
    """Autocast is on in the threads of the slices too, and off in a part of the model that switches it off. Half
    precision rounds a batch and its slices differently"""
    seen = []
    def f(m, h):
        seen.append(h.dtype)
        with torch.autocast('cpu', enabled=False): return m.bn(h.float())
    def run(*cbs):
        set_seed(0)
        model = flat(lambda h, bn, p: p(F.linear(bn(h).tanh(), torch.eye(8))).tanh(), bn8(), Odd(f, bn=bn8()))
        learn = make_learner(make_dls(40, 16, x=X2.float()), model.float(), opt_func=SGD, cbs=[OnCpu(dtype), *cbs],
                             splitter=params)
        learn.recorder.smooth_loss = AvgSmoothLoss()
        learn.fit(1, .01)
        return learn
    a,b = run(),run(MicroBatch(5, exact=True))
    assert {*seen}-{torch.float32, torch.float64}=={dtype}   # the proof runs in float64
    assert rel(list(b.model.parameters()), list(a.model.parameters()))[0]<=HALF[dtype]

# ---- what changes, and how it ends

def test_a_batch_of_another_length_has_its_own_plan():
    "How many draws there are, and which norm is used, depends on the length of the texts; of 4 and 5 only the norm"
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randint(2, 30, (8,t), generator=g), torch.randint(0, 3, (8,), generator=g)) for t in (5,4,9,7)]
    def f(m, x):
        h = m.rnn(m.emb(x))[0].mean(1)
        for _ in range(x.shape[1]//3): h = F.dropout(h, .1, m.training)
        return m.head((m.wide if x.shape[1]>4 else m.narrow)(h))
    def model():
        set_seed(2)
        rnn = nn.LSTM(6, 8, batch_first=True)
        return Odd(f, emb=nn.Embedding(30,6), rnn=rnn, wide=bn8(), narrow=bn8(), head=nn.Linear(8,3)).double()
    same(lambda: MicroBatch(3, exact=True, valid=False), dls=lambda bs: of_batches(batches), model=model,
         fit=lambda l: l.fit(2), **one_group)

def average():
    "A running average, which moves only when it is told to"
    def f(m, h, moves):
        if moves: m.v.mul_(.5).add_(1)
        return h*m.v
    return Odd(f, v=nn.Buffer(torch.ones(()).double()))

def steady(h, on, d, avg, kept): return h
def norm_is_used(m): m.inner = lambda h, a, d, avg: d(F.batch_norm(a(h).tanh(), None, None, training=True))
changes = dict(   # what the model does when a coin is `on`, and what a callback switches
    dropout = (lambda h, on, d, avg, kept: d(h), 0., lambda m: setattr(m.ms[1], 'p', .3)),
    norm    = (steady, 0., lambda m: m.ms.__setitem__(0, bn8(affine=False).double())),
    used    = (steady, 0., norm_is_used),
    # the first batch draws nothing of PyTorch and changes nothing, and no flag shows that the second one does
    draws   = (lambda h, on, d, avg, kept: d(d(h)*2) if on else h, .3, noop),
    counts  = (lambda h, on, d, avg, kept: (on and kept.append(1)) or h*(1+len(kept)), .3, noop),
    average = (lambda h, on, d, avg, kept: avg(h, on), .3, noop))

@drawn(6, k=changes, first=[bn8,nn.Tanh])
def test_what_changes_in_the_middle_of_an_epoch(k, first):
    change,p,switch = changes[k]
    def second(cb):
        if cb.training and cb.iter==1: switch(cb.model)
    def make():
        def f(h, a, d, avg): return change(a(h).tanh(), coins.pop(), d, avg, kept)
        coins,kept = [False]*4+[True,False],[]
        return flat(f, first(), nn.Dropout(p), average())
    same_slices(make, X2, Y2, 5, Callback(before_batch=second), epochs=1)

@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='uses a timer of the system, which Windows does not have')
def test_ctrl_c_at_any_time():
    "A signal at random times: no thread stays, nothing hangs, the buffers are those from before the batch"
    m = flat(lambda h, a, b, d: d(b(a(h).tanh())), bn8(), bn8(), nn.Dropout(.2)).double()
    learn = make_learner(make_dls(20, 8, y=Y), m, cbs=MicroBatch(1, exact=True), splitter=params)
    learn.remove_cb(Spy)
    was = signal.signal(signal.SIGALRM, signal.default_int_handler)
    rng,hits = random.Random(0),0
    try:
        for _ in range(40):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(.001, .06))
            try: learn.fit(1); signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt: hits += 1
    finally: signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, was)
    assert hits
    for t in threading.enumerate():
        # Python keeps for ever what Ctrl-C has kept from starting
        if t.ident is None: threading._limbo.pop(t, None)
        elif t is not threading.main_thread() and t.daemon: t.join(2)
    left_alone(m)
    same_slices(m, X2, Y2, 7)

@each(heads=[(0,1),(1,0,1)])
def test_several_backward_passes(heads):
    "Each may come to other norms, as with two heads and a gradient for each of their losses"
    def f(m, x): h = m.body(x).tanh(); return m.a(h).tanh(),m.b(h).sigmoid()
    class Balance(Callback):
        "The gradients of the heads, one after the other"
        run_valid = False
        def before_backward(self):
            ps = list(self.model.body.parameters())
            losses = [(o**3).mean() for o in self.pred]
            self.grads = [torch.autograd.grad(losses[i], ps, retain_graph=True) for i in heads]
        def before_step(self):
            for gs in self.grads:
                for p,g in zip(self.model.body.parameters(), gs): p.grad += g
    torch.manual_seed(2)
    same_slices(Odd(f, body=nn.Linear(6,6), a=nn.BatchNorm1d(6), b=nn.BatchNorm1d(6)), cbs=Balance(),
                loss_func=lambda pred, y: (pred[0]*pred[1]).mean())

# ---- what is made once in a fit, what goes from slice to slice, and what is shared on the host

@each(kw=[dict(coupled=True), dict(exact=True)])
def test_once_a_fit(kw):
    "The plan, two dry runs, are made once, for both epochs and for all batches of one shape"
    runs,run,norm = [],Dry.run,nn.BatchNorm1d if 'exact' in kw else nn.Identity
    cb = MicroBatch(4, valid=False, prove=False, **kw)
    learn = make_learner(make_dls(64, 16), layers(norm(5)), cbs=cb, **one_group)
    with mock.patch.object(Dry, 'run', lambda *args, **more: runs.append(1) or run(*args, **more)): learn.fit(2)
    assert len(runs)==(2 if 'exact' in kw else 0)

@each(shape=[(6,4), (6,4,5,3), (3,2,2,2,2)], dtype=[torch.float64,torch.float32])
def test_statistics(shape, dtype):
    tol = 1e-14 if dtype==torch.float64 else 1e-6
    x = torch.randn(shape, dtype=torch.float64)*.1+10
    dims = [0,*range(2,len(shape))]
    mean,var = _stats(x.to(dtype))
    assert rel(mean.double(), x.mean(dims))[0]<tol
    assert rel(var.double(), x.to(dtype).double().var(dims, correction=0))[0]<10*tol
    assert not any(o.any() for o in _stats(x[:0]))

def test_a_slab():
    "Tensors have parts of their own, and hold the memory together; test_put has their strides"
    slab,given = Slab(2**12, False),[torch.ones(7)>0, features(4), features(2).bfloat16()]
    made = [slab.like(o).copy_(o) for o in given]
    assert all(map(torch.equal, made, given)) and len({o.untyped_storage().data_ptr() for o in made})==1
