"""Models that `exact`, `coupled` or `GradientCheckpointing` could get wrong, each small and in float64, and controls
that they must get right.

A kind is a model with one odd habit. `verdict` trains it as users do, with the large batch and in the given way, and
says what happened: `exact`, `refused` (a `ValueError` before anything has moved), `silent` (it trained, and something
differs) or `raw` (any other error). A kind may be exact or refused, or must be refused with the words that it `says`; a
control must be exact."""
import types
from fastai.text.all import AWD_LSTM,awd_lstm_clas_config,get_text_classifier,rnn_cbs
from fastai.callback.hook import Hook,Hooks,hook_output,hook_outputs
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from harness import *
from fastai_accum.all import *

tol = 1e-10   # three steps through batch norms amplify the rounding of float64 (2e-16)
E,C,G = 'exact','coupled','checkpointing'
kinds,controls = {},{}   # in each row, what was silently wrong first, or refused though it is right, comes first

class Kind:
    """A model with one odd habit, the row that it belongs to, and the ways in which it is tried; `limit` are those in
    which nobody can see it. Batches have 10, 10 and 7 samples, in slices of 4, 4 and 2, and of 4 and 3"""
    def __init__(self, f, row, ways, says='', loss=None, cbs=noop, data=None, whole=False, limit=(), n=27, bs=10,
                 small=4): store_attr()
    def make(self):
        "A model, and the inputs and targets of an epoch"
        set_seed(2)
        m,(xb,yb) = self.f(),(self.data or (lambda: (features(self.n), classes(self.n))))()
        return (m if self.whole else net(m)).double(),tuplify(xb),tuplify(yb)

def kind(row, *ways, to=kinds, **kwargs):
    def add(f, name=None):
        name = name or f.__name__
        assert name not in {**kinds,**controls}, name
        to[name] = Kind(f, row, ways or (E,C,G), **kwargs)
        return f
    return add

def rows(row, *ways, to=kinds, kw={}, **models):
    "A kind for each of `models`: what makes it, and what its refusal says"
    for name,o in models.items():
        f,*says = o if isinstance(o, tuple) else (o,)
        kind(row, *ways, to=to, **{**dict(zip(['says','data'], says)), **kw})(f, name)

class Odd(Made): "A module whose `forward` is `f`, with modules and attributes"

def one(f, **has):
    "Makes an `Odd` module; `has` makes its modules and attributes"
    return lambda: Odd(f, **{k:v() for k,v in has.items()})

def odd(row, *ways, to=kinds, kw={}, **has):
    "A kind that is an `Odd` module, whose `forward` follows"
    def add(f):
        kind(row, *ways, to=to, **kw)(one(f, **has), f.__name__)
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

@kind(swaps, E, G, to=controls)
def averaged_weights():
    def f(m, h):
        own = {k:.5*p+.5*m.avg[k] for k,p in m.inner.named_parameters()}
        return functional_call(m.inner, own, (h,))+m.inner(h)
    m = Odd(f, inner=deep())
    m.avg = {k:p.detach().double()*.9 for k,p in m.inner.named_parameters()}
    return m

@odd(swaps, G, E, inner=deep)
def data_of_parameters(m, h):
    was = [p.data for p in m.inner.parameters()]
    for p in m.inner.parameters(): p.data = p.data*.5
    y = m.inner(h)
    for p,d in zip(m.inner.parameters(), was): p.data = d
    return y

@odd(swaps, G, E, inner=deep)
def eval_and_back(m, h):
    m.eval(); target = m.inner(h).detach(); m.train()
    return m.inner(h)*target

asks = 'checkpoints where a gradient is needed'

def again(f, h): return checkpoint(f, h, use_reentrant=False)

rows(asks, E, G,
     if_requires_grad=one(lambda m, h: m.b(again(m.inner, h) if h.requires_grad else m.inner(h)), inner=deep, b=norm),
     something_else_without_gradient=one(lambda m, h: again(m.inner, h) if h.requires_grad else h*5,
                                         inner=lambda: nn.Sequential(lin(), nn.Tanh())))

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

rows(views, E, G, dropout_of_two_views=one(lambda m, h: sum(F.dropout(torch.cat([h,h.flip(1)]), .05).chunk(2))))

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

rows(rng, random_of_python=one(lambda m, h: h*(1+m.g.random()), g=lambda: random.Random(3)))
rows(rng, E, G, rows_of_default_rng=one(lambda m, h: h+tensor(m.g.random((len(h),1))),
                                        g=lambda: np.random.default_rng(3)))

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

rows(weight, E, G,
     weight_from_the_mean=one(lambda m, h: F.batch_norm(h, None, None, 1+h.mean(0), training=True)),
     momentum_from_the_size=one(lambda m, h: F.batch_norm(h, m.mean, m.var, training=True, momentum=1/len(h)),
                                mean=lambda: torch.zeros(8).double(), var=lambda: torch.ones(8).double()))

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

rows(backward, function_of_autograd=one(lambda m, h: Centred.apply(h)))

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

rows(pairs, kw=dict(loss=lambda pred, y: F.cross_entropy(pred, torch.arange(len(pred))), whole=True),
     similarities=lambda: full(Odd(lambda m, h: h@m.lin(h).t(), lin=lin())))

picks = 'indices drawn over the batch'

rows(picks, E, G, random_partners=one(lambda m, h: h+.5*h[torch.randint(len(h), (len(h),))]))
rows(picks, E, G, sorted_partners=one(lambda m, h: h+.5*h[torch.rand(len(h)).argsort()]))
rows(picks, E, shuffle=(one(lambda m, h: h+h[torch.randperm(len(h))]), 'randperm'))

gone = 'an attribute that is gone at the end'

@odd(gone, G, E, to=controls, a=norm, b=norm, tmp=noop)
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

rows(layerdrop, E, G,
     layerdrop_by_torch=one(lambda m, h: dropped(m, h, lambda h: torch.rand(())<.5), ls=layers),
     dropout_where_features_are_large=one(lambda m, h: dropped(m, h, lambda h: h.detach().mean()<0), ls=layers))

later = 'is switched in the middle of an epoch'

def switch(f):
    "A callback that calls `f(odd module)` before the third batch"
    def before_batch(cb):
        if cb.iter==2: f(cb.model.block.odd)
    return lambda: Callback(before_batch=before_batch)

rows(later, by_a_flag_of_an_object=one(lambda m, h: h-h.mean(0) if m.o.n>2 else h, o=counting),
     kw=dict(cbs=switch(lambda m: setattr(m.o, 'n', 3))))

@odd(later, n=zero)
def by_an_int(m, h): m.n += 1; return h-h.mean(0) if m.n>2 else h

@kind(later, E, G, cbs=switch(lambda m: m.drop.train()))
def dropout_that_begins_later():
    m = Odd(lambda m, h: m.drop(h), drop=nn.Dropout(.3))
    m.train = lambda mode=True: (nn.Module.train(m, mode), m.drop.eval())[0]
    return m

rows('noise of a size that the batch decides', C, noise_of_the_batch=(
    one(lambda m, h: h+.3*h.detach().std()*torch.randn_like(h)), 'gives other values'))

# ---- controls

tokens = 'turns channels into the last dimension: PyTorch mixes up the gradients of one such sample'

@odd(tokens, E, G, to=controls, bn=lambda: nn.BatchNorm2d(2), lin=lambda: nn.Linear(2,2))
def patches(m, h): return m.lin(m.bn(h.view(-1,2,2,2)).flatten(2).transpose(1,2)).tanh().flatten(1)

# slices of 4, as many as the layer has outputs
rows('makes its weights anew', E, C, to=controls, kw=dict(n=24, bs=8), weight_norm=one(
    lambda m, h: m.b(m.a(h)), a=lambda: nn.utils.weight_norm(nn.Linear(8,4)), b=lambda: nn.Linear(4,8)))

odd_draws = 'draws in an odd way, and right'

rows(odd_draws, E, G, to=controls, views_side_by_side=one(
    lambda m, h: F.dropout(torch.stack([h,h.flip(1)], 1).flatten(0,1), .1).view(-1,2,8).sum(1)))

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

def keeps_rows(m, h):
    m.feats,m.o.pair = h.tanh(),(h.detach(),'name')
    return m.feats*2
for way in E,C,G: rows(keeping, way, to=controls, **{f'rows_kept_{way}':one(keeps_rows, feats=noop, o=counting)})

ordinary = 'ordinary'

class Reverse(Centred):
    @staticmethod
    def backward(ctx, g): return -.3*g

rows(ordinary, to=controls, reversed_gradient=one(lambda m, h: Reverse.apply(h).tanh()))
def two_terms(p, y): return F.cross_entropy(p['logits'], y)+p['extra'].square().mean()
rows(ordinary, to=controls, kw=dict(whole=True, loss=two_terms),
     dictionary=lambda: full(Odd(lambda m, h: dict(logits=m.lin(h)[:,:3], extra=h), lin=lin())))
rows(ordinary, to=controls, kw=dict(whole=True, data=lambda: ((features(27),features(27, 8, 3)), classes(27))),
     two_inputs=lambda: full(Odd(lambda m, h, z: m.lin(h*z)[:,:3], lin=lin())))
rows(ordinary, E, C, to=controls, kw=dict(whole=True, loss=lambda p, y: F.cross_entropy(p['rest'][1][0], y)),
     nested=lambda: full(Odd(lambda m, h: dict(both=h, rest=[h,(m.lin(h),)]), lin=lin())))

# as a video model of four clips wants it: it is tried on as many samples as a few slices have
rows(ordinary, E, to=controls, kw=dict(n=32, bs=16),
     clips_of_four=one(lambda m, h: h+h.view(-1, 4, 8).flip(1).reshape(h.shape)))
def tokens(): return torch.randint(0, 9, (27,3)),classes(27)
rows(ordinary, E, to=controls, kw=dict(whole=True, data=tokens), sparse_gradients=lambda: nn.Sequential(
    nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 3)))

# ---- models that look at the batch, and what the refusal says

def centre(h): return h-h.mean(0)
at_odd,at_batch = "It begins in the Odd 'block.odd'",dict(n=32, bs=32, small=8)
def same_as(k): return (k[:,None]==k[None]).double()
def by_label(f): return lambda: Odd(lambda m, x, k: m.b(torch.tanh(f(m.a(x), k))), a=nn.Linear(6,8), b=nn.Linear(8,3))
def words(f): return one(lambda m, x: m.o(torch.tanh(f(m, x))), e=lambda: nn.Embedding(20,6), o=lambda: nn.Linear(6,3))
def lengths(x): return (x!=1).sum(1)
def texts(n=32, t=12):
    g = torch.Generator().manual_seed(2)
    x = torch.randint(2, 20, (n,t), generator=g)
    for row,k in zip(x, torch.randint(3, t+1, (n,), generator=g)): row[k:] = 1
    return x

whole_batch = dict(at_batch, whole=True, says='It begins in the Odd[. ]')
rows('padding', E, C, kw=dict(whole_batch, data=lambda: (texts(),classes(32))),
     cut_to_the_longest=words(lambda m, x: m.e(x[:,:int(lengths(x).max())]).mean(1)),
     relative_lengths=words(lambda m, x: m.e(x).sum(1)/lengths(x).max()))
rows('groups of rows', E, C, kw=dict(whole_batch, data=lambda: ((features(32),classes(32, 7)), classes(32))),
     mean_of_a_group=by_label(lambda h, k: h-.5*same_as(k)@h/same_as(k).sum(1, keepdim=True)),
     attention_in_a_group=by_label(lambda h, k: h+torch.softmax((h@h.T).masked_fill(same_as(k)==0, -math.inf), 1)@h))

def chosen(k): return one(lambda m, h: h*(1+h.new_zeros(len(h), 1).index_fill(0, k(h.norm(dim=1)), 1.)))
rows('chosen rows', E, C, kw=dict(at_batch, says=at_odd), largest=chosen(lambda o: o.topk(min(12, len(o))).indices),
     smallest=chosen(lambda o: o.argsort()[:10]), late=chosen(lambda o: torch.arange(16, max(16, len(o)))))

def experts(capacity):
    "Each takes its rows, up to its capacity"
    def run(m, h):
        p,i = m.router(h).softmax(1).max(1)
        out = torch.zeros_like(h)
        for j,e in enumerate(m.experts):
            k = capacity((i==j).nonzero()[:,0], len(h))
            if len(k): out = out.index_copy(0, k, e(h[k])*p[k,None])
        return out
    return one(run, router=lambda: nn.Linear(8,3), experts=lambda: nn.ModuleList(lin() for _ in range(3)))
rows('experts', E, C, kw=dict(at_batch, says=at_odd), five_rows=experts(lambda k, n: k[:5]),
     a_share_of_all=experts(lambda k, n: k[:max(1, n//8)]), half_of_its_rows=experts(lambda k, n: k[:len(k)//2]))

def checked(f):
    def run(m, h):
        assert torch.isfinite(h).all() and h.abs().max().item()<1e6
        return f(h)
    return run
rows('behind asserts', E, C, kw=dict(at_batch, says=at_odd),
     groups_of_twelve=one(checked(lambda h: torch.cat(list(map(centre, h.split(12)))))),
     a_number=one(checked(lambda h: h*h[0,0].item())), a_mask=one(checked(lambda h: h+h[h[:,0]>0].mean(0))))

def cnn(*norm): return lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 2), *[f(8) for f in norm], nn.ReLU(),
                                             nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
def pictures(): return features(32, 3*16*16).view(32, 3, 16, 16),classes(32)
def means(m, h):
    "Numbers that count samples, such as a mean that is written by hand"
    by_hand = h.sum()/len(h) + h.sum()*(1/len(h)) + 0*torch.arange(1, len(h)+1).sum()
    return h + 0*by_hand.detach()
def masked_mean(m, x): return (m.e(x)*(x!=1)[...,None]).sum(1)/lengths(x)[:,None]
rows('good images', E, to=controls, kw=dict(whole_batch, says='', data=pictures),
     norm_of_images=cnn(nn.BatchNorm2d, lambda n: nn.Dropout2d(.3)), groups_of_channels=cnn(partial(nn.GroupNorm, 2)))
def force(m, h):
    "The gradient of an energy, which the model takes by itself"
    with torch.enable_grad():
        z = h if h.requires_grad else h.detach().requires_grad_()
        g, = torch.autograd.grad(m.l(z).tanh().sum(), z, create_graph=True)
    return h-.1*g
rows('good models', E, C, G, to=controls, force=one(force, l=lin))
rows('good models', E, C, to=controls, kw=at_batch, numbers_that_count=one(means), behind_an_assert=one(checked(noop)),
     all_of_its_rows=experts(lambda k, n: k))
rows('good models', E, C, to=controls, kw=dict(whole_batch, says='', data=lambda: (texts(),classes(32))),
     masked_mean=words(masked_mean))

def around(*odd): return lambda: nn.Sequential(nn.Linear(6,8), *[o() for o in odd], nn.Linear(8,3))
def between(f): return one(lambda m, x: m.b(f(m.a(x))), a=lin, b=lin)
def in_slices_only(h):
    assert not 4<len(h)<16, 'too few rows'
    return h
rows('in the innermost module that gets the same', C, kw=dict(at_batch, whole=True),
     between_layers=(around(between(centre)), "It begins in the Odd '1'"),
     in_the_batch_only=(around(lambda: nn.Sequential(lin(), between(lambda h: centre(h) if len(h)>=32 else h)())),
                        "It begins in the Odd '1.1'"),
     argument_by_name=(around(one(lambda m, x: m.lin(input=centre(x)), lin=lin)), "It begins in the Odd '1'"),
     the_first_of_two=(around(lambda: nn.Sequential(one(lambda m, x: centre(x))(), between(noop)())),
                       "It begins in the Odd '1.0'"),
     in_place=(around(lambda: nn.Sequential(lin(), Odd(lambda m, x: x.sub_(x.mean(0))))), "in the Odd '1.1'"),
     raises=(around(between(in_slices_only)), 'in slices of 8 the model raises AssertionError: too few rows'))

def among(f, **has):
    "Also where slices wait at norms, and the model runs for a plan before"
    return one(lambda m, h: f(m, m.drop(m.bn(h))), bn=norm, drop=lambda: nn.Dropout(.2), **has)
def hides(h):
    "One mask in fifty hides a row: the trial makes that frequent"
    keep = (torch.rand(len(h))>.02).to(h)
    return h*keep[:,None] + (1-keep).sum()
def keeps_size(m, h): m.bs = float(len(h)); return h
def steps_by_itself(m, h): m.w.data += .1; return h*m.w.detach().clone()
rows('among norms', E, C,
     among_norms=(among(lambda m, h: centre(h)), "is not possible.*block.odd'.*offload_activations"))
rows('among norms', E, its_size=(among(keeps_size), 'block.odd.bs .*take a local variable'),
     recomputes=(among(lambda m, h: centre(h), gradient_checkpointing=lambda: True),   # as transformers say it
                 r'call gradient_checkpointing_disable\(\) first'),
     rare=(among(lambda m, h: hides(h)), 'exact=True'),
     ghost=(one(lambda m, h: torch.cat(list(map(m.bn, h.split(4)))), bn=norm), 'exact=True is not possible'))
def makes(m, h):
    "A layer, when it first runs"
    if 'made' not in m._modules: m.made = lin().to(h)
    return m.made(h)
def odd_rows(m, h):
    "The gradient is half as large where the number of rows is odd, which a look forward cannot see"
    if h.requires_grad: (h := h*1).register_hook(lambda g: g*(1-.5*(len(g)%2)))
    return h
rows('counts rows', E, C, odd_rows=(one(odd_rows), 'gives other values: the gradient'))
rows('makes a layer', E, C, made_in_forward=(one(makes), 'is not possible.*It begins in the Odd'))
rows('another way', E, kw=dict(whole=True),   # before the norm, if a value is large
     branch=(lambda: nn.Sequential(Odd(lambda m, x: centre(x) if x.abs().max()>8 else x), nn.Linear(6,8), norm(),
                                   nn.Tanh(), nn.Linear(8,3)), "It begins in the Odd '0'"))
rows(moves, G, steps_by_itself=(one(steps_by_itself, w=lambda: nn.Parameter(torch.ones(()))),
                                'is not possible.*offload_activations'))
rows(asks, E, kw=dict(says='exact=True is not possible'),
     always=one(lambda m, h: again(m.inner, h), inner=deep),
     reentrant=one(lambda m, h: checkpoint(m.inner, h.requires_grad_(), use_reentrant=True), inner=deep))

# ---- what cannot be cut, or seen into

def inner(f): return one(lambda m, h: m.l(h), l=f)
def in_place(): m = small_model(); m.compile(backend='eager'); return m
rows('cannot be cut', E,
     two_dims=(one(lambda m, h: h*torch.rand(len(h),len(h)).to(h).sum(1, keepdim=True)), 'which dimension'),
     rrelu=(inner(nn.RReLU), "RReLU 'block.odd.l' draws with rrelu"),
     scripted=(inner(lambda: torch.jit.script(lin().double())), 'into the RecursiveScriptModule'),
     compiled=(inner(lambda: torch.compile(lin())), "see into the OptimizedModule 'block.odd.l'"),
     parallel=(inner(lambda: parallel(lin())), "see into the DataParallel 'block.odd.l'"),
     values=(one(lambda m, h: h*torch.bernoulli(h.sigmoid().detach())), 'draws with bernoulli'))
rows('cannot be cut', E, kw=dict(whole=True), compiled_in_place=(in_place, 'which is compiled'),
     # the slices are views of the batch, so autograd sees the change of another one
     the_input=(one(lambda m, x: m.m(x.add_(1.)), m=lambda: nn.Sequential(nn.Linear(6,8), norm(), nn.Linear(8,3))),
                'modified by an inplace'))

def odd_way():
    "A batch norm only where a feature is large"
    norm = Odd(lambda m, x: m.bn(x) if (x[:,0]>9).any() else x, bn=nn.BatchNorm1d(6))
    return nn.Sequential(norm, nn.Linear(6,6), nn.BatchNorm1d(6), nn.Linear(6,3))
def large(i): x = features(27); x[i,0] = 10.; return lambda: (x,classes(27))
rows('a slice goes another way', E, kw=dict(whole=True), third=(odd_way, "comes to the BatchNorm1d '0.bn'", large(8)),
     second=(odd_way, "one comes to the BatchNorm1d '0.bn'", large(5)), first=(odd_way, 'one comes to', large(1)))

def classifier(seq_len):
    config = dict(awd_lstm_clas_config, emb_sz=6, n_hid=10, n_layers=2)
    return lambda: get_text_classifier(AWD_LSTM, 40, 3, seq_len=seq_len, config=config, max_len=30)
def long_texts():
    x = torch.randint(2, 40, (8,30))
    x[5:,12:] = 1   # padding
    return x,classes(8)
long = dict(whole=True, data=long_texts, cbs=rnn_cbs, n=8, bs=8)
rows('texts that end', E, kw=long,   # fastai's classifier leaves them out, so its draws depend on the texts
     long_texts=(classifier(10), 'Pass seq_len=30 to TextDataLoaders.*gradient_checkpointing'))
rows('texts that end', E, to=controls, kw=long, texts_as_read=classifier(30))

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

def way_of(k, way, model):
    "The callback for `way`"
    if way==G: return GradientCheckpointing([model.block] if hasattr(model, 'block') else None)
    return MicroBatch(k.small, **{way:True})

def train(k, way=None):
    "The learner of `k`, the notes on its fit, and the error that stopped it"
    model,xb,yb = k.make()
    set_seed(1)
    dls = DataLoaders(*[DataLoader(Items(xb[0], (*xb[1:],*yb)), bs=k.bs) for _ in range(2)])
    for o in (dls,*dls.loaders): o.n_inp = len(xb)
    notes = Notes()
    cbs = [NoValid(), notes, *L(k.cbs()), *L(way and way_of(k, way, model))]
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
        left_alone(learn.model)
        if got.n: return 'stopped',str(e)
        learn.remove_cbs(learn.cbs.filter(risinstance((MicroBatch,GradientCheckpointing)))).fit(1)   # nothing is lost
        return 'refused',str(e)
    if e: return 'raw',f'{type(e).__name__}: {e}'
    worst = rel(got.read, want.read)
    return ('exact' if worst[0]<=tol else 'silent'),worst
