"Which parameters move, and by what optimizer"
from matrix import *

def branches():
    "Two heads; a sample goes through the one that its first feature names, so a micro-batch can pass one of them by"
    def f(m, x):
        h,out = torch.tanh(m.body(x)),x.new_zeros(len(x), 3)
        for i,head in enumerate(m.heads):
            at = ((x[:,0]>0)==bool(i)).nonzero()[:,0]
            if len(at): out = out.index_put((at,), head(h[at]))
        return out
    return Made(f, body=nn.Linear(6,5), heads=nn.ModuleList([nn.Linear(5,3) for _ in range(2)])).double()

def sorted_dls(n, bs, **kwargs):
    "In the order of the first feature: whole windows use one head"
    x = features(n)
    return make_dls(n, bs, x=x[x[:,0].argsort()], shuffle=False, **kwargs)

def freezing(learn):
    learn.freeze();     learn.fit_one_cycle(1, .02)
    learn.unfreeze();   learn.fit_one_cycle(2, slice(.001,.02))
    learn.freeze_to(1); learn.fit(1, .01)

def wrapped(*opts, **kwargs): return [partial(OptimWrapper, opt=getattr(torch.optim, o), **kwargs) for o in opts]
def by(*opts, **kwargs): return [dict(opt_func=o, **kwargs) for o in opts]
def has_none(a, b): return any(g is None for s in b.spy.steps for g in s['grads'])
three = partial(SGD, mom=.9),Adam,*wrapped('AdamW')
opt = partial(case, 'Optimizers')

test_optimizers = alike(
    opt('parameters without a gradient in some windows', *by(*three), dls=sorted_dls, model=branches, **one_group,
        note='The optimizer leaves them alone, or steps them, as it does with the large batch.', check=has_none),
    opt('`freeze`, `freeze_to`, `unfreeze`, `fine_tune`', *by(*three, fit=freezing),
        *by(*three, fit=lambda l: l.fine_tune(2, .01, freeze_epochs=2)), note='Frozen weights do not move.'),
    opt('discriminative learning rates', *[dict(fit=partial(Learner.fit_one_cycle, n_epoch=3, lr_max=o))
                                           for o in (slice(1e-4,.02), [1e-3,.02])],
        note='A `slice`, and a list with one rate for each group.'),
    opt("fastai's optimizers",
        *by(SGD, partial(SGD, mom=.9), Adam, partial(Adam, decouple_wd=False), RAdam, QHAdam, Lamb, Larc,
            partial(RMSProp, mom=.9), ranger, lambda ps,lr: Lookahead(SGD(ps, lr))),
        note='SGD with and without momentum, Adam with both kinds of weight decay, RAdam, QHAdam, Lamb, Larc, RMSProp, '
             'ranger and Lookahead.'),
    opt('`OptimWrapper` with SGD, Adam, AdamW', note='Plain, `foreach` and `fused`.',
        *by(*[o for kw in (dict(foreach=False), dict(foreach=True), dict(fused=True))
              for o in wrapped('SGD', 'Adam', 'AdamW', **kw)])),
    opt('`OptimWrapper` with other optimizers of PyTorch', fit=lambda l: l.fit(2, .01),
        *by(*wrapped('Adagrad', 'Adadelta', 'Adamax', 'ASGD', 'NAdam', 'RAdam', 'RMSprop', 'Rprop')),
        note='Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop.'))

@row('Optimizers', 'Muon',
     note='`torch.optim.Muon` through `OptimWrapper`, for a network of matrices. It needs PyTorch 2.9.')
def test_muon(works):
    if not hasattr(torch.optim, 'Muon'): pytest.skip('trains with `torch.optim.Muon`, which came with PyTorch 2.9')
    def matrices(): return nn.Sequential(nn.Linear(6,5,bias=False), nn.Tanh(), nn.Linear(5,3,bias=False)).double()
    works(*pair(model=matrices, opt_func=wrapped('Muon')[0]))

@row('Optimizers', 'parameters that the optimizer does not hold', 'weights, optimizer state, losses',
     note='Their gradients are cleared before each window. fastai adds them up over the steps.')
@each(drop_last=[False,True])
def test_not_held(drop_last, works):
    def fit(learn): learn.fit(1); learn.fit(2)
    loss = nn.CrossEntropyLoss(weight=tensor([1.,10.,3.]).double())
    works(*pair(fit=fit, splitter=lambda m: [params(m[0])], drop_last=drop_last, loss_func=loss), but='step.grads')

def bag():
    return Made(lambda m, x: m.lin(m.emb(x).mean(1)), emb=nn.Embedding(20, 6, sparse=True), lin=nn.Linear(6,3)).double()

def bag_dls(n, bs, **kwargs):
    return make_dls(n, bs, x=torch.randint(20, (n,3), generator=torch.Generator().manual_seed(0)), **kwargs)

@row('Optimizers', 'sparse gradients of embeddings', 'weights, gradients, losses',
     note="fastai's SGD, PyTorch's SGD and Adagrad.")
@each(opt=[partial(SGD, mom=.9), *wrapped('SGD', 'Adagrad')])
@pytest.mark.filterwarnings('ignore:Sparse invariant')
def test_sparse_embeddings(opt, works):
    ls = pair(dls=bag_dls, model=bag, opt_func=opt, fit=lambda l: l.fit(2, .02), **one_group)
    assert ls[1].spy.steps[0]['grads'][0].is_sparse
    for l in ls: l.got = [[g.to_dense() for g in s['grads']] for s in l.spy.steps]
    works.same(*[(l.got, weights(l), l.recorder.losses) for l in ls])
