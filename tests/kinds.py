"""Models that `exact`, `coupled` or `GradientCheckpointing` could get wrong, each small and in float64, and controls
that they must get right.

A kind is a model with one odd habit. `verdict` trains it as users do, with the large batch and in the given way, and
says what happened: `exact`, `refused` (a `ValueError` before anything has moved), `silent` (it trained, and something
differs) or `raw` (any other error). A kind may be exact or refused; a control must be exact."""
import itertools,types
import pytest
from collections import deque
from functools import partial
from fastai.callback.hook import Hook,Hooks,hook_output,hook_outputs
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint,checkpoint_sequential
from harness import *
from fastai_accum.all import *

tol = 1e-10   # three steps through batch norms amplify the rounding of float64 (2e-16)
n,bs,small = 27,10,4   # batches of 10, 10 and 7, in slices of 4, 4 and 2, and of 4 and 3
E,C,G = 'exact','coupled','checkpointing'
kinds,controls = {},{}

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
def draw(h, *size): return torch.rand(size).to(h)

# ---- it keeps something between two norms

keeps = 'keeps something between two norms'

@kind(keeps, E, G)
def pyramid():
    m = Odd(lambda m, h: (m.b(m.a(h).tanh()), m.hooks[0].stored+m.hooks[1].stored)[1], a=norm(), b=norm())
    m.hooks = hook_outputs([m.a,m.b], detach=False)
    return m

@kind(keeps, E, G)
def append_and_pop():
    def f(m, h):
        m.kept.append(m.a(h))
        return m.b(h.tanh())+m.kept.pop()
    return Odd(f, a=norm(), b=norm(), kept=[])

@kind(keeps, E, G)
def hook_fills_a_dict():
    def f(m, h):
        y = m.b(m.a(h).tanh())
        return y+m.kept['a']
    m = Odd(f, a=norm(), b=norm(), kept={})
    m.a.register_forward_hook(lambda mod, inp, out: m.kept.update(a=out))
    return m

@kind(keeps, E, G)
def attribute_of_another_module():
    def keep(m, h): m.last = m.bn(h); return m.last
    return Odd(lambda m, h: m.b(m.a(h).tanh())+m.a.last, a=Odd(keep, bn=norm()), b=norm())

@kind(keeps, E, G, limit=(E,))   # a copy of the model has the same class
def attribute_of_a_class():
    class Bus: pass
    def f(m, h):
        Bus.last = m.a(h)
        return m.b(h.tanh())+Bus.last
    return Odd(f, a=norm(), b=norm(), bus=Bus)

@kind(keeps, E, G)
def list_of_a_closure():
    kept = []
    def f(m, h):
        kept.append(m.a(h))
        y = m.b(h.tanh())+kept[-1]
        kept.clear()
        return y
    return Odd(f, a=norm(), b=norm())

@kind(keeps, E, G)
def queue_of_an_object():
    def f(m, h):
        m.bus.q.append(m.a(h))
        return m.b(h.tanh())+m.bus.q.popleft()
    return Odd(f, a=norm(), b=norm(), bus=types.SimpleNamespace(q=deque()))

# ---- it swaps something, and puts it back

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

@kind(swaps, E, G)
def momentum_and_back():
    def f(m, h):
        m.b.momentum = .7
        y = m.b(m.a(h).tanh())
        m.b.momentum = .1
        return y+m.b(h)
    return Odd(f, a=norm(), b=norm())

@kind(swaps, E, G)
def requires_grad_and_back():
    def f(m, h):
        m.lin.requires_grad_(False)
        y = m.lin(m.b(m.lin(m.a(h)).tanh()))
        m.lin.requires_grad_(True)
        return y+m.lin(h)
    return Odd(f, a=norm(), b=norm(), lin=lin())

@kind(swaps, E, G)
def function_and_back():
    use = types.SimpleNamespace(act=torch.tanh)
    def f(m, h):
        use.act,was = F.softplus,use.act
        y = m.b(use.act(m.a(h)))
        use.act = was
        return y+use.act(h)
    return Odd(f, a=norm(), b=norm())

@kind(swaps, E, C, G)
def load_state_and_back():
    def f(m, h):
        was = {k:v.clone() for k,v in m.inner.state_dict().items()}
        with torch.no_grad():
            m.inner.load_state_dict({k:v*.5 for k,v in was.items()})
            target = m.inner(h)
            m.inner.load_state_dict(was)
        return m.inner(h)*target
    return Odd(f, inner=nn.Sequential(lin(), nn.Tanh(), lin()))

# ---- it checkpoints only where a gradient is needed

asks = 'checkpoints where a gradient is needed'

def again(f, h): return checkpoint(f, h, use_reentrant=False)

@kind(asks, E, G)
def if_requires_grad():
    return Odd(lambda m, h: m.b(again(m.inner, h) if h.requires_grad else m.inner(h)), inner=deep(), b=norm())

@kind(asks, E, G)
def if_grad_is_enabled():
    def f(m, h): return m.b(again(m.inner, h) if torch.is_grad_enabled() else m.inner(h))
    return Odd(f, inner=deep(), b=norm())

@kind(asks, E, G)
def something_else_without_gradient():
    return Odd(lambda m, h: again(m.inner, h) if h.requires_grad else h*5, inner=nn.Sequential(lin(), nn.Tanh()))

@kind(asks, E, G)
def reentrant():
    def f(m, h): return m.b(checkpoint(m.inner, h, use_reentrant=True) if h.requires_grad else m.inner(h))
    return Odd(f, inner=deep(), b=norm())

@kind(asks, E, G)
def in_segments():
    def f(m, h): return checkpoint_sequential(m.inner, 2, h, use_reentrant=False) if h.requires_grad else m.inner(h)
    return Odd(f, inner=deep())

@kind(asks, E, G)
def with_dropout():
    def f(m, h): return again(m.inner, h) if h.requires_grad else m.inner(h)
    return Odd(f, inner=nn.Sequential(lin(), nn.Dropout(.3), lin()))

# ---- it counts, anneals or draws by itself, and keeps what a callback reads

counts = 'counts, anneals, or keeps what a callback reads'

@kind(counts)
def mean_that_is_kept():
    def f(m, h): m.mean = h.detach().mean(0); return h.tanh()
    return Odd(f, mean=None)

@kind(counts)
def counter_in_a_dict():
    def f(m, h): m.d['n'] += 1; return h*m.d['n']
    return Odd(f, d=dict(n=0))

@kind(counts)
def counter_in_an_object():
    def f(m, h): m.o.n += 1; return h*m.o.n
    return Odd(f, o=types.SimpleNamespace(n=0))

@kind(counts)
def counter_in_a_closure():
    k = 0
    def f(m, h):
        nonlocal k
        k += 1
        return h*k
    return Odd(f)

@kind(counts, limit=(E,C,G))
def counter_of_a_class():
    class Counts(Odd): k = 0
    def f(m, h): type(m).k += 1; return h*type(m).k
    return Counts(f)

@kind(counts)
def iterator(): return Odd(lambda m, h: h*(1+next(m.it)), it=itertools.count())

@kind(counts)
def every_other_time():
    def f(m, h): m.odd = not m.odd; return h.tanh() if m.odd else h
    return Odd(f, odd=False)

@kind(counts)
def history():
    def f(m, h): m.seen.append(h.detach().norm().item()); return h/(1+len(m.seen))
    return Odd(f, seen=[])

@kind(counts)
def average_inside_a_buffer():
    def f(m, h):
        m.avg.lerp_(h.detach().mean(0), .1)
        return h-m.avg.clone()
    m = Odd(f)
    m.register_buffer('avg', torch.zeros(8))
    return m

# ---- rare draws over two views

views = 'rare draws over several views'

@kind(views, E, G)
def dropout_of_two_views(): return Odd(lambda m, h: sum(F.dropout(torch.cat([h,h.flip(1)]), .05).chunk(2)))

@kind(views, E, G)
def rare_rows_of_two_views():
    def f(m, h):
        two = torch.cat([h,h.flip(1)])
        return sum((two*(draw(h, len(two), 1)>.05)).chunk(2))
    return Odd(f)

@kind(views, E, G)
def three_views():
    def f(m, h):
        hs = torch.cat([h,2*h,h.tanh()])
        return sum((hs*hs.new_empty(len(hs),1).bernoulli_(.95)).chunk(3))
    return Odd(f)

@kind(views, E, G)
def one_row_more():
    token = nn.Parameter(torch.ones(1,8))
    return Odd(lambda m, h: F.dropout(torch.cat([m.token,h]), .05)[1:], token=token)

@kind(views, E, G)
def noise_for_views_between_norms():
    def f(m, h):
        hs = m.a(torch.cat([h,h.flip(1)]))
        return m.b(sum((hs+torch.randn_like(hs)).chunk(2)))
    return Odd(f, a=norm(), b=norm())

@kind(views, E, G)
def mask_of_one_view_for_another():
    def f(m, h):
        mask = (draw(h, 2*len(h), 1)>.05).to(h)
        return h*mask[:len(h)]+h.tanh()*mask[len(h):].flip(0)
    return Odd(f)

# ---- a state for each sample, that begins anew when the batch has another size

state = 'a state a sample, which another batch size begins anew'

@kind(state)
def state_of_rows():
    def f(m, h):
        if m.h is None or len(m.h)!=len(h): m.h = torch.zeros_like(h)
        y = (.5*m.h+h).tanh()
        m.h = y.detach()
        return y
    return Odd(f, h=None)

@kind(state)
def state_by_size():
    def f(m, h):
        y = (.5*m.d.get(len(h), 1.)+h).tanh()
        m.d[len(h)] = y.detach()
        return y
    return Odd(f, d={})

@kind(state)
def state_of_an_lstm():
    def f(m, h):
        if m.hc is not None and m.hc[0].shape[1]!=len(h): m.hc = None
        y,hc = m.rnn(h[:,None], m.hc)
        m.hc = tuple(o.detach() for o in hc)
        return y[:,0]
    return Odd(f, hc=None, rnn=nn.LSTM(8, 8, batch_first=True))

@kind(state)
def state_in_a_buffer():
    def f(m, h):
        if len(m.h)!=len(h): m.h = torch.zeros_like(h)
        y = (.5*m.h+h).tanh()
        m.h = y.detach()
        return y
    m = Odd(f)
    m.register_buffer('h', torch.zeros(0,8))
    return m

@kind(state, E, G)
def state_between_norms():
    def f(m, h):
        if m.h is None or len(m.h)!=len(h): m.h = torch.zeros_like(h)
        m.h = y = m.a(h)+.5*m.h.detach()
        return m.b(y.tanh())
    return Odd(f, h=None, a=norm(), b=norm())

# ---- generators of Python and NumPy that the model holds

rng = 'holds a generator of Python or NumPy'

@kind(rng)
def random_of_python(): return Odd(lambda m, h: h*(1+m.g.random()), g=random.Random(3))

@kind(rng, E, G)
def rows_of_default_rng(): return Odd(lambda m, h: h+tensor(m.g.random((len(h),1))), g=np.random.default_rng(3))

@kind(rng, E, G)
def rows_of_random_state(): return Odd(lambda m, h: h+tensor(m.g.rand(len(h), 1)), g=np.random.RandomState(3))

@kind(rng)
def generators_in_a_dict():
    return Odd(lambda m, h: h*(1+m.gs['a'].random()+m.gs['b'].random()),
               gs=dict(a=random.Random(3), b=np.random.default_rng(3)))

@kind(rng)
def generator_in_an_object():
    return Odd(lambda m, h: h*(1+m.o.g.random()), o=types.SimpleNamespace(g=np.random.default_rng(3)))

@kind(rng)
def generator_in_a_closure():
    g = random.Random(3)
    return Odd(lambda m, h: h*(1+g.random()))

@kind(rng, E, G)
def generator_between_norms():
    return Odd(lambda m, h: m.b(m.a(h)*(1+m.g.random())), a=norm(), b=norm(), g=random.Random(3))

# ---- an encoder that moves in forward

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
def encoder_in_place():
    def move(m):
        for p,q in zip(m.k.parameters(), m.q.parameters()): p.lerp_(q, .1)
    return momentum_encoder(move)

@kind(moves)
def encoder_by_foreach():
    return momentum_encoder(lambda m: torch._foreach_lerp_(list(m.k.parameters()), list(m.q.parameters()), .1))

@kind(moves)
def averaged_model():
    def f(m, h):
        m.avg.update_parameters(m.q)
        return m.q(h)*m.avg(h).detach()
    q = lin()
    return Odd(f, q=q, avg=torch.optim.swa_utils.AveragedModel(q))

@kind(moves)
def spectral_norm(): return nn.utils.parametrizations.spectral_norm(lin())

# ---- what a norm gets depends on the batch

weight = 'what a norm gets depends on the batch'

def batch_norm(f):
    def run(m, h): return F.batch_norm(h, **{**dict(running_mean=None, running_var=None, training=True), **f(m, h)})
    return Odd(run, mean=torch.zeros(8).double(), var=torch.ones(8).double())

@kind(weight, E, G)
def weight_from_the_mean(): return batch_norm(lambda m, h: dict(weight=1+h.mean(0)))

@kind(weight, E, G)
def bias_from_the_largest(): return batch_norm(lambda m, h: dict(bias=h.amax(0)))

@kind(weight, E, G)
def momentum_from_the_size():
    return batch_norm(lambda m, h: dict(running_mean=m.mean, running_var=m.var, momentum=1/len(h)))

@kind(weight, E, G)
def eps_from_the_size(): return batch_norm(lambda m, h: dict(eps=1/len(h)))

@kind(weight, E, G)
def weight_from_another_norm():
    return Odd(lambda m, h: F.batch_norm(h, None, None, m.a(h).relu().mean(0), None, True), a=norm())

# ---- draws on a part of a tensor

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
def uniform_of_every_other_column(): return in_part(lambda e: e[:,::2].uniform_())

@kind(part, E, G)
def normal_of_the_transpose(): return in_part(lambda e: e.t()[:20].normal_())

@kind(part, E, G)
def bernoulli_of_a_part_in_3d(): return in_part(lambda e: e.view(-1,5,8)[...,:3].bernoulli_(.5))

@kind(part, E, G)
def normal_into_a_part(): return in_part(lambda e: e[:,4:28].copy_(torch.randn(24, len(e)).t().to(e)))

@kind(part, E, G)
def exponential_of_a_permuted_tensor(): return in_part(lambda e: e.view(-1,5,8).permute(2,0,1)[:3].exponential_())

@kind(part, E, G)
def random_slopes(): return Odd(lambda m, h: F.rrelu(h, .1, .3, training=True))   # it fills in its noise itself

# ---- a backward pass that looks at the batch

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

@kind(backward)
def hook_that_counts_samples(): return hooked(lambda g: g*len(g))

@kind(backward)
def hook_that_clips_each_sample(): return hooked(lambda g: g/g.norm(dim=1, keepdim=True).clamp(min=1e-4)*1e-4)

@kind(backward)
def backward_hook_of_a_module():
    m = lin()
    m.register_full_backward_hook(lambda m, gi, go: (gi[0]-gi[0].mean(0),))
    return m

@kind(backward)
def hook_of_a_parameter():
    m = lin()
    m.weight.register_hook(lambda g: g.clamp(-.01, .01))
    return m

@kind(backward, E, G)
def hook_between_norms():
    return Odd(lambda m, h: m.b(Centred.apply(m.a(h).tanh())), a=norm(), b=norm())

# ---- modules where PyTorch does not see them

hidden = 'modules in a plain list'

def aside(): return nn.BatchNorm1d(8).double()

@kind(hidden, E, G)
def modules_in_a_list():
    def f(m, h):
        for l in m.ls: h = l(h).tanh()
        return h
    return Odd(f, ls=[aside(),aside()])

@kind(hidden, E, G)
def modules_in_a_dict(): return Odd(lambda m, h: m.d['a'](h).tanh(), d=dict(a=aside()))

@kind(hidden, E, G)
def module_in_a_closure():
    bn = aside()
    return Odd(lambda m, h: bn(h).tanh())

@kind(hidden, E, G)
def module_in_an_object(): return Odd(lambda m, h: m.o.bn(h).tanh(), o=types.SimpleNamespace(bn=aside()))

@kind(hidden, E, G)
def module_in_a_partial(): return Odd(lambda m, h: m.p(h), p=partial(lambda bn, h: bn(h).tanh(), aside()))

# ---- logits of all pairs

pairs = 'logits of all pairs'
def each_its_own(pred, y): return F.cross_entropy(pred, torch.arange(len(pred)))

@kind(pairs, loss=each_its_own, whole=True)
def similarities(): return Full(Odd(lambda m, h: h@m.lin(h).t(), lin=lin()))

@kind(pairs, loss=each_its_own, whole=True)
def distances(): return Full(Odd(lambda m, h: -torch.cdist(h, m.lin(h)), lin=lin()))

@kind(pairs, loss=lambda p, y: each_its_own(p[1], y)+p[0].square().mean(), whole=True)
def features_and_similarities(): return Full(Odd(lambda m, h: (h, h@m.lin(h).t()), lin=lin()))

@kind(pairs, loss=each_its_own, whole=True)
def similarities_of_two_views():
    def f(m, h): hs = torch.cat([h,m.lin(h)]); return hs@hs.t()
    return Full(Odd(f, lin=lin()))

@kind(pairs, loss=lambda p, y: F.softplus(p).mean(), whole=True)
def each_pair_once():
    return Full(Odd(lambda m, h: (h@m.lin(h).t())[torch.triu(torch.ones(len(h), len(h)), 1).bool()], lin=lin()))

# ---- indices drawn over the batch

picks = 'indices drawn over the batch'

@kind(picks, E, G)
def random_partners(): return Odd(lambda m, h: h+.5*h[torch.randint(len(h), (len(h),))])

@kind(picks, E, G)
def random_order(): return Odd(lambda m, h: .7*h+.3*h[torch.randperm(len(h))])

@kind(picks, E, G)
def order_of_numpy(): return Odd(lambda m, h: .7*h+.3*h[np.random.permutation(len(h))])

@kind(picks, E, G)
def one_anchor(): return Odd(lambda m, h: h-h[random.randrange(len(h))])

@kind(picks, E, G)
def partners_by_weight(): return Odd(lambda m, h: h+h[torch.multinomial(h.detach().softmax(0)[:,0], len(h), True)])

@kind(picks, E, G)
def random_order_between_norms():
    return Odd(lambda m, h: m.b(m.a(h)+m.a(h)[torch.randperm(len(h))]), a=norm(), b=norm())

# ---- attributes that are gone at the end

gone = 'an attribute that is gone at the end'

def kept_for_a_while(m, h):
    m.tmp = m.a(h)
    y = m.b(h.tanh())+m.tmp
    m.tmp = None
    return y

@kind(gone, E, G)
def none_again(): return Odd(kept_for_a_while, a=norm(), b=norm(), tmp=None)

@kind(gone)
def none_again_without_norms(): return Odd(kept_for_a_while, a=lin(), b=lin(), tmp=None)

@kind(gone, E, G)
def deleted():
    def f(m, h):
        m.tmp = m.a(h)
        y = m.b(h.tanh())+m.tmp
        del m.tmp
        return y
    return Odd(f, a=norm(), b=norm())

@kind(gone, E, G)
def cleared():
    def f(m, h):
        m.d['a'] = m.a(h)
        y = m.b(h.tanh())+m.d['a']
        m.d.clear()
        return y
    return Odd(f, a=norm(), b=norm(), d={})

@kind(gone, E, G)
def depth_of_calls():
    def f(m, h, depth=2):
        m.depth += 1
        y = m.bn(h)*m.depth if not depth else f(m, m.bn(h).tanh(), depth-1)
        m.depth -= 1
        return y
    return Odd(f, bn=norm(), depth=0)

# here the module ends the block, and PyTorch stops a second run as soon as it has what the backward pass needs

@kind(gone, G, whole=True)
def none_again_in_the_last_module():
    def f(m, h):
        m.tmp = m.lin(h)
        y = m.tmp.tanh()
        m.tmp = None
        return y
    return Full(Odd(f, lin=nn.Linear(8,3), tmp=None))

@kind(gone, G, whole=True)
def append_and_pop_in_the_last_module():
    def f(m, h): m.kept.append(m.lin(h)); y = m.kept[-1].tanh(); m.kept.pop(); return y
    return Full(Odd(f, lin=nn.Linear(8,3), kept=[]))

# ---- language models of transformers that return their cache

cache = 'returns its cache (use_cache=True)'
tokens = lambda: (torch.randint(5, 50, (27,7), generator=torch.Generator().manual_seed(0)), classes(n, 50))
class Logits(Callback):
    "Takes the logits of the last token, as users do"
    def after_pred(self): self.learn.pred = self.pred['logits'][:,-1].double()

def of_transformers(kind, config, **kwargs):
    tf = pytest.importorskip('transformers', reason='tests a model of transformers, which is not installed')
    ids = dict(vocab_size=50, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return getattr(tf, kind)(getattr(tf, config)(**ids, **kwargs))
tiny = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)

class Cached(nn.Module):
    "A language model that returns what its blocks have put into a cache"
    def __init__(self, new, put, out):
        super().__init__()
        self.emb,self.blocks,self.head = nn.Embedding(50,8),nn.ModuleList(Puts(put) for _ in range(2)),nn.Linear(8,50)
        self.new,self.out = new,out
    def forward(self, x):
        h,cache = self.emb(x),self.new()
        for b in self.blocks: h = b(h, cache)
        return dict(logits=self.head(h), past_key_values=self.out(cache))

class Puts(nn.Module):
    def __init__(self, put): super().__init__(); self.a,self.b,self.put = lin(),lin(),put
    def forward(self, h, cache):
        cached = self.put(cache, self.a(h))
        return (h+self.b(cached).sum(0)).tanh()

@kind(cache, cbs=Logits, data=tokens, whole=True, says='use_cache')
def gpt2():
    drops = dict(embd_pdrop=0., attn_pdrop=0., resid_pdrop=0.)
    return of_transformers('GPT2LMHeadModel', 'GPT2Config', n_layer=2, n_embd=8, n_head=2, n_positions=16, **drops)

@kind(cache, cbs=Logits, data=tokens, whole=True, says='use_cache')
def llama(): return of_transformers('LlamaForCausalLM', 'LlamaConfig', **tiny)

@kind(cache, cbs=Logits, data=tokens, whole=True)
def cache_in_an_object():
    def put(cache, h): cache.hs.append(h); return torch.stack(cache.hs)
    return Cached(lambda: types.SimpleNamespace(hs=[]), put, noop)

@kind(cache, cbs=Logits, data=tokens, whole=True)
def cache_in_a_list():
    def put(cache, h): cache.append(h); return torch.stack(cache)
    return Cached(list, put, noop)

@kind(cache, cbs=Logits, data=tokens, whole=True)
def cache_of_detached_rows():
    def put(cache, h): cache['h'] = h.detach()+cache.get('h', 0); return torch.stack([cache['h'],h])
    return Cached(dict, put, lambda c: str(len(c['h'])))

# ---- draws that depend on an earlier draw

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
def layerdrop_by_python(): return dropped(lambda h: random.random()<.5)

@kind(layerdrop, E, G)
def layerdrop_by_numpy(): return dropped(lambda h: np.random.uniform(0,1)<.5)

@kind(layerdrop, E, G)
def dropout_where_features_are_large(): return dropped(lambda h: h.detach().mean()<0)

@kind(layerdrop, E, G)
def so_many_rounds():
    def f(m, h):
        for _ in range(int(torch.randint(1, 4, ()))): h = F.dropout(m.lin(h).tanh(), .3)
        return h
    return Odd(f, lin=lin())

@kind(layerdrop, E, G)
def layerdrop_with_norms():
    def f(m, h):
        for bn in m.bns:
            if torch.rand(())>.3: h = F.dropout(bn(h).tanh(), .3)
        return h
    return Odd(f, bns=nn.ModuleList(norm() for _ in range(3)))

# ---- what is switched in the middle of an epoch

later = 'is switched in the middle of an epoch'

class Switch(Callback):
    "Calls `f(odd module)` before the third batch"
    def __init__(self, f): self.f = f
    def before_batch(self):
        if self.iter==2: self.f(self.model.block.odd)

def centred(on):
    "Looks at the batch from some time on"
    return Odd(lambda m, h: h-h.mean(0) if on(m) else h, n=0, on=False, o=types.SimpleNamespace(n=0))

@kind(later)
def by_an_int():
    def on(m): m.n += 1; return m.n>2
    return centred(on)

@kind(later)
def by_an_object():
    def on(m): m.o.n += 1; return m.o.n>2
    return centred(on)

@kind(later, cbs=lambda: Switch(lambda m: setattr(m, 'on', True)))
def by_a_flag(): return centred(lambda m: m.on)

@kind(later, cbs=lambda: Switch(lambda m: setattr(m.o, 'n', 3)))
def by_a_flag_of_an_object(): return centred(lambda m: m.o.n>2)

@kind(later, E, G, cbs=lambda: Switch(lambda m: m.drop.train()))
def dropout_that_begins_later():
    m = Odd(lambda m, h: m.drop(h), drop=nn.Dropout(.3))
    m.train = lambda mode=True: (nn.Module.train(m, mode), m.drop.eval())[0]
    return m

@kind(later, E, G, cbs=lambda: Switch(lambda m: m.bn.eval()))
def norm_that_stops_later(): return Odd(lambda m, h: m.bn(h).tanh(), bn=norm())

# ---- controls: they are right, and must not be refused

odd_draws = 'draws in an odd way, and right'

def of_rows(f): return lambda m, h: f(h)
for name,f in dict(
    dropout          = lambda h: F.dropout(h, .3),
    rare_dropout     = lambda h: F.dropout(h, .02),
    scalar_draw      = lambda h: h*(1+draw(h, 1)),
    scalar_of_python = lambda h: h*(1+random.random()),
    scalar_of_numpy  = lambda h: h*(1+np.random.rand()),
    feature_mask     = lambda h: h*(draw(h, 8)>.3),
    rand_like        = lambda h: h+torch.rand_like(h),
    reparameterise   = lambda h: h+h.sigmoid()*torch.randn_like(h),
    normal_of_tensors = lambda h: h+torch.normal(h.detach(), h.detach().exp()),
    bernoulli_of_a_tensor = lambda h: h*torch.bernoulli(h.detach().sigmoid()),
    gumbel           = lambda h: F.gumbel_softmax(h),
    depth_of_rows    = lambda h: h*h.new_empty(len(h),1).bernoulli_(.6)/.6,
    integers         = lambda h: h*torch.randint(0, 3, h.shape),
    columns_first    = lambda h: h+torch.rand(8, len(h)).t().to(h),
    heads            = lambda h: F.dropout(h.view(-1,4,2).flatten(0,1), .3).view(-1,8),
    views_side_by_side = lambda h: F.dropout(torch.stack([h,h.flip(1)], 1).flatten(0,1), .1).view(-1,2,8).sum(1),
    views_on_top     = lambda h: F.dropout(torch.stack([h,h.flip(1)]), .1).sum(0),
    alpha            = lambda h: F.alpha_dropout(h, .3, training=True),
).items():
    def make(f=f): return Odd(of_rows(f))
    make.__name__ = name
    control(odd_draws, E, G)(make)

@control(odd_draws, E, G)
def attention():
    a = nn.MultiheadAttention(4, 2, dropout=.3, batch_first=True)
    return Odd(lambda m, h: m.a(*[h.view(-1,2,4)]*3)[0].flatten(1), a=a)

@control(odd_draws, E, G)
def encoder_layer():
    l = nn.TransformerEncoderLayer(4, 2, 8, dropout=.3, batch_first=True)
    return Odd(lambda m, h: m.l(h.view(-1,2,4)).flatten(1), l=l)

@control(odd_draws, E, G)
def dropout_between_norms():
    return Odd(lambda m, h: m.b(F.dropout(m.a(h).tanh(), .3)), a=norm(), b=norm())

@control(odd_draws, E, G)
def own_generator_of_torch():
    return Odd(lambda m, h: h+torch.rand(len(h), 1, generator=m.g).to(h), g=torch.Generator().manual_seed(3))

counting = 'counts or anneals'

@control(counting)
def counter():
    def f(m, h): m.n += 1; return h*(1+.1*m.n)
    return Odd(f, n=0)

@control(counting)
def temperature():
    def f(m, h): m.t *= .9; return h/m.t
    return Odd(f, t=1.)

@control(counting)
def counter_in_a_buffer():
    def f(m, h): m.n.add_(1); return h*m.n.clone()
    m = Odd(f)
    m.register_buffer('n', torch.zeros(()))
    return m

@control(counting)
def scalar_of_its_own_generator():
    return Odd(lambda m, h: h*(1+torch.rand(1, generator=m.g).to(h)), g=torch.Generator().manual_seed(3))

@control(counting, E, G)
def counter_between_norms():
    def f(m, h): m.n += 1; return m.b(m.a(h).tanh()*m.n)
    return Odd(f, n=0, a=norm(), b=norm())

keeping = 'keeps what has a row for each sample'

@control(keeping)
def rows_that_are_kept():
    def f(m, h): m.feats = h.tanh(); return m.feats*2
    return Odd(f, feats=None)

@control(keeping, E, G)
def rows_kept_between_norms():
    def f(m, h): m.feats = m.a(h); return m.b(m.feats.tanh())
    return Odd(f, feats=None, a=norm(), b=norm())

@control(keeping)
def attention_that_is_kept():
    def f(m, h): y,m.w = m.a(*[h.view(-1,2,4)]*3); return y.flatten(1)
    return Odd(f, w=None, a=nn.MultiheadAttention(4, 2, batch_first=True))

@control(keeping)
def hook_for_cam():
    m = Odd(lambda m, h: m.lin(h).tanh(), lin=lin())
    m.lin.register_forward_hook(Hook(m.lin, noop).hook_fn)
    return m

@control(keeping, E, G)
def hook_for_cam_between_norms():
    m = Odd(lambda m, h: m.b(m.a(h).tanh()), a=norm(), b=norm())
    hook = hook_output(m.a)
    return m

ordinary = 'ordinary'

@control(ordinary, E, G)
def norms(): return deep()

@control(ordinary, E, G)
def norm_used_twice(): return Odd(lambda m, h: m.bn(m.bn(h).tanh()+h), bn=nn.BatchNorm1d(8, momentum=None))

@control(ordinary, E, G)
def norm_in_evaluation():
    m = Odd(lambda m, h: m.bn(h).tanh(), bn=norm())
    m.bn.train = lambda mode=True: m.bn
    m.bn.training = False
    return m

@control(ordinary)
def other_norms():
    return Odd(lambda m, h: m.b(m.a(h)[:,:,None])[...,0], a=nn.LayerNorm(8), b=nn.GroupNorm(2,8))

@control(ordinary)
def reversed_gradient():
    class Reverse(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return -.3*g
    return Odd(lambda m, h: Reverse.apply(h).tanh())

@control(ordinary)
def weight_norm(): return nn.utils.parametrizations.weight_norm(lin())

@control(ordinary)
def recurrent():
    rnn = nn.GRU(4, 4, num_layers=2, batch_first=True)
    return Odd(lambda m, h: m.rnn(h.view(-1,2,4))[0].flatten(1), rnn=rnn)

@control(ordinary, E, G)
def weights_dropped():
    from fastai.text.models.awdlstm import WeightDropout
    return Odd(lambda m, h: m.rnn(h[:,None])[0][:,0], rnn=WeightDropout(nn.LSTM(8, 8, batch_first=True), .5))

@control(ordinary, loss=lambda p, y: F.cross_entropy(p['logits'], y)+p['extra'].square().mean(), whole=True)
def dictionary(): return Full(Odd(lambda m, h: dict(logits=m.lin(h)[:,:3], extra=h), lin=lin()))

@control(ordinary, loss=lambda p, y: F.cross_entropy(p[0], y)+p[1].square().mean(), whole=True)
def two_predictions(): return Full(Odd(lambda m, h: (m.lin(h)[:,:3], h), lin=lin()))

@control(ordinary, data=lambda: ((features(n),features(n, 8, 3)), classes(n)), whole=True)
def two_inputs(): return Full(Odd(lambda m, h, z: m.lin(h*z)[:,:3], lin=lin()))

@control(ordinary)
def frozen_part():
    m = nn.Sequential(lin(), nn.Tanh(), lin())
    for p in m[0].parameters(): p.requires_grad_(False)
    return m

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
           str(o.get_state(legacy=False))          if isinstance(o, np.random.RandomState) else
           repr(o)                                 if isinstance(o, itertools.count) else None)
    if one is not None: yield path,one; return
    if isinstance(o, (dict,list,tuple,L,deque)): yield f'{path}.len',len(o)
    for k,v in _inside(o): yield from held(v, f'{path}.{k}', seen)

def _inside(o):
    "The names and the values that `o` consists of; those of PyTorch's own objects and of hooks do not count"
    if isinstance(o, dict):                 return o.items()
    if isinstance(o, (list,tuple,L,deque)): return enumerate(o)
    if isinstance(o, nn.Module): return [(k,v) for k,v in vars(o).items() if 'hook' not in k and k!='forward']
    if isinstance(o, partial):              return enumerate([o.func,*o.args])
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
