"How batches are cut, run in slices and joined again, and what is tried again when memory runs out"
import pytest,warnings
from contextlib import nullcontext
from dataclasses import dataclass
from unittest import mock
from weakref import WeakKeyDictionary
from harness import *
from fastai_accum import microbatch
from fastai_accum.microbatch import *
from fastai_accum.slices import *
from fastai_accum.devices import n_autocast
from fastai_accum.patch import *
from fastai_accum.extras import *
from fastai.callback.mixup import *

@pytest.fixture(autouse=True)
def unproved(monkeypatch):
    "The models of these tests note their slices, so a proof would rightly refuse them; test_prove.py has the proofs"
    monkeypatch.setattr(microbatch, 'guard', noop)

def cycle(learn): learn.fit_one_cycle(2, .02)
def train(cbs=(), n=76, bs=32, fit=cycle, model=None, dls=None, **kwargs):
    learn = make_learner((dls or make_dls)(n, bs), model and model(), cbs=cbs, **{**one_group, **kwargs})
    torch.manual_seed(1); np.random.seed(1); random.seed(1)
    fit(learn)
    return learn
def alike(cb, tol=TOL, **kwargs): assert_same(train(cb, **kwargs), train(**kwargs), tol)

modes = each(coupled=[False,True])

def test_weight():
    "`weight=` for a loss that `loss_weight` does not know"
    w = tensor([1.,10.,3.]).double()
    kwargs = dict(loss_func=lambda p, y: F.cross_entropy(p, y, weight=w), opt_func=SGD)
    own,acc = MicroBatch(5, weight=lambda p, y: w[y].sum()),AccumulateStep(1, weight=lambda p, y: w[y].sum())
    for cbs in own,[MicroBatch(5),acc],[MicroBatch(5, weight=own.weight),AccumulateStep(1)]: alike(cbs, **kwargs)
    assert worst(train(MicroBatch(5), **kwargs), train(**kwargs))[0]>1e-3

def info_nce(p, y):
    p = F.normalize(p, dim=1)
    return F.cross_entropy(p@p.roll(1, 0).T/.1, torch.arange(len(p)))
def rmse(p, y): return (p-F.one_hot(y, 3)).pow(2).mean().sqrt()

@each(loss=[info_nce,rmse])
def test_losses_that_tie_samples(loss):
    "Exact if they see all predictions; slice by slice they are other losses"
    whole = train(loss_func=loss)
    assert_same(train([MicroBatch(3, coupled=True),AccumulateStep(1)], loss_func=loss), whole)
    assert worst(train(MicroBatch(5), loss_func=loss), whole)[0]>1e-3

class Noisy(nn.Module):
    "A model that draws from all sources, and has buffers"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.drop,self.bn,self.b = nn.Linear(6,5),nn.Dropout(.5),nn.BatchNorm1d(5),nn.Linear(5,3)
        self.double()
        self.n = 0
    def forward(self, x):
        self.n += 1
        scale = (1+random.random()+np.random.rand()) if self.training else 1
        return self.b(self.bn(self.drop(self.a(x).tanh())*scale))

@torch.no_grad()
def leave(dicts, was, ends, sizes):
    for i,(d,w) in enumerate(zip(dicts, was)):
        for k,b in w.items():
            vs = [e[i][k] for e in ends]
            if b is None or any(v.shape!=b.shape for v in vs): d[k] = vs[-1]; continue
            mean = sum(n*v for n,v in zip(sizes, vs))/sum(sizes)
            d[k] = b.copy_(mean if b.is_floating_point() else vs[-1])

def in_slices(m, f, x):
    """What `f` returns for slices of eight, keeping the activations of all. Each slice begins with the buffers from
    before the batch, which get the mean of what the slices leave"""
    dicts,outs,ends = [o._buffers for o in m.modules()],[],[]
    was = [dict(d) for d in dicts]
    for o in x.split(8):
        for d,w in zip(dicts, was): d.update({k:b if b is None else b.clone() for k,b in w.items()})
        outs.append(f(o)); ends.append([dict(d) for d in dicts])
    leave(dicts, was, ends, [len(o) for o in x.split(8)])
    return outs

class InSlices(Noisy):
    "The same model, slice by slice"
    def forward(self, x): return torch.cat(in_slices(self, super().forward, x))

def test_the_second_pass_draws_what_the_first_has_drawn():
    "Dropout masks are the same, batch norm moves once, and the next draws are as if there were no second pass"
    a,b = train(MicroBatch(8, coupled=True), model=Noisy),train(model=InSlices)
    assert_same(a, b)
    assert a.model.bn.num_batches_tracked==b.model.bn.num_batches_tracked
    assert a.model.n<b.model.n   # a batch counts once; the slices of the other model count each

class Structured(nn.Module):
    "Several inputs and outputs, nested"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b = nn.Linear(6,3).double(),nn.Linear(2,3).double()
    def forward(self, x, more):
        a,b = self.a(x),self.b(more['side'])*more['scale']
        return dict(both=a+b, rest=[a,(b,)])

def listed(batch, n, bs):
    "Loaders of two inputs, which have what `batch` makes of ranges of samples"
    dls = DataLoaders(*[DataLoader([batch(i, min(i+bs,k)) for i in range(0, k, bs)], bs=None) for k in (n,24)])
    dls.n_inp = 2
    return dls
def nested(i, j):
    x,side,y,z = (o[i:j] for o in (features(80),features(80, 2),classes(80),features(80, 3)))
    return x,dict(side=side, scale=tensor(2.).double(), name='side'),y,z

@modes
def test_nested_batches(coupled):
    def loss(pred, y, z): return F.cross_entropy(pred['both'], y)+F.mse_loss(pred['rest'][1][0].mean(1), z[:,0])
    alike(MicroBatch(5, coupled=coupled), dls=partial(listed, nested), model=Structured, loss_func=loss)

def test_slices_of_containers():
    from collections import UserDict,namedtuple
    P = namedtuple('P', 'x ids')
    b = P(TensorImage(torch.ones(4,2)), np.arange(4)),UserDict(m=torch.zeros(4)),[torch.ones(4),None,'text'],3
    a,c = slices(b, 3)
    assert type(a[0]) is P and type(a[0].x) is TensorImage and [o[0].ids.tolist() for o in (a,c)]==[[0,1,2],[3]]
    assert type(a[1]) is UserDict and len(a[1]['m'])==3 and len(b[1]['m'])==4
    assert [len(o[2][0]) for o in (a,c)]==[3,1] and a[2][1:]==[None,'text'] and a[3]==3

def test_slices_of_texts():
    "As fastai collates them: a tuple of strings, also nested"
    b = torch.ones(4,2),('a','b','c','d'),dict(names=['x']*4, more=(['y']*4,torch.zeros(4)))
    a,c = slices(b, 3)
    assert a[1]==('a','b','c') and c[1]==('d',) and a[2]['names']==['x']*3
    assert a[2]['more'][0]==['y']*3 and len(c[2]['more'][1])==1
    assert slices((['a','b','c'],), 2)==[(['a','b'],),(['c'],)]
    assert slices((('a','b'),('c','d')), 1)==[(('a',),('c',)),(('b',),('d',))]   # two inputs, and as many samples
    with pytest.raises(ValueError, match='one row per sample'): slices((['a','b'],['c']), 1)

packed = nn.utils.rnn.pack_sequence([torch.ones(3),torch.ones(2)])
bad = dict(uneven=(torch.ones(5), torch.ones(2,5)), nested=(dict(x=torch.ones(5), m=torch.ones(3)),), none=('text',),
           packed=(packed,))
@each(name=bad)
def test_batches_that_cannot_be_cut(name):
    with pytest.raises(ValueError, match='MicroBatch: .*split=f'): slices(bad[name], 2)

bad_splits = dict(
    loses      = lambda b, bs: [(b[0][:bs],b[1][:bs])],
    repeats    = lambda b, bs: [b, b],
    too_large  = lambda b, bs: [b],
    shuffles   = lambda b, bs: [(b[0][i::4],b[1][i::4]) for i in range(4)],
    transposed = lambda b, bs: [o.split(bs) for o in b],
    dict       = lambda b, bs: dict(x=b),
    tensor     = lambda b, bs: [b[0]])
@each(coupled=[False,True], name=bad_splits)
def test_bad_splits(coupled, name):
    with pytest.raises(ValueError, match='MicroBatch: split must return'):
        train(MicroBatch(8, coupled=coupled, split=bad_splits[name]), n=64)

class Packed(nn.Module):
    "Texts of any length one after the other, and where each of them starts"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag,self.out = nn.EmbeddingBag(20, 5).double(),nn.Linear(5, 3).double()
    def forward(self, tokens, starts): return self.out(self.bag(tokens, starts))

texts = [torch.arange(i, i+1+i%5)%20 for i in range(80)]
def of_texts(i, j):
    return torch.cat(texts[i:j]),tensor([0]+[len(o) for o in texts[i:j-1]]).cumsum(0),classes(80)[i:j]

def split_packed(b, bs):
    tokens,starts,*ys = b
    ends = [*starts[1:].tolist(), len(tokens)]
    parts = range(0, len(starts), bs)
    return [(tokens[starts[i]:ends[min(i+bs, len(starts))-1]], starts[i:i+bs]-starts[i], *(y[i:i+bs] for y in ys))
            for i in parts]

@modes
def test_packed_texts(coupled):
    kwargs = dict(dls=partial(listed, of_texts), model=Packed)
    a,b = train(MicroBatch(5, coupled=coupled, split=split_packed), **kwargs),train(**kwargs)
    assert_same(a, b)
    test = DataLoader([o[:2] for o in a.dls.valid], bs=None)   # no targets to count the samples by
    close(a.get_preds(dl=test)[0], b.get_preds(dl=test)[0])

logs = WeakKeyDictionary()   # not held by the models: what they hold counts a batch once, however it is cut

class Sizes(nn.Module):
    sizes = property(lambda self: logs.setdefault(self, []))
    def __init__(self): super().__init__(); self.m = small_model()
    def forward(self, x): self.sizes.append((self.training,len(x))); return self.m(x)

others = dict(clip=lambda: GradientClip(.1), scaler=lambda: OnCpu(init_scale=2.**10, growth_interval=2),
              freeze=BnFreeze, skip_first=lambda: SkipToEpoch(1))
@each(5, coupled=[False,True], name=others)
def test_beside_others(coupled, name):
    "`GradAccumDtype` finds the windows, whatever the order of the callbacks"
    a = train([GradAccumDtype(torch.float64),MicroBatch(5, coupled=coupled),others[name]()], metrics=accuracy)
    assert_same(a, train(others[name](), metrics=accuracy))

@each(mix=[MixUp,CutMix])
def test_mixup_in_slices(mix, monkeypatch):
    "With `coupled=True`, MixUp draws as without slices. Otherwise it draws within each slice, and still trains"
    def images(n, bs): return make_dls(n, bs, x=features(80, 16).view(80,1,4,4), y=classes(80))
    def model(): return nn.Sequential(nn.Flatten(), small_model(16))
    def mixer(): cb = mix(.4); cb.distrib = torch.distributions.Beta(*torch.tensor([.4,.4])); return cb
    torch.set_default_dtype(torch.float64)   # of λ
    try: a,b,c = (train([mixer(),*L(o)], dls=images, model=model, loss_func=StackedCE())
                  for o in (MicroBatch(8, coupled=True),None,MicroBatch(8)))
    finally: torch.set_default_dtype(torch.float32)
    assert_same(a, b)
    assert len(c.spy.steps)==len(b.spy.steps) and 0<rel(c.recorder.losses, b.recorder.losses)[0]<1

# A limited memory: the model runs out of it by the size of its input

class Small(Noisy):
    "Runs out of memory when a slice has more than `limit` samples, or tokens in all"
    sizes = property(lambda self: logs.setdefault(self, []))
    def __init__(self, limit, where='forward', err=None):
        super().__init__()
        self.limit,self.where,self.err = limit,where,err
    def raise_(self, *_): raise self.err or torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')
    def forward(self, x):
        if self.training: self.sizes.append(len(x))
        out,full = super().forward(x),self.training and len(x)>self.limit
        if full and self.where=='forward': self.raise_()
        if full and out.requires_grad: out.register_hook(self.raise_)
        return out

@each(8, coupled=[False,True], where=['forward','backward'], how=[(1,32,8),(1,30,7),(4,8,2),(3,8,5)],
       scaler=[False,True])
def test_auto(coupled, where, how, scaler):
    "Bit for bit the run that uses the right size from the beginning, with its constant and its samples in the metric"
    n_step,bs,limit = how
    found = bs
    while found>limit: found = -(-found//2)
    more = lambda: [AccumulateStep(n_step)] + [OnCpu(init_scale=2.**10, growth_interval=2)]*scaler
    def fit(learn): learn.recorder.train_metrics = True; cycle(learn)
    kwargs = dict(bs=bs, fit=fit, metrics=accuracy, loss_func=nn.CrossEntropyLoss(weight=tensor([1.,10.,3.]).double()))
    a = train([MicroBatch('auto', coupled=coupled),*more()], model=partial(Small, limit, where), **kwargs)
    b = train([MicroBatch(found, coupled=coupled),*more()], model=Noisy, **kwargs)
    assert_same(a, b, tol=0)
    assert a.accumulate_step.counts==b.accumulate_step.counts
    is_clean(a)
    assert n_autocast()==0 and max(a.model.sizes[-5:])<=found

def test_auto_when_memory_runs_out_before_the_model():
    """Memory can also run out while a batch is cut and copied to the device: here in the second window, after the
    step of the first"""
    k = 0
    def split(b, bs):
        nonlocal k
        k += 1
        if k>1 and bs>8: raise torch.OutOfMemoryError('CUDA out of memory')
        return slices(b, bs)
    def later(b, bs): return slices(b, 8 if next(n) else 32)
    n = itertools.count()
    a = train(MicroBatch(split=split, valid=False), n=96, fit=lambda l: l.fit(1))
    b = train(MicroBatch(32, split=later, valid=False), n=96, fit=lambda l: l.fit(1))
    assert_same(a, b, tol=0)

@pytest.mark.skipif(not torch.cuda.is_available(),
                    reason='lets the memory of a GPU run out, and this machine has none; the tests above raise the '
                           'error themselves')
@each(coupled=[False,True], amp=[False,True])
def test_auto_on_a_gpu(coupled, amp):
    "With a fraction of its memory; a batch takes four times as much"
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6,2**16), nn.Tanh(), nn.Dropout(.1), nn.Linear(2**16,3)).double()
    def fit(learn): learn.dls.to('cuda'); learn.fit(2); learn.model.cpu()
    def run(cb, bs=1024):
        return train([cb,*([MixedPrecision()] if amp else [])], n=3*bs, bs=bs, fit=fit, model=model, opt_func=SGD)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated()+2**29)/total)
    try: a = run(MicroBatch('auto', coupled=coupled))
    finally: torch.cuda.set_per_process_memory_fraction(1.)
    found = a.micro_batches.fits[True]
    assert 1<=found<1024
    assert_same(a, run(MicroBatch(found, coupled=coupled)), tol=1e-3 if amp else TOL)
    assert n_autocast()==0

def test_auto_adds_up_samples():
    "Windows of `n_samples` go back too, and the schedule with them"
    for n_samples in 20,32,50:
        a,b = (train([MicroBatch(bs),AccumulateStep(n_samples=n_samples)], bs=8, model=m)
               for bs,m in (('auto',partial(Small, 2)),(2,Noisy)))
        assert_same(a, b, tol=0)
        assert a.accumulate_step.counts==b.accumulate_step.counts

def test_auto_says_what_it_has_found(capsys):
    "When memory gets scarce, in training and in validation; it is remembered, and gradients stay"
    model = Small(16)
    def later(cb): model.limit = 4
    def valid(m, x, o):
        if not m.training and len(x[0])>8: model.raise_()
    at = model.a.register_forward_hook(valid)
    learn = make_learner(make_dls(96, 32), model, cbs=[MicroBatch(),Callback(after_epoch=later)], **one_group)
    learn.fit(2)
    said = [o for o in capsys.readouterr().out.splitlines() if o.startswith('MicroBatch: memory')]
    assert said==['MicroBatch: memory ran out, and batches of 32 are now cut into slices of 16',
                  'MicroBatch: memory ran out in validation, and batches of 16 are now cut into slices of 8',
                  'MicroBatch: memory ran out, and batches of 32 are now cut into slices of 4']
    learn.micro_batches.fits.pop(False)
    for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    learn.validate()
    at.remove()
    assert all((p.grad==1).all() for p in learn.model.parameters())
    capsys.readouterr(); learn.fit(1)
    assert max(model.sizes[-24:])==4 and 'memory' not in capsys.readouterr().out

class OwnOptimizer(Callback):
    "Parameters of the loss, with an optimizer that the learner does not know of"
    run_valid = False
    def before_fit(self): self.opt = torch.optim.SGD(self.learn.loss_func.parameters(), lr=.1)
    def before_step(self): self.opt.step(); self.opt.zero_grad()
class Scaled(nn.Module):
    def __init__(self): super().__init__(); self.s = nn.Parameter(torch.ones(3).double())
    def forward(self, p, y): return F.cross_entropy(p*self.s, y)
@modes
def test_parameters_of_the_loss(coupled):
    for cbs,plain,bs,tol,models in ([MicroBatch(5, coupled=coupled)],[],32,TOL,(small_model,small_model)), \
        ([MicroBatch('auto', coupled=coupled),AccumulateStep(2)],[MicroBatch(4, coupled=coupled),AccumulateStep(2)],8,0,
         (partial(Small, 4, 'backward'),Noisy)):
        a,b = (train([OwnOptimizer(),*o], bs=bs, loss_func=Scaled(), model=m) for o,m in zip((cbs,plain), models))
        assert_same(a, b, tol)
        close(a.loss_func.s, b.loss_func.s, tol)

def test_auto_below_one():
    class Never(nn.Module):
        def __init__(self): super().__init__(); self.l = nn.Linear(6,3).double()
        def forward(self, x): raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(RuntimeError, match='MicroBatch: memory .*even with one sample at a time'):
        train(MicroBatch(), model=Never)

@each(2, coupled=[False,True], where=['forward','backward'])
def test_auto_lets_other_errors_through(coupled, where):
    err = RuntimeError('mat1 and mat2 shapes cannot be multiplied')
    learn = make_learner(make_dls(64, 32), Small(8, where, err), cbs=MicroBatch('auto', coupled=coupled), **one_group)
    with pytest.raises(RuntimeError, match='mat1 and mat2'): learn.fit(1)
    assert set(learn.model.sizes)=={32}

# Models with a state

class TokenLoss(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred.flatten(0,1), y.flatten())

def texts_dls(n, bs):
    "A language model's batches: row `i` goes on where row `i` of the batch before has ended"
    from fastai.text.data import LMDataLoader
    ids = torch.randint(2, 20, (n*bs,), generator=torch.Generator().manual_seed(0))
    return DataLoaders(*[LMDataLoader([(ids,)], lens=[len(ids)], bs=bs, seq_len=7, shuffle=False, num_workers=0)
                         for _ in range(2)])

def language_model(p=0.):
    from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    # fastai fails for a weight_p of 0
    config = {**awd_lstm_lm_config,
              **dict(emb_sz=6, n_hid=8, n_layers=2, output_p=p, hidden_p=p, input_p=p, embed_p=p, weight_p=p or 1e-20)}
    torch.manual_seed(0)
    return get_language_model(AWD_LSTM, 20, config).double()

def train_lm(*cbs, model=language_model):
    return train([*rnn_cbs(0., 0.),*cbs], dls=texts_dls, model=model, n=40, bs=16, loss_func=TokenLoss())

@each(coupled=[False,True], bs=[4,5])
def test_a_model_with_a_state(coupled, bs):
    "Each slice goes on with the state of its own rows"
    a = train_lm(AccumulateStep(bs-3), MicroBatch(bs, coupled=coupled))
    assert_same(a, train_lm(AccumulateStep(bs-3)))
    assert len(a.model[0].hidden[0][0][0])==16

@modes
def test_auto_with_a_state(coupled):
    "AWD-LSTM goes back to its hidden state"
    def full(m, x, out):
        if m.training and len(x[0])>5: raise torch.OutOfMemoryError('CUDA out of memory')
    def model(): m = language_model(.3); m[0].register_forward_hook(full); return m
    a = train_lm(MicroBatch('auto', coupled=coupled), model=model)
    b = train_lm(MicroBatch(4, coupled=coupled), model=partial(language_model, .3))
    assert_same(a, b, tol=TOL if coupled else 0)

# What models, callbacks and learners do besides

def test_slices_without_gradient():
    "A slice, or all of the model, has no part in the gradient"
    class Some(nn.Module):
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x):
            out,keep = torch.zeros(len(x), 3).double(),x[:,0]>.5
            if keep.any(): out[keep] = self.m(x[keep])
            return out
    alike(MicroBatch(2, coupled=True), model=Some)
    def frozen(): return small_model().requires_grad_(False)
    def run(*cbs):
        loss = Scaled()
        return train(cbs, model=frozen, loss_func=loss, splitter=lambda m: [[loss.s]])
    a,b = run(MicroBatch(8, coupled=True)),run()
    assert_same(a, b)
    close(a.loss_func.s, b.loss_func.s)

def test_input_changed_in_place():
    class Changes(Small):
        def forward(self, x): return super().forward(x.mul_(.5))
    for cb,limit,says in (MicroBatch(8, coupled=True),99,'the model changes its input in place, and coupled=True'), \
                         (MicroBatch(),8,'memory ran out, and .* in place'):
        with pytest.raises(RuntimeError, match=f'MicroBatch: {says}'): train(cb, model=partial(Changes, limit))

def test_modes_of_the_first_pass():
    "A callback sets a part of the model to evaluation for the length of its forward pass"
    class Mode(Callback):
        run_valid = False
        def before_batch(self): self.model.drop.eval()
        def after_pred(self): self.model.drop.train()
    assert_same(train([MicroBatch(8, coupled=True),Mode()], model=Noisy), train(Mode(), model=InSlices))

@each(preds=[[(torch.ones(2),1.), (torch.ones(1),5.)], [torch.ones(()), torch.zeros(())],
                                   [torch.ones(2,2), torch.ones(2,2)], [SimpleNamespace(x=1), SimpleNamespace(x=1)]])
def test_predictions_that_cannot_be_joined(preds):
    with pytest.raises(ValueError, match='MicroBatch: .*joined'): join(preds, [2,1])

def test_entries_for_samples():
    assert [o[0] for o in slices((['a','b','c'], torch.arange(3)), 2)]==[['a','b'],['c']]
    assert join([['a','b'],['c']], [2,1])==['a','b','c']
    boxes = [[dict(boxes=torch.ones(i,4)) for i in range(3)], [dict(boxes=torch.ones(7,4))]]
    assert [len(o['boxes']) for o in join(boxes, [3,1])]==[0,1,2,7]

def test_a_model_with_an_unknown_state():
    class Counting(Sizes):
        def reset(self): pass
    with pytest.raises(ValueError, match=r'MicroBatch: the model has a reset\(\)'):
        train(MicroBatch(5), model=Counting)

@modes
def test_callbacks_that_call_the_model(coupled):
    "Calls of `forward` with other inputs than the batch, with keywords, or from within the model"
    class Asks(Sizes):
        def forward(self, x, scale=1.):
            return super().forward(x)*scale if len(x)<3 else super().forward(x)*scale + 0*self(x[:2]).sum()
    class Calls(Callback):
        def after_pred(self):
            with torch.no_grad():
                self.model(self.xb[0][:3])
                assert not torch.equal(self.model(*self.xb, scale=2.), self.pred)
    assert_same(train([MicroBatch(5, coupled=coupled),Calls()], model=Asks), train(Calls(), model=Asks))

class Normal(nn.Module):
    "Its output depends on a buffer that moves; another buffer is there from the first pass on, and one grows"
    def __init__(self, limit=99):
        super().__init__()
        torch.manual_seed(0)
        self.m,self.limit = nn.utils.spectral_norm(nn.Linear(6,3)).double(),limit
        self.register_buffer('s', torch.ones(()).double())
        self.register_buffer('q', torch.zeros(0,6).double())
        self.register_buffer('first', None)
    def forward(self, x):
        self.s = .9*self.s+.1*x.detach().std()
        if self.first is None: self.first = x.detach().clone()
        self.q = torch.cat([self.q,x.detach()])[-20:]
        out = self.m(x/self.s)+self.first.mean()
        if self.training and len(x)>self.limit: raise torch.OutOfMemoryError('CUDA out of memory')
        return out
class NormalInSlices(Normal):
    def forward(self, x): return torch.cat(in_slices(self, super().forward, x))

def test_buffers_that_the_output_depends_on():
    "The second pass has those of the first; memory that runs out leaves none changed"
    kwargs = dict(n=64, fit=lambda l: l.fit(2, cbs=NoValid()))   # in validation it runs out on its own
    runs = (MicroBatch(8, coupled=True),Normal), (None,NormalInSlices), (MicroBatch(coupled=True),partial(Normal, 8))
    a,b,c = (train(o, model=m, **kwargs) for o,m in runs)
    assert_same(a, b); assert_same(c, a, tol=0)
    a,b = (train(o, model=m, **kwargs) for o,m in ((MicroBatch(),partial(Normal, 8)), (MicroBatch(8),Normal)))
    assert_same(a, b, tol=0)

def test_auto_does_not_try_a_step_again():
    class Full(Callback):
        def before_step(self): raise torch.OutOfMemoryError('CUDA out of memory')
    with pytest.raises(torch.OutOfMemoryError): train([MicroBatch(),Full()])

@modes
def test_auto_closes_autocast(coupled):
    def dls(n, bs): return make_dls(n, bs, x=features(80).float(), y=classes(80))
    train([MicroBatch('auto', coupled=coupled),OnCpu(torch.bfloat16)], model=lambda: Small(8).float(), dls=dls)
    assert n_autocast()==0

def test_auto_goes_back_twice_to_what_was_there():
    "The second batch of a window does not fit, nor does its half: both times the gradients of the first are undone"
    def fit(learn):
        for p in learn.model.parameters(): p.grad = torch.full_like(p, .1)
        learn.fit(1, .02)
    def dls(n, bs):
        x,y = features(80),classes(80)
        return DataLoaders(*[DataLoader([(x[i:j],y[i:j]) for i,j in ((0,8),(8,40),(40,48),(48,80))], bs=None)
                             for _ in range(2)])
    a,b = (train([MicroBatch(bs),AccumulateStep(2)], dls=dls, fit=fit, model=m)
           for bs,m in (('auto',partial(Small, 8)),(8,Noisy)))
    assert_same(a, b, tol=0)

def parallel(model):
    "In `DataParallel`, as on a machine without an accelerator: it would look for the model on the simulated one"
    with mock.patch('torch.nn.parallel.data_parallel._get_available_device_type', lambda: None):
        return nn.DataParallel(model)

@each(coupled=[False,True], how=[torch.jit.script, lambda m: torch.jit.trace(m, features(4)), parallel,
                                 lambda m: torch.compile(m, backend='eager')])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_models_in_wrappers(coupled, how):
    cb,model = MicroBatch(5, coupled=coupled),lambda: how(small_model())
    if not (coupled and 'jit' in str(type(model()))): return assert_same(train(cb, model=model), train())
    with pytest.raises(RuntimeError, match='TorchScript'): train(cb, model=model)   # its code cannot be run in part

def test_a_forward_of_the_user():
    "One that was put on the model stays on it"
    def model(): m = small_model(); f = m.forward; m.forward = lambda x: f(x)*2; return m
    a,b = train(MicroBatch(5), model=model),train(model=model)
    assert_same(a, b)
    assert 'forward' in vars(a.model) and a.model.forward(features(2)).shape==(2,3)

# What cannot be cut or joined is said early

@dataclass
class Boxed:
    x:Tensor
def test_objects_that_hold_tensors():
    for o in Boxed(torch.ones(4)),SimpleNamespace(a=[SimpleNamespace(x=np.ones(4))]):
        with pytest.raises(ValueError, match='cannot be cut: it has .*an object that holds tensors; pass split=f'):
            slices((o,torch.ones(4)), 2)
        assert slices((o,torch.ones(4)), 4)[0][0] is o   # it need not be cut
        with pytest.raises(ValueError, match='cannot be joined'): join([o,o], [2,2])
    assert slices((SimpleNamespace(a='text', n=3),torch.ones(4)), 2)[1][0].n==3

class Hidden2(nn.Module):
    "A hidden state whose second dimension is that of the samples"
    def __init__(self): super().__init__(); self.m = small_model()
    def forward(self, x): h = self.m(x); return h,h[None].repeat(2,1,1)
def first_of(p, y): return F.cross_entropy(p[0], y)

def test_refused_before_the_first_step():
    "What validation could not join after the first epoch is refused in its first slice"
    for n,kw,match in (76,{},r'pred\[1\] is a Tensor of shape'),(76,dict(valid=False),None),(4,{},None):
        learn = make_learner(make_dls(76, n), Hidden2(), first_of, cbs=MicroBatch(5, **kw), **one_group)
        with pytest.raises(ValueError, match=match) if match else nullcontext():
            learn.fit(1, cbs=NoValid())
        assert bool(learn.spy.steps)==(match is None)

def replaced(m, args): return tuple(x*2 for x in args)

@each(kw=[{}, dict(coupled=True)])
def test_a_batch_that_is_never_cut(kw):
    "One warning, which says what to do; plain slices are cut by the loop"
    def run(**more):
        learn = make_learner(make_dls(64, 32), cbs=MicroBatch(8, **kw, **more))
        learn.model.register_forward_pre_hook(replaced)
        with warnings.catch_warnings(record=True) as ws:
            warnings.simplefilter('always')
            learn.fit(2)
        return [str(w.message) for w in ws if 'was not cut' in str(w.message)]
    found = run()
    assert len(found)==1 and 'from a forward pre-hook' in found[0] and 'before_batch' in found[0]
    assert ('leave out coupled' if kw else 'pass valid=False') in found[0]
    if not kw: assert not run(valid=False)

class Keeps(nn.Module):
    "Keeps sizes and shapes of its batch, features, a penalty, and a number that is no size"
    def __init__(self): super().__init__(); self.m = small_model()
    def forward(self, x):
        self.bs,self.shape,self.four = len(x),x.shape,4
        self.both = self.bs,self.m[0].in_features
        self.h = self.m[0](x).tanh()
        self.penalty,self.two = self.h.pow(2).mean(),dict(n=len(x), h=x)
        return self.m[1:](self.h)

def test_the_proof_refuses_what_a_model_keeps(monkeypatch):
    monkeypatch.undo()   # the proof is on
    for kw in dict(coupled=True),dict(exact=True):
        with pytest.raises(ValueError, match='leaves something else behind: .*model.bs'): train(MicroBatch(8, **kw), model=Keeps)

@each(kw=[{}, dict(coupled=True), dict(exact=True)])
def test_hooks_that_come_with_the_first_batch(kw):
    "They come once, as with the whole batch"
    class Hooks(nn.Module):
        done = False
        def __init__(self): super().__init__(); self.m = small_model()
        def forward(self, x):
            if not self.done: self.m[0].register_forward_hook(lambda m, xs, out: out*1.1); self.done = True
            return self.m(x)
    a,b = (train(cbs, model=Hooks) for cbs in (MicroBatch(5, **kw),()))
    assert_same(a, b)
    assert len(a.model.m[0]._forward_hooks)==1

def test_the_count_of_samples_is_not_stale():
    "After a cancel the loader runs out of memory: that is no reason for smaller slices"
    def late(cb):
        if cb.training: raise CancelBatchException
    class Data(Items):
        def __getitem__(self, i):
            if i==40: raise torch.OutOfMemoryError('CUDA out of memory')
            return super().__getitem__(i)
    dls = make_dls(64, 8, shuffle=False)
    dls.train.dataset.__class__ = Data
    learn = make_learner(dls, cbs=[MicroBatch(), Callback(after_backward=late)])
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1)
    assert learn.micro_batches.fits=={} and learn.micro_batches.n is None

class Penalty(Callback):
    "Adds a penalty of the gradient at `of`"
    def __init__(self, of, **kwargs): self.of,self.kwargs = of,kwargs
    def before_batch(self): self.learn.xb = (self.x.clone().requires_grad_(),)
    def after_loss(self):
        if not self.training: return
        at = self.learn.pred if self.of=='pred' else self.learn.xb
        g, = torch.autograd.grad(self.learn.pred.pow(2).sum(), at, **self.kwargs)
        self.learn.loss_grad = self.learn.loss_grad+(self.learn.pred.sum(1)*g.pow(2).mean(1)).mean()
def with_norm():
    m = small_model()
    m[0].bias = None   # its gradient would be 0, but for rounding
    m.insert(1, nn.BatchNorm1d(5).double())
    return m

@each(5, kw=[dict(create_graph=True), dict(retain_graph=True)], model=[small_model,with_norm], way=['coupled','exact'])
def test_gradient_penalties(kw, model, way):
    "They are exact; only two backward passes through exact batch norms are refused"
    def run(of, *cbs): return train([Penalty(of, **kw), *cbs], model=model)
    cb,is_exact = partial(MicroBatch, 5, **{way:True}),way=='exact'
    if not is_exact and model is with_norm: return   # it sees slices
    assert_same(run('pred', cb()), run('pred'))
    if model is small_model or 'retain_graph' in kw: return assert_same(run('x', cb()), run('x'))
    with pytest.raises(RuntimeError, match='(?s)event `after_loss`.*MicroBatch: .*create_graph=True'): run('x', cb())
