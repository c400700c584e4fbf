"""Models that `exact`, `coupled` or `GradientCheckpointing` could get wrong, each small and in float64, and controls
that they must get right.

A kind is a model with one odd habit. `verdict` trains it as users do, with the large batch and in the given way, and
says what happened: `exact`, `refused` (a `ValueError` before anything has moved), `silent` (it trained, and something
differs) or `raw` (any other error). A kind may be exact or refused; a control must be exact."""
import types
from fastai.callback.hook import Hook,Hooks,hook_output,hook_outputs
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from harness import *
from fastai_accum.all import *

tol = 1e-10   # three steps through batch norms amplify the rounding of float64 (2e-16)
n,bs,small = 27,10,4   # batches of 10, 10 and 7, in slices of 4, 4 and 2, and of 4 and 3
E,C,G = 'exact','coupled','checkpointing'
kinds,controls = {},{}   # in each row, what was silently wrong first, or refused though it is right, comes first

class Kind:
    """A model with one odd habit, the row that it belongs to, and the ways in which it is tried; `limit` are those in
    which nobody can see it"""
    def __init__(self, f, row, ways, loss=None, cbs=noop, data=None, whole=False, limit=()): store_attr()
    def make(self):
        "A model, and the inputs and targets of an epoch"
        set_seed(2)
        m,(xb,yb) = self.f(),(self.data or (lambda: (features(n), classes(n))))()
        return (m if self.whole else net(m)).double(),tuplify(xb),tuplify(yb)

def kind(row, *ways, to=kinds, **kwargs):
    def add(f, name=None):
        name = name or f.__name__
        assert name not in {**kinds,**controls}, name
        to[name] = Kind(f, row, ways or (E,C,G), **kwargs)
        return f
    return add

class Odd(Made): "A module whose `forward` is `f`, with modules and attributes"

def odd(row, *ways, to=kinds, kw={}, **has):
    "A kind that is an `Odd` module, whose `forward` follows; `has` makes its modules and attributes"
    def add(f):
        kind(row, *ways, to=to, **kw)(lambda: Odd(f, **{k:v() for k,v in has.items()}), f.__name__)
        return f
    return add

def net(odd):
    """An odd module among layers. `GradientCheckpointing` computes the block again, and the odd module with it, since
    the gradient of the layer behind it is needed"""
    return Odd(lambda m, x: m.head(m.block(m.inp(x))), inp=nn.Linear(6,8),
               block=Odd(lambda m, h: m.lin(m.odd(h)).tanh(), odd=odd, lin=lin()), head=nn.Linear(8,3))

def full(odd):
    "A model that ends with an odd module, which returns the predictions"
    return Odd(lambda m, x, *xs: m.block(m.inp(x), *xs), inp=nn.Linear(6,8), block=odd)

def norm(): return nn.BatchNorm1d(8)
def lin(): return nn.Linear(8,8)
def deep(): return nn.Sequential(lin(), norm(), nn.Tanh(), lin(), norm())
def zero(): return 0
def counting(): return types.SimpleNamespace(n=0)

keeps = 'keeps something between two norms'

@kind(keeps, E, G)
def pyramid():
    m = Odd(lambda m, h: (m.b(m.a(h).tanh()), m.hooks[0].stored+m.hooks[1].stored)[1], a=norm(), b=norm())
    m.hooks = hook_outputs([m.a,m.b], detach=False)
    return m

@kind(keeps, E, G)
def hook_fills_a_dict():
    m = Odd(lambda m, h: m.b(m.a(h).tanh())+m.kept['a'], a=norm(), b=norm(), kept={})
    m.a.register_forward_hook(lambda mod, inp, out: m.kept.update(a=out))
    return m

swaps = 'swaps something and puts it back'

@kind(swaps, E, G)
def averaged_weights():
    def f(m, h):
        own = {k:.5*p+.5*m.avg[k] for k,p in m.inner.named_parameters()}
        return functional_call(m.inner, own, (h,))+m.inner(h)
    m = Odd(f, inner=deep())
    m.avg = {k:p.detach().double()*.9 for k,p in m.inner.named_parameters()}
    return m

@odd(swaps, E, G, inner=deep)
def data_of_parameters(m, h):
    was = [p.data for p in m.inner.parameters()]
    for p in m.inner.parameters(): p.data = p.data*.5
    y = m.inner(h)
    for p,d in zip(m.inner.parameters(), was): p.data = d
    return y

@odd(swaps, E, G, inner=deep)
def eval_and_back(m, h):
    m.eval(); target = m.inner(h).detach(); m.train()
    return m.inner(h)*target

asks = 'checkpoints where a gradient is needed'

def again(f, h): return checkpoint(f, h, use_reentrant=False)

@odd(asks, E, G, inner=deep, b=norm)
def if_requires_grad(m, h): return m.b(again(m.inner, h) if h.requires_grad else m.inner(h))

@odd(asks, E, G, inner=lambda: nn.Sequential(lin(), nn.Tanh()))
def something_else_without_gradient(m, h): return again(m.inner, h) if h.requires_grad else h*5

counts = 'counts, anneals, or keeps what a callback reads'

@odd(counts, mean=noop)
def mean_that_is_kept(m, h): m.mean = h.detach().mean(0); return h.tanh()

@odd(counts, o=counting)
def counter_in_an_object(m, h): m.o.n += 1; return h*m.o.n

@odd(counts, avg=lambda: nn.Buffer(torch.zeros(8)))
def average_inside_a_buffer(m, h):
    m.avg.lerp_(h.detach().mean(0), .1)
    return h-m.avg.clone()

@kind(counts, limit=(E,C,G))
def counter_of_a_class():
    class Counts(Odd): k = 0
    def f(m, h): type(m).k += 1; return h*type(m).k
    return Counts(f)

views = 'rare draws over several views'

@odd(views, E, G)
def dropout_of_two_views(m, h): return sum(F.dropout(torch.cat([h,h.flip(1)]), .05).chunk(2))

state = 'a state a sample, which another batch size begins anew'

def state_of(m, h): return torch.zeros_like(h) if m.h is None or len(m.h)!=len(h) else m.h.detach()

@odd(state, h=noop)
def state_of_rows(m, h):
    y = (.5*state_of(m, h)+h).tanh()
    m.h = y.detach()
    return y

@odd(state, E, G, h=noop, a=norm, b=norm)
def state_between_norms(m, h):
    m.h = m.a(h)+.5*state_of(m, h)
    return m.b(m.h.tanh())

rng = 'holds a generator of Python or NumPy'

@odd(rng, g=lambda: random.Random(3))
def random_of_python(m, h): return h*(1+m.g.random())

@odd(rng, E, G, g=lambda: np.random.default_rng(3))
def rows_of_default_rng(m, h): return h+tensor(m.g.random((len(h),1)))

moves = 'a part of the model moves in forward'

@kind(moves)
def data_of_an_encoder():
    def f(m, h):
        y = m.q(h)
        for p,q in zip(m.k.parameters(), m.q.parameters()): p.data = p.data*.9+q.data*.1
        return y*m.k(h).detach()
    m = Odd(f, q=lin(), k=lin())
    for p in m.k.parameters(): p.requires_grad_(False)
    return m

@kind(moves)
def averaged_model():
    def f(m, h):
        m.avg.update_parameters(m.q)
        return m.q(h)*m.avg(h).detach()
    q = lin()
    return Odd(f, q=q, avg=torch.optim.swa_utils.AveragedModel(q))

weight = 'what a norm gets depends on the batch'

@odd(weight, E, G)
def weight_from_the_mean(m, h): return F.batch_norm(h, None, None, 1+h.mean(0), training=True)

@odd(weight, E, G, mean=lambda: torch.zeros(8).double(), var=lambda: torch.ones(8).double())
def momentum_from_the_size(m, h): return F.batch_norm(h, m.mean, m.var, training=True, momentum=1/len(h))

part = 'draws into a part of a tensor, or in an unusual operation'

@odd(part, E, G)
def normal_of_some_columns(m, h):
    e = torch.zeros(len(h), 40).to(h)
    e[:,:24].normal_()
    return h+e.view(len(h), 5, 8).sum(1)

backward = 'a backward pass that looks at the batch'

class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g-g.mean(0)

@odd(backward)
def function_of_autograd(m, h): return Centred.apply(h)

@odd(backward)
def hook_that_normalises(m, h):
    h = h.tanh()
    if h.requires_grad: h.register_hook(lambda g: g/g.norm())
    return h

hidden = 'modules in a plain list'

def aside(): return nn.BatchNorm1d(8).double()

@odd(hidden, E, G, ls=lambda: [aside(),aside()])
def modules_in_a_list(m, h):
    for l in m.ls: h = l(h).tanh()
    return h

@kind(hidden, E, G)
def module_in_a_closure():
    bn = aside()
    return Odd(lambda m, h: bn(h).tanh())

pairs = 'logits of all pairs'

@kind(pairs, loss=lambda pred, y: F.cross_entropy(pred, torch.arange(len(pred))), whole=True)
def similarities(): return full(Odd(lambda m, h: h@m.lin(h).t(), lin=lin()))

picks = 'indices drawn over the batch'

@odd(picks, E, G)
def random_partners(m, h): return h+.5*h[torch.randint(len(h), (len(h),))]

gone = 'an attribute that is gone at the end'

@odd(gone, E, G, a=norm, b=norm, tmp=noop)
def none_again(m, h):
    m.tmp = m.a(h)
    y = m.b(h.tanh())+m.tmp
    m.tmp = None
    return y

# here the module ends the block, and PyTorch stops a second run as soon as it has what the backward pass needs

@kind(gone, G, whole=True)
def append_and_pop_in_the_last_module():
    def f(m, h):
        m.kept.append(m.lin(h))
        y = m.kept[-1].tanh()
        m.kept.pop()
        return y
    return full(Odd(f, lin=nn.Linear(8,3), kept=[]))

cache = 'returns its cache (use_cache=True)'

@kind(cache, loss=lambda p, y: F.cross_entropy(p['logits'], y), whole=True)
def cache_in_an_object():
    "It returns what its blocks have put into a cache, as language models do"
    def block(m, h, cache):
        cache.hs.append(m.a(h))
        return (h+m.b(torch.stack(cache.hs)).sum(0)).tanh()
    def f(m, h):
        cache = types.SimpleNamespace(hs=[])
        for b in m.blocks: h = b(h, cache)
        return dict(logits=m.head(h), past_key_values=cache)
    return full(Odd(f, head=nn.Linear(8,3), blocks=nn.ModuleList(Odd(block, a=lin(), b=lin()) for _ in range(2))))

layerdrop = 'draws that depend on an earlier draw (LayerDrop)'

def dropped(m, h, skips):
    for l in m.ls:
        if not skips(h): h = F.dropout(l(h).tanh(), .3)
    return h
def layers(): return nn.ModuleList(lin() for _ in range(4))

@odd(layerdrop, E, G, ls=layers)
def layerdrop_by_torch(m, h): return dropped(m, h, lambda h: torch.rand(())<.5)

@odd(layerdrop, E, G, ls=layers)
def dropout_where_features_are_large(m, h): return dropped(m, h, lambda h: h.detach().mean()<0)

later = 'is switched in the middle of an epoch'

def switch(f):
    "A callback that calls `f(odd module)` before the third batch"
    def before_batch(cb):
        if cb.iter==2: f(cb.model.block.odd)
    return lambda: Callback(before_batch=before_batch)

@odd(later, o=counting, kw=dict(cbs=switch(lambda m: setattr(m.o, 'n', 3))))
def by_a_flag_of_an_object(m, h): return h-h.mean(0) if m.o.n>2 else h

@odd(later, n=zero)
def by_an_int(m, h): m.n += 1; return h-h.mean(0) if m.n>2 else h

@kind(later, E, G, cbs=switch(lambda m: m.drop.train()))
def dropout_that_begins_later():
    m = Odd(lambda m, h: m.drop(h), drop=nn.Dropout(.3))
    m.train = lambda mode=True: (nn.Module.train(m, mode), m.drop.eval())[0]
    return m

# ---- controls

odd_draws = 'draws in an odd way, and right'

@odd(odd_draws, E, G, to=controls)
def views_side_by_side(m, h): return F.dropout(torch.stack([h,h.flip(1)], 1).flatten(0,1), .1).view(-1,2,8).sum(1)

anneals = 'counts or anneals'

@odd(anneals, to=controls, t=lambda: 1.)
def temperature(m, h): m.t *= .9; return h/m.t

@odd(anneals, to=controls, n=zero)
def counter(m, h): m.n += 1; return h*(1+.1*m.n)

@odd(anneals, to=controls, n=lambda: nn.Buffer(torch.zeros(())))
def counter_in_a_buffer(m, h): m.n.add_(1); return h*m.n.clone()

keeping = 'keeps what has a row for each sample'

@kind(keeping, E, G, to=controls)
def hook_for_cam_between_norms():
    m = Odd(lambda m, h: m.b(m.a(h).tanh()), a=norm(), b=norm())
    hook = hook_output(m.a)
    return m

@odd(keeping, to=controls, feats=noop)
def rows_that_are_kept(m, h): m.feats = h.tanh(); return m.feats*2

ordinary = 'ordinary'

class Reverse(Centred):
    @staticmethod
    def backward(ctx, g): return -.3*g

@odd(ordinary, to=controls)
def reversed_gradient(m, h): return Reverse.apply(h).tanh()

@kind(ordinary, to=controls, loss=lambda p, y: F.cross_entropy(p['logits'], y)+p['extra'].square().mean(), whole=True)
def dictionary(): return full(Odd(lambda m, h: dict(logits=m.lin(h)[:,:3], extra=h), lin=lin()))

@kind(ordinary, to=controls, data=lambda: ((features(n),features(n, 8, 3)), classes(n)), whole=True)
def two_inputs(): return full(Odd(lambda m, h, z: m.lin(h*z)[:,:3], lin=lin()))

# ---- training in both ways

def held(o, path='model', seen=None):
    "What `o` holds, wherever it is: pairs of a path and a number, a text, a tensor, or the state of a generator"
    seen = set() if seen is None else seen
    if isinstance(o, (int,float,str,bool,type(None))): yield path,o; return
    if id(o) in seen: return
    seen.add(id(o))
    one = (o.detach().clone()                      if isinstance(o, Tensor) else
           torch.tensor(o)                         if isinstance(o, np.ndarray) else
           o.get_state()                           if isinstance(o, torch.Generator) else
           str(o.getstate())                       if isinstance(o, random.Random) else
           str(o.bit_generator.state)              if isinstance(o, np.random.Generator) else
           None)
    if one is not None: yield path,one; return
    if isinstance(o, (dict,list,tuple,L)): yield f'{path}.len',len(o)
    for k,v in _inside(o): yield from held(v, f'{path}.{k}', seen)

def _inside(o):
    "The names and the values that `o` consists of; those of PyTorch's own objects and of hooks do not count"
    if isinstance(o, dict):                 return o.items()
    if isinstance(o, (list,tuple,L)): return enumerate(o)
    if isinstance(o, nn.Module): return [(k,v) for k,v in vars(o).items() if 'hook' not in k and k!='forward']
    if isinstance(o, types.FunctionType):   return enumerate(c.cell_contents for c in o.__closure__ or ())
    if isinstance(o, type):                 return [(k,v) for k,v in vars(o).items() if isinstance(v, (Tensor,int))]
    foreign = isinstance(o, (Hook,Hooks)) or type(o).__module__.startswith(('torch','transformers'))
    return () if foreign else getattr(o, '__dict__', {}).items()

def now(model):
    "All that a step, or a refusal, could have moved"
    odd = getattr(getattr(model, 'block', None), 'odd', None)
    return {**dict(held(model)), **dict(held(type(odd), 'class')), 'torch':torch.get_rng_state(),
            'python':str(random.getstate()), 'numpy':str(np.random.get_state(legacy=False))}

class Notes(Callback):
    "What the model holds and where the generators stand: before a batch, when the loss reads it, and after the batch"
    order = 10_000
    def __init__(self): self.start,self.read,self.n = None,[],0
    def before_batch(self): self.start = now(self.model)
    before_fit = before_batch
    def after_pred(self): self.read.append(now(self.model))
    def after_batch(self): self.read.append(now(self.model)); self.n += 1

def way_of(way, model):
    "The callback for `way`"
    if way==G: return GradientCheckpointing([model.block] if hasattr(model, 'block') else None)
    return MicroBatch(small, **{way:True})

def train(k, way=None):
    "The learner of `k`, the notes on its fit, and the error that stopped it"
    model,xb,yb = k.make()
    set_seed(1)
    dls = DataLoaders(*[DataLoader(Items(xb[0], (*xb[1:],*yb)), bs=bs) for _ in range(2)])
    for o in (dls,*dls.loaders): o.n_inp = len(xb)
    notes = Notes()
    cbs = [NoValid(), notes, *L(k.cbs()), *L(way and way_of(way, model))]
    learn = make_learner(dls, model, k.loss, partial(SGD, mom=.9), cbs, lr=.01, splitter=params)
    try: learn.fit(1)
    except Exception as e: return learn,notes,e
    return learn,notes,None

_whole = {}
def verdict(k, way):
    """What happens to the kind `k` in this `way`, and the details: the largest error and where it is (`exact` and
    `silent`) or a message (`refused` before the first step, `stopped` later, `moved` if refused too late, `raw`)"""
    if k not in _whole: _whole[k] = train(k)
    (_,want,err),(learn,got,e) = _whole[k],train(k, way)
    if err: raise err   # the large batch must train
    if isinstance(e, ValueError) and str(e).startswith(('MicroBatch','GradientCheckpointing')):
        off,where = rel(now(learn.model), got.start)
        if off>0: return 'moved',f'{where} is not as before: {e}'
        return ('stopped' if got.n else 'refused'),str(e)
    if e: return 'raw',f'{type(e).__name__}: {e}'
    worst = rel(got.read, want.read)
    return ('exact' if worst[0]<=tol else 'silent'),worst
