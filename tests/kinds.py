"""Models that `exact`, `coupled` or `GradientCheckpointing` could get wrong, each small and in float64, and controls
that they must get right.

A kind is a model with one odd habit. `verdict` trains it as users do, with the large batch and in the given way, and
says what happened: `exact`, `refused` (a `ValueError` before anything has moved), `silent` (it trained, and something
differs) or `raw` (any other error). A kind may be exact or refused; a control must be exact."""
import types
import pytest
from functools import partial
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
    def __init__(self, f, row, ways, loss=None, cbs=noop, data=None, whole=False, says='', limit=()): store_attr()
    def make(self):
        "A model, and the inputs and targets of an epoch"
        set_seed(2)
        m,(xb,yb) = self.f(),(self.data or (lambda: (features(n), classes(n))))()
        return (m if self.whole else Net(m)).double(),tuplify(xb),tuplify(yb)

def kind(row, *ways, to=kinds, **kwargs):
    def add(f):
        assert f.__name__ not in {**kinds,**controls}, f.__name__
        to[f.__name__] = Kind(f, row, ways or (E,C,G), **kwargs)
        return f
    return add
control = partial(kind, to=controls)

class Odd(nn.Module):
    "A module whose `forward` is `f`, with modules and attributes"
    def __init__(self, f, **kwargs):
        super().__init__()
        self.f = f
        for k,v in kwargs.items(): setattr(self, k, v)
    def forward(self, *xs): return self.f(self, *xs)

class Block(nn.Module):
    "An odd module and a layer: what `GradientCheckpointing` computes again"
    def __init__(self, odd):
        super().__init__()
        self.odd,self.lin = odd,nn.Linear(8,8)
    def forward(self, h): return self.lin(self.odd(h)).tanh()   # to compute its gradient, the odd module must run again

class Net(nn.Module):
    "An odd module among layers"
    def __init__(self, odd):
        super().__init__()
        self.inp,self.block,self.head = nn.Linear(6,8),Block(odd),nn.Linear(8,3)
    def forward(self, x): return self.head(self.block(self.inp(x)))

class Full(nn.Module):
    "A model that ends with an odd module, which returns the predictions"
    def __init__(self, odd):
        super().__init__()
        self.inp,self.block = nn.Linear(6,8),odd
    def forward(self, *xs): return self.block(self.inp(xs[0]), *xs[1:])

def norm(): return nn.BatchNorm1d(8)
def lin(): return nn.Linear(8,8)
def deep(): return nn.Sequential(lin(), norm(), nn.Tanh(), lin(), norm())

keeps = 'keeps something between two norms'

@kind(keeps, E, G)
def pyramid():
    m = Odd(lambda m, h: (m.b(m.a(h).tanh()), m.hooks[0].stored+m.hooks[1].stored)[1], a=norm(), b=norm())
    m.hooks = hook_outputs([m.a,m.b], detach=False)
    return m

@kind(keeps, E, G)
def hook_fills_a_dict():
    def f(m, h):
        y = m.b(m.a(h).tanh())
        return y+m.kept['a']
    m = Odd(f, a=norm(), b=norm(), kept={})
    m.a.register_forward_hook(lambda mod, inp, out: m.kept.update(a=out))
    return m

swaps = 'swaps something and puts it back'

@kind(swaps, E, G)
def averaged_weights():
    def f(m, h):
        own = dict(m.inner.named_parameters())
        y = functional_call(m.inner, {k:.5*p+.5*m.avg[k] for k,p in own.items()}, (h,))
        return y+m.inner(h)
    m = Odd(f, inner=deep())
    m.avg = {k:p.detach().double()*.9 for k,p in m.inner.named_parameters()}
    return m

@kind(swaps, E, G)
def data_of_parameters():
    def f(m, h):
        was = [p.data for p in m.inner.parameters()]
        for p in m.inner.parameters(): p.data = p.data*.5
        y = m.inner(h)
        for p,d in zip(m.inner.parameters(), was): p.data = d
        return y
    return Odd(f, inner=deep())

@kind(swaps, E, G)
def eval_and_back():
    def f(m, h):
        m.eval(); target = m.inner(h).detach(); m.train()
        return m.inner(h)*target
    return Odd(f, inner=deep())

asks = 'checkpoints where a gradient is needed'

def again(f, h): return checkpoint(f, h, use_reentrant=False)

@kind(asks, E, G)
def if_requires_grad():
    return Odd(lambda m, h: m.b(again(m.inner, h) if h.requires_grad else m.inner(h)), inner=deep(), b=norm())

@kind(asks, E, G)
def something_else_without_gradient():
    return Odd(lambda m, h: again(m.inner, h) if h.requires_grad else h*5, inner=nn.Sequential(lin(), nn.Tanh()))

counts = 'counts, anneals, or keeps what a callback reads'

@kind(counts)
def mean_that_is_kept():
    def f(m, h): m.mean = h.detach().mean(0); return h.tanh()
    return Odd(f, mean=None)

@kind(counts)
def counter_in_an_object():
    def f(m, h): m.o.n += 1; return h*m.o.n
    return Odd(f, o=types.SimpleNamespace(n=0))

@kind(counts)
def average_inside_a_buffer():
    def f(m, h):
        m.avg.lerp_(h.detach().mean(0), .1)
        return h-m.avg.clone()
    m = Odd(f)
    m.register_buffer('avg', torch.zeros(8))
    return m

@kind(counts, limit=(E,C,G))
def counter_of_a_class():
    class Counts(Odd): k = 0
    def f(m, h): type(m).k += 1; return h*type(m).k
    return Counts(f)

views = 'rare draws over several views'

@kind(views, E, G)
def dropout_of_two_views(): return Odd(lambda m, h: sum(F.dropout(torch.cat([h,h.flip(1)]), .05).chunk(2)))

@kind(views, E, G)
def rare_rows_of_two_views():
    def f(m, h):
        two = torch.cat([h,h.flip(1)])
        return sum((two*(torch.rand(len(two), 1)>.05)).chunk(2))
    return Odd(f)

state = 'a state a sample, which another batch size begins anew'

@kind(state)
def state_of_rows():
    def f(m, h):
        if m.h is None or len(m.h)!=len(h): m.h = torch.zeros_like(h)
        y = (.5*m.h+h).tanh()
        m.h = y.detach()
        return y
    return Odd(f, h=None)

@kind(state, E, G)
def state_between_norms():
    def f(m, h):
        if m.h is None or len(m.h)!=len(h): m.h = torch.zeros_like(h)
        m.h = y = m.a(h)+.5*m.h.detach()
        return m.b(y.tanh())
    return Odd(f, h=None, a=norm(), b=norm())

rng = 'holds a generator of Python or NumPy'

@kind(rng)
def random_of_python(): return Odd(lambda m, h: h*(1+m.g.random()), g=random.Random(3))

@kind(rng, E, G)
def rows_of_default_rng(): return Odd(lambda m, h: h+tensor(m.g.random((len(h),1))), g=np.random.default_rng(3))

moves = 'a part of the model moves in forward'

def momentum_encoder(move):
    def f(m, h):
        y = m.q(h)
        with torch.no_grad(): move(m); key = m.k(h)
        return y*key
    m = Odd(f, q=lin(), k=lin())
    for p in m.k.parameters(): p.requires_grad_(False)
    return m

@kind(moves)
def data_of_an_encoder():
    def move(m):
        for p,q in zip(m.k.parameters(), m.q.parameters()): p.data = p.data*.9+q.data*.1
    return momentum_encoder(move)

@kind(moves)
def averaged_model():
    def f(m, h):
        m.avg.update_parameters(m.q)
        return m.q(h)*m.avg(h).detach()
    q = lin()
    return Odd(f, q=q, avg=torch.optim.swa_utils.AveragedModel(q))

weight = 'what a norm gets depends on the batch'

def batch_norm(f):
    def run(m, h): return F.batch_norm(h, **{**dict(running_mean=None, running_var=None, training=True), **f(m, h)})
    return Odd(run, mean=torch.zeros(8).double(), var=torch.ones(8).double())

@kind(weight, E, G)
def weight_from_the_mean(): return batch_norm(lambda m, h: dict(weight=1+h.mean(0)))

@kind(weight, E, G)
def momentum_from_the_size():
    return batch_norm(lambda m, h: dict(running_mean=m.mean, running_var=m.var, momentum=1/len(h)))

part = 'draws into a part of a tensor, or in an unusual operation'

def in_part(fill):
    def f(m, h):
        e = torch.zeros(len(h), 40).to(h)
        fill(e)
        return h+e.view(len(h), 5, 8).sum(1)
    return Odd(f)

@kind(part, E, G)
def normal_of_some_columns(): return in_part(lambda e: e[:,:24].normal_())

@kind(part, E, G)
def random_slopes(): return Odd(lambda m, h: F.rrelu(h, .1, .3, training=True))   # it fills in its noise itself

backward = 'a backward pass that looks at the batch'

class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): return g-g.mean(0)

def hooked(f):
    def run(m, h):
        h = h.tanh()
        if h.requires_grad: h.register_hook(f)
        return h
    return Odd(run)

@kind(backward)
def function_of_autograd(): return Odd(lambda m, h: Centred.apply(h))

@kind(backward)
def hook_that_normalises(): return hooked(lambda g: g/g.norm())

hidden = 'modules in a plain list'

def aside(): return nn.BatchNorm1d(8).double()

@kind(hidden, E, G)
def modules_in_a_list():
    def f(m, h):
        for l in m.ls: h = l(h).tanh()
        return h
    return Odd(f, ls=[aside(),aside()])

@kind(hidden, E, G)
def module_in_a_closure():
    bn = aside()
    return Odd(lambda m, h: bn(h).tanh())

pairs = 'logits of all pairs'
def each_its_own(pred, y): return F.cross_entropy(pred, torch.arange(len(pred)))

@kind(pairs, loss=each_its_own, whole=True)
def similarities(): return Full(Odd(lambda m, h: h@m.lin(h).t(), lin=lin()))

@kind(pairs, loss=lambda p, y: F.softplus(p).mean(), whole=True)
def each_pair_once():
    return Full(Odd(lambda m, h: (h@m.lin(h).t())[torch.triu(torch.ones(len(h), len(h)), 1).bool()], lin=lin()))

picks = 'indices drawn over the batch'

@kind(picks, E, G)
def random_partners(): return Odd(lambda m, h: h+.5*h[torch.randint(len(h), (len(h),))])

@kind(picks, E, G)
def order_of_numpy(): return Odd(lambda m, h: .7*h+.3*h[np.random.permutation(len(h))])

gone = 'an attribute that is gone at the end'

def kept_for_a_while(m, h):
    m.tmp = m.a(h)
    y = m.b(h.tanh())+m.tmp
    m.tmp = None
    return y

@kind(gone, E, G)
def none_again(): return Odd(kept_for_a_while, a=norm(), b=norm(), tmp=None)

# here the module ends the block, and PyTorch stops a second run as soon as it has what the backward pass needs

@kind(gone, G, whole=True)
def append_and_pop_in_the_last_module():
    def f(m, h):
        m.kept.append(m.lin(h))
        y = m.kept[-1].tanh()
        m.kept.pop()
        return y
    return Full(Odd(f, lin=nn.Linear(8,3), kept=[]))

cache = 'returns its cache (use_cache=True)'
tokens = lambda: (torch.randint(5, 50, (27,7), generator=torch.Generator().manual_seed(0)), classes(n, 50))
class Logits(Callback):
    "Takes the logits of the last token, as users do"
    def after_pred(self): self.learn.pred = self.pred['logits'][:,-1].double()

class Cached(nn.Module):
    "A language model that returns what its blocks have put into a cache"
    def __init__(self):
        super().__init__()
        self.emb,self.blocks,self.head = nn.Embedding(50,8),nn.ModuleList(Puts() for _ in range(2)),nn.Linear(8,50)
    def forward(self, x):
        h,cache = self.emb(x),types.SimpleNamespace(hs=[])
        for b in self.blocks: h = b(h, cache)
        return dict(logits=self.head(h), past_key_values=cache)

class Puts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a,self.b = lin(),lin()
    def forward(self, h, cache):
        cache.hs.append(self.a(h))
        return (h+self.b(torch.stack(cache.hs)).sum(0)).tanh()

@kind(cache, cbs=Logits, data=tokens, whole=True, says='use_cache')
def gpt2():
    tf = pytest.importorskip('transformers', reason='tests a model of transformers, which is not installed')
    config = dict(n_layer=2, n_embd=8, n_head=2, n_positions=16, embd_pdrop=0., attn_pdrop=0., resid_pdrop=0.)
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=1, **config))

@kind(cache, cbs=Logits, data=tokens, whole=True)
def cache_in_an_object(): return Cached()

layerdrop = 'draws that depend on an earlier draw (LayerDrop)'

def dropped(skips):
    def f(m, h):
        for l in m.ls:
            if not skips(h): h = F.dropout(l(h).tanh(), .3)
        return h
    return Odd(f, ls=nn.ModuleList(lin() for _ in range(4)))

@kind(layerdrop, E, G)
def layerdrop_by_torch(): return dropped(lambda h: torch.rand(())<.5)

@kind(layerdrop, E, G)
def dropout_where_features_are_large(): return dropped(lambda h: h.detach().mean()<0)

later = 'is switched in the middle of an epoch'

class Switch(Callback):
    "Calls `f(odd module)` before the third batch"
    def __init__(self, f): self.f = f
    def before_batch(self):
        if self.iter==2: self.f(self.model.block.odd)

def centred(on):
    "Looks at the batch from some time on"
    return Odd(lambda m, h: h-h.mean(0) if on(m) else h, n=0, on=False, o=types.SimpleNamespace(n=0))

@kind(later, cbs=lambda: Switch(lambda m: setattr(m.o, 'n', 3)))
def by_a_flag_of_an_object(): return centred(lambda m: m.o.n>2)

@kind(later)
def by_an_int():
    def on(m): m.n += 1; return m.n>2
    return centred(on)

@kind(later, E, G, cbs=lambda: Switch(lambda m: m.drop.train()))
def dropout_that_begins_later():
    m = Odd(lambda m, h: m.drop(h), drop=nn.Dropout(.3))
    m.train = lambda mode=True: (nn.Module.train(m, mode), m.drop.eval())[0]
    return m

odd_draws = 'draws in an odd way, and right'

@control(odd_draws, E, G)
def views_side_by_side():
    def f(m, h): return F.dropout(torch.stack([h,h.flip(1)], 1).flatten(0,1), .1).view(-1,2,8).sum(1)
    return Odd(f)

@control(odd_draws, E, G)
def rare_dropout(): return Odd(lambda m, h: F.dropout(h, .02))

@control(odd_draws, E, G)
def dropout_between_norms():
    return Odd(lambda m, h: m.b(F.dropout(m.a(h).tanh(), .3)), a=norm(), b=norm())

counting = 'counts or anneals'

@control(counting)
def temperature():
    def f(m, h): m.t *= .9; return h/m.t
    return Odd(f, t=1.)

@control(counting)
def counter():
    def f(m, h): m.n += 1; return h*(1+.1*m.n)
    return Odd(f, n=0)

@control(counting)
def counter_in_a_buffer():
    def f(m, h): m.n.add_(1); return h*m.n.clone()
    m = Odd(f)
    m.register_buffer('n', torch.zeros(()))
    return m

keeping = 'keeps what has a row for each sample'

@control(keeping, E, G)
def hook_for_cam_between_norms():
    m = Odd(lambda m, h: m.b(m.a(h).tanh()), a=norm(), b=norm())
    hook = hook_output(m.a)
    return m

@control(keeping)
def rows_that_are_kept():
    def f(m, h): m.feats = h.tanh(); return m.feats*2
    return Odd(f, feats=None)

ordinary = 'ordinary'

@control(ordinary)
def reversed_gradient():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return -.3*g
    return Odd(lambda m, h: Reverse.apply(h).tanh())

@control(ordinary, loss=lambda p, y: F.cross_entropy(p['logits'], y)+p['extra'].square().mean(), whole=True)
def dictionary(): return Full(Odd(lambda m, h: dict(logits=m.lin(h)[:,:3], extra=h), lin=lin()))

@control(ordinary, data=lambda: ((features(n),features(n, 8, 3)), classes(n)), whole=True)
def two_inputs(): return Full(Odd(lambda m, h, z: m.lin(h*z)[:,:3], lin=lin()))

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

def generators():
    numpy = np.random.get_state(legacy=False)
    return dict(torch=torch.get_rng_state(), python=str(random.getstate()), numpy=str(numpy))

def now(model):
    "All that a step, or a refusal, could have moved"
    odd = getattr(getattr(model, 'block', None), 'odd', None)
    return {**dict(held(model)), **dict(held(type(odd), 'class')), **generators()}

class Notes(Callback):
    "What the model holds and where the generators stand: before a batch, when the loss reads it, and after the batch"
    order = 10_000
    def __init__(self): self.start,self.read,self.n = None,[],0
    def before_fit(self): self.start = now(self.model)
    def before_batch(self): self.start = now(self.model)
    def after_pred(self): self.read.append(now(self.model))
    def after_batch(self): self.read.append(now(self.model)); self.n += 1

def way_of(way, model):
    "The callback for `way`"
    if way==E: return MicroBatch(small, exact=True)
    if way==C: return MicroBatch(small, coupled=True)
    return GradientCheckpointing([model.block] if hasattr(model, 'block') else None)

def train(k, way=None):
    "The learner of `k`, the notes on its fit, and the error that stopped it"
    model,xb,yb = k.make()
    torch.manual_seed(1); np.random.seed(1); random.seed(1)
    dls = DataLoaders(*[DataLoader(Items(xb[0], (*xb[1:],*yb)), bs=bs) for _ in range(2)])
    for o in (dls,*dls.loaders): o.n_inp = len(xb)
    notes = Notes()
    cbs = [NoValid(), notes, *L(k.cbs()), *L(way and way_of(way, model))]
    learn = make_learner(dls, model, k.loss, partial(SGD, mom=.9), cbs, lr=.01, splitter=params)
    try: learn.fit(1)
    except Exception as e: return learn,notes,e
    return learn,notes,None

def differs(a, b):
    "The largest relative error between two notes, and where it is"
    if set(a)!=set(b): return math.inf,', '.join(sorted(set(a)^set(b))[:3])
    def off(x, y):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape==y.shape:
            x,y = x.double(),y.double()
            return ((x-y).norm()/y.norm().clamp(min=1e-3)).item()
        if isinstance(x, float) and isinstance(y, float): return abs(x-y)/max(abs(y), 1e-3)
        return math.inf if isinstance(x, Tensor) or isinstance(y, Tensor) or x!=y else 0.
    return max(((off(a[k], v),k) for k,v in b.items()), default=(0.,''))

_whole = {}
def verdict(k, way):
    """What happens to the kind `k` in this `way`, and the details: the largest error and where it is (`exact` and
    `silent`) or a message (`refused` before the first step, `stopped` later, `moved` if refused too late, `raw`)"""
    if k not in _whole: _whole[k] = train(k)
    (_,want,err),(learn,got,e) = _whole[k],train(k, way)
    if err: raise err   # the large batch must train
    if isinstance(e, ValueError) and str(e).startswith(('MicroBatch','GradientCheckpointing')):
        off,where = differs(now(learn.model), got.start)
        if off>0: return 'moved',f'{where} is not as before: {e}'
        return ('stopped' if got.n else 'refused'),str(e)
    if e: return 'raw',f'{type(e).__name__}: {e}'
    worst = max((differs(a, b) for a,b in zip(got.read, want.read)), key=itemgetter(0))
    if len(got.read)!=len(want.read): worst = math.inf,f'{len(got.read)} notes for {len(want.read)}'
    return ('exact' if worst[0]<=tol else 'silent'),worst
