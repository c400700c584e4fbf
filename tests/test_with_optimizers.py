"Which parameters move, and by what optimizer"
from matrix import *
from torch.optim import LBFGS

class Branches(nn.Module):
    "Two heads; a sample goes through the one that its first feature names, so a micro-batch can pass one of them by"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body,self.heads = nn.Linear(6,5).double(),nn.ModuleList([nn.Linear(5,3).double() for _ in range(2)])
    def forward(self, x):
        which,h = x[:,0]>0,torch.tanh(self.body(x))
        out = h.new_zeros(len(x), 3)
        for i,head in enumerate(self.heads):
            at = which==bool(i)
            if at.any(): out = out.index_put((at.nonzero()[:,0],), head(h[at]))
        return out

def sorted_dls(n, bs, **kwargs):
    "In the order of the first feature: whole windows use one head"
    x = features(n)
    return make_dls(n, bs, x=x[x[:,0].argsort()], shuffle=False, **kwargs)

opts = dict(SGD=partial(SGD, mom=.9), Adam=Adam, AdamW=partial(OptimWrapper, opt=torch.optim.AdamW))
@row('Optimizers', 'parameters without a gradient in some windows',
     note='The optimizer leaves them alone, or steps them, as it does with the large batch.')
@each(opt=opts)
def test_no_gradient(opt, works):
    a,b = pair(dls=sorted_dls, model=Branches, n=76, opt_func=opts[opt], splitter=trainable_params)
    works(a, b)
    assert any(g is None for s in b.spy.steps for g in s['grads']), 'every parameter had a gradient in every step'

@row('Optimizers', 'Muon',
     note='`torch.optim.Muon` through `OptimWrapper`, for a network of matrices. It needs PyTorch 2.9.')
def test_muon(works):
    if not hasattr(torch.optim, 'Muon'): pytest.skip('trains with `torch.optim.Muon`, which came with PyTorch 2.9')
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6,5,bias=False), nn.Tanh(), nn.Linear(5,3,bias=False)).double()
    works(*pair(model=model, opt_func=partial(OptimWrapper, opt=torch.optim.Muon)))

@row('Optimizers', 'parameters that the optimizer does not hold', 'weights, optimizer state, losses',
     note='Their gradients are cleared before each window. fastai adds them up over the steps.')
@each(drop_last=[False,True])
def test_not_held(drop_last, works):
    def fit(learn): learn.fit(1); learn.fit(2)
    loss = nn.CrossEntropyLoss(weight=tensor([1.,10.,3.]).double())
    a,b = pair(n=76, fit=fit, splitter=lambda m: [params(m[0])], drop_last=drop_last, loss_func=loss)
    works(a, b, but='step.grads')

def freezing(learn):
    learn.freeze();     learn.fit_one_cycle(1, .02)
    learn.unfreeze();   learn.fit_one_cycle(2, slice(.001,.02))
    learn.freeze_to(1); learn.fit(1, .01)

@row('Optimizers', '`freeze`, `freeze_to`, `unfreeze`, `fine_tune`', note='Frozen weights do not move.')
@each(opt=opts, fit=[freezing, lambda l: l.fine_tune(2, .01, freeze_epochs=2)])
def test_freeze(fit, opt, works): works(*pair(fit=fit, opt_func=opts[opt]))

@row('Optimizers', 'discriminative learning rates', note='A `slice`, and a list with one rate for each group.')
@each(lr=[slice(1e-4,.02), [1e-3,.02]])
def test_discriminative(lr, works): works(*pair(fit=lambda l: l.fit_one_cycle(3, lr)))

fastais = dict(SGD=SGD, momentum=partial(SGD, mom=.9), Adam=Adam, RAdam=RAdam, QHAdam=QHAdam, Lamb=Lamb, Larc=Larc,
               RMSProp=partial(RMSProp, mom=.9),
               ranger=ranger, Lookahead=lambda ps,lr: Lookahead(SGD(ps, lr)),
               decoupled=partial(Adam, decouple_wd=False))
@row('Optimizers', "fastai's optimizers",
     note='SGD with and without momentum, Adam with both kinds of weight decay, RAdam, QHAdam, Lamb, Larc, RMSProp, '
          'ranger and Lookahead.')
@each(opt=fastais)
def test_fastais(opt, works): works(*pair(opt_func=fastais[opt]))

torchs = [(o,kw) for o in (torch.optim.SGD,torch.optim.Adam,torch.optim.AdamW)
          for kw in (dict(foreach=False), dict(foreach=True), dict(fused=True))]
@row('Optimizers', '`OptimWrapper` with SGD, Adam, AdamW', note='Plain, `foreach` and `fused`.')
@each(o=torchs)
def test_torchs(o, works): works(*pair(opt_func=partial(OptimWrapper, opt=o[0], **o[1])))

others = 'Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop'.split()
@row('Optimizers', '`OptimWrapper` with other optimizers of PyTorch',
     note='Adagrad, Adadelta, Adamax, ASGD, NAdam, RAdam, RMSprop and Rprop.')
@each(opt=others)
def test_other_torchs(opt, works):
    works(*pair(fit=lambda l: l.fit(2, .01), opt_func=partial(OptimWrapper, opt=getattr(torch.optim, opt))))

@row('Optimizers', 'LBFGS', note='Plain fastai cannot use it either.')
def test_lbfgs(works):
    """It goes through the model several times a step, on a batch that must still be there; plain fastai cannot drive
    it either"""
    with works.refused(TypeError, match="closure"):
        pair(opt_func=partial(OptimWrapper, opt=LBFGS), splitter=trainable_params, fit=lambda l: l.fit(1))

class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.emb,self.lin = nn.Embedding(20, 6, sparse=True).double(),nn.Linear(6,3).double()
    def forward(self, x): return self.lin(self.emb(x).mean(1))

def bag_dls(n, bs, **kwargs):
    return make_dls(n, bs, x=torch.randint(20, (n,3), generator=torch.Generator().manual_seed(0)), **kwargs)

def dense(learn):
    "The gradients that the optimizer got, and its state, as dense tensors"
    grads = [[g.to_dense() for g in s['grads']] for s in learn.spy.steps]
    return grads,[p.detach() for p in learn.model.parameters()],[float(o) for o in learn.recorder.losses]

sparse = dict(SGD=partial(SGD, mom=.9), torch_SGD=partial(OptimWrapper, opt=torch.optim.SGD),
              torch_Adagrad=partial(OptimWrapper, opt=torch.optim.Adagrad))
@row('Optimizers', 'sparse gradients of embeddings', 'weights, gradients, losses',
     note="fastai's SGD, PyTorch's SGD and Adagrad.")
@each(opt=sparse)
@pytest.mark.filterwarnings('ignore:Sparse invariant')
def test_sparse_embeddings(opt, works):
    a,b = pair(dls=bag_dls, model=Bag, splitter=trainable_params, opt_func=sparse[opt], fit=lambda l: l.fit(2, .02))
    assert b.spy.steps[0]['grads'][0].is_sparse
    works.same(dense(a), dense(b))

@row('Optimizers', "sparse gradients with fastai's Adam", note='It fails in plain fastai too.')
@each(cbs=[[], [AccumulateStep(4)]])
def test_sparse_adam(cbs, works):
    learn = make_learner(bag_dls(76, 8), Bag(), splitter=trainable_params, opt_func=Adam, cbs=cbs)
    with works.refused(NotImplementedError, match='addcmul_'): learn.fit(1)
