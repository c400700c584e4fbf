"How batches are cut, run in slices and joined again, and what is tried again when memory runs out"
import pytest,warnings
from collections import UserDict,namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from weakref import WeakKeyDictionary
from nets import *
from kinds import Odd
from fastai_accum import microbatch
from fastai_accum.microbatch import *
from fastai_accum.slices import *
from fastai_accum.devices import n_autocast
from fastai_accum.extras import *
from fastai_accum.know.check import *

@pytest.fixture(autouse=True)
def unproved(monkeypatch):
    "The models of these tests note their slices, so a proof would rightly refuse them; test_proof.py has the proofs"
    monkeypatch.setattr(microbatch, 'guard', noop)

train = partial(train, shuffle=True, **one_group)
def odd(f, **kwargs): return lambda: Odd(f, m=small_model(), **kwargs)

modes = each(coupled=[False,True])

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

def sliced(cls):
    "The same model, slice by slice: each begins with the buffers from before the batch, which get the mean"
    def forward(m, x):
        dicts,parts,outs,ends = [o._buffers for o in m.modules()],x.split(8),[],[]
        was = [dict(d) for d in dicts]
        for o in parts:
            for d,w in zip(dicts, was): d.update({k:b if b is None else b.clone() for k,b in w.items()})
            outs.append(cls.forward(m, o)); ends.append([dict(d) for d in dicts])
        for d,w,*vs in zip(dicts, was, *ends):
            for k,b in w.items():
                new = [v[k] for v in vs]
                d[k] = new[-1]
                if b is None or any(v.shape!=b.shape for v in new): continue
                if b.is_floating_point(): new.append(sum(len(o)*v for o,v in zip(parts, new))/len(x))
                d[k] = b.copy_(new[-1])
        return torch.cat(outs)
    return type(cls.__name__, (cls,), dict(forward=forward))

def test_the_second_pass_draws_what_the_first_has_drawn():
    "Dropout masks are the same, batch norm moves once, and the next draws are as if there were no second pass"
    a,b = train(MicroBatch(8, coupled=True), model=Noisy),train(model=sliced(Noisy))
    assert_same(a, b)
    assert a.model.bn.num_batches_tracked==b.model.bn.num_batches_tracked
    assert a.model.n<b.model.n   # a batch counts once; the slices of the other model count each

@dataclass
class Boxed: x:Tensor
objects = Boxed(torch.ones(4)),SimpleNamespace(a=[SimpleNamespace(x=np.ones(4))])

def test_slices():
    "Of containers, also nested, and of texts as fastai collates them: a tuple of strings"
    P = namedtuple('P', 'x ids')
    b = (P(TensorImage(torch.ones(4,2)), np.arange(4)), UserDict(m=torch.zeros(4)), [torch.ones(4),None,'text'], 3,
         ('a','b','c','d'), dict(names=['x']*4, more=(['y']*4,torch.zeros(4))))
    a,c = slices(b, 3)
    assert type(a[0]) is P and type(a[0].x) is TensorImage and [o[0].ids.tolist() for o in (a,c)]==[[0,1,2],[3]]
    assert type(a[1]) is UserDict and len(a[1]['m'])==3 and len(b[1]['m'])==4
    assert [len(o[2][0]) for o in (a,c)]==[3,1] and a[2][1:]==[None,'text'] and a[3]==3
    assert a[4]==('a','b','c') and c[4]==('d',) and a[5]['names']==['x']*3
    assert a[5]['more'][0]==['y']*3 and len(c[5]['more'][1])==1
    for n,bs,unit in (9,8,1),(20,8,4),(74,8,2),(16,4,4),(7,3,1),(5,9,1):   # alike, few, and no group is cut
        sizes = even_sizes(n, bs)
        assert sum(sizes)==n and len(sizes)==-(-n//bs) and max(sizes)<=bs and max(sizes)-min(sizes)<=unit, (n,bs,sizes)
        assert all(o%unit==0 for o in sizes)
    assert slices((['a','b','c'],), 2)==[(['a','b'],),(['c'],)]
    assert slices((('a','b'),('c','d')), 1)==[(('a',),('c',)),(('b',),('d',))]   # two inputs, and as many samples
    for o in objects: assert slices((o,torch.ones(4)), 4)[0][0] is o   # it need not be cut
    assert slices((SimpleNamespace(a='text', n=3),torch.ones(4)), 2)[1][0].n==3

def rows(*shapes): return [torch.ones(o) for o in shapes]
def record(k): return dict(boxes=torch.ones(k,4), label=torch.tensor(k))

beside = dict(   # what stands beside four samples, and what a slice of two has of it; `None`: nobody knows
    boxes=(rows((1,4), (3,4), (4,4), (0,4)), 2), box=(rows(*[(1,4)]*4), 2), masks=(rows(*[(9,9)]*4), 2),
    records=([*map(record, range(4))], 2), alike=([record(4)]*4, 2), some=([*rows((2,4), (4,4)), None, None], 2),
    labels=([torch.tensor(1)]*4, 2), texts=(tuple('abcd'), 2), levels=(rows((4,8,8), (4,4,4), (4,2,2)), 3),
    of_one_shape=(rows(*[(4,3)]*5), 5), constants=([*rows((4,2)), torch.tensor(2.), 'text', None], 4),
    in_a_dict=(dict(boxes=rows(*[(1,4)]*4)), 1), both=(rows(*[(4,3)]*4), None),
    of_two_sizes=(rows(*[(4,3), (4,2)]*2), None))

@each(k=beside)
def test_lists(k):
    "A list has an entry for each sample, or tensors with rows; a batch is cut, or refused by name"
    o,n = beside[k]
    for more in [torch.ones(4)], [dict(x=torch.ones(4))]:
        if n is None:
            with pytest.raises(ValueError, match='nobody knows whether a list of 4'): slices((*more,o), 2)
            continue
        parts = slices((*more,o), 2)
        assert [len(p[-1]) for p in parts]==[n,n] and n_rows((*more,o))==4
        whole,was = (first(leaves(x)) for x in (join([p[-1] for p in parts], [2,2]),o))
        assert whole is was is None or torch.equal(whole[1], was[1])

def test_only_lists():
    "Images and records, as detectors get them; two inputs; and what may be either"
    images,targets = rows((3,8,9), (3,9,8), (3,7,7), (3,8,8)),[record(k) for k in range(4)]
    assert n_rows((images,targets))==4 and [len(o[0]) for o in slices((images,targets), 2)]==[2,2]
    assert n_rows((targets,))==4 and n_rows((rows((8,2), (8,3)),))==8
    with pytest.raises(ValueError, match='one row per sample'): n_rows((rows((8,), (8,)),rows((8,), (8,))))

joined = dict(   # predictions for slices, their sizes, and how long they are together; `None`: nobody knows
    texts=([['a','b'],['c']], [2,1], 3), records=([[record(i) for i in range(3)],[record(7)]], [3,1], 4),
    points=([rows(*[(5,2)]*4)]*2, [4,4], 8), alike=([[record(2)]*2]*2, [2,2], 4),
    both=([rows(*[(4,2)]*4)]*2, [4,4], None),
    sizes_differ=([rows(*[(3,2)]*3), rows((2,2), (2,2))], [3,2], 5), levels=([rows((2,8), (2,4))]*2, [2,2], 2),
    widths=([rows((2,8), (2,4)), rows((2,5), (2,6))], [2,2], 4), two=([tuple(rows((2,8), (2,8)))]*2, [2,2], 2),
    of_two_kinds=([tuple(rows((2,8), (2,)))]*2, [2,2], 2))

@each(k=joined)
def test_joined_lists(k):
    preds,sizes,n = joined[k]
    if n is not None: assert len(join(preds, sizes))==n; return
    with pytest.raises(Refused, match='nobody knows whether pred of 4.*pass another bs'): join(preds, sizes)

def levels(h): return [h+i for i in range(3)]
wraps = dict(tuple=lambda h: h.unbind(), list=lambda h: [*h], dict=lambda h: dict(o=h.unbind()),
             beside=lambda h: (h,h.unbind()), levels=levels)

@each(k=wraps)
def test_entries_that_look_like_levels(k):
    """A slice of another size shows whether there is an entry for each sample, which has as many numbers as a slice has
    samples, or a few tensors with rows"""
    def entries(p): return p['o'] if k=='dict' else p[1] if k=='beside' else p
    def loss(p, y):
        return sum(F.cross_entropy(o, t) for o,t in zip(entries(p), [y]*3 if k=='levels' else y))/len(entries(p))
    whole(lambda: MicroBatch(3), dls=lambda _: make_dls(12, 12, valid_bs=12), loss_func=loss,
          model=odd(lambda m, x: wraps[k](m.m(x))))

def zipped(p, os): return sum((a-(b if isinstance(b, Tensor) else b['box'])).pow(2).mean() for a,b in zip(p, os))/len(p)
def boxes_of(x, y): return [o.new_ones(1+int(k),3)*o[:3] for o,k in zip(x, y)]
collates = dict(records=lambda x, y: [dict(box=o[:3], name='a') for o in x], boxes=boxes_of,
                box=lambda x, y: [*x[:,None,:3]], masks=lambda x, y: [o[:5,None]*torch.ones(3) for o in x])

@each(3, k=collates, coupled=[False,True])
def test_lists_of_targets(k, coupled):
    "Slices, windows and the check are exact with them"
    def dls(bs, n=76):
        def collate(os): x,y = map(torch.stack, zip(*os)); return x,collates[k](x, y)
        data = list(zip(features(n), classes(n)))
        return DataLoaders(*[DataLoader(data, bs=bs, create_batch=collate) for _ in range(2)])
    kwargs = dict(dls=dls, loss_func=zipped, fit=lambda l: l.fit(1))
    whole(lambda: MicroBatch(8, coupled=coupled), **kwargs)
    a,b = train(AccumulateStep(4), bs=8, **kwargs),train(**kwargs)
    assert_same(a, b, but=('values','final_record'))   # in validation, fastai counts the rows of boxes
    learn = make_learner(dls(8, 40), cbs=AccumulateStep(4), loss_func=zipped)
    assert learn.check_accumulation().error<1e-12

uncut = (torch.ones(5), torch.ones(2,5)),(dict(x=torch.ones(5), m=torch.ones(3)),),('text',),(['a','b'],['c']), \
        (nn.utils.rnn.pack_sequence([torch.ones(3),torch.ones(2)]),)
unjoined = [(torch.ones(2),1.), (torch.ones(1),5.)],[torch.ones(()), torch.zeros(())],[torch.ones(2,2)]*2, \
           [dict(h=torch.ones(n), loss=torch.tensor(1./n)) for n in (2,1)], \
           [SimpleNamespace(x=1), SimpleNamespace(x=1)],*([o,o] for o in objects)

@each(case=[*((slices, b, 1, 'MicroBatch: .*one row per sample.*; pass split=f') for b in uncut),
            *((slices, (o,torch.ones(4)), 2, 'cannot be cut: it has .*an object that holds tensors; pass split=f')
              for o in objects),
            *((join, preds, [2,1], 'MicroBatch: .*cannot be joined') for preds in unjoined)])
def test_what_cannot_be_cut_or_joined(case):
    f,what,n,match = case
    with pytest.raises(ValueError, match=match): f(what, n)

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

others = dict(clip=lambda: GradientClip(.1), scaler=lambda: OnCpu(init_scale=2.**10, growth_interval=2),
              freeze=BnFreeze, skip_first=lambda: SkipToEpoch(1))
@each(5, coupled=[False,True], name=others)
def test_beside_others(coupled, name):
    "`GradAccumDtype` finds the windows, whatever the order of the callbacks"
    a = train([GradAccumDtype(torch.float64),MicroBatch(5, coupled=coupled),others[name]()], metrics=accuracy)
    assert_same(a, train(others[name](), metrics=accuracy))

# A limited memory: the model runs out of it by the size of its input

logs = WeakKeyDictionary()   # not held by the models: what they hold counts a batch once, however it is cut

class Small(Noisy):
    "Fails when a slice has more than `limit` samples"
    sizes = property(lambda self: logs.setdefault(self, []))
    def __init__(self, limit, where='forward', fail=out_of_memory): super().__init__(); store_attr()
    def forward(self, x):
        if self.training: self.sizes.append(len(x))
        out,full = super().forward(x),self.training and len(x)>self.limit
        if full and self.where=='forward': self.fail()
        if full and out.requires_grad: out.register_hook(self.fail)
        return out

windows = [*((dict(n_step=n),*o) for n,*o in ((1,32,8),(1,30,7),(4,8,2),(3,8,5))),
           *((dict(n_samples=n),8,2) for n in (20,32,50))]
@each(8, coupled=[False,True], where=['forward','backward'], how=windows, scaler=[False,True])
def test_auto(coupled, where, how, scaler):
    "Bit for bit the run that uses the right size from the beginning, with its constant and its samples in the metric"
    window,bs,limit = how
    found = bs
    while found>limit: found = -(-found//2)
    def fit(learn): learn.recorder.train_metrics = True; learn.fit_one_cycle(2, .02)
    def run(size, model):
        more = [AccumulateStep(**window)] + [OnCpu(init_scale=2.**10, growth_interval=2)]*scaler
        loss = nn.CrossEntropyLoss(weight=tensor([1.,10.,3.]).double())
        return train([MicroBatch(size, coupled=coupled),*more], bs=bs, fit=fit, metrics=accuracy, loss_func=loss,
                     model=model)
    a,b = run('auto', partial(Small, limit, where)),run(found, Noisy)
    # without memory that runs out in validation, its batches stay whole, and sum up in another order
    assert_same(a, b, tol=0, but=('values','final_record'))
    assert_same(a, b)
    assert a.accumulate_step.counts==b.accumulate_step.counts
    is_clean(a)
    assert n_autocast()==0 and max(a.model.sizes[-5:])<=found

def test_auto_when_memory_runs_out_before_the_model():
    "While a batch is cut and copied to the device: here in the second window, after the step of the first"
    def split(n, b, bs):
        if next(n) and bs>8: out_of_memory()
        return slices(b, bs)
    def later(n, b, bs): return slices(b, 8 if next(n) else 32)
    a,b = (train(MicroBatch(bs, split=partial(f, itertools.count()), valid=False), n=96, fit=lambda l: l.fit(1))
           for bs,f in (('auto',split),(32,later)))
    assert_same(a, b, tol=0)

@pytest.mark.skipif(not torch.cuda.is_available(), reason='lets the memory of a GPU run out, and this machine has none')
@each(coupled=[False,True], amp=[False,True])
def test_auto_on_a_gpu(coupled, amp):
    "With a fraction of its memory; a batch takes four times as much"
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6,2**16), nn.Tanh(), nn.Dropout(.1), nn.Linear(2**16,3)).double()
    def fit(learn): learn.dls.to('cuda'); learn.fit(2); learn.model.cpu()
    def run(bs):
        cbs = [MicroBatch(bs, coupled=coupled)]+[MixedPrecision()]*amp
        return train(cbs, n=3*1024, bs=1024, fit=fit, model=model, opt_func=SGD)
    torch.cuda.empty_cache()
    most = torch.cuda.memory_allocated()+2**29
    torch.cuda.set_per_process_memory_fraction(most/torch.cuda.get_device_properties(0).total_memory)
    try: a = run('auto')
    finally: torch.cuda.set_per_process_memory_fraction(1.)
    found = a.micro_batches.fits[True]
    assert 1<=found<1024
    assert_same(a, run(found), tol=1e-3 if amp else TOL)
    assert n_autocast()==0

def test_auto_says_what_it_has_found(capsys):
    "When memory gets scarce, in training and in validation; it is remembered, and gradients stay"
    model = Small(16)
    def later(cb): model.limit = 4
    def valid(m, x, o):
        if not m.training and len(x[0])>8: out_of_memory()
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

@modes
def test_parameters_of_the_loss(coupled):
    for cbs,plain,bs,tol,models in ([MicroBatch(5, coupled=coupled)],[],32,TOL,(small_model,small_model)), \
        ([MicroBatch('auto', coupled=coupled),AccumulateStep(2)],[MicroBatch(4, coupled=coupled),AccumulateStep(2)],8,0,
         (partial(Small, 4, 'backward'),Noisy)):
        a,b = (train([Elsewhere('module'),*o], bs=bs, loss_func=scaled(), model=m) for o,m in zip((cbs,plain), models))
        assert_same(a, b, tol)

@each(4, coupled=[False,True], where=['forward','backward'],
      case=[("DefaultCPUAllocator: can't allocate memory",'MicroBatch: memory .*even with one sample at a time',1),
            ('mat1 and mat2 shapes cannot be multiplied','mat1 and mat2',32)])
def test_auto_gives_up(coupled, where, case):
    "Below one sample, and for other errors"
    text,match,least = case
    def fail(*_): raise RuntimeError(text)
    model = Small(0, where, fail)
    model.bn = nn.Identity()
    with pytest.raises(RuntimeError, match=match): train(MicroBatch(coupled=coupled), n=64, model=lambda: model)
    assert min(model.sizes)==least

# Models with a state

def texts_dls(bs):
    "A language model's batches: row `i` goes on where row `i` of the batch before has ended"
    from fastai.text.data import LMDataLoader
    ids = torch.randint(2, 20, (40*bs,), generator=torch.Generator().manual_seed(0))
    return DataLoaders(*[LMDataLoader([(ids,)], lens=[len(ids)], bs=bs, seq_len=7, shuffle=False, num_workers=0)
                         for _ in range(2)])

def language_model(p=0.):
    from fastai.text.models.awdlstm import AWD_LSTM,awd_lstm_lm_config
    from fastai.text.models.core import get_language_model
    config = dict(awd_lstm_lm_config, emb_sz=6, n_hid=8, n_layers=2, weight_p=p or 1e-20,   # fastai fails for 0
                  **dict.fromkeys(['output_p','hidden_p','input_p','embed_p'], p))
    torch.manual_seed(0)
    return get_language_model(AWD_LSTM, 20, config).double()

def train_lm(*cbs, model=language_model):
    return train([*rnn_cbs(0., 0.),*cbs], dls=texts_dls, model=model, bs=16, loss_func=TokenLoss())

@each(coupled=[False,True], bs=[4,5])
def test_a_model_with_a_state(coupled, bs):
    "Each slice goes on with the state of its own rows"
    a = train_lm(AccumulateStep(bs-3), MicroBatch(bs, coupled=coupled))
    assert_same(a, train_lm(AccumulateStep(bs-3)))
    assert len(a.model[0].hidden[0][0][0])==16

@modes
def test_auto_with_a_state(coupled):
    "AWD-LSTM goes back to its hidden state"
    def run(bs, limit):
        def full(m, x, out): m.training and len(x[0])>limit and out_of_memory()
        def model(): m = language_model(.3); m[0].register_forward_hook(full); return m
        return train_lm(MicroBatch(bs, coupled=coupled), model=model)
    assert_same(run('auto', 5), run(4, 99), tol=TOL if coupled else 0)

# What models, callbacks and learners do besides

def test_slices_without_gradient():
    "A slice, or all of the model, has no part in the gradient"
    def some(m, x):
        out,keep = torch.zeros(len(x), 3).double(),x[:,0]>.5
        if keep.any(): out[keep] = m.m(x[keep])
        return out
    whole(lambda: MicroBatch(2, coupled=True), model=odd(some))
    def frozen(): return small_model().requires_grad_(False)
    def run(*cbs):
        loss = scaled()
        return train(cbs, model=frozen, loss_func=loss, splitter=lambda m: [[loss.s]])
    a,b = run(MicroBatch(8, coupled=True)),run()
    assert_same(a, b)
    close(a.loss_func.s, b.loss_func.s)

@modes
def test_callbacks_that_call_the_model(coupled):
    "Calls of `forward` with other inputs than the batch, with keywords, or from within the model"
    class Asks(Odd):
        def forward(self, x, scale=1.): return self.m(x)*scale + (0*self(x[:2]).sum() if len(x)>2 else 0)
    class Calls(Callback):
        def after_pred(self):
            with torch.no_grad():
                self.model(self.xb[0][:3])
                assert not torch.equal(self.model(*self.xb, scale=2.), self.pred)
    def model(): return Asks(None, m=small_model())
    assert_same(train([MicroBatch(5, coupled=coupled),Calls()], model=model), train(Calls(), model=model))

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
        if self.training and len(x)>self.limit: out_of_memory()
        return out

def test_buffers_that_the_output_depends_on():
    "The second pass has those of the first; memory that runs out leaves none changed"
    kwargs = dict(n=64, fit=lambda l: l.fit(2, cbs=NoValid()))   # in validation it runs out on its own
    full = partial(Normal, 8)
    runs = (dict(bs=8, coupled=True),Normal),(dict(coupled=True),full),(dict(bs=8),Normal),({},full)
    a,b,c,d = (train(MicroBatch(**kw), model=m, **kwargs) for kw,m in runs)
    assert_same(a, train(model=sliced(Normal), **kwargs))
    assert_same(b, a, tol=0); assert_same(d, c, tol=0)

def test_auto_does_not_try_a_step_again():
    with pytest.raises(torch.OutOfMemoryError): train([MicroBatch(),Callback(before_step=out_of_memory)])

def test_auto_goes_back_twice_to_what_was_there():
    """The second batch of a window does not fit, nor does its half: both times the gradients of the first are undone,
    and each sample counts once in the metric"""
    def fit(learn):
        for p in learn.model.parameters(): p.grad = torch.full_like(p, .1)
        learn.recorder.train_metrics = True
        learn.fit(1, .02)
    def dls(bs):
        parts = [(features(80)[i:j],classes(80)[i:j]) for i,j in ((0,8),(8,40),(40,48),(48,80))]
        return of_batches(parts)
    a,b = (train([MicroBatch(bs),AccumulateStep(2)], dls=dls, fit=fit, model=m, metrics=accuracy)
           for bs,m in (('auto',partial(Small, 8)),(8,Noisy)))
    assert_same(a, b, tol=0)

def in_place(model): model.compile(backend='eager'); return model

@each(coupled=[False,True], how=[torch.jit.script, lambda m: torch.jit.trace(m, features(4)), parallel,
                                 lambda m: torch.compile(m, backend='eager'), in_place])
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_models_in_wrappers(coupled, how):
    cb,model = MicroBatch(5, coupled=coupled),lambda: how(small_model())
    if not (coupled and 'jit' in str(type(model()))): return assert_same(train(cb, model=model), train())
    with pytest.raises(RuntimeError, match='TorchScript'): train(cb, model=model)   # its code cannot be run in part

# What cannot be cut or joined is said early

def test_refused_before_the_first_step():
    "What validation could not join after the first epoch is refused in its first slice"
    def hidden(m, x): h = m.m(x); return h,h[None].repeat(2,1,1)   # its samples are in the second dimension
    def number(m, x): h = m.m(x); return h,h.pow(2).mean()*m.training
    def often(m, x): h = m.m(x); return h,h.pow(2).mean()
    def five(m, x): h = m.m(x); return [h+i for i in range(5)]
    shape = r'pred\[1\] is a Tensor of shape'
    for f,n,kw,match in (hidden,76,{},shape),(hidden,76,dict(valid=False),None),(hidden,4,{},None), \
                        (often,76,{},rf'{shape} \(\)'),(number,76,{},None),(five,10,{},None):
        learn = make_learner(make_dls(76, n), odd(f)(), lambda p, y: F.cross_entropy(p[0], y),
                             cbs=MicroBatch(5, **kw), **one_group)
        with pytest.raises(ValueError, match=match) if match else nullcontext(): learn.fit(1, cbs=NoValid())
        assert bool(learn.spy.steps)==(match is None)

@each(kw=[{}, dict(coupled=True)])
def test_a_batch_that_is_never_cut(kw):
    "One warning, which says what to do; plain slices are cut by the loop"
    def run(**more):
        learn = make_learner(make_dls(64, 32), cbs=MicroBatch(8, **kw, **more))
        learn.model.register_forward_pre_hook(lambda m, args: tuple(x*2 for x in args))
        with warnings.catch_warnings(record=True, action='always') as ws:
            learn.fit(2)
        return [str(w.message) for w in ws if 'was not cut' in str(w.message)]
    found = run()
    assert len(found)==1 and 'from a forward pre-hook' in found[0] and 'before_batch' in found[0]
    assert ('leave out coupled' if kw else 'pass valid=False') in found[0]
    if not kw: assert not run(valid=False)

@each(kw=[{}, dict(coupled=True), dict(exact=True)])
def test_hooks_that_come_with_the_first_batch(kw):
    "They come once, as with the whole batch"
    def hooks(m, x):
        if not m.done: m.m[0].register_forward_hook(lambda m, xs, out: out*1.1); m.done = True
        return m.m(x)
    a,_ = whole(lambda: MicroBatch(5, **kw), model=odd(hooks, done=False))
    assert len(a.model.m[0]._forward_hooks)==1

def test_a_batch_that_needs_no_cut_runs_once():
    model = Small(99)
    make_learner(make_dls(64, 8), model, cbs=MicroBatch(8, coupled=True), **one_group).fit(1)
    assert model.sizes==[8]*8

def test_each_row_comes_once_to_a_hook():
    "Also if the model keeps something, in the first batch of a validation"
    def keeps(m, x): m.x = x; return m.m(x)
    rows,learn = [],make_learner(make_dls(64, 8), odd(keeps, x=None)(), cbs=MicroBatch(4))
    learn.model.m[0].register_forward_hook(lambda m, xs, out: rows.append(len(out)))
    learn.validate()
    assert sum(rows)==learn.dls.valid.n and len(learn.model.x)==8

def test_the_count_of_samples_is_not_stale():
    "After a cancel the loader runs out of memory: that is no reason for smaller slices"
    class Data(Items):
        def __getitem__(self, i):
            if i==40: out_of_memory()
            return super().__getitem__(i)
    dls = make_dls(64, 8, shuffle=False)
    dls.train.dataset.__class__ = Data
    learn = make_learner(dls, cbs=[MicroBatch(), raising(CancelBatchException, 'after_backward')])
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

@each(5, kw=[dict(create_graph=True), dict(retain_graph=True)], model=[small_model,normed], way=['coupled','exact'])
def test_gradient_penalties(kw, model, way):
    "They are exact; only two backward passes through exact batch norms are refused"
    def run(of, *cbs): return train([Penalty(of, **kw), *cbs], model=model)
    cb,is_exact = partial(MicroBatch, 5, **{way:True}),way=='exact'
    if not is_exact and model is normed: return   # it sees slices
    assert_same(run('pred', cb()), run('pred'))
    if model is small_model or 'retain_graph' in kw: return assert_same(run('x', cb()), run('x'))
    with pytest.raises(RuntimeError, match='(?s)event `after_loss`.*MicroBatch: .*create_graph=True'): run('x', cb())
