"Unusual inputs, targets, samplers, losses, loaders and models, each against the large batch"
from torch.utils.data import BatchSampler,TensorDataset,WeightedRandomSampler
from torch.utils.data import DataLoader as TorchLoader
from nets import *
from fastai_accum.loss import *
from fastai_accum.microbatch import *
from fastai_accum.windows import count_samples

def learner(dls, cbs=None, model=None, **kwargs): return make_learner(dls, model, cbs=cbs, **{**one_group, **kwargs})
def alike(cbs=lambda: AccumulateStep(4), **kwargs):
    "Train in windows of four micro-batches, and with the large batch"
    return same(cbs, **{**one_group, **kwargs})

def test_count_samples():
    x,b5 = torch.ones(5,3,8,8),[dict(boxes=torch.ones(2,4))]*5
    for yb in (b5,), ((torch.ones(5),torch.ones(5,2)),), (dict(a=torch.ones(5)),), (), (tensor(1.),):
        assert count_samples(yb, (x,))==5
    for n in (3,2): assert count_samples((b5,), ([torch.ones(n,4,4)]*5,))==count_samples((b5,), [torch.ones(n,4)]*5)==5
    assert count_samples((torch.ones(7),), (torch.ones(3,7),))==7   # samples in the second dimension of the inputs
    with pytest.raises(ValueError, match='cannot count the samples.*make one of them a tensor'):
        count_samples((object(),), (object(),))

# Callbacks, losses, targets and loaders in other clothes

# loaders that know no batch size, or whose number of batches says nothing of their samples
at_a_rate = dict(fit=lambda l: l.fit(2), but=('hps','step.pct_train'))
by_samples = dict(at_a_rate, cbs=lambda: AccumulateStep(n_samples=32))
def prebatched(target, loss):
    "Targets that have no row for each sample"
    def make(idxs): return features(96)[idxs],target(idxs)
    def dls(bs): return of_batches([make(range(i, min(i+bs, 76))) for i in range(0, 76, bs)], [make(range(16))])
    return dict(at_a_rate, dls=dls, loss_func=loss, opt_func=SGD)
def ids_loss(pred, ys): return F.cross_entropy(pred, tensor([int(o) for o in ys]))

idxs = [*range(0, 76, 2),1,3]
def sampled(make):
    "Loaders of PyTorch that draw 40 of 76 samples"
    ds = TensorDataset(features(76), classes(76))
    return dict(by_samples, dls=lambda bs: DataLoaders(make(ds, bs), TorchLoader(ds, 16)))
def weighted_sampler(ds, bs):
    g = torch.Generator().manual_seed(0)
    return TorchLoader(ds, bs, sampler=WeightedRandomSampler(torch.ones(76), 40, generator=g))

W = tensor([1.,10.,3.]).double()
weighted = dict(loss_func=nn.CrossEntropyLoss(weight=W))
def rare(v=0): y = classes(76); y[:20] = v; return y
compiled = partial(torch.compile, backend='eager')

def push(cb):
    "Adds gradients of another backward pass"
    if cb.training: (sum(p.pow(2).sum() for p in cb.model.parameters())/7).backward()
def clips(cb): cb.learn.loss *= nn.utils.clip_grad_norm_(cb.model.parameters(), .1)   # what it returns is logged
def edits(f, event):
    def do(cb):
        if cb.training: cb.learn.loss_grad = f(cb.learn)
    return dict(also=partial(Callback, **{event:do}))

class OwnMean(nn.CrossEntropyLoss):
    "A subclass that reduces by itself: its parent returns losses that are not reduced, or a sum"
    def forward(self, pred, y):
        loss = super().forward(pred, y)
        return loss.mean() if self.reduction=='none' else loss/len(y)

class MultiTask(nn.CrossEntropyLoss):
    "A loss with two predictions and two targets"
    def forward(self, preds, y, z):
        a,b = preds.values() if isinstance(preds, dict) else preds
        return super().forward(a, y)+F.mse_loss(b[:,0], z)
def two_heads(of):
    def dls(bs):
        dls = make_dls(76, bs, y=(classes(76),features(76,1,seed=3)[:,0]))
        dls.n_inp = 1
        return dls
    return dict(dls=dls, model=lambda: Made(lambda m, x: of(m.m(x)), m=small_model()), loss_func=MultiTask())

class Long(nn.CrossEntropyLoss):
    def forward(self, pred, y): return super().forward(pred, y.long())

def longer(cb): cb.learn.dl = make_dls(152, cb.dls.train.bs, shuffle=False).train

class DiceLike(nn.Module):
    "Sums by nature"
    def __init__(self, reduction='sum'): super().__init__(); self.reduction = reduction
    def forward(self, pred, y): return F.cross_entropy(pred, y, reduction=self.reduction)
def swaps(cb): cb.learn.loss_func = DiceLike()

def named():
    "`model.lr_finder` is no `LRFinder`, `model.accumulate_step` no callback, and `model.pbar` no bar"
    m = small_model()
    m.pbar,m.autocast,m.each_micro_batch,m.train_epoch,m.cuts,m.without = SimpleNamespace(),3,True,4,5,6
    m.lr_finder = m.accumulate_step = m.micro_batches = m.recorder = 'a part of the model'
    return m

cases = dict(
    # the loss is scaled last, so changes of `loss_grad` in `before_backward` count; a penalty on the weights is exact
    # where micro-batches weigh the same
    replaced   = lambda: dict(edits(lambda l: F.cross_entropy(l.pred*2, *l.yb), 'before_backward'), n=96),
    penalty    = lambda: dict(edits(lambda l: l.loss_grad+.5*l.pred.pow(2).mean(), 'after_loss'), n=96),
    of_weights = lambda: edits(lambda l: l.loss_grad+sum(p.pow(2).sum() for p in l.model.parameters())/7,
                               'before_backward'),
    # `before_step` sees finished gradients and the mean loss of the window, at any order, and may change them
    **{f'clips_{o}':lambda o=o: dict(also=partial(at_order, o, before_step=clips)) for o in (-math.inf,0,1000)},
    # a backward pass when the gradients are finished is not scaled; gradients from before a window are cleared
    finished    = lambda: dict(weighted, also=partial(Callback, before_step=push)),
    after_batch = lambda: dict(weighted, cbs=lambda: [Callback(after_batch=push), AccumulateStep(4)]),
    compiled = lambda: dict(y=rare(), loss_func=compiled(nn.CrossEntropyLoss(weight=W))),
    compiled_function = lambda: dict(y=rare(-100), loss_func=compiled(F.cross_entropy)),
    compiled_partial  = lambda: dict(y=rare(), loss_func=partial(compiled(F.cross_entropy), weight=W)),
    own_mean = lambda: dict(loss_func=OwnMean(reduction='none')),
    own_sum  = lambda: dict(loss_func=OwnMean(reduction='sum')),
    several_targets = lambda: two_heads(lambda h: (h,h*2)),
    several_in_dict = lambda: two_heads(lambda h: dict(a=h, b=h*2)),
    nan_of_weight_0 = lambda: dict(also=TerminateOnNaNCallback,   # which is not shown that loss
                                   y=torch.where(torch.arange(76)//8==1, -100, classes(76))),
    scripted = lambda: dict(cbs=lambda: AccumulateStep(4, weight=lambda p,t: W[t].sum()),
                            loss_func=torch.jit.script(nn.CrossEntropyLoss(weight=W))),
    uint8 = lambda: dict(y=rare().to(torch.uint8), loss_func=Long(weight=W)),
    swapped_loss = lambda: dict(also=partial(Callback, before_train=swaps), n=96, opt_func=SGD, lr=1e-3,
                                fit=lambda l: l.fit(2)),
    names = lambda: dict(model=named),
    ids    = lambda: prebatched(lambda idxs: [f'{i%3}' for i in idxs], ids_loss),
    object = lambda: dict(prebatched(lambda idxs: SimpleNamespace(y=classes(96)[idxs]),
                                     lambda pred, y: F.cross_entropy(pred, y.y)), **by_samples),
    sampler = lambda: sampled(weighted_sampler),
    batches = lambda: sampled(lambda ds, bs: TorchLoader(ds, batch_sampler=BatchSampler(idxs, bs, False))),
    listed  = lambda: sampled(lambda ds, bs: TorchLoader(ds, batch_sampler=list(BatchSampler(idxs, bs, False)))),
    # the windows are those of the loader that is trained on
    longer_loader = lambda: dict(also=partial(Callback, before_train=longer)))

try: compiled(F.cross_entropy)
except AssertionError:   # PyTorch 2.6 compiles no function of its own
    for k in 'compiled_function','compiled_partial': del cases[k]

@each(name=cases)
@pytest.mark.filterwarnings('ignore:.*torch.jit.*')
def test_alike(name): alike(**cases[name]())
