"""The batch that trains runs forward as a whole and in its slices, and a model that does something else is refused.

test_kinds has what users do to a batch, and good models, which must not be refused. A model that has changed between
two fits is tried again."""
import pytest
from nets import *
from kinds import Odd,around,centre,kinds,lin,norm,one
from fastai_accum.all import *
from fastai_accum.proof import compare as the_look
from fastai_accum.proof.compare import Sizes,Trial,Way,most,part
from fastai_accum.proof.dry import sketch
from fastai_accum.slices import Refused,slices

N,bs = 32,8
double = torch.float64
def g(seed): return torch.Generator().manual_seed(seed)
def feats(n=N, k=6): return torch.randn(n, k, generator=g(0), dtype=double)
def rows(f):
    "Two layers, with what `f` does to the rows between them"
    torch.manual_seed(0)
    return Odd(lambda m, x: m.b(torch.tanh(f(m, m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 3)).double()

ways = 'exact','coupled'

def learner(model, xb, *cbs, loss=nn.CrossEntropyLoss(), y=None, device=None):
    b = *tuplify(xb),classes(N) if y is None else y
    return Learner(of_batches([b]*2, n_inp=len(b)-1, device=device), model, loss, SGD, lr=.1, default_cbs=False,
                   cbs=[TrainEvalCallback(), NoValid(), *cbs])

refused = partial(refused, match='is not possible', exc=Refused, fit=lambda l: trained(l))

def trained(learn, n=1):
    torch.manual_seed(5)
    with redirect_stdout(io.StringIO()): learn.fit(n)

at_16 = dict(number=lambda m,h: h*(2. if len(h)>=16 else 1.),
             dropout=lambda m,h: F.dropout(h, .5 if len(h)>=16 else .1),
             weights=lambda m,h: (m.c if len(h)>=16 else m.d)(h), norm=lambda m,h: m.norm(h) if len(h)>=16 else h)

@drawn(5, k=at_16, size=[8,1], dim=[0,1])
def test_numbers_and_weights_that_depend_on_the_size(k, size, dim):
    "With the same operations of PyTorch; also where slices have one sample, or where a batch is split in another way"
    def split(b, bs): return [(b[0][:,i:i+bs],b[1][i:i+bs]) for i in range(0, len(b[1]), bs)]
    m = Odd(lambda m, x: m.b(at_16[k](m, m.a(x.transpose(0, dim)))), a=nn.Linear(6,8), b=nn.Linear(8,3),
            c=lin(), d=lin(), norm=nn.BatchNorm1d(8)).double()
    cb = MicroBatch(size, exact=True, split=split if dim else None)
    assert 'your batch of 32 samples is fine, but in slices of' in refused(learner(m, feats().transpose(0, dim), cb))

def test_on_a_device(device):
    for k in 'mean_of_a_group','cut_to_the_longest':
        model,xb,_ = kinds[k].make()
        xb = tuple(o.to(here.device) for o in xb)
        refused(learner(model.to(here.device), xb, MicroBatch(bs, exact=True), device=here.device))

# ---- models that change between two fits

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.share = nn.Linear(6, 8),nn.Linear(8, 3),0
        self.double()
        self.is_balanced = False
    def forward(self, x):
        h = self.a(x)
        h = h-self.share*h.mean(0)
        if self.is_balanced and h.requires_grad: h.register_hook(lambda g: g/g.norm())
        return self.b(torch.tanh(h))

def hook(m): m.a.register_forward_hook(lambda m, x, out: centre(out))
def number(m): m.share = 1
def of_the_gradient(m): m.is_balanced = True

@each(change=[hook,number,of_the_gradient], way=ways)
def test_a_model_that_has_changed_between_two_fits(change, way):
    learn = learner(Plain(), feats(), MicroBatch(bs, **{way:True}))
    trained(learn)
    change(learn.model)
    refused(learn)

def test_each_number_of_samples_is_looked_at_once(monkeypatch):
    seen = []
    def compare(at):
        seen.append((len(at.batches[0][0]),at.ways[0].size))
        return the_look.Proof(error=0.)
    monkeypatch.setattr(the_look, 'compare', compare)
    bs = [(feats(n),classes(n)) for n in (32,20,32,20,6)]
    learn = learner(Plain(), feats(), MicroBatch(8, exact=True))
    learn.dls = of_batches(bs)
    for i in range(2): trained(learn, 2)
    assert seen==2*[(32,8),(20,8)]   # in each fit; six samples are not cut

# ---- what a refusal says

@each(case=[(lambda h: centre(h),'MicroBatch: coupled=True is not'),   # or its input cannot be computed again
            (lambda h: h.mul_(2),'GradientCheckpointing: 1 changes')])
def test_of_two_ways_the_one_that_fails_is_named(case):
    "Whichever comes first"
    f,says = case
    m = around(one(lambda m, h: m.lin(f(h)), lin=lin))().double()
    learn = learner(m, feats(), MicroBatch(bs, coupled=True), GradientCheckpointing([m[1]]))
    with pytest.raises(Refused, match=says): trained(learn)

def test_what_is_exact_comes_first():
    blocks = lambda: nn.Sequential(lin(), nn.Tanh()),lambda: nn.Sequential(lin())
    m = around(one(lambda m, x: centre(x)), nn.Tanh, *blocks)().double()
    said = refused(learner(m, feats(), MicroBatch(bs, exact=True)))
    assert 'write `learn.gradient_checkpointing()` or `learn.offload_activations()`, which' in said
    assert 'MicroBatch without exact=True is another training: batch norm, random numbers and the Odd ' in said
    said = refused(learner(rows(lambda m, h: centre(h)), feats(), MicroBatch(bs, exact=True)))   # it has no blocks
    assert ') and write `learn.offload_activations()`, which' in said

@each(times=[3,300])
def test_how_sharp_it_is(times):
    "Where weights cancel, the limit is 30 times what their last bit does: ten limits are refused, a tenth passes"
    large = [nn.Parameter(torch.full((1000,), 1e10, dtype=double)) for _ in range(2)]
    m = Odd(lambda m, x: (x+m.a)-m.b, **dict(zip('ab', large)))
    x = torch.randn(1, 1000, generator=g(0), dtype=double)
    err = times*1e10*torch.finfo(double).eps*2**.5   # two weights move, and a number in `x` is about 1
    way = Way('twice', (), lambda forward, yb, x: forward(x)*(1+err), '')
    found = the_look.compare(Trial(m, [(x,)], 1, [way], double=False, learns=False))
    assert found.fails==(times>30) and .5<times*found.limit/(30*found.error)<2, found

@each(bad=[False,True])
def test_the_line_without_a_proof(bad):
    "It is advised only if the batch that trains runs in slices: a model that takes no large values has no trial"
    def small(m, h): assert h.std()<1.5; return h-.5*h.mean(0) if bad else h
    with pytest.raises(Refused) as e: trained(learner(rows(small), feats(), MicroBatch(bs, exact=True)))
    assert ('prove=False' in str(e.value))!=bad, e.value

def too_many(m, h):
    if len(h)>bs: raise IndexError('not so many')
    return h
def standardised():
    "Batch norm of weights, as in NFNets: without gradients nobody can tell that slices come to the same one"
    def f(m, x): return m.bn(F.linear(x, F.batch_norm(m.lin.weight[None], None, None, m.gain*2, training=True)[0]))
    return around(one(f, lin=lin, gain=lambda: nn.Parameter(torch.ones(8)), bn=norm))().double()

@each(case=[
    (Plain, '32 samples give the same output in slices of 8: an error above 1e-08 would show.'),
    (lambda: rows(too_many), 'Your batch could not run forward as a whole and in slices (IndexError: not so many).'),
    (standardised, '')])
def test_the_line_says_what_was_compared(case, capsys):
    "If nobody knows, the line says so, and the training goes on"
    make,says = case
    learner(make(), feats(), MicroBatch(bs, exact=True)).fit(1)
    said = capsys.readouterr().out
    assert 'is proved on your model' in said and says in said

# ---- memory

@pytest.mark.parametrize('px,n_seen', [(8,32),(256,16)])
def test_fewer_samples_of_large_images(px, n_seen):
    "Without gradients, a layer of 32 large images takes more than a step with 8: decided from the size"
    x = torch.randn(32, 3, px, px)
    m = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3))
    way = Way('', (), None, '', blind=True, size=8)
    assert most(m, (x,), 32, 1, way)==n_seen

def test_part_of_a_batch_comes_from_the_whole_of_it():
    b = torch.arange(32),[str(i) for i in range(32)]
    x,y = part(b, 32, 8, slices)
    assert x.tolist()==list(range(0, 32, 4)) and y==[str(i) for i in x.tolist()]
    assert part(b, 32, 40, slices) is b

@each(case=[(16, RuntimeError('CUDA out of memory'), '16 samples give the same output in slices of 4'),
            (0, MemoryError(), 'could not run forward as a whole and in slices (memory runs out)')])
def test_memory_that_runs_out_means_fewer_samples(case, monkeypatch, capsys):
    (most,error,says),run = case,Trial.run
    def limited(self, *args, **kwargs):
        if not self.learns and len(self.batches[0][0])>most: raise error
        return run(self, *args, **kwargs)
    with monkeypatch.context() as mp:
        mp.setattr(Trial, 'run', limited)
        learner(Plain(), feats(), MicroBatch(4, coupled=True)).fit(1)
    assert says in capsys.readouterr().out

def test_large_predictions_are_kept_in_pieces():
    "Never as a whole in float64"
    x,largest = torch.randn(40, 100_000),[0]
    class Watch(Sizes):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dtype==double: largest[0] = max(largest[0], out.numel())
            return out
    with Watch(): sketch(x)
    assert largest[0]<=1_000_000

# ---- what cannot be cut, and groups of rows

class Graph:
    def __init__(self, x): self.x = x
    def to(self, *args, **kwargs): return self
layouts = dict(coo=lambda x: x.to_sparse(), csr=lambda x: x.to_sparse_csr(), graph=Graph, nested=lambda x: [Graph(x)]*3)

@each(kind=layouts, way=[{},dict(coupled=True),dict(exact=True)])
def test_one_error_for_what_cannot_be_cut(kind, way):
    learn = learner(Plain(), layouts[kind](feats()), MicroBatch(bs, **way))
    says = 'MicroBatch: the batch cannot be cut: it .*; pass split=f, with f.batch, bs. -> slices'
    with pytest.raises(ValueError, match=says): trained(learn)

def asserted(p, y):
    assert len(p)%32==0
    return p.mean()

@each(case=[(triplets,8,30), (pairs,5,32), (asserted,8,32)])
def test_a_note_where_a_slice_cuts_a_group(case):
    loss,size,n = case
    learn = learner(Plain(), feats()[:n], MicroBatch(size), loss=loss, y=classes(n))
    with pytest.raises((RuntimeError,ValueError,AssertionError)) as e: trained(learn)
    said = ' '.join(e.value.__notes__)
    assert 'MicroBatch: this came while a batch of' in said and 'let bs be a multiple of a group' in said
