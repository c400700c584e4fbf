"""After a trial, nothing of it is left: a fit after a check, a proof, `what_fits` or `noise_scale` is plain training, bit for bit, however the
trial has ended"""
import itertools
from contextlib import suppress
from typing import NamedTuple
import pytest
from harness import *
from harness import here
from fastai_accum.all import *
from fastai_accum.state import State,arrays,generators,held,with_memory

trials = dict(check=lambda l: l.check_accumulation(), what_fits=lambda l: l.what_fits('1KB'),
              noise=lambda l: l.noise_scale(2, 3, False))

class Moves(nn.Module):
    "Moves a tensor that it holds in place, with a gradient, and detaches it at the next batch"
    def __init__(self, how):
        super().__init__()
        self.how = how
        m = torch.zeros(5, dtype=torch.float64, device=here.device)
        if how=='list': self.kept = [m]
        elif how=='tuple': self.kept = (m,1)
        elif how=='dict': self.kept = dict(m=m)
        elif how=='closure': self.kept = lambda: m
        elif how=='attribute': self.kept = m
        else: self.register_buffer('kept', m)
    def held(self):
        if self.how in ('list','tuple'): return self.kept[0]
        if self.how=='dict': return self.kept['m']
        return self.kept() if self.how=='closure' else self.kept
    def forward(self, x):
        m = self.held()
        if self.training:
            m.detach_()
            if self.how=='mul_add_': m.mul_(.7).add_(x.mean(0), alpha=.3)
            elif self.how=='copy_': m.copy_(.7*m.clone()+.3*x.mean(0))
            elif self.how=='index': m[:] = .7*m.clone()+.3*x.mean(0)
            elif self.how=='out': m.sub_(.3*(m.clone()-x.mean(0)))
            else: m.lerp_(x.mean(0), .3)
        return x-m

hows = 'lerp_','mul_add_','copy_','index','out','attribute','list','tuple','dict','closure'

def net(how): return nn.Sequential(nn.Linear(6,5), Moves(how), nn.Tanh(), nn.Linear(5,3)).double()
def make(how='lerp_', *cbs, bs=8, **kwargs):
    torch.manual_seed(0)
    learn = make_learner(make_dls(64, bs), net(how), cbs=list(cbs), loss_func=nn.CrossEntropyLoss(), **kwargs)
    return learn.remove_cb(ProgressCallback)

def left(learn):
    "All that a trial must leave: values, graphs, gradients, hooks, attributes, the optimizer and the generators"
    def of(t): return id(t),t.detach().clone(),t.grad_fn,t.requires_grad,id(t._backward_hooks),len(t._backward_hooks or ())
    ts = [*learn.model.parameters(), *learn.model.buffers(), learn.model[1].held()]
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in learn.model.parameters()]
    names = [(id(o), {k:id(v) for k,v in vars(o).items()}) for o in (learn, *learn.cbs, *learn.model.modules())]
    opt = learn.opt and (deepcopy(learn.opt.state_dict()), [dict(h) for h in learn.opt.hypers])
    drawn = random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state()
    return [list(map(of, ts)), grads, names, opt, drawn, learn.dls.train.rng.getstate()]

def same(a, b):
    if isinstance(a, Tensor): return torch.equal(a, b)
    if isinstance(a, dict): return list(a)==list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list,tuple)): return len(a)==len(b) and all(map(same, a, b))
    return a is b or a==b

def assert_left(was, learn):
    for i,(a,b) in enumerate(zip(was, left(learn), strict=True)): assert same(a, b), f'{i}: {a} is now {b}'

def fitted(*args, cbs=(), **kwargs):
    learn = make(*args, *cbs, **kwargs)
    with learn.no_logging(): learn.fit(1)
    return learn

@pytest.mark.parametrize('name', trials)
@pytest.mark.parametrize('how', hows)
def test_a_tensor_with_a_graph(how, name, capsys):
    "It is untouched, with its graph, and the next fit is that without a trial"
    learn,plain = (fitted(how, cbs=[AccumulateStep(2)]) for _ in range(2))
    assert learn.model[1].held().grad_fn is not None
    was = left(learn)
    trials[name](learn)
    assert_left(was, learn)
    for o in learn,plain:
        torch.manual_seed(3)
        with o.no_logging(): o.fit(1)
    assert same([*learn.model.state_dict().values(), learn.model[1].held()], [*plain.model.state_dict().values(), plain.model[1].held()])

@pytest.mark.parametrize('how', hows)
@pytest.mark.parametrize('cb', [GradientCheckpointing, OffloadActivations])
def test_the_proof_of_a_tensor_with_a_graph(cb, how, capsys):
    "Checkpointing is proved, and trains as plain training does"
    blocks = lambda: nn.Sequential(nn.Sequential(nn.Linear(6,5), nn.Tanh()), Moves(how), nn.Sequential(nn.Linear(5,5), nn.Tanh()), nn.Linear(5,3))
    res = []
    for cbs in [],[cb()]:
        torch.manual_seed(0)
        learn = make_learner(make_dls(64, 8), blocks().double(), cbs=cbs, loss_func=nn.CrossEntropyLoss())
        try:
            for _ in range(2):
                with learn.no_logging(): learn.fit(1)
        except ValueError as e:   # what is no buffer may be refused
            assert f'{cb.__name__} is not possible' in str(e) and cbs and not [*learn.model.buffers()]
            return
        res.append([*learn.model.state_dict().values(), learn.model[1].held()])
    assert same(*res)

# hooks and iterators
def twice(p): p.grad *= 2

class Hooks(Callback):
    "Registers hooks in `before_fit`, of one of the kinds that there are"
    def __init__(self, kind): self.kind = kind
    def before_fit(self):
        ps = list(self.model.parameters())
        if self.kind=='gradient':
            for p in ps: p.register_hook(lambda g: 2*g)
        elif self.kind=='one': ps[0].register_hook(lambda g: 2*g)
        elif self.kind=='late':
            for p in ps: p.register_post_accumulate_grad_hook(twice)
        elif self.kind=='module': self.model[0].register_forward_hook(lambda m, x, y: 2*y)
        elif self.kind=='backward': self.model[0].register_full_backward_hook(lambda m, i, o: None)
        elif self.kind=='both':
            for p in ps: p.register_hook(lambda g: 2*g); p.register_post_accumulate_grad_hook(twice)
        elif self.kind=='removed': ps[0].register_hook(noop).remove(); ps[0].register_hook(lambda g: 2*g)

def hooks(learn):
    "How many there are"
    ms = [len(h) for m in learn.model.modules() for h in (m._forward_hooks,m._forward_pre_hooks,m._backward_hooks,m._backward_pre_hooks)]
    return ms + [len(o or ()) for p in learn.model.parameters() for o in (p._backward_hooks,p._post_accumulate_grad_hooks)]

@pytest.mark.parametrize('name', trials)
@pytest.mark.parametrize('kind', ['gradient','one','late','module','backward','both','removed'])
@pytest.mark.parametrize('own', [False, True])
def test_hooks(kind, own, name, capsys):
    "As many as before, beside those that the user has registered, and gradients pass through these only"
    learn,calls = make('lerp_', Hooks(kind)),[]
    p = learn.model[0].weight
    if own: p.register_hook(lambda g: calls.append(1) or g)
    was = hooks(learn)
    trials[name](learn)
    assert hooks(learn)==was
    calls.clear()
    p.grad = None
    x = torch.ones(2, 6, dtype=torch.float64)
    learn.model.eval()(x).sum().backward()
    assert len(calls)==own
    once,p.grad = p.grad.clone(),None
    p._backward_hooks = None
    p.register_hook(noop)
    learn.model(x).sum().backward()
    assert torch.equal(p.grad, once)

class Turns(nn.Module):
    "Takes its factors from an iterator"
    def __init__(self, it): super().__init__(); self.it,self.lin = it,nn.Linear(6,3)
    def forward(self, x): return self.lin(x)*(next(self.it) if self.training else 1)

class Own:
    "An iterator of Python, which has attributes"
    def __init__(self): self.i = 0
    def __iter__(self): return self
    def __next__(self): self.i += 1; return 1+self.i%3

iterators = dict(cycle=lambda: itertools.cycle([1.,2.,3.]), count=lambda: itertools.count(1), list=lambda: iter([1.,2.]*500),
                 chain=lambda: itertools.chain([1.,2.]*500, [3.]),
                 map=lambda: map(abs, itertools.cycle([1.,-2.,3.])), own=Own)

@pytest.mark.parametrize('name', trials)
@pytest.mark.parametrize('kind', iterators)
def test_iterators(kind, name, capsys):
    learn = make_learner(make_dls(64, 8), Turns(iterators[kind]()).double(), nn.CrossEntropyLoss(), splitter=trainable_params)
    it,rest = learn.model.it,iterators[kind]()
    next(it); next(rest)
    trials[name](learn)
    assert learn.model.it is it and list(itertools.islice(it, 5))==list(itertools.islice(rest, 5))

# how a trial ends
count = []   # global, or the trials would put it back

@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError('CUDA out of memory. Tried to allocate'), ValueError('other')], ids=['ctrl-c','memory','error'])
@pytest.mark.parametrize('at', [1,4,6])
@pytest.mark.parametrize('name', trials)
def test_a_trial_that_stops(name, at, error, capsys):
    "In the forward pass, when a trial has changed something already"
    learn = fitted('lerp_')
    count.clear()
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    def stop(*_):
        count.append(1)
        if len(count)==at: raise error
    learn.model[2].register_forward_hook(stop)
    was = left(learn)
    with suppress(KeyboardInterrupt, RuntimeError, ValueError): trials[name](learn)
    assert len(count)>=at
    assert_left(was, learn)

@pytest.mark.parametrize('name', trials)
@pytest.mark.parametrize('at', ['put_back','hold','rewind'])
def test_ctrl_c_twice(name, at, monkeypatch, capsys):
    "Once in a step, and once more while all is put back"
    learn,n,plain = fitted('lerp_'),0,getattr(State, at)
    def stop(*_): raise KeyboardInterrupt
    handle = learn.model[2].register_forward_hook(stop)
    was = left(learn)
    def again(self):
        nonlocal n
        n += 1
        if n==1: raise KeyboardInterrupt
        plain(self)
    monkeypatch.setattr(State, at, again)
    with pytest.raises(KeyboardInterrupt): trials[name](learn)
    monkeypatch.setattr(State, at, plain)
    assert n>1
    assert_left(was, learn)
    handle.remove()

@pytest.mark.parametrize('name', ['check','noise'])
def test_on_a_device(device, name, capsys):
    "Buffers with a graph, weights and gradients, where the learner trains"
    learn,plain = (fitted('lerp_') for _ in range(2))
    was = left(learn)
    trials[name](learn)
    assert_left(was, learn)
    for o in learn,plain:
        torch.manual_seed(3)
        with o.no_logging(): o.fit(1)
    assert same([*learn.model.state_dict().values()], [*plain.model.state_dict().values()])

# the block itself
def test_what_is_shared_stays_shared():
    "Two names of one tensor with a graph have one stand-in, and a tensor in a named tuple has one"
    class Pair(NamedTuple):
        a:Tensor
        b:int
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.a = self.b = self.w*2
            self.pair = Pair(self.a, 1)
    model = Model()
    was = model.a,model.pair
    with State(held(model), with_memory(arrays(held(model)))).untouched():
        assert model.a is model.b is model.pair.a and model.a is not was[0] and model.a.is_leaf
        assert isinstance(model.pair, Pair)
        model.a.mul_(3); model.c = 1
    assert model.a is model.b is was[0] and model.pair is was[1] and torch.equal(model.a, 2*model.w) and not hasattr(model, 'c')

def test_memory_and_gradients():
    "In the block a tensor may have other values; afterwards it has its own memory, gradient and flag"
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    at,grad = p.data_ptr(),p.grad
    with State(tensors=[p]).untouched(torch.Tensor.double):
        assert p.dtype==torch.float64 and p.grad is None
        p.data += 1; p.requires_grad_(False)
    assert (p.data_ptr(),p.dtype,p.requires_grad)==(at,torch.float32,True) and p.grad is grad and torch.equal(p, torch.ones(3))

def test_something_with_a_gradient_is_written_into_a_buffer():
    b,w = torch.zeros(3),torch.ones(3, requires_grad=True)
    with State(tensors=[b]).untouched(torch.clone): b.copy_(2*w)
    assert b.is_leaf and not b.requires_grad and torch.equal(b, torch.zeros(3))

def test_a_generator_that_nobody_can_copy():
    "The block goes on with the user's own; the proof says that it was not made"
    def f(): yield from range(9)
    o = SimpleNamespace(it=f())
    with State([o]).untouched(): assert next(o.it)==0
    assert next(o.it)==1
    with pytest.raises(TypeError):
        with State([o]).untouched(another=deepcopy): pass
