"""After a trial, nothing of it is left: a fit after a check, a proof, `what_fits` or `noise_scale` is plain training,
bit for bit, however the trial has ended, and nothing logs, tracks, saves or draws the trial itself"""
import queue,threading,tracemalloc
import matplotlib,pytest
from collections import deque,namedtuple
from contextlib import nullcontext,suppress
from operator import setitem
from torch.optim.lr_scheduler import StepLR
from nets import *
from fastai_accum.all import *
from fastai_accum.know.bench import learner_state,unchanged
from fastai_accum.state import State,arrays,held,with_memory
matplotlib.use('Agg')

trials = dict(check=lambda l: l.check_accumulation(), what_fits=lambda l: l.what_fits('1KB'),
              noise=lambda l: l.noise_scale(2, 3, False))

def branch(learn):
    with unchanged(learn):
        learn.freeze()
        learn.unfreeze()
        learn.fit(1, .1, cbs=AccumulateStep(2))

# ---- tensors with a graph, hooks and iterators

moves = dict(lerp_=lambda m,x: m.lerp_(x, .3), mul_add_=lambda m,x: m.mul_(.7).add_(x, alpha=.3),
             copy_=lambda m,x: m.copy_(.7*m.clone()+.3*x), index=lambda m,x: setitem(m, ..., .7*m.clone()+.3*x))
places = dict(attribute=(noop,noop), tuple=(lambda m: (m,1),itemgetter(0)), dict=(lambda m: dict(m=m),itemgetter('m')),
              closure=(lambda m: lambda: m,lambda f: f()))

class Moves(nn.Module):
    "Moves a tensor that it holds in place, with a gradient, and detaches it at the next batch"
    def __init__(self, how):
        super().__init__()
        self.move,(hold,self.find) = moves.get(how, moves['lerp_']),places.get(how, (None,noop))
        m = torch.zeros(5, dtype=torch.float64, device=here.device)
        if hold: self.kept = hold(m)
        else: self.register_buffer('kept', m)
    def held(self): return self.find(self.kept)
    def forward(self, x):
        m = self.held()
        if self.training: self.move(m.detach_(), x.mean(0))
        return x-m

hows = *moves,*places

class Plain:
    "A plain object that anneals, counts and draws"
    def __init__(self):
        self.t,self.seen,self.by,self.rng,self.old = 1.,deque(maxlen=3),{'n':np.zeros(1)},random.Random(0),torch.ones(2)
        self.np,self.inner,self.me = np.random.default_rng(0),SimpleNamespace(n=0),self
    def next(self):
        self.t *= .97
        self.seen.append(self.t)
        self.by['n'] += 1
        self.by[len(self.by)] = 1
        self.inner.n += 1
        self.old.mul_(.9)
        return self.t*(1+.1*self.rng.random()+.1*self.np.random())*self.old.mean().item()

class Own:
    "An iterator of Python, which has attributes"
    def __init__(self): self.i = 0
    def __iter__(self): return self
    def __next__(self): self.i += 1; return 1+self.i%3

class Net(nn.Module):
    "Draws, has a buffer and an attribute, objects of a class of its own, one in a list, and iterators"
    def __init__(self, how):
        super().__init__()
        self.body,self.drop,self.calls,self.o,self.os = layers(Moves(how)),nn.Dropout(.2),0,Plain(),[Plain()]
        self.register_buffer('b', torch.ones(3).double())
        self.its = itertools.cycle([1.,2.,3.]),iter([1.,2.]*50),map(abs, itertools.cycle([1.,-2.,3.])),Own()
    def forward(self, x):
        self.calls += 1
        if self.training: self.b.mul_(1.01+sum(map(next, self.its))/1e3)
        return self.body(self.drop(x))*self.b*self.o.next()*self.os[0].next()*(1+self.calls/100)

class Changes(Callback):
    "Changes what it holds, with a scheduler of PyTorch for an optimizer of PyTorch"
    held = sched = None
    def before_fit(self):
        self.held = self.held or Plain()
        if isinstance(self.opt, OptimWrapper): self.sched = self.sched or StepLR(self.opt.opt, 2)
    def after_batch(self):
        if self.sched: self.sched.step()
    def after_backward(self): self.held.next()

def AdamW(ps, **kwargs): return OptimWrapper(ps, torch.optim.AdamW, **kwargs)

def fit(learn): learn.fit(1); return learn
def make(how='lerp_', *cbs, opt=Adam):
    return make_learner(make_dls(64, 8), Net(how), cbs=[*cbs, Changes()], opt_func=opt, metrics=accuracy, **one_group)
def untouched(name, learn):
    def places(): return [p.data_ptr() for p in learn.model.parameters()],list(map(id, learn.model.its))
    was,at = left(learn),places()
    {**trials, 'branch':branch}[name](learn)
    assert_left(was, learn)
    assert places()==at

def same_next_fit(learn, plain):
    "The next fit of `learn` is that of a learner without a trial, bit for bit"
    for o in learn,plain:
        set_seed(3)
        fit(o)
    assert_same(learn, plain, 0)
    a,b = ([l.model.body[1].held(), l.model.o.t, l.model.os[0].t, l.changes.held.t,
            l.changes.sched and l.changes.sched.state_dict()] for l in (learn,plain))
    assert identical(a, b)

cases = sample(itertools.product(hows, [*trials,'branch'], [Adam,AdamW], ['cpu',GPU]), 13)

@pytest.mark.parametrize('how,name,opt,device', cases, indirect=['device'])
def test_a_trial_leaves_no_trace(how, name, opt, device, capsys):
    "What the model and callbacks hold is untouched, a tensor with its graph, too, and the next fit is the same"
    learn,plain = (fit(make(how, AccumulateStep(2), opt=opt)) for _ in range(2))
    assert learn.model.body[1].held().grad_fn is not None
    untouched(name, learn)
    same_next_fit(learn, plain)

def twice(p): p.grad *= 2
hooks = dict(
    gradient = lambda m: m[0].weight.register_hook(lambda g: 2*g),
    late     = lambda m: m[0].weight.register_post_accumulate_grad_hook(twice),
    forward  = lambda m: m[0].register_forward_hook(lambda m, x, y: 2*y),
    backward = lambda m: m[0].register_full_backward_hook(lambda m, i, o: None),
    removed  = lambda m: [m[0].weight.register_hook(noop).remove(), m[0].weight.register_hook(lambda g: 2*g)])

@drawn(8, kind=hooks, own=[False,True], name=trials)
def test_hooks(kind, own, name, capsys):
    "Those of a callback's `before_fit` are gone, those of the user are not, and gradients pass through these only"
    def register(cb): hooks[kind](cb.learn.model.body)
    learn,calls = make('lerp_', Callback(before_fit=register)),[]
    p = learn.model.body[0].weight
    if own: p.register_hook(lambda g: calls.append(1) or g)
    untouched(name, learn)
    calls.clear()
    plain = deepcopy(learn.model)   # whose parameters have no hooks
    for m in learn.model,plain: m.eval()(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    assert len(calls)==own
    assert torch.equal(p.grad, plain.body[0].weight.grad)

# ---- how a trial ends

count = []   # global, or the trials would put it back
errors = dict(ctrl_c=KeyboardInterrupt, memory=RuntimeError('CUDA out of memory. Tried to allocate'),
              error=ValueError('other'))

ends = itertools.product([*trials,'branch'], [1,4,6,'put_back','differs','rewind'], errors, ['cpu',GPU])

@pytest.mark.parametrize('name,at,error,device', sample(ends, 12), indirect=['device'])
def test_a_trial_that_stops(name, at, error, device, monkeypatch, capsys):
    """In the forward pass in mixed precision, when a trial has changed something already; and by Ctrl-C once more while
    all is put back"""
    half = OnCpu(torch.bfloat16) if device.type=='cpu' else MixedPrecision('bf16')
    learn,plain = (fit(make('lerp_', deepcopy(half))) for _ in range(2))
    count.clear()
    for l in learn,plain:
        for p in l.model.parameters(): p.grad = torch.ones_like(p)
    def stop(*_):
        count.append(1)
        if len(count)==at or at in vars(State): raise KeyboardInterrupt if at in vars(State) else errors[error]
    hook = [*learn.model.modules()][-1].register_forward_hook(stop)
    was,calls,own = left(learn),[],getattr(State, str(at), None)
    def again(self, *args):
        calls.append(1)
        return stop() if len(calls)==1 else own(self, *args)
    if own: monkeypatch.setattr(State, at, again)
    ends = pytest.raises(KeyboardInterrupt) if own else suppress(KeyboardInterrupt, RuntimeError, ValueError)
    with ends: untouched(name, learn)
    assert len(calls)>1 if own else len(count)>=at
    assert_left(was, learn)
    left_alone(learn.model)
    hook.remove()
    count.clear()
    same_next_fit(learn, plain)

# ---- the block itself

def test_what_is_shared_stays_shared():
    "Two names of one tensor with a graph have one stand-in, and a tensor in a named tuple has one"
    Pair,model = namedtuple('Pair', 'a b'),nn.Module()
    model.w = nn.Parameter(torch.ones(2))
    model.a = model.b = model.w*2
    was = model.a,Pair(model.a, 1)
    model.pair = was[1]
    with State(held(model), with_memory(arrays(held(model)))).untouched():
        assert model.a is model.b is model.pair.a and model.a is not was[0] and model.a.is_leaf
        assert isinstance(model.pair, Pair)
        model.a.mul_(3); model.c = 1
    assert model.a is model.b is was[0] and model.pair is was[1]
    assert torch.equal(model.a, 2*model.w) and not hasattr(model, 'c')

def test_a_generator_that_nobody_can_copy():
    "The block goes on with the user's own; the proof says that it was not made"
    def f(): yield from range(9)
    o = SimpleNamespace(it=f())
    with State([o]).untouched(): assert next(o.it)==0
    assert next(o.it)==1
    with pytest.raises(TypeError):
        with State([o]).untouched(another=deepcopy): pass

# ---- objects, data, samplers, and the learner's own callbacks

few = partial(Learner.noise_scale, n_step=2, num_it=6, show_plot=False)   # of 12 batches

class Images:
    "A dataset in memory, with a table and a generator"
    def __init__(self, n=5000):
        self.x,self.y = np.zeros((n,50)),torch.zeros(n,50)
        self.df,self.items,self.rng = pd.DataFrame(self.x),[np.zeros(50) for _ in range(n)],np.random.default_rng(0)
    def __len__(self): return 96
    def __getitem__(self, i): self.rng.random(); return features(96)[i],classes(96)[i]

@each(part=[noop, lambda ds: torch.utils.data.Subset(ds, range(96)), lambda ds: torch.utils.data.ConcatDataset([ds])])
def test_data_is_not_copied(part):
    "8 MB, also if the model holds them; the generator of an augmentation is set back"
    ds = Images()
    dl = DataLoader(part(ds), bs=8)
    learn = make_learner(DataLoaders(dl, dl))
    learn.model.ds = ds
    tracemalloc.start()
    was = learner_state(learn)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size<5e5 and not was.arrays and not any(o.tensor is ds.y for o in was.tensors), size
    few(learn)
    assert len(ds.items)==5000 and ds.rng.random()==np.random.default_rng(0).random()

class Draws:
    "A dataset that draws by generators of its own"
    def __init__(self):
        self.np,self.py,self.torch = np.random.default_rng(0),random.Random(0),torch.Generator().manual_seed(0)
    def __len__(self): return 64
    def __getitem__(self, i):
        noise = self.np.normal()+self.py.random()+torch.rand(1, generator=self.torch).item()
        noise += random.random()+np.random.rand()+torch.rand(1).item()
        return features(64)[i]+noise,classes(64)[i]

class Orders(torch.utils.data.Sampler):
    "Shuffles an array, or a tensor, in place"
    def __init__(self, idxs): self.idxs = idxs
    def __len__(self): return len(self.idxs)
    def __iter__(self): np.random.shuffle(np.asarray(self.idxs)); return iter(self.idxs.tolist())

dl_of_torch = torch.utils.data.DataLoader
def weighted(): return torch.utils.data.WeightedRandomSampler(torch.rand(64), 64, generator=torch.Generator())
loaders = dict(
    fastai  = lambda: TfmdDL(Draws(), bs=8, shuffle=True, num_workers=0),
    sampler = lambda: dl_of_torch(Draws(), 8, sampler=weighted()),
    array   = lambda: dl_of_torch(Draws(), 8, sampler=Orders(np.arange(64))),
    tensor  = lambda: dl_of_torch(Draws(), 8, sampler=Orders(torch.arange(64))),
    workers = lambda: dl_of_torch(list(zip(features(64), classes(64))), 8, shuffle=True, num_workers=1, timeout=999))

@drawn(7, make=loaders, name=trials)
def test_loaders(make, name, capsys):
    "The batches after a trial are those without one, in the middle of an epoch too"
    res = []
    for trial in noop,trials[name]:
        set_seed(0)
        dl = loaders[make]()
        learn = make_learner(DataLoaders(dl, dl))
        trial(learn)
        batches,it = list(dl),iter(dl)
        batches.append(next(it))
        trial(learn)
        res.append([*batches, *it])
    assert len(res[0])==16 and identical(*res)

def test_what_lives_is_left_alone():
    "A queue that a thread reads is not set back"
    q,got = queue.Queue(),[]
    class Logs(Callback):
        def __init__(self):
            self.q,self.thread = q,threading.Thread(target=lambda: [got.append(o) for o in iter(q.get, None)])
            self.thread.start()
        def after_batch(self): self.q.put(self.iter)
    learn = make_learner(make_dls(96, 8), cbs=Logs())
    try: few(learn)
    finally: q.put(None); learn.logs.thread.join()
    assert got==list(range(6)) and q.empty()

# ---- nothing logs it, and what else goes wrong with a trial

class Logs(Callback):
    "As the loggers of fastai: keeps off in `lr_find` and while predictions are gathered"
    order,gathers = 70,False
    def before_fit(self):
        self.run = not hasattr(self.learn, 'lr_finder') and hasattr(self.learn, 'gather_preds')==self.gathers
    def after_pred(self): count.append(type(self))
class Projects(Logs):
    "As fastai's `TensorBoardProjectorCallback`, which works only while predictions are gathered"
    gathers = True

@pytest.mark.parametrize('k', trials)
def test_keeps_off(k, capsys):
    "The page of `keep_off` has fastai's loggers"
    learn = make_learner(make_dls(64, 8), cbs=[Logs(), Projects(), ShowGraphCallback()]).add_cb(ProgressCallback())
    count.clear()
    trials[k](learn)
    assert not count and not {'lr_finder','gather_preds'} & set(vars(learn))
    learn.remove_cbs([ProgressCallback,ShowGraphCallback]).fit(1)
    assert count==[Logs]*10
