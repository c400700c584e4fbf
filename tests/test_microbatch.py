"Batches in slices against whole batches, also when memory runs out; test_slices.py has how they are cut and joined"
import pytest
from weakref import WeakKeyDictionary
from harness import *
from fastai_accum.patch import *

modes = each(coupled=[False,True])
def whole(cbs, n=76, bs=32, **kwargs): return same(cbs, bs, bs, n, **{**one_group, **kwargs})

@each(10, coupled=[False,True], drop_last=[False,True], n=[64,76,75,40], bs=[1,5,8,31,32,100])
@pytest.mark.filterwarnings('ignore:MicroBatch.*no batch is cut')
def test_same_as_the_whole_batch(coupled, drop_last, n, bs):
    whole(lambda: MicroBatch(bs, coupled=coupled), n, drop_last=drop_last)

@modes
def test_windows_of_cut_batches(coupled):
    "Beside an `AccumulateStep`, in either order, and by `accumulation`"
    same(lambda: [AccumulateStep(4), MicroBatch(3, coupled=coupled)])
    same(lambda: [MicroBatch(3, coupled=coupled), AccumulateStep(n_samples=32)])
    whole(lambda: [AccumulateStep(1), MicroBatch(3, coupled=coupled)])
    a,b = (make_learner(make_dls(76, bs, shuffle=False), cbs=cbs)
           for bs,cbs in ((8,MicroBatch(3, coupled=coupled)), (32,None)))
    with accumulation(4): a.fit(2)
    b.fit(2)
    assert_same(a, b)

logs = WeakKeyDictionary()   # not held by the models: what they hold counts a batch once, however it is cut

class Sizes(nn.Module):
    "Notes the sizes of its inputs; memory runs out at more than `limit` samples in training, `valid` in validation"
    def __init__(self, limit=99, valid=99, where='forward'):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.drop,self.b = nn.Linear(6,5).double(),nn.Dropout(.3),nn.Linear(5,3).double()
        self.register_buffer('mean', torch.zeros(5).double())
        self.limits,self.where = {True:limit, False:valid},where
    sizes = property(lambda self: logs.setdefault(self, []))
    def full(self, *_): raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 MiB')
    def forward(self, x):
        self.sizes.append((self.training,len(x)))
        h,full = self.drop(self.a(x).tanh()),len(x)>self.limits[self.training]
        if self.training: self.mean = .9*self.mean+.1*h.detach().mean(0)
        if full and self.where=='forward': self.full()
        if full and h.requires_grad: h.register_hook(self.full)
        return self.b(h)

def spread(p, y): return (p-F.one_hot(y, 3)).pow(2).mean().sqrt()

@modes
def test_validation_in_slices(coupled):
    "The model never sees more than a slice; loss and metrics see whole batches"
    seen = []
    def metric(p, y): seen.append(len(y)); return spread(p, y)   # no mean of those of slices
    def model(): m = Sizes(); m.drop.p = 0.; return m
    kwargs = dict(metrics=metric, model=model, but='buffers')
    a,b = whole(lambda: MicroBatch(5, coupled=coupled, prove=False), **kwargs)
    assert max(n for _,n in a.model.sizes)==5 and set(seen)=={16,8}
    for x,y in zip(a.get_preds(with_loss=True), b.get_preds(with_loss=True)): close(x, y)
    close(a.validate(), b.validate())
    c,_ = whole(lambda: MicroBatch(5, coupled=coupled, valid=False, prove=False), **kwargs)
    assert max(n for t,n in c.model.sizes if not t)==16 and max(n for t,n in c.model.sizes if t)==5

@modes
def test_batches_of_strings(coupled):
    "A batch of strings is cut in training and in validation alike"
    x = L(['a','bb','ccc','dddd']*19)
    class Texts(nn.Module):
        def __init__(self): super().__init__(); self.m,self.seen = small_model(),[]
        def forward(self, texts):
            logs.setdefault(self, []).append(len(texts))
            return self.m(torch.stack(list(map(row, texts))))
    def row(t): return torch.arange(6).double()*len(t)/10-len(t)
    a,b = whole(lambda: MicroBatch(5, coupled=coupled, prove=False), x=x, model=Texts)
    close(a.validate(), b.validate())
    assert max(logs[a.model])==5 and max(logs[b.model])==32

@each(cb=[lambda: MicroBatch(8), MicroBatch, lambda: MicroBatch(8, coupled=True)])
def test_compiled_in_place(cb):
    def compiled(): m = small_model(); m.compile(backend='eager'); return m
    whole(cb, model=compiled)
    with pytest.raises(ValueError, match='which is compiled'):
        make_learner(make_dls(64, 32), compiled(), cbs=MicroBatch(8, exact=True)).fit(1)

class Scaled(nn.Module):
    "Embeddings and a scale, as CLIP has them"
    shape = ()
    def __init__(self):
        super().__init__()
        self.m,self.s = small_model(),nn.Parameter(torch.full(self.shape, .3).double())
    def forward(self, x): return dict(h=F.normalize(self.m(x), dim=1), scale=self.s.exp())

class ScaledAsSigLIP(Scaled): shape = 1,

@each(3, model=[Scaled,ScaledAsSigLIP], kw=[{}, dict(coupled=True), dict(exact=True)])
def test_a_scale_beside_the_predictions(kw, model):
    "The gradient of a number that all slices share is right, too"
    whole(lambda: MicroBatch(5, **kw), model=model, loss_func=lambda p, y: F.cross_entropy(p['scale']*p['h'], y))

def test_a_loss_beside_the_predictions():
    "A number that each slice has for itself cannot be joined"
    class Own(Scaled):
        def forward(self, x): h = self.m(x); return dict(h=h, loss=h.mean())
    learn = make_learner(make_dls(64, 32), Own(), lambda p, y: F.cross_entropy(p['h'], y),
                         cbs=MicroBatch(8, coupled=True), **one_group)
    with pytest.raises(ValueError, match="pred..loss.. is a Tensor of shape"): learn.fit(1)

class TakesIds(nn.Module):
    def __init__(self): super().__init__(); self.m = small_model()
    def forward(self, x, ids):
        assert isinstance(ids, np.ndarray) and len(x)==len(ids)
        return self.m(x)

ids = dict(strings=np.array([f'id{i%3}' for i in range(64)]), dates=np.arange(64).astype('M8[D]'),
           objects=np.array([dict(id=i) for i in range(64)], dtype=object))
@each(4, name=ids, kw=[{}, dict(coupled=True), dict(exact=True)])
def test_arrays_that_hold_no_numbers(name, kw):
    "File names, dates and objects in a batch are cut like its tensors"
    def train(*cbs):
        def batch(idxs): return features(64)[idxs],ids[name][idxs],classes(64)[idxs]
        dl = torch.utils.data.DataLoader(range(64), batch_size=16, collate_fn=batch)
        dls = DataLoaders(dl, dl)
        dls.train.n_inp = 2
        learn = make_learner(dls, TakesIds(), cbs=cbs, **one_group)
        learn.fit(2)
        return learn
    assert_same(train(MicroBatch(5, **kw)), train())

class AllPairs(nn.Module):
    "Compares all samples with each other, as CLIP does"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b = (nn.Linear(6,3).double() for _ in range(2))
    def embed(self, x): return F.normalize(self.a(x), dim=1),F.normalize(self.b(x), dim=1)
    def forward(self, x): a,b = self.embed(x); return dict(logits=a@b.t())
class Embeds(AllPairs):
    forward = AllPairs.embed

def own_pair(logits): return F.cross_entropy(logits, torch.arange(len(logits)))

@each(kw=[{}, dict(coupled=True), dict(exact=True)])
def test_logits_of_all_pairs(kw):
    "They cannot be joined, and the error says what to do; this is right"
    learn = make_learner(make_dls(64, 32), AllPairs(), lambda p, y: own_pair(p['logits']), cbs=MicroBatch(5, **kw),
                         **one_group)
    with pytest.raises(ValueError, match='return the embeddings, and compare all pairs of them in the loss'):
        learn.fit(1)
    if kw: whole(lambda: MicroBatch(5, **kw), model=Embeds, loss_func=lambda p, y: own_pair(p[0]@p[1].t()))
