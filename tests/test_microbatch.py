"Batches in slices against whole batches; test_slices.py has how they are cut and joined, and when memory runs out"
import pytest
from contextlib import nullcontext
from weakref import WeakKeyDictionary
from harness import *
from kinds import Odd
from fastai_accum.core import *

modes = each(coupled=[False,True])
ways = {}, dict(coupled=True), dict(exact=True)
def whole(cbs, n=76, bs=32, **kwargs): return same(cbs, bs, bs, n, **{**one_group, **kwargs})
def odd(f, **kwargs): return Odd(f, m=small_model(), **kwargs)

@each(10, coupled=[False,True], drop_last=[False,True], n=[64,76,75,40], bs=[1,5,8,31,32,100])
@pytest.mark.filterwarnings('ignore:MicroBatch.*no batch of the training')
def test_same_as_the_whole_batch(coupled, drop_last, n, bs):
    whole(lambda: MicroBatch(bs, coupled=coupled), n, drop_last=drop_last)

@modes
def test_windows_of_cut_batches(coupled):
    "Beside an `AccumulateStep`, in either order, and by `accumulation`"
    def cut(): return MicroBatch(3, coupled=coupled)
    def fit(learn):
        with accumulation(4) if learn.dls.train.bs==8 else nullcontext(): learn.fit(2)
    same(lambda: [AccumulateStep(4), cut()])
    same(lambda: [cut(), AccumulateStep(n_samples=32)])
    whole(lambda: [AccumulateStep(1), cut()])
    same(cut, fit=fit)

logs = WeakKeyDictionary()   # not held by the models: what they hold counts a batch once, however it is cut

def sizes(f=lambda m, x: m.m(x)):
    "A model whose log has the sizes of its inputs, and whether it trained"
    def run(m, x): logs.setdefault(m, []).append((len(x), m.training)); return f(m, x)
    return lambda: odd(run)

def spread(p, y): return (p-F.one_hot(y, 3)).pow(2).mean().sqrt()

@modes
def test_validation_in_slices(coupled):
    "The model never sees more than a slice; loss and metrics see whole batches"
    seen = []
    def metric(p, y): seen.append(len(y)); return spread(p, y)   # no mean of those of slices
    def run(**kw):
        return whole(lambda: MicroBatch(5, coupled=coupled, prove=False, **kw), metrics=metric, model=sizes())
    a,b = run()
    assert max(logs[a.model])[0]==5 and set(seen)=={16,8}
    for x,y in zip(a.get_preds(with_loss=True), b.get_preds(with_loss=True)): close(x, y)
    close(a.validate(), b.validate())
    c,_ = run(valid=False)
    assert [max(n for n,t in logs[c.model] if t==training) for training in (False,True)]==[16,5]

@modes
def test_batches_of_strings(coupled):
    "A batch of strings is cut in training and in validation alike"
    def row(t): return torch.arange(6).double()*len(t)/10-len(t)
    model = sizes(lambda m, texts: m.m(torch.stack(list(map(row, texts)))))
    a,b = whole(lambda: MicroBatch(5, coupled=coupled, prove=False), x=L(['a','bb','ccc','dddd']*19), model=model)
    close(a.validate(), b.validate())
    assert [max(logs[l.model])[0] for l in (a,b)]==[5,32]

@each(3, shape=[(),(1,)], kw=ways)
def test_a_scale_beside_the_predictions(kw, shape):
    "CLIP's is one number, SigLIP's has a dimension: the gradient of what all slices share is right, too"
    def scaled(m, x): return dict(h=F.normalize(m.m(x), dim=1), scale=m.s.exp())
    whole(lambda: MicroBatch(5, **kw), model=lambda: odd(scaled, s=nn.Parameter(torch.full(shape, .3).double())),
          loss_func=lambda p, y: F.cross_entropy(p['scale']*p['h'], y))

ids = dict(strings=np.array([f'id{i%3}' for i in range(64)]), dates=np.arange(64).astype('M8[D]'),
           objects=np.array([dict(id=i) for i in range(64)], dtype=object))
@each(4, name=ids, kw=ways)
def test_arrays_that_hold_no_numbers(name, kw):
    "File names, dates and objects in a batch are cut like its tensors"
    def takes(m, x, ids):
        assert isinstance(ids, np.ndarray) and len(x)==len(ids)
        return m.m(x)
    def dls(bs):
        def batch(idxs): return features(64)[idxs],ids[name][idxs],classes(64)[idxs]
        dl = torch.utils.data.DataLoader(range(64), batch_size=bs, collate_fn=batch)
        dl.n_inp = 2
        return DataLoaders(dl, dl)
    whole(lambda: MicroBatch(5, **kw), bs=16, dls=dls, model=lambda: odd(takes))

def embed(m, x): return F.normalize(m.a(x), dim=1),F.normalize(m.b(x), dim=1)
def own_pair(logits): return F.cross_entropy(logits, torch.arange(len(logits)))
def all_pairs(f):
    "Compares all samples with each other, as CLIP does"
    torch.manual_seed(0)
    return Odd(f, a=nn.Linear(6,3), b=nn.Linear(6,3)).double()
def logits(m, x): a,b = embed(m, x); return dict(logits=a@b.t())

@each(kw=ways)
def test_logits_of_all_pairs(kw):
    "They cannot be joined, and the error says what to do; this is right"
    def train(f, loss): whole(lambda: MicroBatch(5, **kw), model=partial(all_pairs, f), loss_func=loss)
    with pytest.raises(ValueError, match='return the embeddings, and compare all pairs of them in the loss'):
        train(logits, lambda p, y: own_pair(p['logits']))
    if kw: train(embed, lambda p, y: own_pair(p[0]@p[1].t()))

def test_a_loss_beside_the_predictions():
    "A number that each slice has for itself cannot be joined"
    def own(m, x): h = m.m(x); return dict(h=h, loss=h.mean())
    def loss(p, y): return F.cross_entropy(p['h'], y)
    with pytest.raises(ValueError, match="pred..loss.. is a Tensor of shape"):
        whole(lambda: MicroBatch(8, coupled=True), model=lambda: odd(own), loss_func=loss)
