"Batches in slices against whole batches; test_slices.py has how they are cut and joined, and when memory runs out"
import pytest
from weakref import WeakKeyDictionary
from nets import *
from kinds import Odd

modes = each(coupled=[False,True])
ways = {}, dict(coupled=True), dict(exact=True)
def odd(f, **kwargs): return Odd(f, m=small_model(), **kwargs)

@each(10, coupled=[False,True], drop_last=[False,True], n=[64,76,75,40], bs=[1,5,8,31,32,100])
@pytest.mark.filterwarnings('ignore:MicroBatch.*no batch of the training')
def test_same_as_the_whole_batch(coupled, drop_last, n, bs):
    whole(lambda: MicroBatch(bs, coupled=coupled), n, drop_last=drop_last)

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

@each(3, shape=[(),(1,)], kw=ways)
def test_a_scale_beside_the_predictions(kw, shape):
    "CLIP's is one number, SigLIP's has a dimension: the gradient of what all slices share is right, too"
    def scaled(m, x): return dict(h=F.normalize(m.m(x), dim=1), scale=m.s.exp())
    whole(lambda: MicroBatch(5, **kw), model=lambda: odd(scaled, s=nn.Parameter(torch.full(shape, .3).double())),
          loss_func=lambda p, y: F.cross_entropy(p['scale']*p['h'], y))

X,Y = features(64),classes(64)
ids = dict(strings=np.array([f'id{i%3}' for i in range(64)]), dates=np.arange(64).astype('M8[D]'),
           objects=np.array([dict(id=i) for i in range(64)], dtype=object))
def first_of(m, x, more):
    assert not isinstance(more, np.ndarray) or len(x)==len(more)
    return m.m(x)
def stacked(m, xs): return m.m(torch.stack(list(xs)).flatten(1)[:,:6] if isinstance(xs, list) else xs)
batches = dict(   # of the samples `i`, and the model
    # file names, dates and objects are cut like tensors
    **{k:(lambda i, o=o: (X[i],o[i],Y[i]), first_of) for k,o in ids.items()},
    # the last of two inputs has no rows, and no `n_inp` says so
    listed=(lambda i: (X[i],[f'{o}' for o in i],Y[i]), first_of), number=(lambda i: (X[i],3.,Y[i]), first_of),
    # of three channels, all of one size: the targets tell that the list has an entry for each
    images=(lambda i: [[*features(64, 12)[i].view(-1, 3, 4)],Y[i]], stacked))

@each(8, k=batches, kw=ways)
def test_inputs_of_other_kinds(k, kw):
    make,f = batches[k]
    def dls(bs):
        dl = torch.utils.data.DataLoader(range(64), batch_size=bs, collate_fn=make)
        if k in ids: dl.n_inp = 2
        return DataLoaders(dl, dl)
    learns = whole(lambda: MicroBatch(4, prove=k!='images', **kw), bs=8, dls=dls, model=lambda: odd(f))
    if k not in ('listed','number'): return
    for l in learns: l.dls.n_inp = 2
    test = of_batches([make(range(i, i+8))[:-1] for i in (0,8)], n_inp=None).train
    close(*(l.get_preds(dl=test)[0] for l in learns))

def embed(m, x): return tuple(F.normalize(o, dim=1) for o in m.m(x).chunk(2, 1))
def logits(m, x): a,b = embed(m, x); return dict(logits=a@b.t())
def own_pair(logits): return F.cross_entropy(logits, torch.arange(len(logits)))

@each(kw=ways)
def test_logits_of_all_pairs(kw):
    "CLIP compares all samples with each other: this cannot be joined, and the error says what to do, which is right"
    def train(f, loss):
        whole(lambda: MicroBatch(5, **kw), model=lambda: Odd(f, m=small_model(out=6)), loss_func=loss)
    with pytest.raises(ValueError, match='return the embeddings, and compare all pairs of them in the loss'):
        train(logits, lambda p, y: own_pair(p['logits']))
    if kw: train(embed, lambda p, y: own_pair(p[0]@p[1].t()))

def test_all_pairs_in_slices_of_one_size():
    "A square may be rows or pairs: a slice of another size says which, in validation, too; eight classes are rows"
    def learner(model, loss): return make_learner(make_dls(64, 16), model, loss, cbs=MicroBatch(8), **one_group)
    for f in lambda l: l.fit(1),lambda l: l.validate():
        learn = learner(Odd(logits, m=small_model(out=6)), lambda p, y: own_pair(p['logits']))
        with pytest.raises(ValueError, match='return the embeddings'): f(learn)
        assert not getattr(learn.spy, 'steps', ())
    m = sizes()()
    m.m = small_model(out=8)
    learner(m, None).fit(2)
    assert {o for o in logs[m] if o[0]!=8}=={(7,False)} and logs[m].count((7,False))==3   # and in each validation
