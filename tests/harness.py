"""Train twice, with the large batch and in micro-batches, and compare everything that a `Learner` does or records.

Everything is float64, with plain `torch.nn` losses: fastai's flattened losses round to float32, which would put a
floor of 1e-8 under any comparison. `TOL` is a relative error. Sums of the same numbers in another order differ by a
few units in the last place (2e-16); the bound leaves three digits for optimizers that divide by small numbers."""
import inspect,itertools,os,threading
from functools import partialmethod
from unittest import mock
import pytest
from fastai.basics import *
from fastai.callback.all import *
from fastai_accum.core import *
from fastai_accum.devices import n_autocast
from fastai_accum.microbatch import MicroBatch   # for all tests
from fastai_accum.state import Lent

TOL = 1e-12
TOL32 = 1e-4   # where fastai rounds to float32, by 6e-8: gradients that cancel differ by up to 1e-6

SWEEP = bool(os.environ.get('SWEEP'))   # all of what is drawn below: `make sweep`

def sample(cases, n=0):
    """Some of `cases`, which are tuples, drawn with a fixed seed: so many that each value still occurs in its column,
    and then others with new pairs of values, up to `n` in all. With `SWEEP=1` in the environment, all"""
    cases = list(cases)
    if SWEEP: return cases
    random.Random(0).shuffle(cases)
    res,seen = [],set()
    def new(c): return {k for i in (1,2) for k in itertools.combinations(enumerate(map(str, c)), i)}-seen
    for least in range(len(cases[0]), -1, -1):   # of values that did not occur yet
        for c in cases:
            ks = new(c)
            if ks and sum(len(k)==1 for k in ks)>=least and (least or len(res)<n):
                res.append(c)
                seen |= ks
    return res

def _cases(n, columns):
    "The values of a `sample` of the combinations of `columns`, and a name for each; of all of them if `n` is None"
    def name(o): return getattr(o, '__name__', re.sub(' at 0x[0-9a-f]+', '', str(o)))
    names = [{i:name(o) for i,o in enumerate(c)} for c in columns.values()]
    values,cases = [list(c) for c in columns.values()],itertools.product(*names)
    for c in cases if n is None else sample(cases, n):
        yield [v[i] for v,i in zip(values, c)],'-'.join(nm[i] for nm,i in zip(names, c))

def drawn(n, /, **columns):
    "Call a test with a `sample` of the combinations of `columns`"
    return pytest.mark.parametrize(','.join(columns), [pytest.param(*v, id=nm) for v,nm in _cases(n, columns)])

def seed_all(): random.seed(0); np.random.seed(0); torch.manual_seed(0)

def each(n=None, /, **columns):
    "One test that tries every combination of `columns`, or a `sample` of them; an error says with which"
    def wrap(f):
        sig = inspect.signature(f)
        def test(**fixtures):
            for values,name in _cases(n, columns):
                seed_all()
                try: f(**fixtures, **dict(zip(columns, values)))
                except BaseException as e:
                    e.add_note(f'with {name}: {dict(zip(columns, values))}')
                    raise
        test.__signature__ = sig.replace(parameters=[p for k,p in sig.parameters.items() if k not in columns])
        test.__name__,test.__doc__,test.__module__ = f.__name__,f.__doc__,f.__module__
        test.pytestmark = getattr(f, 'pytestmark', [])
        return test
    return wrap

class AvgSmoothLoss64(AvgSmoothLoss):
    "`AvgSmoothLoss` starts from a float32 zero, which float64 losses cannot be mixed with"
    def reset(self): self.count,self.val = 0,torch.zeros((), dtype=torch.float64)
    def accumulate(self, learn):
        self.count += 1
        self.val = torch.lerp(to_detach(learn.loss.mean()).double(), self.val, self.beta)

class Spy(Callback):
    "Record what the optimizer gets: gradients and hyper-parameters at each step"
    order = 1000
    def before_fit(self):
        if not hasattr(self, 'steps'): self.steps = []
    def before_step(self):
        grads = [None if p.grad is None else p.grad.clone() for p in self.learn.model.parameters()]
        self.steps.append(dict(grads=grads, hypers=[dict(h) for h in self.opt.hypers], train_iter=self.train_iter,
                               pct_train=self.pct_train))

class Micro(Callback):
    "Counts the micro-batches of an epoch. Without accumulation this is `learn.iter`"
    order = -1e9
    def before_train(self): self.i = -1
    def before_batch(self):
        if self.training: self.i += 1

here = SimpleNamespace(device=None)   # where the data of `make_dls` goes: the fixture `device` sets it

GPU = 'cuda:0' if torch.cuda.is_available() else 'fakegpu:0'   # the first accelerator: a real one, or the simulated one

def threads():
    "How many there are, but for those that CUDA begins when it likes"
    seen = os.path.exists('/proc') and not torch.cuda.is_available()
    return len(os.listdir('/proc/self/task')) if seen else threading.active_count()

simulated = pytest.mark.skipif(torch.cuda.is_available(),
    reason='about the simulated accelerator, whose place a real one takes on this machine')

HALF = {torch.float16:2**-11, torch.bfloat16:2**-8}   # what one rounding may change, relative

class OnCpu(MixedPrecision):
    "`MixedPrecision` on the CPU, which fastai's own switches off there; without `dtype`, only its loss scaler"
    name = 'mixed_precision'
    def __init__(self, dtype=None, **kwargs): super().__init__(**kwargs); self.dtype = dtype
    def before_fit(self):
        self.kwargs['enabled'] = self.dtype is not torch.bfloat16
        self.autocast = torch.amp.autocast('cpu', dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None)
        self.learn.scaler,self.scales = torch.amp.GradScaler('cpu', **self.kwargs),L()
    def after_pred(self):
        if self.dtype is not None: super().after_pred()   # which rounds to float32
    def after_fit(self):
        self.kept = list(self.scales)
        super().after_fit()

def parallel(model):
    "In `DataParallel`, as on a machine without an accelerator: it would look for the model on the simulated one"
    with mock.patch('torch.nn.parallel.data_parallel._get_available_device_type', lambda: None):
        return nn.DataParallel(model)

class NoValid(Callback):
    "Train only"
    def before_validate(self): raise CancelValidException

def at_order(order, **events):
    "A callback of this order that calls functions at events"
    cb = Callback(**events)
    cb.order = order
    return cb

def raising(exc, event, when=lambda cb: True, order=0):
    "A callback that raises `exc` at an event of training, if `when(cb)` is true"
    def f(cb):
        if cb.training and when(cb): raise exc
    return at_order(order, **{event:f})

class EachMicro(Callback):
    "Has `after_batch` at each micro-batch"
    each_micro_batch = True

events = """before_fit before_epoch before_train before_step after_step after_batch after_train
before_validate after_validate after_epoch after_fit""".split()
orders = -100,-11,-10,0,49,50,51,60,100   # around fastai's own: -10, 50, 60

class Losses(Metric):
    "The mean of the losses that a metric sees, weighted by samples"
    def reset(self): self.total,self.n = 0.,0
    def accumulate(self, learn):
        bs = find_bs(learn.yb)
        self.total,self.n = self.total+learn.loss.item()*bs,self.n+bs
    value = property(lambda self: self.total/self.n)

class Probe(Callback):
    "Notes in `learn.seen` each event, and the counters and the loss of the learner at that moment"
    def __init__(self, order): self.order = order
    def _note(self, event):
        now = vars(self.learn)
        counters,loss = map(now.get, ('training','epoch','iter','n_iter','train_iter','pct_train')),now.get('loss')
        now.setdefault('seen', []).append([event, self.order, *counters, None if loss is None else loss.item()])
for e in events: setattr(Probe, e, partialmethod(Probe._note, e))
def probes(): return [Probe(o) for o in orders]

class Items:
    "`n` samples of a dataset; those in `skip` raise `SkipItemException`, so that the loader is shorter than its length"
    def __init__(self, x, y, skip=()): self.x,self.y,self.skip = x,tuplify(y),set(skip)
    def __len__(self): return len(self.x)
    def new_empty(self): return Items(self.x[:0], tuple(o[:0] for o in self.y))
    def __getitem__(self, i):
        if i in self.skip: raise SkipItemException
        return (self.x[i], *(o[i] for o in self.y))

def features(n, d=6, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
def classes(n, c=3, seed=0): return torch.randint(0, c, (n,), generator=torch.Generator().manual_seed(seed+1))
def halves(m): return [params(m[0]), params(m[1:])]
one_group = dict(splitter=trainable_params)

class Made(nn.Module):
    "A module of `parts`, which calls `f(self, *inputs)`"
    def __init__(self, f, **parts):
        super().__init__()
        for k,v in parts.items(): setattr(self, k, v)
        self.f = f
    def forward(self, *args): return self.f(self, *args)

def small_model(d=6, out=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(d,5), nn.Tanh(), nn.Linear(5,out)).double()

def make_dls(n, bs, y=None, drop_last=False, skip=(), shuffle=True, x=None, valid_bs=16):
    x,y = features(n) if x is None else x, classes(n) if y is None else y
    random.seed(0)
    trn = DataLoader(Items(x, y, skip), bs=bs, shuffle=shuffle, drop_last=drop_last)
    return DataLoaders(trn, DataLoader(Items(x[:24], tuple(o[:24] for o in tuplify(y))), bs=valid_bs),
                       device=here.device)

def make_learner(dls, model=None, loss_func=None, opt_func=Adam, cbs=None, **kwargs):
    kwargs = {**dict(lr=0.02, splitter=halves), **kwargs}
    learn = Learner(dls, small_model() if model is None else model,
                    loss_func=nn.CrossEntropyLoss() if loss_func is None else loss_func, opt_func=opt_func,
                    cbs=L(Spy(), Micro()) + L(cbs), **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.recorder.smooth_loss = AvgSmoothLoss64()
    learn.logger = noop
    return learn

def opt_state(opt):
    if isinstance(opt, Lookahead): return [opt_state(opt.opt), opt.slow_weights, opt.count]
    state = opt.opt.state if isinstance(opt, OptimWrapper) else opt.state
    return [dict(state[p]) for pg in opt.param_lists for p in pg if p in state]

def snapshot(learn):
    "Everything that the promise covers, by name"
    rec = learn.recorder
    res = dict(params=[p.detach().clone() for p in learn.model.parameters()], buffers=list(learn.model.buffers()),
               opt=opt_state(learn.opt), hypers=[dict(h) for h in learn.opt.hypers], hps=getattr(rec,'hps',{}))
    for o,names in (rec,'losses lrs values iters'),(learn,'final_record train_iter pct_train smooth_loss'):
        res.update({k:getattr(o, k) for k in names.split()})
    for k in ('grads','hypers','train_iter','pct_train'): res[f'step.{k}'] = [s[k] for s in learn.spy.steps]
    return res

def rel(a, b, path=''):
    """The largest relative error of `a` against `b`, however they are nested, and where it is. It is infinite if the
    structures differ"""
    if isinstance(b, dict):
        if set(a)!=set(b): return math.inf,f'{path}: keys {sorted(a)} for {sorted(b)}'
        return max((rel(a[k], b[k], f'{path}.{k}') for k in b), default=(0.,path))
    if isinstance(b, (list,tuple,L)):
        if len(a)!=len(b): return math.inf,f'{path}: length {len(a)} for {len(b)}'
        return max((rel(x, y, f'{path}[{i}]') for i,(x,y) in enumerate(zip(a,b))), default=(0.,path))
    if b is None or isinstance(b, (str,bool)): return (0. if a==b else math.inf),f'{path}: {a} for {b}'
    if a is None: return math.inf,f'{path}: None for {b}'
    a,b = (torch.as_tensor(o, dtype=torch.float64, device='cpu') for o in (a,b))
    if a.shape!=b.shape: return math.inf,f'{path}: shape {tuple(a.shape)} for {tuple(b.shape)}'
    if not torch.equal(a.isnan(), b.isnan()): return math.inf,f'{path}: NaN in other places'
    a,b = a.nan_to_num(),b.nan_to_num()
    err = (a-b).norm()/b.norm() if b.norm()>0 else a.norm()
    return (math.inf if err.isnan() else err.item()),path

def worst(a, b, but=()):
    "The largest error between two learners, and where it is"
    b = snapshot(b)
    return max(rel(v, b[k], k) for k,v in snapshot(a).items() if k not in but)

def assert_same(a, b, tol=TOL, but=()):
    err,where = worst(a, b, but)
    assert err<=tol, f'relative error {err:.2e} at {where}, allowed {tol:.0e}'
    assert len(b.spy.steps)>0, 'the large batch made no step, so nothing was compared'
    return err

def is_clean(learn):
    "No gradient is left, no open window, and nothing that was lent to the learner or its model"
    assert not any(p.grad.any() for p in learn.model.parameters() if p.grad is not None), 'a gradient is left'
    assert not {'_with_events','one_batch','all_batches'} & set(vars(learn)) and 'forward' not in vars(learn.model)
    for cb in learn.cbs: assert getattr(cb, 'window', None) is None, 'a window is open'
    assert is_returned(learn), 'something is lent'

def is_returned(learn):
    "Whether nothing that we lend is in the learner or in its model"
    return not any(isinstance(v, Lent) for o in (learn,*learn.model.modules()) for v in vars(o).values())

def left_alone(model):
    "No thread of ours waits, and what was lent to the model is back"
    ours = [t for t in threading.enumerate() if t.name.startswith('Thread-') and t.daemon
            and '_read_thread' not in t.name]   # which `torch.compile` starts, and keeps
    assert threading.active_count()==1 or not ours, ours
    assert is_returned(SimpleNamespace(model=model))

def left(learn):
    """All that a trial must leave as it was, by name: autocast and streams, tensors with their graphs and hooks,
    gradients, attributes, modes, the optimizer, the generators, and what is global"""
    def of(t):
        hooks = t._backward_hooks
        return id(t),t.detach().clone(),t.grad_fn,t.requires_grad,id(hooks),len(hooks or ())
    ms,ps,rec = list(learn.model.modules()),list(learn.model.parameters()),getattr(learn, 'recorder', None)
    objects = [o for o in (learn, *learn.cbs, learn.loss_func, *ms) if hasattr(o, '__dict__')]
    device = here.device or torch.device('cpu')
    return dict(
        open = (n_autocast(), [torch.is_autocast_enabled(o) for o in ('cpu',device.type)],
                torch.get_device_module(device).current_stream()),
        tensors = list(map(of, [*ps, *learn.model.buffers()])), modes=[m.training for m in ms],
        grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in ps],
        hooks = [len(v) for m in ms for k,v in vars(m).items() if 'hooks' in k and isinstance(v, dict)],
        attributes = [(id(o), {k:id(v) for k,v in vars(o).items()}) for o in objects],
        opt = learn.opt and (deepcopy(learn.opt.state_dict()), [dict(h) for h in learn.opt.hypers]),
        losses = list(getattr(rec, 'losses', [])), loader = getattr(learn.dls.loaders[0], 'rng', random).getstate(),
        drawn = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
        globals = (torch.get_default_dtype(), torch.is_grad_enabled(), dict(vars(defaults))))

def assert_left(was, learn):
    now = left(learn)
    for k in was: assert identical(was[k], now[k]), f'{k}: {was[k]} is now {now[k]}'

def refused(learn, match, exc=ValueError, fit=lambda l: l.fit(1)):
    "The words of the error that `fit` raises; no weight and no buffer has moved"
    was = deepcopy(learn.model.state_dict())
    with pytest.raises(exc, match=match) as e: fit(learn)
    assert identical(was, learn.model.state_dict()) and is_returned(learn), 'something has moved'
    return str(e.value)

def close(a, b, tol=TOL):
    "Whether `a` is `b` up to `tol`, however they are nested"
    err,where = rel(a, b)
    assert err<=tol, f'relative error {err:.2e} at {where}, allowed {tol:.0e}'

def identical(a, b):
    "Whether two things are the same bit for bit, or the same object, however they are nested"
    if isinstance(a, Tensor): return torch.equal(a, b)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(identical, a, b))
    if isinstance(a, dict): return list(a)==list(b) and all(identical(a[k], b[k]) for k in a)
    return a is b or a==b

def train(cbs=(), bs=32, n=76, fit=lambda l: l.fit_one_cycle(2, 0.02), dls=None, model=None, drop_last=False, skip=(),
          y=None, x=None, shuffle=False, also=(), **kwargs):
    "A learner with `cbs` and those that `also` makes, trained by `fit` on what `dls(bs)` and `model()` make"
    data = dls(bs) if dls else make_dls(n, bs, y, drop_last, skip, shuffle, x)
    made = [o for f in L(also) for o in L(f())]
    learn = make_learner(data, model and model(), cbs=[*made, *L(cbs)], **kwargs)
    torch.manual_seed(1); np.random.seed(1); random.seed(1)
    fit(learn)
    return learn

def pair(cbs, bs=8, large=32, *args, **kwargs):
    "The learner with the callbacks that `cbs` makes and the one with the large batch; both have those of `also`"
    return train(cbs(), bs, *args, **kwargs),train((), large, *args, **kwargs)

def same(*args, but=(), tol=TOL, **kwargs):
    "Train the two learners of `pair`, and compare everything"
    a,b = pair(*args, **kwargs)
    assert_same(a, b, tol, but)
    return a,b

class StackedCE(nn.CrossEntropyLoss): y_int = True   # as fastai's: MixUp mixes losses, not targets
class TokenLoss(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred.flatten(0,1), y.flatten())

def weights(learn): return [p.detach() for p in learn.model.parameters()]

# pytest would collect fastcore's `test_eq` and friends
__all__ = [o for o in globals() if not o.startswith(('_','test'))]
