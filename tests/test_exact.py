"""`MicroBatch(exact=True)`: batch norm, dropout and every other draw are the whole batch's.

Everything is float64 and compared with the large batch, the state of the random generators included."""
import gc,pickle,signal,subprocess,sys,threading
from itertools import chain
import pytest
from harness import *
from fastai.data.transforms import ItemGetter
from fastai.text.models import *
from fastai.callback.mixup import CutMix,MixUp
from fastai_accum.all import *
from torchvision.ops import stochastic_depth

def train(model, x, y, cbs=None, bs=None, lr=1e-3, epochs=2, drop_last=False, loss_func=None, fit='fit_one_cycle',
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

def assert_exact(a, b, tol=TOL, but=()):
    "All that is recorded is the same, the generators end at the same place, and nothing is left in the model"
    assert_same(a, b, tol, but)
    draws = [torch.equal(x, y) if isinstance(x, Tensor) else x==y for x,y in zip(a.rng, b.rng)]
    assert all(draws), 'the generators end elsewhere'
    left_alone(a.model)

def same_slices(model, x, y, n=3, tol=TOL, but=(), **kwargs):
    "Whether slices of `n` samples train as the whole batch"
    a = train(model, x, y, **kwargs)
    b = train(model, x, y, **{**kwargs, 'cbs':L(kwargs.get('cbs')) + MicroBatch(n, exact=True)})
    assert_exact(b, a, tol, but)
    return b

def left_alone(model):
    ours = [t for t in threading.enumerate() if t.name.startswith('Thread-') and t.daemon
            and '_read_thread' not in t.name]   # which `torch.compile` starts, and keeps
    assert threading.active_count()==1 or not ours, ours
    assert is_returned(SimpleNamespace(model=model))

@each(norms=[[],[nn.BatchNorm1d(8)]])
def test_a_mask_of_minus_infinity(norms):
    "A buffer that stays as it is, and of which a difference is not a number"
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer('mask', torch.full((8,8), -math.inf).triu(1))
        def forward(self, x): return (x[:,None]+self.mask.to(x)).softmax(-1).sum(1)
    m = flat(lambda h, *ms: nn.Sequential(*ms)(h), *norms, Masked(), nn.Dropout(.3))
    same_slices(m, X, Y)
    assert not m.ms[len(norms)].mask.isnan().any()

images = torch.randn(20,3,16,16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
labels = classes(20)

class Fn(nn.Module):
    "A model around a function of the features of a batch and the module `m`"
    def __init__(self, f, *ms, d=6, h=8):
        super().__init__()
        self.f,self.ms,self.inp,self.head = f,nn.ModuleList(ms),nn.Linear(d,h,bias=False),nn.Linear(h,3)
    def forward(self, x): return self.head(self.f(self.inp(x), *self.ms))

def flat(f, *ms, **kwargs): torch.manual_seed(2); return Fn(f, *ms, **kwargs)
X,Y = features(20),classes(20)
X2,Y2 = features(40),classes(40)   # enough of them for two norms, one after the other

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

@pytest.mark.parametrize('bs', [3,'auto'])
def test_exact(bs, device): assert_exact(of_pictures(MicroBatch(bs, exact=True)), of_pictures())

def test_exact_beside_accumulate_step(device):
    "Without batch norm, which would see smaller batches"
    def model():
        m = PictureNet()
        m.stem[1] = m.blocks[0][1] = m.blocks[1][1] = nn.Identity()
        return m
    a,b = (of_pictures(AccumulateStep(2), *o, model=model, bs=5) for o in ([MicroBatch(2, exact=True)],[]))
    assert_exact(a, b)

def rmse(pred, y): return ((pred-F.one_hot(y,3))**2).mean().sqrt()

@pytest.mark.parametrize('kw', [dict(coupled=True), dict(exact=True)], ids=str)
def test_a_loss_over_the_whole_batch(kw, device):
    def model(): torch.manual_seed(2); return nn.Sequential(nn.Flatten(), nn.Linear(768,8), nn.Tanh(), nn.Linear(8,3))
    a,b = (of_pictures(*o, model=model, loss_func=rmse) for o in ([MicroBatch(3, **kw)],[]))
    assert_exact(a, b)

everything = dict(exact=lambda: [MicroBatch(3, exact=True)], coupled=lambda: [MicroBatch(3, coupled=True)],
                  memory=lambda: [GradientCheckpointing(),OffloadActivations()])

@each(how=[deepcopy, lambda m: pickle.loads(pickle.dumps(m))], k=everything)
def test_copies_in_the_middle_of_a_batch(k, how):
    "As of a callback that averages weights: a copy runs by itself, as a plain model"
    class Copies(Callback):
        def after_backward(self): self.copy = how(self.learn.model)
    copy = of_pictures(Copies(), *everything[k]()).copies.copy
    left_alone(copy)
    plain = PictureNet().double()
    plain.load_state_dict(copy.state_dict())
    preds = [m.eval()(images[:4]) for m in (copy,plain) if set_seed(0) is None]
    assert torch.equal(*preds)

# ---- batch norm

def conv(bn, nd=2):
    torch.manual_seed(2)
    C = (nn.Conv1d,nn.Conv2d,nn.Conv3d)[nd-1]
    return nn.Sequential(C(2,4,3,bias=False), bn, nn.ReLU(), nn.Flatten(), nn.Linear(4*2**nd, 3))

class Act(nn.BatchNorm1d):
    "A norm with a forward of its own"
    def forward(self, x):
        self.num_batches_tracked.add_(1)
        ts = self.running_mean,self.running_var,self.weight,self.bias
        return F.batch_norm(x, *ts, True, self.momentum, self.eps).tanh()

def computed(h, bn):
    "The weight of a norm is computed from what it holds"
    weight,bias = bn.weight.abs()+h.new_zeros(8),bn.bias[:8]*1
    return F.batch_norm(h, bn.running_mean, bn.running_var, weight, bias, bn.training)

def bn8(**kwargs): return nn.BatchNorm1d(8, **kwargs)
def statistics(h): return torch.batch_norm(h, None, None, None, None, True, .1, 1e-5, False)

uses = dict(
    twice      = lambda: flat(lambda h, bn: bn(bn(h).relu()+h), bn8(momentum=None)),
    input      = lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6,3)),
    functional = lambda: flat(lambda h: F.batch_norm(h, None, None, training=True)),
    torch      = lambda: flat(statistics),
    own        = lambda: flat(lambda h, bn: bn(h), Act(8)),
    computed   = lambda: flat(computed, bn8()),
    unused     = lambda: flat(lambda h, bn: (bn(h), h)[1], bn8()),
    skips      = lambda: flat(lambda h, a, b, c: c((h+b(a(h).tanh())).tanh())+h, bn8(), bn8(), bn8()))

@each(k=uses)
def test_how_a_norm_is_used(k): same_slices(uses[k](), X2 if k=='skips' else X, Y2 if k=='skips' else Y)

def test_other_norms_pass_and_slices_have_any_size():
    norms = nn.Sequential(nn.InstanceNorm2d(4), nn.GroupNorm(2,4), nn.Tanh(), nn.BatchNorm2d(4))
    for bs in 1,7: same_slices(conv(norms), torch.randn(20,2,4,4).double(), labels, bs)

@each(kw=[dict(n=20, drop_last=True), dict(n=18, size=1, bs=8)])
def test_the_last_batch(kw):
    "Is dropped, or has two samples"
    kw = dict(kw)
    n = kw.pop('n')
    same_slices(flat(lambda h, bn: bn(h), bn8()), X[:n], Y[:n], kw.pop('size', 3), **kw)

arguments = [{}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False),
             dict(affine=False, track_running_stats=False), dict(eps=.1, momentum=.7)]

@drawn(6, nd=[1,2,3], kw=arguments)
def test_norms(nd, kw):
    norm = (nn.BatchNorm1d,nn.BatchNorm2d,nn.BatchNorm3d)[nd-1]
    same_slices(conv(norm(4, **kw), nd), torch.randn(20,2,*[4]*nd).double(), labels)

@pytest.mark.parametrize('kw,layer', [(dict(exact=True),nn.BatchNorm1d(8)), (dict(coupled=True),nn.Dropout())])
def test_no_batch_waits_for_the_garbage_collector(kw, layer):
    "When a batch is over, its tensors are gone: nothing leads from them to themselves"
    learn = train(flat(lambda h, m: m(h), layer), X, Y, MicroBatch(4, **kw))
    gc.collect(); gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        learn.fit(1)   # the proof is done
        gc.collect()
        assert not [o.shape for o in gc.garbage if isinstance(o, Tensor)]
    finally: gc.set_debug(0); gc.garbage.clear()

@each(train_bn=[True,False])
def test_a_frozen_group(train_bn):
    body = nn.Sequential(nn.Linear(6,8,bias=False), nn.BatchNorm1d(8))
    m = nn.Sequential(body, nn.Sequential(nn.Tanh(), nn.Linear(8,8,bias=False), nn.BatchNorm1d(8), nn.Linear(8,3)))
    class FreezeFirst(Callback):
        order = -5
        def before_fit(self): self.learn.freeze()
    same_slices(m, X, Y, cbs=FreezeFirst(), splitter=lambda m: [params(m[0]),params(m[1])], train_bn=train_bn)

def test_norms_in_evaluation_need_no_lockstep():
    same_slices(flat(lambda h, bn: bn(h), nn.BatchNorm1d(8)), X, Y, cbs=BatchNormEval())

def test_one_sample_is_refused_as_without():
    for cb in None,MicroBatch(3, exact=True):
        with pytest.raises(ValueError, match='more than 1 value per channel'):
            train(flat(lambda h, bn: bn(h), nn.BatchNorm1d(8)), X[:17], Y[:17], bs=8, cbs=cb)

# ---- draws

def rows_first(x, *ms): return x+torch.rand(len(x), 8).double()
class Hand(nn.Module):
    "Stochastic depth as timm writes it"
    def forward(self, x): return x*x.new_empty((len(x),)+(1,)*(x.ndim-1)).bernoulli_(.5) if self.training else x

def generator(): return torch.Generator().manual_seed(3)
def three(h): return [h]*3

def in_a_closure(g): return flat(lambda h: h+torch.rand(len(h), 1, generator=g).double())

draws = dict(
    dropout      = lambda: flat(lambda h, d: d(h), nn.Dropout(.3)),
    inplace      = lambda: flat(lambda h, d: d(h*2), nn.Dropout(.3, inplace=True)),
    functional   = lambda: flat(lambda h: F.dropout(h, .3)),
    dropout2d    = lambda: flat(lambda h, d: d(h[:,:,None,None]).flatten(1), nn.Dropout2d(.3)),
    alpha        = lambda: flat(lambda h, d, e: e(d(h)), nn.AlphaDropout(.3), nn.FeatureAlphaDropout(.3)),
    weight       = lambda: flat(lambda h, d: d(h[:,None])[0][:,0], WeightDropout(nn.LSTM(8,8,batch_first=True), .5)),
    by_hand      = lambda: flat(rows_first),
    once         = lambda: flat(lambda h: h*(1+torch.rand(1).double())),
    like         = lambda: flat(lambda h: h+torch.randn_like(h)+torch.rand_like(h)),
    batch_depth  = lambda: flat(lambda h: stochastic_depth(h, .5, 'batch')),
    timm_depth   = lambda: flat(lambda h, d: d(h), Hand()),
    second       = lambda: flat(lambda h: F.dropout(h.t(), .3).t()),
    heads        = lambda: flat(lambda h: F.dropout(h.view(-1,4,2).flatten(0,1), .3).view(-1,8)),
    python       = lambda: flat(lambda h: h*(2 if random.random()<.5 else 1)*(1+np.random.rand())),
    own          = lambda: in_a_closure(generator()),
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
        if k=='own': m.f.__closure__[0].cell_contents.manual_seed(3)
        return m
    same_slices(make, X2, Y2, 2*bs-1)

def test_the_masks_are_filled_in_the_order_of_memory():
    class Last(nn.Module):
        def forward(self, x): return F.dropout(x.to(memory_format=torch.channels_last), .3)
    same_slices(conv(nn.Sequential(Last(), nn.BatchNorm2d(4), Last())), torch.randn(20,2,4,4).double(), labels)

# ---- what is refused, before any weight moves

class Odd(nn.Module):
    "A batch norm only where a feature is large"
    def __init__(self): super().__init__(); self.bn = nn.BatchNorm1d(6)
    def forward(self, x): return self.bn(x) if (x[:,0]>9).any() else x

refused = dict(
    shuffle  = (lambda: flat(lambda h: h+h[torch.randperm(len(h))]), 'randperm'),
    two_dims = (lambda: flat(lambda h: h*torch.rand(len(h),len(h)).double().sum(1,keepdim=True)), 'which dimension'),
    rrelu    = (lambda: flat(lambda h, r: r(h), nn.RReLU()), "RReLU 'ms.0' draws with rrelu"),
    scripted = (lambda: nn.Sequential(torch.jit.script(nn.Linear(6,3).double())), 'into the RecursiveScriptModule'),
    compiled = (lambda: flat(lambda h, l: l(h), torch.compile(nn.Linear(8,8))), "see into the OptimizedModule 'ms.0'"),
    parallel = (lambda: flat(lambda h, l: l(h), nn.DataParallel(nn.Linear(8,8))), "see into the DataParallel 'ms.0'"))

@pytest.mark.filterwarnings('ignore')
@each(k=refused)
def test_refused(k):
    make,msg = refused[k]
    m = make().double()
    learn = make_learner(make_dls(20, 8, y=labels, x=X), m, cbs=MicroBatch(3, exact=True), splitter=params)
    def now(): return [*m.parameters(), *m.buffers()]
    before = [o.detach().clone() for o in now()]
    state = torch.get_rng_state()
    class State(Callback):
        def before_batch(self): state.copy_(torch.get_rng_state())
    learn.add_cb(State)
    with pytest.raises(ValueError, match=msg): learn.fit(1)
    assert all(map(torch.equal, before, now()))
    assert torch.equal(state, torch.get_rng_state())
    left_alone(m)

@each(at=[6,4,1])
def test_ways_that_differ(at):
    "The sample at `at` takes another way: in the third slice, in the second, or in the first"
    x = X.clone(); x[at,0] = 10.
    m = nn.Sequential(Odd(), nn.Linear(6,6), nn.BatchNorm1d(6), nn.Linear(6,3)).double()
    learn = make_learner(make_dls(20, 8, y=Y, x=x, shuffle=False), m, cbs=MicroBatch(3, exact=True), splitter=params)
    before = [o.clone() for o in chain(m.parameters(), m.buffers())]
    where = 'one comes to' if at==1 else "one comes to the BatchNorm1d '0.bn'"
    with pytest.raises((RuntimeError,ValueError), match=where): learn.fit(1)
    assert all(torch.equal(a, b) for a,b in zip(before, chain(m.parameters(), m.buffers())))
    left_alone(m)

# ---- what a model holds

class Keeps(nn.Module):
    "Keeps rows that a callback reads: itself, and in an object"
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(2)
        self.a,self.head,self.obj = nn.Linear(6,8,bias=False),nn.Linear(8,3),SimpleNamespace()
        self.norm = nn.BatchNorm1d(8) if norm else nn.Tanh()
    def forward(self, x):
        h = self.norm(self.a(x)).tanh()
        self.kept,self.obj.pair = h,(h.detach(),'name')
        return self.head(h)

class Reads(Callback):
    run_valid = False
    def after_pred(self): self.log = getattr(self, 'log', [])+[self.model.kept, self.model.obj.pair[0]]
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+self.model.kept.pow(4).mean()

@each(way=[dict(exact=True),dict(coupled=True)])
def test_rows_that_a_model_keeps_are_joined(way):
    make = partial(Keeps, 'exact' in way)
    a,b = (train(make, X2, Y2, cbs=[Reads(), *o], bs=16) for o in ([],[MicroBatch(4, **way)]))
    assert_same(b, a)
    close(b.reads.log, a.reads.log)

def test_draws_whose_numbers_depend_on_values_are_refused():
    def model(): return flat(lambda h: h*torch.bernoulli(h.sigmoid().detach()))
    with pytest.raises(ValueError, match='draws with bernoulli'): train(model(), X2, Y2, cbs=MicroBatch(4, exact=True))

# ---- beside other callbacks

def bn_drop(): return flat(lambda h, bn, d: d(bn(h).tanh()), nn.BatchNorm1d(8), nn.Dropout(.3))

@each(mix=[MixUp,CutMix])
def test_mixup_and_cutmix(mix):
    def mixer(): cb = mix(.4); cb.distrib = torch.distributions.Beta(*torch.tensor([.4,.4])); return cb
    model,x = conv(nn.Sequential(nn.BatchNorm2d(4), nn.Dropout2d(.2))).double(),torch.randn(20,2,4,4).double()
    torch.set_default_dtype(torch.float64)   # of λ
    def run(*cbs): return train(model, x, labels, [mixer(),*cbs], loss_func=StackedCE())
    try: assert_same(run(MicroBatch(3, exact=True)), run())
    finally: torch.set_default_dtype(torch.float32)

def test_another_way_to_train():
    weighted = nn.CrossEntropyLoss(torch.tensor([1.,5,.1]).double())
    same_slices(bn_drop, X, Y, fit='fit_flat_cos', cbs=GradientClip(.1), loss_func=weighted)

@each(dtype=HALF)
def test_autocast(dtype):
    """Autocast is on in the threads of the slices too, and off in a part of the model that switches it off. Half
    precision rounds a batch and its slices differently"""
    seen = []
    class Part(nn.Module):
        def __init__(self): super().__init__(); self.bn = nn.BatchNorm1d(8)
        def forward(self, h):
            seen.append(h.dtype)
            with torch.autocast('cpu', enabled=False): return self.bn(h.float())
    def run(*cbs):
        set_seed(0)
        model = flat(lambda h, bn, p: p(F.linear(bn(h).tanh(), torch.eye(8))).tanh(), nn.BatchNorm1d(8), Part())
        learn = make_learner(make_dls(40, 16, x=X2.float()), model.float(), opt_func=SGD, cbs=[OnCpu(dtype), *cbs],
                             splitter=params)
        learn.recorder.smooth_loss = AvgSmoothLoss()
        learn.fit(1, .01)
        return learn
    a,b = run(),run(MicroBatch(5, exact=True))
    assert {*seen}-{torch.float32, torch.float64}=={dtype}   # the proof runs in float64
    assert rel(list(b.model.parameters()), list(a.model.parameters()))[0]<=HALF[dtype]

# ---- ends

class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, e): ctx.e = e; return x.clone()
    @staticmethod
    def backward(ctx, g): raise ctx.e

calls = []
class Fails(nn.Module):
    "Fails in slice `k`, in the forward or in the backward pass"
    def __init__(self, k, e, backward): super().__init__(); store_attr()
    def forward(self, x):
        k = (len(calls)-2)%3   # the plan has made two calls
        calls.append(k)
        if k!=self.k: return x
        if self.backward: return Boom.apply(x, self.e)
        raise self.e

errors = ValueError('mine'),KeyboardInterrupt(),RuntimeError('out of memory')

@drawn(5, k=[0,1,2], e=errors, backward=[False,True], norm=[True,False])
def test_a_failure_in_a_slice(k, e, backward, norm):
    ms = nn.BatchNorm1d(8) if norm else nn.Tanh(),nn.Dropout(),Fails(k, e, backward)
    m = flat(lambda h, bn, d, f: f(d(bn(h))), *ms).double()
    # no proof, since the model counts its calls
    learn = make_learner(make_dls(20, 8, y=Y), m, cbs=MicroBatch(3, exact=True, prove=False), splitter=params)
    seen = {}
    class State(Callback):
        order = -100
        def before_batch(self):
            seen.update(rng=torch.get_rng_state(), now=[o.detach().clone() for o in chain(m.buffers(), m.parameters())])
    learn.add_cb(State)
    calls.clear()
    with pytest.raises(type(e)): learn.fit(1)
    left_alone(m)
    if backward: return   # the forward pass is over, as in the plain run
    assert torch.equal(seen['rng'], torch.get_rng_state())
    assert all(map(torch.equal, seen['now'], chain(m.buffers(), m.parameters())))

def test_a_batch_of_another_length_has_its_own_plan():
    "Texts of several lengths"
    def batches():
        g = torch.Generator().manual_seed(0)
        return [(torch.randint(2, 30, (8,t), generator=g), torch.randint(0, 3, (8,), generator=g)) for t in (5,9,5,7)]
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.emb,self.rnn = nn.Embedding(30,6),nn.LSTM(6,8,batch_first=True)
            self.bn,self.head = nn.BatchNorm1d(8),nn.Linear(8,3)
        def forward(self, x):
            h = F.dropout(self.emb(x), .2)
            for _ in range(x.shape[1]//3): h = F.dropout(h, .1)   # the number of draws depends on the length
            return self.head(self.bn(self.rnn(h)[0].mean(1)))
    def run(*cbs):
        dls = DataLoaders(DataLoader(batches(), bs=None), DataLoader(batches()[:1], bs=None))
        learn = make_learner(dls, Net().double(), cbs=cbs, splitter=params)
        set_seed(0); learn.fit(2)
        return learn
    a,b = run(),run(MicroBatch(3, exact=True))
    assert_same(b, a)

def test_a_batch_of_two_samples():
    "Batch norm needs two samples, so the plan takes one of them twice"
    same_slices(flat(lambda h: F.dropout(h, .3)), X[:6], Y[:6], 1, bs=2)
    same_slices(conv(nn.BatchNorm2d(4)), torch.randn(6,2,4,4).double(), labels[:6], 1, bs=2)

class Turned(nn.Module):
    "Has the samples along the second dimension"
    def __init__(self): super().__init__(); self.m = bn_drop()
    def forward(self, x): return self.m(x.t())

class Turn(Callback):
    order = -50
    def before_batch(self): self.learn.xb = self.xb[0].t(),

def columns(b, bs): return [(b[0][:,i:i+bs], *(o[i:i+bs] for o in b[1:])) for i in range(0, b[0].shape[1], bs)]

def test_split():
    "Also for predictions: without targets nobody can count what `split` returns"
    a,b = (train(Turned, X, Y, cbs=[Turn(), *o]) for o in ([],[MicroBatch(3, exact=True, split=columns)]))
    assert_same(b, a)
    left_alone(b.model)
    dl = DataLoader(list(zip(X)), bs=8)
    close(b.get_preds(dl=dl)[0], a.get_preds(dl=dl)[0])

def test_a_head_that_the_loss_does_not_use():
    "Its norms have no gradient, and their parameters keep none"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.body,self.a = bn_drop(),nn.Sequential(nn.Linear(3,3), nn.BatchNorm1d(3))
            self.b = nn.Sequential(nn.Tanh(), nn.Linear(3,3,bias=False), nn.BatchNorm1d(3), nn.Linear(3,3))
        def forward(self, x): h = self.body(x); return self.b(h),self.a(h)
    class First(Callback):
        def after_pred(self): self.learn.pred = self.pred[0]
    same_slices(Two, X2, Y2, 5, cbs=First(), wd=.1)

def test_slices_without_a_row_at_a_norm():
    x = X.clone(); x[:,0] = x[:,0].abs()+.1; x[5,0] = -1   # with slices of one, this sample has none
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.lin,self.bn,self.head = nn.Linear(6,8,bias=False),nn.BatchNorm1d(8),nn.Linear(8,3)
        def forward(self, x):
            h,keep = self.lin(x),x[:,0]>0
            return self.head(torch.zeros_like(h).masked_scatter(keep[:,None], self.bn(h[keep])))
    same_slices(Masked, x, Y, 1, bs=10)

def test_a_model_that_changes_its_input():
    "The slices are views of the batch, so autograd sees the change of another one"
    class Shifts(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = nn.Sequential(nn.Linear(6,8,bias=False), nn.BatchNorm1d(8), nn.Linear(8,3))
        def forward(self, x): return self.m(x.add_(1.))
    with pytest.raises(ValueError, match='modified by an inplace'): train(Shifts, X, Y, cbs=MicroBatch(3, exact=True))

switches = dict(
    dropout      = lambda m: setattr(m.ms[1], 'p', .3),
    norm         = lambda m: m.ms.__setitem__(0, nn.BatchNorm1d(8, affine=False).double()),
    norm_is_used = lambda m: setattr(m, 'f', lambda h, a, d: d(F.batch_norm(a(h).tanh(), None, None, training=True))))

@drawn(3, k=switches, first=['norm','none'])
def test_what_is_switched_in_the_middle_of_an_epoch(k, first):
    class Switch(Callback):
        def before_batch(self):
            if self.training and self.iter==1: switches[k](self.model)
    def make():
        return flat(lambda h, a, d: d(a(h).tanh()), nn.BatchNorm1d(8) if first=='norm' else nn.Tanh(), nn.Dropout(0.))
    same_slices(make, X2, Y2, 5, cbs=Switch(), epochs=1)

class Average(nn.Module):
    "A running average, which moves only when it is told to"
    def __init__(self):
        super().__init__()
        self.register_buffer('v', torch.ones(()).double())
    def forward(self, h, moves):
        if moves: self.v.mul_(.5).add_(1)
        return h*self.v

later = dict(
    draws   = lambda h, on, d, avg, kept: d(d(h)*2) if on else h,
    counts  = lambda h, on, d, avg, kept: (on and kept.append(1)) or h*(1+len(kept)),
    average = lambda h, on, d, avg, kept: avg(h, on))

@drawn(3, what=later, first=['norm','none'])
def test_what_begins_in_a_later_batch(what, first):
    "The first batch draws nothing of PyTorch and changes nothing, and no flag shows that the second one does"
    def make():
        def f(h, a, d, avg): return later[what](a(h).tanh(), coins.pop(), d, avg, kept)
        coins,kept = [False]*4+[True,False],[]
        return flat(f, nn.BatchNorm1d(8) if first=='norm' else nn.Tanh(), nn.Dropout(.3), Average())
    same_slices(make, X2, Y2, 5, epochs=1)

@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='uses a timer of the system, which Windows does not have')
def test_ctrl_c_at_any_time():
    "A signal at random times: no thread stays, nothing hangs, the buffers are those from before the batch"
    m = flat(lambda h, a, b, d: d(b(a(h).tanh())), nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Dropout(.2)).double()
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
        if t is not threading.main_thread() and t.daemon: t.join(2)
    left_alone(m)
    same_slices(m, X2, Y2, 7)

def test_long_texts_are_refused_in_words():
    "fastai's text classifier leaves out texts that have ended, so its draws depend on the texts"
    x = torch.randint(2, 40, (8,30))
    x[5:,12:] = 1   # padding
    def make(seq_len):
        config = dict(awd_lstm_clas_config, emb_sz=6, n_hid=10, n_layers=2)
        return get_text_classifier(AWD_LSTM, 40, 3, seq_len=seq_len, config=config, max_len=30)
    y = torch.tensor([0,1,2,0,1,2,0,1])
    def fit(seq_len):
        learn = make_learner(make_dls(8, 8, y=y, x=x, valid_bs=8), make(seq_len).double(),
                             cbs=[MicroBatch(4, exact=True), *rnn_cbs()], splitter=params)
        learn.fit(1)
    fit(30)
    with pytest.raises((RuntimeError,ValueError), match='Pass seq_len=30 to TextDataLoaders.*gradient_checkpointing'):
        fit(10)

def test_an_exported_learner_works_where_only_fastai_is_imported(tmp_path):
    dsets = Datasets([(torch.randn(6), tensor(i%3)) for i in range(20)], [[ItemGetter(0)],[ItemGetter(1)]])
    model = nn.Sequential(nn.Linear(6,8), nn.BatchNorm1d(8), nn.Linear(8,3))
    learn = Learner(DataLoaders.from_dsets(dsets, dsets, bs=8, device='cpu'), model, nn.CrossEntropyLoss(),
                    cbs=MicroBatch(3, exact=True), path=tmp_path)
    learn.export('exact.pkl')
    learn.remove_cb(MicroBatch).gradient_checkpointing([model[0]]).export('checkpointing.pkl')
    code = """from fastai.basics import *
items = L((torch.randn(6), i%3) for i in range(16))
for name in 'exact','checkpointing':
    learn = load_learner(f'{name}.pkl')
    print(learn.get_preds(dl=learn.dls.test_dl([(torch.ones(6),0)]*7))[0].shape)
    learn.dls = DataLoaders.from_dsets(items, items, bs=8, device='cpu')
    learn.fit(1)"""
    res = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=tmp_path, capture_output=True, text=True)
    said = [res.stdout.count(o) for o in ('torch.Size([7, 3])','is proved on your model')]
    assert said==[2,2], res.stdout+res.stderr

@each(heads=[(0,1),(1,0,1)])
def test_several_backward_passes(heads):
    "Each may come to other norms, as with two heads and a gradient for each of their losses"
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body,self.a,self.b = nn.Linear(6,6),nn.BatchNorm1d(6),nn.BatchNorm1d(6)
        def forward(self, x): h = self.body(x).tanh(); return self.a(h).tanh(),self.b(h).sigmoid()
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
    same_slices(Two().double(), X, Y, cbs=Balance(), loss_func=lambda pred, y: (pred[0]*pred[1]).mean())
