"""The gradient noise scale: sums against gradients that are stored, estimates against a population whose scale is
known, and what is put back"""
import os,queue,re,subprocess,sys,threading,warnings
from collections import Counter,defaultdict,deque
from contextlib import contextmanager
from itertools import permutations
import fastcore.test as fct
import matplotlib; matplotlib.use('Agg')
import pytest
from harness import *
import fastai_accum.all   # for `exact=True`
from fastai_accum.extras.batchnorm import *
from fastai_accum.loop import in_charge
from fastai_accum.loss import loss_weight
from fastai_accum.know.check import *
from fastai_accum.microbatch import *
from fastai_accum.know.gradients import *
from fastai_accum.know.noise import *
from fastai_accum.know.unchanged import learner_state,unchanged
from fastai_accum.patch import *
from fastai_accum.extras.precision import *
from fastai_accum.extras.skip import *
from fastai.text.data import LMDataLoader

W = torch.tensor([1.,10.,3.]).double()

class Stored(Callback):
    "The gradient of each micro-batch from a copy of the model, and that of the window"
    run_valid = False
    def before_fit(self): self.seen,self.sums = [],[]
    def after_loss(self):
        acc,model = in_charge(self.learn),deepcopy(self.model)
        for p in model.parameters(): p.grad = None
        w = (acc.weight or partial(loss_weight, self.loss_func))(self.learn.pred, *self.learn.yb)
        loss = self.loss_func(model(*self.learn.xb), *self.learn.yb)
        loss.backward()
        loss_is_mean = getattr(self.loss_func, 'reduction', 'mean')=='mean'
        self.seen.append((float(w), [None if p.grad is None else p.grad.to_dense()/(1 if loss_is_mean else w)
                                     for p in model.parameters()]))
    def before_step(self):
        seen = [(w,gs) for w,gs in self.seen if w]
        total = sum(w for w,_ in seen)
        cols = [[g for g in col if g is not None] for col in zip(*(gs for _,gs in seen))]
        mean = [sum(w*g for w,g in col)/total for col in ([(w,gs[i]) for w,gs in seen if gs[i] is not None]
                                                          for i in range(len(self.seen[0][1])))]
        dots = lambda gs: sum((g*g).sum().item() for g in gs if torch.is_tensor(g))
        self.sums.append([len(seen), total, sum(w*dots(gs) for w,gs in seen), dots(mean)])
        self.seen = []

def recorded(*cbs, loss=None, n=92, bs=8, model=None, fit=None, dls=None, **kwargs):
    "Fit with `NoiseScale`, and compare its sums with those of stored gradients"
    learn = make_learner(dls or make_dls(n, bs), model, loss, cbs=[*cbs, NoiseScale(), Stored()], **kwargs)
    (fit or (lambda l: l.fit(2)))(learn)
    df = learn.gradient_noise.windows
    ours = df['n weight sum_sq mean_sq'.split()].values
    exact = np.array([o for o in learn.stored.sums if o[0]>1])
    err = rel(torch.tensor(ours), torch.tensor(exact))
    assert len(ours)>3 and err[0]<=TOL, err
    assert not any(p._backward_hooks for p in learn.model.parameters())
    return learn

def uneven(sizes=(7,3,11,2,5,9,1,4)*2, y=None):
    at,x,y = np.cumsum([0,*sizes]),features(sum(sizes)),classes(sum(sizes)) if y is None else y
    batches = [(x[a:b], y[a:b]) for a,b in zip(at, at[1:])]
    return DataLoaders(DataLoader(batches, bs=None), DataLoader(batches[:1], bs=None))

class Sparse(nn.Module):
    "Rows of an embedding that every micro-batch has some of, twice or more"
    def __init__(self):
        super().__init__(); torch.manual_seed(0)
        self.emb,self.lin = nn.Embedding(9, 4, sparse=True).double(),nn.Linear(4, 3).double()
    def forward(self, x): return self.lin(self.emb((x.abs()*4).long().clamp(max=8)).mean(1))

class Unused(nn.Module):
    "A branch without a gradient in most micro-batches"
    def __init__(self):
        super().__init__(); torch.manual_seed(0); self.a,self.b = nn.Linear(6,3).double(),nn.Linear(6,3).double()
    def forward(self, x): return self.a(x)+self.b(x) if (x[:,0]>2.).any() else self.a(x)

def half_frozen(learn): learn.freeze(); learn.fit(1); learn.unfreeze(); learn.fit(1)

cases = dict(
    plain     = dict(cbs=[AccumulateStep(4)]),
    uneven    = dict(cbs=[AccumulateStep(4)], dls=uneven()),
    weights   = dict(cbs=[AccumulateStep(4)], dls=uneven(), loss=nn.CrossEntropyLoss(weight=W)),
    ignored   = dict(cbs=[AccumulateStep(4)], dls=uneven(y=torch.where(torch.arange(84)%9<4, -100, classes(84))),
                     loss=nn.CrossEntropyLoss()),
    weight_0  = dict(cbs=[AccumulateStep(4)], dls=uneven(y=torch.where((torch.arange(84)>=7)&(torch.arange(84)<10),
                                                                       -100, classes(84)))),
    own_weight= dict(cbs=[AccumulateStep(4, weight=lambda pred, y: len(y)**2)], dls=uneven()),
    samples   = dict(cbs=[AccumulateStep(n_samples=20)], dls=uneven()),
    sums      = dict(cbs=[AccumulateStep(4, average=False)], dls=uneven()),
    sum_loss  = dict(cbs=[AccumulateStep(4, average=True)], dls=uneven(), loss=nn.CrossEntropyLoss(reduction='sum')),
    sum_sums  = dict(cbs=[AccumulateStep(4, average=False)], dls=uneven(), loss=nn.CrossEntropyLoss(reduction='sum')),
    slices    = dict(cbs=[MicroBatch(3)], n=96),
    both      = dict(cbs=[AccumulateStep(2), MicroBatch(3)]),
    scaled    = dict(cbs=[AccumulateStep(4), OnCpu(init_scale=2.**10, growth_interval=2)], dls=uneven()),
    scaled_sum= dict(cbs=[AccumulateStep(4, average=False), OnCpu(init_scale=2.**10, growth_interval=2)], dls=uneven()),
    clipped   = dict(cbs=[AccumulateStep(4), GradientClip(1e-3)], dls=uneven()),
    sparse    = dict(cbs=[AccumulateStep(4)], model=Sparse(), splitter=trainable_params, opt_func=partial(SGD, mom=0)),
    unused    = dict(cbs=[AccumulateStep(4)], model=Unused(), splitter=trainable_params),
    dtype     = dict(cbs=[AccumulateStep(4), GradAccumDtype(torch.float64)], dls=uneven(),
                     loss=nn.CrossEntropyLoss(weight=W)),
    dtype_sum = dict(cbs=[AccumulateStep(4, average=False), GradAccumDtype(torch.float64), OnCpu(init_scale=64.)],
                     dls=uneven()))

@pytest.mark.parametrize('name', cases)
def test_sums(name, recwarn):
    "The sums of the hooks are those of stored gradients"
    kw = dict(cases[name])
    recorded(*[deepcopy(o) for o in kw.pop('cbs')], **kw)
    assert not [o for o in recwarn if 'NoiseScale' in str(o.message)]

def test_frozen():
    "Only what the optimizer steps is measured: a frozen layer is not there, and back after it is unfrozen"
    learn = make_learner(make_dls(92, 8), cbs=[AccumulateStep(4), NoiseScale()], opt_func=partial(SGD, mom=0))
    learn.freeze()
    seen = []
    def norm(cb): seen.append(sum(p.grad.square().sum().item() for p in cb.model[2].parameters()))
    learn.fit(1, cbs=Callback(before_step=norm))
    fct.test_close(learn.gradient_noise.windows.mean_sq, seen, 1e-12)
    learn.unfreeze()
    def norm(cb): seen.append(sum(p.grad.square().sum().item() for p in cb.model.parameters()))
    seen.clear()
    learn.fit(1, cbs=Callback(before_step=norm))
    fct.test_close(learn.gradient_noise.windows.mean_sq, seen, 1e-12)

def test_training_is_the_same():
    a,b = (make_learner(make_dls(92, 8), cbs=[AccumulateStep(4), GradientClip(.1), *cbs])
           for cbs in ([NoiseScale()], []))
    for l in (a,b): l.fit_one_cycle(2)
    assert worst(a, b)[0]==0

def population(n=4000, d=10, noise=3., seed=0):
    """A linear regression, the gradient of each sample, and the noise and the squared gradient of the population
    that it is a sample of"""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, d, generator=g, dtype=torch.float64)
    b = a@torch.randn(d, generator=g, dtype=torch.float64) + noise*torch.randn(n, generator=g, dtype=torch.float64)
    torch.manual_seed(seed)
    model = nn.Linear(d, 1, bias=False).double()
    grads = 2*(model(a).detach()-b[:,None])*a
    var = grads.var(0).sum().item()
    return a,b[:,None],model,var,grads.mean(0).square().sum().item()-var/n

@pytest.mark.parametrize('seed', range(3))
def test_known_scale(seed):
    "The interval holds the scale of a population, and its ends are within a factor of 3"
    a,b,model,noise,grad_sq = population(seed=seed)
    random.seed(seed)
    learn = make_learner(DataLoaders(DataLoader(list(zip(a, b)), bs=8, shuffle=True), DataLoader([(a[0],b[0])], bs=1)),
                         model, nn.MSELoss(), splitter=trainable_params)
    found = learn.noise_scale(n_step=4, num_it=256, show_plot=False)
    assert found.low<noise/grad_sq<found.high<3*found.low, (found, noise/grad_sq)
    assert found.scale==pytest.approx(found.noise/found.grad_sq)

def test_uneven_windows_are_unbiased():
    "|z| < 3 over 4,000 windows of [16, 8, 4, 2], drawn with replacement; and a mean of ratios would be far off"
    a,b,model,*_ = population(n=500)
    grads = (2*(model(a).detach()-b)*a).numpy()
    true = grads.var(0).sum(),(grads.mean(0)**2).sum()   # with replacement, the data set is the population
    sizes,idxs = [16,8,4,2],np.random.default_rng(0).integers(500, size=(4000,30))
    parts = [grads[o].mean(1) for o in np.split(idxs, np.cumsum(sizes)[:-1], axis=1)]
    whole = sum(w*g for w,g in zip(sizes, parts))/30
    found = unbiased(4, 30, sum(w*(g**2).sum(1) for w,g in zip(sizes, parts)), (whole**2).sum(1))
    for v,t in zip(found, true): assert abs(z := (v.mean()-t)/v.std()*4000**.5)<3, z
    ratio,low,high = ratio_interval(*found)
    assert low<true[0]/true[1]<high and not low<np.mean(found[0]/found[1])<high

@contextmanager
def unchanged_weights(learn):
    was = [p.clone() for p in learn.model.parameters()]
    yield
    assert all(torch.equal(p, o) for p,o in zip(learn.model.parameters(), was))

def test_without_replacement():
    "Over all orders of a data set: the noise is its variance with N-1, the squared gradient is that of the population"
    g = np.random.default_rng(0).normal(.5, 1, (6,3))
    var = g.var(0, ddof=1).sum()
    def one(order):
        parts = [g[list(order[:2])].mean(0), g[[order[2]]].mean(0), g[list(order[3:5])].mean(0)]
        whole = sum(w*m for w,m in zip((2,1,2), parts))/5
        return unbiased(3, 5, sum(w*m@m for w,m in zip((2,1,2), parts)), whole@whole)
    fct.test_close(np.mean([one(o) for o in permutations(range(6))], axis=0), [var, g.mean(0)@g.mean(0)-var/6], 1e-12)

def test_interval():
    "The ends solve Fieller's equation; a denominator whose interval reaches 0 gives none"
    from scipy import stats
    r = np.random.default_rng(0)
    a,b = r.multivariate_normal([6,2], [[9,3],[3,4]], 40).T
    for end in ratio_interval(a, b)[1:]:
        d = a-end*b   # at an end, the t test of the mean of a - ratio·b is at its limit
        assert abs(d.mean())/(d.std(ddof=1)/40**.5)==pytest.approx(stats.t.ppf(.975, 39))
    low,_ = stats.ttest_1samp(b, 0).confidence_interval(.95)
    assert all(map(math.isnan, ratio_interval(a, b-1.001*low))) and not any(map(math.isnan,
        ratio_interval(a, b-.999*low)))
    assert all(map(math.isnan, ratio_interval(a, -b))) and all(map(math.isnan, ratio_interval(a[:1], b[:1])))

def test_samples_are_the_unit():
    "Two outputs a sample: the weight of a sample is 2, and the scale is that of one output that is the mean of both"
    x,y = features(96),torch.randn(96, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    def scale(k):
        torch.manual_seed(0)
        lin = nn.Linear(6, 1).double()
        class Copies(nn.Module):
            def __init__(self): super().__init__(); self.lin = lin
            def forward(self, x): return self.lin(x).expand(-1, k)
        random.seed(0)
        items = [(a, b.expand(k)) for a,b in zip(x, y)]
        learn = make_learner(DataLoaders(DataLoader(items, bs=4, shuffle=True), DataLoader(items, bs=16)), Copies(),
                             nn.MSELoss(), splitter=trainable_params)
        return learn.noise_scale(num_it=20, show_plot=False)
    assert rel(list(scale(2)), list(scale(1)))[0]<1e-12

# What cannot be measured

def test_two_backward_passes():
    "A window in which a parameter got two gradients for a micro-batch does not count"
    def penalty(cb):
        if cb.learn.iter==1: (sum(p.square().sum() for p in cb.model.parameters())).backward()
    for event in 'before_backward','after_backward','after_loss':
        cb = Callback(**{event:lambda cb: penalty(cb) if cb.training else None})
        learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), cb, NoiseScale()])
        learn.fit(1)
        assert len(learn.gradient_noise.windows)==2

class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b = (nn.Linear(6,3).double() for _ in range(2))
    def forward(self, x): return self.a(x)

def test_second_backward_pass_of_another_head():
    "It reaches a parameter that the first one did not, and spoils its window, too"
    def extra(cb):
        if cb.training: cb.learn.model.b(cb.x).square().mean().backward()
    cbs = [AccumulateStep(4), Callback(after_backward=extra), NoiseScale()]
    learn = make_learner(make_dls(96, 8), TwoHeads(), cbs=cbs, splitter=trainable_params)
    learn.fit(1)
    with pytest.raises(ValueError, match='each had a second backward pass'): learn.gradient_noise.result()

def test_last():
    learn = recorded(AccumulateStep(4), n=96, dls=make_dls(96, 8))
    noise = learn.gradient_noise
    assert noise.result(last=None)==noise.result()
    for v in 1,-2,2.:
        with pytest.raises(ValueError, match='NoiseScale: last must be an int of at least 2'): noise.result(last=v)

def test_no_window_of_two():
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(1), NoiseScale()])
    learn.fit(1)
    for ask in learn.gradient_noise.result,learn.gradient_noise.plot:
        with pytest.raises(ValueError, match='NoiseScale: nothing was measured.*take n_step=2 or more'): ask()

def test_one_in_the_tail(recwarn):
    learn = recorded(AccumulateStep(4, drop_last=False), n=104, dls=make_dls(104, 8))
    assert len(learn.gradient_noise.windows)==6 and len(learn.stored.sums)==8
    assert not [o for o in recwarn if 'NoiseScale' in str(o.message)]

def test_not_finite():
    "A window with an infinite gradient does not count in the estimate"
    def inf(cb):
        if cb.learn.iter==1: cb.learn.loss_grad = cb.learn.loss_grad*math.inf
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), NoiseScale(), Callback(before_backward=inf)])
    learn.fit(1)
    assert learn.gradient_noise.windows.step.tolist()==[0,*([2] if all(p.isfinite().all()
                                                                       for p in learn.model.parameters()) else [])]

def test_dropped():
    "A micro-batch that is left out does not count"
    def drop(cb):
        if cb.training and cb.micro.i==1: raise CancelBatchException
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), NoiseScale(), Callback(after_loss=drop)])
    learn.fit(1)
    df = learn.gradient_noise.windows
    assert df.n.tolist()==[3,4,4] and df.samples.tolist()==[24,32,32]

def test_batch_norm():
    def model(): torch.manual_seed(0); return nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Linear(5,3)).double()
    learn = make_learner(make_dls(96, 8), model(), cbs=[AccumulateStep(4), NoiseScale()], splitter=trainable_params)
    with pytest.warns(UserWarning, match='NoiseScale: .*batch norm.*BatchNormEval'): learn.fit(1)
    assert len(learn.gradient_noise.windows)==3
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        make_learner(make_dls(96, 8), model(), cbs=[AccumulateStep(4), BatchNormEval(), NoiseScale()],
                     splitter=trainable_params).fit(1)

@pytest.mark.parametrize('cbs,match', [(noop, 'has no AccumulateStep.*n_step=2'),
    (lambda: MicroBatch(4, coupled=True), r'MicroBatch\(bs=4, coupled=True\).*without coupled'),
    (lambda: MicroBatch(4, exact=True), 'without coupled=True and exact=True')], ids=['no windows','coupled','exact'])
def test_refused(cbs, match):
    learn = make_learner(make_dls(96, 8), cbs=[*L(cbs()), NoiseScale()])
    with pytest.raises(ValueError, match=f'NoiseScale: .*{match}'): learn.fit(1)
    learn.validate()

def test_bad_arguments():
    learn = make_learner(make_dls(96, 8))
    for kw in dict(n_step=1), dict(n_step=2.), dict(num_it=True), dict(num_it=1):
        with pytest.raises(ValueError, match=f'noise_scale: {first(kw)} must be an int of at least 2, got '):
            learn.noise_scale(**kw)
    msg = 'noise_scale: n_step=99 is more than the 12 batches of an epoch; lower it, or the batch size'
    with pytest.raises(ValueError, match=msg):
        learn.noise_scale(n_step=99)
    assert learn.opt is None and len(learn.spy.steps if hasattr(learn.spy, 'steps') else [])==0

def test_keeps_off(tmp_path):
    "`lr_find` is no training to record; the record before it stays, validation leaves it too"
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), NoiseScale()], path=tmp_path)
    learn.fit(1)
    was = learn.gradient_noise.windows
    learn.lr_find(num_it=6, show_plot=False, suggest_funcs=None); learn.validate(); learn.get_preds()
    assert learn.gradient_noise.windows.equals(was) and len(was)==3
    learn.fit(2)
    assert len(learn.gradient_noise.windows)==6

@pytest.mark.parametrize('stop', [KeyboardInterrupt, ValueError, CancelFitException])
def test_no_hooks_left(stop):
    def at(cb):
        if cb.training and cb.micro.i==5: raise stop('now')
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), NoiseScale(), Callback(after_backward=at)])
    try: learn.fit(1)
    except (KeyboardInterrupt,ValueError): pass
    assert not any(p._backward_hooks for p in learn.model.parameters()) and '_with_events' not in vars(learn)
    assert learn.gradient_noise.sums is None
    assert len(learn.gradient_noise.windows)==1
    cb = learn.gradient_noise
    learn.remove_cb(cb)
    assert pickle.loads(pickle.dumps(cb)).windows.equals(cb.windows)

def test_syncs(monkeypatch):
    "The host never asks a tensor for its value in a window, with weights and gradients that could be on a device"
    asked = []
    for name in 'item','tolist','__float__','__bool__','__int__','numpy':
        old = getattr(Tensor, name)
        def ask(self, *args, old=old, name=name): asked.append(name) if inside else None; return old(self, *args)
        monkeypatch.setattr(Tensor, name, ask)
    inside,real = [],[(NoiseScale,k) for k in ('before_batch','after_backward','before_step')]+[(Sums,'arrive')]
    for cls,k in real:
        def within(self, *args, f=getattr(cls, k)):
            inside.append(1)
            try: return f(self, *args)
            finally: inside.pop()
        monkeypatch.setattr(cls, k, within)
    learn = make_learner(make_dls(96, 8), cbs=[AccumulateStep(4), NoiseScale(), OnCpu()])
    learn.fit(3)
    monkeypatch.undo()
    assert not asked and len(learn.gradient_noise.windows)==9

# What is put back

class Everything(Callback):
    "Has all kinds of attributes, and changes them"
    def __init__(self):
        self.n,self.all,self.by,self.t,self.q = 0,[1],{'a':[1]},torch.zeros(2),deque([1])
        self.net,self.kinds = nn.Linear(2,2),{1}
        self.counter,self.lists,self.array,self.space = Counter(a=3),defaultdict(list,
            a=[1]),np.zeros(3),SimpleNamespace(n=0)
    def after_batch(self):
        self.n += 1; self.all.append(self.n); self.by['a'].append(self.n); self.by[self.n] = 0; self.t += 1
        self.q.append(1); self.kinds.add(self.n)
        self.counter['a'] += 1; self.lists['b'].append(1); self.array += 1; self.space.n += 1
        self.new = 1
        with torch.no_grad(): self.net.weight += 1

class Net(nn.Module):
    "Draws, keeps a buffer and an attribute"
    def __init__(self):
        super().__init__(); torch.manual_seed(0); self.body,self.drop = small_model(),nn.Dropout(.2)
        self.register_buffer('b', torch.ones(3).double()); self.calls = 0
    def forward(self, x):
        self.calls += 1
        if self.training: self.b.mul_(1.01)
        return self.body(self.drop(x))*self.b

def frozen_state(o, seen=None):
    "Everything that `o` holds, as plain values"
    seen = {} if seen is None else seen
    if isinstance(o, Tensor):
        return ('tensor', o.detach().clone(), None if not o.is_leaf or o.grad is None else o.grad.clone())
    if isinstance(o, (random.Random)): return o.getstate()
    if isinstance(o, (list,tuple,deque)): return [type(o).__name__, *(frozen_state(v, seen) for v in o)]
    if isinstance(o, set): return sorted(o)
    if isinstance(o, dict):
        return [(k if isinstance(k, (str,int)) else id(k), frozen_state(v, seen)) for k,v in o.items()]
    if id(o) in seen: return id(o)
    seen[id(o)] = o
    optimizers = Optimizer,OptimWrapper,torch.optim.Optimizer
    if isinstance(o, (Learner,Callback,Metric,nn.Module,DataLoaders,DataLoader,L,*optimizers)):
        return [id(o), frozen_state({k:v for k,v in sorted(vars(o).items()) if k!='dataset'}, seen)]
    return o if isinstance(o, (int,float,str,bool,type(None))) else id(o)

def same(a, b):
    if isinstance(a, Tensor): return isinstance(b, Tensor) and a.dtype==b.dtype and torch.equal(a, b)
    if isinstance(a, (list,tuple)): return type(a)==type(b) and len(a)==len(b) and all(map(same, a, b))
    return a==b or a!=a and b!=b

def generators(): return random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state()

def make_all(opt_func=Adam, fitted=True, cbs=()):
    learn = make_learner(make_dls(92, 8), Net(), cbs=[AccumulateStep(3, drop_last=False), Everything(), NoiseScale(),
                                                      *cbs], opt_func=opt_func, splitter=trainable_params,
                         metrics=accuracy)
    if fitted: learn.fit(1)
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    learn.model[0].eval() if isinstance(learn.model, nn.Sequential) else learn.model.drop.eval()
    return learn

def branch(learn):
    with unchanged(learn): learn.fit(1, .1, cbs=AccumulateStep(2))

acts = dict(noise=lambda l: l.noise_scale(num_it=6, n_step=2, show_plot=False), branch=branch)

@pytest.mark.parametrize('act', acts)
@pytest.mark.parametrize('opt', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['fastai','torch'])
@pytest.mark.parametrize('fitted', [True,False])
@pytest.mark.parametrize('stop', [None,KeyboardInterrupt,ValueError])
def test_put_back(act, opt, fitted, stop):
    "Weights, buffers, modes, gradients, optimizer, generators, loaders, callbacks, recorder: bit for bit"
    def at(cb):
        if armed and cb.training and cb.micro.i==5: raise stop('now')
    armed = False
    learn = make_all(opt, fitted, [Callback(after_backward=at)] if stop else [])
    before,drawn,armed = frozen_state(learn),generators(),True
    if stop:
        with pytest.raises(stop): acts[act](learn)
    else: acts[act](learn)
    assert (learn.opt is None)!=fitted
    assert same(frozen_state(learn), before) and same(generators(), drawn)
    armed = False
    learn.fit(1)

def test_next_fit_is_the_same():
    a,b = make_all(),make_all()
    a.noise_scale(num_it=5, n_step=2, show_plot=False)
    torch.manual_seed(1); a.fit(1); torch.manual_seed(1); b.fit(1)
    assert worst(a, b, but=['step.grads'])[0]==0

class Plain:
    "A plain object that anneals, counts and draws"
    def __init__(self):
        self.t,self.seen,self.by,self.rng,self.old = 1.,deque(maxlen=3),{'n':np.zeros(1)},random.Random(0),torch.ones(2)
        self.np,self.inner,self.me = np.random.default_rng(0),SimpleNamespace(n=0),self
    def next(self):
        self.t *= .97; self.seen.append(self.t); self.by['n'] += 1; self.by[len(self.by)] = 1; self.inner.n += 1
        self.old.mul_(.9)
        return self.t*(1+.1*self.rng.random()+.1*self.np.random())*self.old.mean().item()

holds = dict(attribute=lambda o: o, in_a_list=lambda o: [o])

class Holder(nn.Module):
    def __init__(self, hold): super().__init__(); self.body,self.by = small_model(),hold(Plain())
    def forward(self, x):
        o = self.by[0] if isinstance(self.by, list) else self.by
        return self.body(x)*o.next()

@pytest.mark.parametrize('where', holds)
@pytest.mark.parametrize('act', acts)
@pytest.mark.parametrize('stop', [None,KeyboardInterrupt])
def test_plain_objects(act, where, stop):
    "What the model holds in an object of a class of its own is put back, so the next fit is the same"
    def make(): return make_learner(make_dls(96, 8), Holder(holds[where]), splitter=trainable_params, cbs=Stop())
    class Stop(Callback):
        on = False
        def after_backward(self):
            if self.on and self.micro.i==3: raise stop
    a,b = make(),make()
    a.stop.on = stop is not None
    if stop:
        with pytest.raises(stop): acts[act](a)
    else: acts[act](a)
    a.stop.on = False
    for l in (a,b): random.seed(0); torch.manual_seed(1); l.fit(1)
    assert worst(a, b)[0]==0

def test_plain_object_of_a_callback():
    learn = make_learner(make_dls(96, 8))
    o = Plain()
    class Counts(Callback):
        def __init__(self): self.o = o
        def after_batch(self): self.o.next()
    learn.add_cb(Counts())
    learn.noise_scale(n_step=2, num_it=4, show_plot=False)
    assert (o.t,len(o.seen),o.inner.n,list(o.by),o.by['n'].item()) == (1.,0,0,['n'],0) and o.old.tolist()==[1,1]

def test_optimizer_and_scheduler_of_pytorch():
    class Steps(Callback):
        def before_fit(self):
            if not hasattr(self, 'sched'): self.sched = torch.optim.lr_scheduler.StepLR(self.opt.opt, 2)
        def after_batch(self): self.sched.step()
    learn = Learner(make_dls(96, 8), small_model(), nn.CrossEntropyLoss(), cbs=Steps(),
                    opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)).remove_cb(ProgressCallback)
    learn.recorder.smooth_loss = AvgSmoothLoss64()
    with learn.no_logging(): learn.fit(1)
    def now(): return str((learn.steps.sched.state_dict(), learn.opt.opt.state_dict()))
    before = now()
    with unchanged(learn),learn.no_logging(): learn.fit(1)
    assert now()==before

def test_freezing_and_moving():
    "`requires_grad`, the dtype and the memory of a parameter come back"
    learn = make_learner(make_dls(96, 8))
    learn.fit(1)
    was,ptrs = [p.clone() for p in learn.model.parameters()],[p.data_ptr() for p in learn.model.parameters()]
    with unchanged(learn):
        learn.freeze()
        assert not learn.model[0].weight.requires_grad
        learn.model.float()
        for p in learn.model.parameters(): p.data.zero_()
    ps = list(learn.model.parameters())
    assert [p.data_ptr() for p in ps]==ptrs and all(torch.equal(p, o) for p,o in zip(ps, was))
    assert all(p.requires_grad for p in ps)
    learn.fit(1)

class Images:
    "A dataset in memory, with a table and a generator"
    def __init__(self, n=5000):
        self.x,self.y = np.zeros((n,50)),torch.zeros(n,50)
        self.df,self.items,self.rng = pd.DataFrame(self.x),[np.zeros(50) for _ in range(n)],np.random.default_rng(0)
    def __len__(self): return 96
    def __getitem__(self, i):
        self.rng.random()
        return features(96)[i],classes(96)[i]

def test_data_is_not_copied():
    "A dataset of 8 MB is not copied, also if a callback and the model hold it; its generator is put back"
    import tracemalloc
    ds = Images()
    class Holds(Callback):
        def __init__(self): self.ds = ds
    dl = DataLoader(ds, bs=8)
    learn = make_learner(DataLoaders(dl, dl), cbs=Holds())
    learn.model.ds = ds
    tracemalloc.start()
    was = learner_state(learn)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size<5e5, size
    assert not was.arrays and not any(t is ds.y for t,*_ in was.tensors)
    learn.noise_scale(n_step=2, num_it=20, show_plot=False)
    assert len(ds.items)==5000
    assert ds.rng.random()==np.random.default_rng(0).random()

@pytest.mark.parametrize('part', [lambda ds: torch.utils.data.Subset(ds, range(96)),
                                  lambda ds: torch.utils.data.ConcatDataset([ds])])
def test_a_dataset_in_one_of_pytorch(part):
    "The generator of an augmentation goes back there, too"
    ds = Images()
    dl = DataLoader(part(ds), bs=8)
    make_learner(DataLoaders(dl, dl)).noise_scale(n_step=2, num_it=4, show_plot=False)
    assert ds.rng.random()==np.random.default_rng(0).random()

def test_what_lives_is_left_alone():
    "A queue that a thread reads is not set back"
    q,got = queue.Queue(),[]
    class Logs(Callback):
        def __init__(self):
            self.q,self.thread = q,threading.Thread(target=lambda: [got.append(o) for o in iter(q.get, None)])
            self.thread.start()
        def after_batch(self): self.q.put(self.iter)
    learn = make_learner(make_dls(96, 8), cbs=Logs())
    try: learn.noise_scale(n_step=2, num_it=4, show_plot=False)
    finally: q.put(None); learn.logs.thread.join(5)
    assert got==[0,1,2,3] and q.empty()

def test_scaler_backs_off():
    "An overflow leaves a window out, the scaler finds its scale, and is what it was afterwards"
    mp = OnCpu(torch.float16, init_scale=2.**40)
    x,y = features(96).float(),classes(96)
    learn = Learner(DataLoaders.from_dsets(list(zip(x, y)), list(zip(x, y)), bs=8, device='cpu'), small_model().float(),
                    loss_func=nn.CrossEntropyLoss(), cbs=mp)
    learn.remove_cb(ProgressCallback); learn.logger = noop
    found = learn.noise_scale(n_step=4, num_it=30, show_plot=False)
    mp2 = learn.mixed_precision
    assert found.noise>0 and not hasattr(mp2, 'autocast') and 'scaler' not in vars(learn)
    plain = Learner(learn.dls, learn.model, loss_func=nn.CrossEntropyLoss()); plain.remove_cb(ProgressCallback)
    assert found.noise==pytest.approx(plain.noise_scale(n_step=4, num_it=30, show_plot=False).noise, rel=.2)

@pytest.mark.parametrize('kind', [L,list])
def test_text_loader(kind):
    "The order of texts is shuffled in place"
    texts = [torch.randint(20, (40,)) for _ in range(30)]
    dl = LMDataLoader(texts, bs=4, seq_len=5, shuffle=True)
    dl.items.idxs = kind(dl.items.idxs)
    was = list(dl.items.idxs)
    class Lm(nn.Module):
        def __init__(self): super().__init__(); self.emb,self.out = nn.Embedding(20,4),nn.Linear(4,20)
        def forward(self, x): return self.out(self.emb(x)).flatten(0, 1)
    learn = Learner(DataLoaders(dl, dl), Lm(), loss_func=lambda p, y: F.cross_entropy(p, y.flatten()))
    learn.remove_cb(ProgressCallback)
    learn.noise_scale(n_step=2, num_it=30, show_plot=False)
    assert list(dl.items.idxs)==was

def test_other_callbacks(tmp_path):
    "Trackers and files are left alone"
    learn = make_learner(make_dls(96, 8), cbs=[SaveModelCallback(), CSVLogger()], path=tmp_path, metrics=accuracy)
    learn.fit(1)
    was = {p:p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}
    assert len(was)==2
    learn.noise_scale(num_it=6, n_step=2, show_plot=False)
    assert {p:p.read_bytes() for p in tmp_path.rglob('*') if p.is_file()}==was

# What it says

def test_suggestion(capsys):
    "The suggestion counts batches of the loader, also if `MicroBatch` cuts them"
    a,b,model,*_ = population()
    def find(*cbs, **kw):
        random.seed(0)
        learn = make_learner(DataLoaders(DataLoader(list(zip(a, b)), bs=8), DataLoader([(a[0],b[0])], bs=1)), model,
                             nn.MSELoss(), splitter=trainable_params, cbs=cbs)
        res = learn.noise_scale(num_it=20, show_plot=False, **kw)
        return res,capsys.readouterr().out
    for cbs in ([], [AccumulateStep(5)], [AccumulateStep(n_samples=100)], [MicroBatch(2)],
                [MicroBatch(2, weight=lambda p,y: len(y))]):
        res,said = find(*cbs)
        assert res.n_step==round(res.scale/8)
        assert f'`learn.accumulate({res.n_step})` makes steps of {8*res.n_step} samples' in said, said
    own = find()[0]
    with accumulation(6): assert find()[0]==own

def sure_learner(bs, n=96, noise=.1, cbs=None):
    "A regression whose gradient has about as much noise as is asked for"
    x = features(n)
    y = x@torch.ones(6,1).double()+noise*torch.randn(n, 1, generator=torch.Generator().manual_seed(3)).double()
    return make_learner(make_dls(n, bs, x=x, y=y), small_model(out=1), nn.MSELoss(), splitter=trainable_params, cbs=cbs)

def test_not_needed(capsys):
    "Where a batch of the loader is enough, it says that, and not that n_step=1 would be as now"
    res = sure_learner(48, n=480).noise_scale(n_step=4, num_it=40, show_plot=False)
    said = capsys.readouterr().out
    assert res.n_step==1 and res.scale<72, res
    assert 'A batch has 48 samples, so you do not need accumulation.' in said and 'learn.accumulate' not in said

def test_not_beyond_the_epoch(capsys):
    "A scale above the samples of an epoch: it says so, and suggests at most the epoch"
    def find(seed):
        learn = make_learner(make_dls(24, 2, x=features(24, seed=seed), y=classes(24, seed=seed)))
        return learn.noise_scale(n_step=4, num_it=200, show_plot=False),capsys.readouterr().out
    for res,said in map(find, range(20)):
        if not res.scale>24: continue
        assert res.n_step==12 and 'learn.accumulate' not in said
        assert 'An epoch is smaller, with 24 samples, so this sets no limit.' in said
        return
    assert False, 'no scale was above the epoch'

@pytest.mark.parametrize('kw', [dict(coupled=True), dict(exact=True), dict(bs='auto', coupled=True)], ids=str)
def test_line_to_write(kw):
    "What the refusal of a callback that shows the whole batch says to write, works"
    learn = make_learner(make_dls(96, 8), cbs=MicroBatch(**{**dict(bs=4), **kw}))
    with pytest.raises(ValueError, match='measure without coupled=True and exact=True') as e:
        learn.noise_scale(show_plot=False)
    line = re.findall('`(.*?)`', str(e.value))[-1]   # fastai names the callback before
    assert isinstance(eval(line, dict(learn=learn)).noise_scale(show_plot=False), Noise)

@pytest.mark.parametrize('act', [lambda l: l.noise_scale(n_step=2, num_it=4, show_plot=False), lambda l: l.fit(1)],
                         ids=['noise_scale','fit'])
def test_one_note_on_batch_norm(act, capsys):
    "One note in all: a warning; the line that `AccumulateStep` prints once a learner is not used up"
    model = nn.Sequential(nn.Linear(6,5), nn.BatchNorm1d(5), nn.Linear(5,3)).double()
    learn = make_learner(make_dls(96, 8), model, cbs=[AccumulateStep(2), NoiseScale()], splitter=trainable_params)
    with pytest.warns(UserWarning) as said: act(learn)
    notes = [o for o in said if 'batch norm' in str(o.message)]
    assert len(notes)==1 and 'biases the noise scale' in str(notes[0].message)
    assert 'batch norm' not in capsys.readouterr().out
    learn.remove_cb(NoiseScale)
    learn.fit(1)
    assert capsys.readouterr().out.count('batch norm sees')==1

def test_reads_no_private_attributes():
    "Neither module reads an attribute of another object that begins with an underscore"
    for name in 'noise','gradients','unchanged':
        src = (Path(fastai_accum.__file__).parent/'know'/f'{name}.py').read_text()
        found = set(re.findall(r'\.(_[a-z]\w*)', src))-{'_stateattrs'}
        assert not found, found

def test_not_measurable(capsys):
    x,y = features(96),classes(96, seed=5)
    learn = make_learner(make_dls(96, 8, x=x, y=y))
    model = learn.model
    with torch.no_grad():
        for p in model[2].parameters(): p.zero_()   # equal predictions, and targets that tell nothing
    res = learn.noise_scale(num_it=6, n_step=2, show_plot=False)
    if math.isnan(res.scale):
        said = capsys.readouterr().out
        assert 'The noise hides the gradient. Take more windows (num_it)' in said and res.n_step is None
    assert math.isnan(res.scale) and math.isnan(res.low) and math.isnan(res.high) and res.noise>0

def test_plots():
    "The line is smoothed with `beta`, or the mean so far; it ends at the estimate, and a line marks the suggestion"
    import matplotlib.pyplot as plt
    learn = make_learner(make_dls(92, 8), cbs=[AccumulateStep(2), NoiseScale()], metrics=accuracy)
    learn.fit(4)
    learn.gradient_noise.plot()
    line, = plt.gca().lines
    df = learn.gradient_noise.windows
    s,g = unbiased(df.n, df.weight, df.sum_sq, df.mean_sq)
    def avg(v, k): return sum(.02*.98**(k-i)*o for i,o in enumerate(v[:k+1]))/(1-.98**(k+1))
    for k in (0,3,len(df)-1):
        y = line.get_ydata()[k]
        assert np.isnan(y) if avg(g, k)<=0 else y==pytest.approx(avg(s, k)/avg(g, k))
    res = sure_learner(8).noise_scale(n_step=4, num_it=40)
    line,suggested = plt.gca().lines
    assert line.get_ydata()[-1]==pytest.approx(res.scale)
    assert suggested.get_ydata()[0]==8*res.n_step
    plt.close('all')

# Several processes

def several(rank, world, folder):
    "What process `rank` records, and the gradients that it stores"
    import torch.distributed as dist
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=world)
    y = torch.where(torch.arange(84)%9<2, -100, classes(84))
    sizes = (7,3,11,2,5,9,1,4,6,8,2,10)
    at = np.cumsum([0,*sizes])
    every = [(features(84)[a:b], y[:84][a:b]) for a,b in zip(at, at[1:])]
    mine = every[rank::world][:6-rank]   # one has fewer
    dls = DataLoaders(DataLoader(mine, bs=None), DataLoader(every[:1], bs=None))
    ddp = nn.parallel.DistributedDataParallel(small_model())
    learn = make_learner(dls, ddp, nn.CrossEntropyLoss(weight=W), splitter=trainable_params,
                         opt_func=partial(SGD, mom=0),
                         cbs=[AccumulateStep(2), NoiseScale(), OnCpu(init_scale=2.**10)])
    with unchanged_weights(learn): learn.fit(2, 0., wd=0.)
    df = learn.gradient_noise.windows
    learn2 = make_learner(dls, ddp, nn.CrossEntropyLoss(weight=W), splitter=trainable_params)
    found = learn2.noise_scale(n_step=2, num_it=4, show_plot=False)
    torch.save((df.values, list(found), found.n_step, not any(p._backward_hooks for p in ddp.parameters())),
               f'{folder}/out{rank}')
    dist.barrier(); dist.destroy_process_group()

def test_two_processes(tmp_path):
    "Both record the sums over the micro-batches of both"
    here = Path(__file__).resolve().parent
    code = (f'import sys; sys.path[:0] = {[str(here), str(here.parent)]!r}; import torch; torch.set_num_threads(1); '
            f'from test_noise import several; several(int(sys.argv[1]), 2, {str(tmp_path)!r})')
    env = {**os.environ, 'OMP_NUM_THREADS':'1',
           'PYTHONPATH':os.pathsep.join([str(here.parents[1]), os.environ.get('PYTHONPATH','')])}
    ps = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code, str(r)], env=env, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True) for r in range(2)]
    try: outs = [p.communicate(timeout=100)[0] for p in ps]
    finally:
        for p in ps: p.kill()
    assert not any(p.returncode for p in ps), '\n'.join(o[-3000:] for o in outs)
    y = torch.where(torch.arange(84)%9<2, -100, classes(84))
    at,model,loss = np.cumsum([0,7,3,11,2,5,9,1,4,6,8,2,10]),small_model(),nn.CrossEntropyLoss(weight=W)
    rows,parts = [],[(a,b) for a,b in zip(at, at[1:])]
    mine = [parts[0::2][:6], parts[1::2][:5]]
    for k in range(0, 6, 2):
        ws,gs = [],[]
        for a,b in (o for m in mine for o in m[k:k+2]):
            model.zero_grad()
            yb = y[:84][a:b]
            w = W[yb[yb>=0]].sum().item()
            if not w: continue
            loss(model(features(84)[a:b]), yb).backward()
            ws.append(w); gs.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        whole = sum(w*g for w,g in zip(ws, gs))/sum(ws)
        rows.append([len(ws), sum(ws), sum(w*(g@g).item() for w,g in zip(ws, gs)), (whole@whole).item()])
    for r in range(2):
        found,scale,n_step,clean = torch.load(tmp_path/f'out{r}', weights_only=False)
        err = rel(torch.tensor(found[:,[1,2,4,5]]), torch.tensor(np.array(rows*2)))
        assert err[0]<=TOL and clean, (err, found[:,[1,2,4,5]]/np.array(rows*2)-1)
    a,b = (torch.load(tmp_path/f'out{r}', weights_only=False) for r in range(2))
    assert same(a[1], b[1]) and a[2]==b[2]

class Orders(torch.utils.data.Sampler):
    "Shuffles an array, or a tensor, in place"
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __iter__(self):
        np.random.shuffle(self.idxs.numpy() if isinstance(self.idxs, Tensor) else self.idxs)
        return iter(self.idxs.tolist())

@pytest.mark.parametrize('idxs', [np.arange(96), torch.arange(96)], ids=['array','tensor'])
def test_order_of_a_sampler(idxs):
    dl = torch.utils.data.DataLoader(Items(features(96), classes(96)), batch_size=8, sampler=Orders(idxs))
    learn,was = make_learner(DataLoaders(dl, dl)),idxs.tolist()
    learn.noise_scale(n_step=2, num_it=4, show_plot=False)
    learn.check_accumulation()
    assert idxs.tolist()==was

def test_loaders_of_few_batches():
    says = 'n_step=8 is more than the 5 batches of an epoch; lower it, or the batch size of the loader'
    with pytest.raises(ValueError, match=says):
        make_learner(make_dls(40, 8)).noise_scale()

def nan_learner(*cbs):
    model = small_model()
    with torch.no_grad(): model[0].weight.fill_(math.nan)
    return make_learner(make_dls(96, 8), model, cbs=cbs)

def test_not_finite():
    with pytest.raises(ValueError, match='the gradients are not finite'):
        nan_learner().noise_scale(n_step=2, num_it=4, show_plot=False)

def test_left_out_micro_batches_do_not_change_the_unit():
    def some(cb):
        if cb.training and cb.micro.i%24==5: raise CancelBatchException
    a,b = (make_learner(make_dls(960, 8), cbs=cbs).noise_scale(n_step=4, num_it=30, show_plot=False) for cbs in ([],
        [Callback(after_loss=some)]))
    assert b.n_step==max(1, round(b.scale/8)) and a.n_step==max(1, round(a.scale/8))

@pytest.mark.skipif(not torch.cuda.is_available(),
                    reason='compares the noise scale on a GPU with that on the CPU, and this machine has no GPU')
def test_on_a_gpu():
    "The same figures as on the CPU, and no wait for the device in hooks and steps"
    def measure(device):
        dls = make_dls(960, 8, shuffle=False)
        dls.device = device
        return make_learner(dls, small_model().to(device)).noise_scale(n_step=4, num_it=20, show_plot=False)
    assert rel(list(measure('cuda')), list(measure('cpu')))[0]<1e-9
